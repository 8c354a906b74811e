"""Which flag was meant, where one does not exist."""

import contextlib
import difflib
import io
import itertools
import re
from collections.abc import Callable, Iterable, Sequence

# What other libraries call it.
_OTHER_NAMES = {
    "lr": "learning-rate",
    "max-lr": "learning-rate",
    "wd": "weight-decay",
    "warmup": "warmup-steps",
    "bs": "batch-size",
    "per-device-train-batch-size": "batch-size",
    "gradient-accumulation-steps": "accumulation-steps",
    "seq-len": "sequence-length",
    "sequence-len": "sequence-length",
    "max-seq-length": "sequence-length",
    "block-size": "sequence-length",
    "context-length": "sequence-length",
    "layers": "num-layers",
    "n-layer": "num-layers",
    "num-hidden-layers": "num-layers",
    "heads": "num-heads",
    "n-head": "num-heads",
    "num-attention-heads": "num-heads",
    "hidden-size": "width",
    "dim": "width",
    "d-model": "width",
    "n-embd": "width",
    "intermediate-size": "mlp-width",
    "vocab-size": "vocabulary-size",
    "max-steps": "steps",
    "max-iters": "steps",
    "epochs": "steps",
    "output-dir": "run",
    "out-dir": "run",
    "save-every": "every",
    "save-steps": "every",
    "dataset": "paths",
    "data": "paths",
    "file": "paths",
    "files": "paths",
    "max-tokens": "max-new-tokens",
    "checkpointing": "remat",
    "gradient-checkpointing": "remat",
    "tp": "tensor",
    "dp": "data",
    "sp": "context",
    "cp": "context",
}


def similar_flags(flag: str, flags: Iterable[str], *, most: int = 2) -> list[str]:
    """Existing flags that a wrong one may stand for, the likeliest first; those that fit about as well stand beside it.

    Args:
        flag: The flag that does not exist, such as "--model.mixer".
        flags: Those that do, such as "--model.mixers".
        most: How many at most.
    """

    def likeness(one: str, other: str) -> float:
        if one == other:
            return 1.0
        begins = min(len(one), len(other)) >= 3 and (one.startswith(other) or other.startswith(one))
        return max(difflib.SequenceMatcher(None, one, other).ratio(), 0.85 if begins else 0.0)

    section, _, name = flag.partition("=")[0].lstrip("-").replace("_", "-").rpartition(".")
    name = _OTHER_NAMES.get(name, name)
    scores = {}
    for other in flags:
        other_section, _, other_name = other.lstrip("-").rpartition(".")
        if (score := likeness(name, other_name)) >= 0.7:
            scores[other] = score + 0.3 * (likeness(section, other_section) if section else 0.0)
    best = sorted(scores, key=lambda other: -scores[other])
    return [other for other in best if scores[other] > scores[best[0]] - 0.05][:most]


def switch_with_value(unknown: str, argv: Sequence[str], flags: Iterable[str]) -> str | None:
    """What to say where an argument is the value of a flag that is only on or off; None where it is not.

    Args:
        unknown: The argument that was not understood, such as the "True" of `--resume True` or `--resume=True`.
        argv: All arguments.
        flags: The command's flags.
    """
    before = [flag for flag, argument in itertools.pairwise(argv) if argument == unknown]
    before += [argument.partition("=")[0] for argument in argv if argument.partition("=")[2] == unknown]
    known = set(flags)
    for flag in (given.replace("_", "-") for given in before):
        section, dot, name = flag.removeprefix("--").rpartition(".")
        off = f"--{section}{dot}no-{name}"
        if {flag, off} <= known:
            return f"{flag} takes no value; {off} turns it off"
    return None


def flags_of(show_help: Callable[[], object]) -> list[str]:
    """The flags that a command's help lists.

    Args:
        show_help: Prints the help, and may exit.
    """
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        show_help()
    return list(
        dict.fromkeys(re.findall(r"(?<![\w-])--[a-z][\w.-]*\w", re.sub(r"\x1b\[[0-9;]*m", "", shown.getvalue())))
    )
