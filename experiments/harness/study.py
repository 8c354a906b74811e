"""What studies share: settings, and mixers with their labels."""

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal

Setting = Literal["small", "real"]

SETTINGS: tuple[Setting, ...] = ("small", "real")


def slug(text: str) -> str:
    """A file name for a label: lower case, everything but letters and digits an underscore, `[-1` as `minus1`."""
    return re.sub(r"[^a-z0-9]+", "_", text.lower().replace("[-1", "[minus1")).strip("_")


@dataclasses.dataclass(frozen=True)
class Mixer:
    """One line of a table: a mixer preset, or a pattern of several, with overrides.

    Attributes:
        label: its name in tables and figures; unique in a study.
        preset: names of `rnnlib.layers.mixer_names()`, repeated over the layers.
        overrides: what `mixer_preset` takes, for the recurrent mixers among them, as pairs.
    """

    label: str
    preset: tuple[str, ...]
    overrides: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, label: str, *preset: str, **overrides: Any) -> "Mixer":
        """`Mixer.of("DeltaNet [-1, 1]", "deltanet", negative_eigenvalues=True)`; paths as `**{"keys.bound": 1.2}`."""
        return cls(label, preset, tuple(sorted(overrides.items())))


def pick(mixers: Iterable[Mixer], parts: Sequence[str]) -> tuple[Mixer, ...]:
    """The mixers whose label is one of `parts` or, for a part that is no mixer's label, contains it; () picks all.

    They come in the order of `parts`, so that what is named first is trained first.
    """
    mixers = tuple(mixers)
    labels = {mixer.label for mixer in mixers}
    named = (m for part in parts or ("",) for m in mixers if (part == m.label if part in labels else part in m.label))
    return tuple(dict.fromkeys(named))


def pick_named(mixers: Sequence[Mixer], parts: Sequence[str]) -> tuple[Mixer, ...]:
    """`pick`, of parts that each name something.

    Raises:
        ValueError: a part is in no label.
    """
    labels = [mixer.label for mixer in mixers]
    if unknown := unmatched(parts, labels):
        raise ValueError(f"mixers {', '.join(map(repr, unknown))} match nothing; expected parts of {'; '.join(labels)}")
    return pick(mixers, parts)


def unmatched(parts: Iterable[str], names: Iterable[str]) -> list[str]:
    """The parts that no name contains."""
    names = tuple(names)
    return [part for part in parts if not any(part in name for name in names)]
