"""Hypotheses of the studies' plans, each judged by the rule that its PLAN.md stated before the first run."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

from experiments.beside_fla.report import judged as judged_curves
from experiments.beside_fla.report import runs_of
from experiments.beside_fla.study import MIXERS as CURVE_MIXERS
from experiments.beside_fla.study import SETTINGS
from experiments.beside_fla.study import study as curve_study
from experiments.claims.evidence import (
    LOSS,
    SHARE,
    Measure,
    between,
    layer_beside_peer,
    of_times,
    solved,
    solved_at_all_rates,
    solved_so_far,
)
from experiments.decoding import report as decoding
from experiments.float8 import report as float8
from experiments.harness.tables import EXPERIMENTS, Row, read_table, table_path
from experiments.harness.verdicts import (
    Interval,
    Region,
    Verdict,
    above,
    below,
    combined,
    equal,
)
from experiments.kernel_benchmarks.view import PASSES
from experiments.kla_pretraining.report import ADDITIVE, ERASING
from experiments.language_modelling.command import load_study
from experiments.language_modelling.needles import comparisons
from experiments.language_modelling.report import chosen
from experiments.language_modelling.runs import read_run
from experiments.long_context import report as long_context
from experiments.mesanet_stability import report as mesanet
from experiments.recall.study import MIXERS as RECALL_MIXERS
from experiments.scaling.report import bits_of, verdicts
from experiments.scaling.study import SIZES

NOT_RUN = "not run"
RECURRENCES, ATTENTION = ("Gated DeltaNet", "KLA", "Mamba-2"), "Transformer++"
READS, READS_ON, NOT_HURT, OWN_DOCUMENT = (
    "reads its trained length",
    "reads on beyond it",
    "is not hurt beyond it",
    "what is far back is its own document's",
)
"""Questions of `long_context`, by which its report names them."""
MORE, LOWER = above(SHARE), below(LOSS)
Answer = tuple[str, Verdict]
"""What was found, in words, and what follows of it."""


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """What a plan says that a study will find.

    Attributes:
        study: folder of the plan.
        says: the hypothesis, in short.
        answer: from the tables of today.
    """

    study: str
    says: str
    answer: Callable[[], Answer]


def judged(parts: Iterable[tuple[str, Measure, Region]]) -> Callable[[], Answer]:
    """The answer of differences, each with a name and where the plan puts it."""
    asked = tuple(parts)

    def answer() -> Answer:
        found = [(name, measure(), region) for name, measure, region in asked]
        told = "; ".join(f"{name}: {interval}" for name, interval, _ in found if interval is not None)
        each = [Verdict.UNDECIDED if interval is None else region.judge(interval) for _, interval, region in found]
        return told or NOT_RUN, combined(each)

    return answer


def answers(found: Iterable[tuple[str, Verdict]]) -> Answer:
    """The answer of parts that have verdicts already, told part by part."""
    parts = list(found)
    if not parts:
        return NOT_RUN, Verdict.UNDECIDED
    return "; ".join(f"{name}: {verdict.value}" for name, verdict in parts), combined([one for _, one in parts])


def _recall() -> list[Hypothesis]:
    """Of seeds that chose no rate."""

    def more(cell: str, *pairs: tuple[str, str], region: Region = MORE) -> Callable[[], Answer]:
        parts = ((f"{ours} less {theirs}", solved("recall", cell, ours, theirs), region) for ours, theirs in pairs)
        return judged(parts)

    def more_so_far(ours: str, theirs: str) -> Callable[[], Answer]:
        return judged([(f"{ours} less {theirs}", solved_so_far("recall", twice, ours, theirs), MORE)])

    linear = [m.label for m in RECALL_MIXERS if m.label not in ("attention", "Gated KalmaNet")]
    cell, twice = "32 pairs, T=128", "64 pairs, T=256"
    long_keys = ("KLA, long keys", "KLA without key norm, long keys")
    asked = (
        (
            "DeltaNet solves 32 pairs more often than its layer with an additive rule",
            more(cell, ("DeltaNet", "DeltaNet's layer, additive")),
        ),
        (
            "DeltaNet solves 32 pairs more often than rules that forget",
            more(cell, *(("DeltaNet", other) for other in ("Gated DeltaNet", "KDA", "Gated DeltaNet-2"))),
        ),
        ("PDN solves 32 pairs as often as DeltaNet", more(cell, ("PDN", "DeltaNet"), region=equal(SHARE))),
        ("KLA needs its key norm where keys are long", more(cell, long_keys)),
        (
            "Gated KalmaNet solves 64 pairs more often than every linear rule",
            more(twice, *(("Gated KalmaNet", other) for other in linear)),
        ),
        (
            "DeltaNet solves 64 pairs in more of the choosing runs than its layer with an additive rule",
            more_so_far("DeltaNet", "DeltaNet's layer, additive"),
        ),
        (
            "Gated KalmaNet solves 64 pairs in more of the choosing runs than DeltaNet",
            more_so_far("Gated KalmaNet", "DeltaNet"),
        ),
    )
    return [Hypothesis("recall", says, answer) for says, answer in asked]


def _ablations() -> list[Hypothesis]:
    """Of all runs at every rate, with 32 pairs."""
    cell = "MQAR T=128, 32 pairs, width 64, 4000 steps"

    def shares(region: Region, *pairs: tuple[str, str]) -> Callable[[], Answer]:
        measures = [solved_at_all_rates("ablations", cell, *pair) for pair in pairs]
        return judged((f"{pair[0]} less {pair[1]}", own, region) for pair, own in zip(pairs, measures, strict=True))

    maps = ("ReLU", "1 + ELU", "1 + ELU, L1 norm")
    variants = ("norm 1 / (1 + a k.Bk)", "range [1, x]", "range [1 / x, 1]", "tanh")
    asked = (
        (
            "SiLU with unit length solves as many runs as other maps and norms, or more",
            shares(Region(-SHARE, math.inf), *(("DeltaNet", f"DeltaNet, {other}") for other in maps)),
        ),
        (
            "No range, squash or norm solves more than PGDN's own",
            shares(Region(-math.inf, SHARE), *((f"PGDN, {variant}", "PGDN") for variant in variants)),
        ),
        ("P-Longhorn and Longhorn solve as many", shares(equal(SHARE), ("P-Longhorn", "Longhorn"))),
    )
    return [Hypothesis("ablations", says, answer) for says, answer in asked]


def _axes() -> list[Hypothesis]:
    """Contrasts of one layer, between reporting seeds."""
    decays, solves = ("no decay", "decay by head", "decay by channel"), ("additive", "delta rule", "delta rule + ATK")

    def contrast(*pairs: tuple[str, str], region: Region = LOWER) -> Callable[[], Answer]:
        return judged((f"{ours} less {theirs}", between("axes", ours, theirs), region) for ours, theirs in pairs)

    def interaction() -> Interval | None:
        first, second = (between("axes", f"delta rule, {d}", f"additive, {d}")() for d in decays[:2])
        if first is None or second is None:
            return None
        return Interval(second.estimate - first.estimate, second.low - first.high, second.high - first.low)

    asked = (
        (
            "Erasing lowers the loss under every decay",
            contrast(*((f"delta rule, {d}", f"additive, {d}") for d in decays)),
        ),
        (
            "Forgetting lowers the loss under every solve",
            contrast(*((f"{s}, {decays[1]}", f"{s}, {decays[0]}") for s in (*solves, "ridge"))),
        ),
        (
            "A decay by channel adds nothing to one by head under the delta rule",
            contrast((f"delta rule, {decays[2]}", f"delta rule, {decays[1]}"), region=equal(LOSS)),
        ),
        (
            "ATK equals the delta rule",
            contrast(*((f"delta rule + ATK, {d}", f"delta rule, {d}") for d in decays), region=equal(LOSS)),
        ),
        (
            "Erasing gains less where there is a decay",
            judged([("difference of the two gains", interaction, Region(0.0, math.inf))]),
        ),
    )
    return [Hypothesis("axes", says, answer) for says, answer in asked]


Runs = dict[tuple[str, float], list[Row]]
"""Finished runs of a study by label and rate, a row a seed."""


def _of_rates(judge: Callable[[Runs], Answer]) -> Callable[[], Answer]:
    """The answer of the rates' study, once all of its runs are there."""

    def answer() -> Answer:
        plan = load_study("rates", "real")
        runs: Runs = {}
        for mixer, rate, seed in plan.runs:
            row = read_run(plan, table_path("rates", "real"), mixer, rate, seed)
            if row is None:
                return NOT_RUN, Verdict.UNDECIDED
            runs.setdefault((mixer.label, rate), []).append(row)
        return judge(runs)

    return answer


def _bits(rows: list[Row]) -> list[float]:
    return [row["validation"]["bits_per_byte"] for row in rows]


def _best(runs: Runs) -> dict[str, float]:
    """Each mixer's rate of fewest bits per byte, mean over seeds."""
    means = {key: sum(_bits(rows)) / len(rows) for key, rows in runs.items()}
    labels = dict.fromkeys(label for label, _ in runs)
    return {
        label: min((rate for own, rate in means if own == label), key=lambda r: means[label, r]) for label in labels
    }


@_of_rates
def _inside(runs: Runs) -> Answer:
    rates = sorted({rate for _, rate in runs})
    best = _best(runs)
    return answers(
        (f"{label} {rate:g}", Verdict.AGREES if rates[0] < rate < rates[-1] else Verdict.DISAGREES)
        for label, rate in best.items()
    )


@_of_rates
def _higher(runs: Runs) -> Answer:
    def right(label: str, rate: float) -> bool:
        return rate <= 2e-3 if label.startswith("Transformer++") else rate >= 4e-3

    return answers(
        (f"{label} {rate:g}", Verdict.AGREES if right(label, rate) else Verdict.DISAGREES)
        for label, rate in _best(runs).items()
    )


@_of_rates
def _seeds(runs: Runs) -> Answer:
    most = max(max(bits) / min(bits) - 1 for bits in map(_bits, runs.values()))
    return f"at most {100 * most:.1f} %", Verdict.AGREES if most < 0.02 else Verdict.DISAGREES


@_of_rates
def _level(runs: Runs) -> Answer:
    best = _best(runs)
    means = [sum(_bits(runs[label, best[label]])) / 2 for label in ("Gated DeltaNet", "KLA", "KDA")]
    most = max(means) / min(means) - 1
    return f"{100 * most:.1f} % apart", Verdict.AGREES if most <= LOSS else Verdict.DISAGREES


def _curve(mixer: str) -> Callable[[], Answer]:
    """Of the longest setting that has both libraries' runs."""

    def answer() -> Answer:
        for name in SETTINGS[:0:-1]:
            rows = {(row["mixer"], row["arm"]): row for row in read_table(table_path("beside_fla", name))}
            runs = runs_of(mixer, rows)
            if (found := judged_curves(curve_study(name), runs)) is not None:
                return f"{name}: {found[0]}", found[1]
        return NOT_RUN, Verdict.UNDECIDED

    return answer


def _float8(label: str) -> Callable[[], Answer]:
    def answer() -> Answer:
        for setting in ("real", "short"):
            plan = load_study("float8", setting)
            for found in float8.answers(float8.runs_of(plan, table_path("float8", setting))):
                if found.label == label:
                    return f"{setting}: {found.told}", found.verdict
        return NOT_RUN, Verdict.UNDECIDED

    return answer


def _long_context(question: str, labels: Sequence[str], region: Region | None = None) -> Callable[[], Answer]:
    """Of these models; by the question's own region where there is no other."""

    def answer() -> Answer:
        plan = load_study("long_context", "real")
        rows = long_context.finished(plan, table_path("long_context", "real"))  # type: ignore[arg-type]
        found = []
        for label in (label for label in labels if label in rows):
            interval, verdict = long_context.verdicts(plan, rows[label])[question]  # type: ignore[arg-type]
            found.append((f"{label} {interval}", verdict if region is None else region.judge(interval)))
        return answers(found)

    return answer


def _long_prompts(length: str) -> Callable[[], Answer]:
    def answer() -> Answer:
        found = decoding.answers(list(read_table(table_path("decoding", f"long_{length}"))))
        return answers((f"{says} {interval}", verdict) for says, interval, verdict in found)

    return answer


def _low_rank() -> Callable[[], Answer]:
    """DPLR over KDA, both passes, heads of 64 and of 128 channels."""
    parts = []
    for size in (64, 128):
        for run, passes in PASSES.items():
            what = {"kind": "time", "implementation": "ours", "pass": run, "shape": [8, 4096, 16, size, size]}
            of = [what | {"operator": name, "beside": None} for name in ("dplr", "kda")]
            measure = of_times(f"kernel_benchmarks/results/dplr_{size}.json", *of)
            parts.append((f"{size} channels, {passes}", measure, Region(0.5, 2.0)))
    return judged(parts)


def _kalmanet_layer() -> Callable[[], Answer]:
    """Our Gated KalmaNet's layer over flash-linear-attention's Gated DeltaNet's, both passes."""
    return judged((passes, layer_beside_peer(run), equal(0.1)) for run, passes in PASSES.items())


def _needles() -> Answer:
    plan = load_study("kla_pretraining", "real")
    runs = chosen(plan, table_path("kla_pretraining", "real"))
    found = comparisons(runs, ERASING, ADDITIVE, plan.train.data.sequence_length)
    return answers((f"{ours} less {theirs} {interval}", verdict) for ours, theirs, interval, verdict in found)


def _mesanet(says: str) -> Callable[[], Answer]:
    def answer() -> Answer:
        rows = read_table(table_path("mesanet_stability", "real"))
        runs = {(row["mixer"]["label"], row["learning_rate"]): row for row in rows}
        return answers(found for found in mesanet.verdicts(runs) if found[0] == says)

    return answer


def _scaling(says: str) -> Callable[[], Answer]:
    def answer() -> Answer:
        found = verdicts({size: bits_of(size, EXPERIMENTS / "scaling") for size in SIZES})
        return answers((f"{name}, {size} {interval}", one) for name, size, interval, one in found if says in name)

    return answer


HYPOTHESES: tuple[Hypothesis, ...] = (
    *_recall(),
    Hypothesis(
        "long_context",
        "Models read their trained length (the control)",
        _long_context(READS, (*RECURRENCES, ATTENTION)),
    ),
    Hypothesis("long_context", "Recurrences are not hurt beyond it", _long_context(NOT_HURT, RECURRENCES)),
    Hypothesis("long_context", "Recurrences read on beyond it", _long_context(READS_ON, RECURRENCES)),
    Hypothesis("long_context", "What is far back is of its own document", _long_context(OWN_DOCUMENT, RECURRENCES)),
    Hypothesis(
        "long_context",
        "Transformer++ is hurt beyond it (the control)",
        _long_context(NOT_HURT, (ATTENTION,), above(LOSS)),
    ),
    *(
        Hypothesis("beside_fla", f"{label} follows flash-linear-attention's within rounding's noise", _curve(label))
        for label in (mixer.label for mixer in CURVE_MIXERS)
    ),
    *(
        Hypothesis("float8", f"{label} loses no more by float8 than seeds differ by", _float8(label))
        for label in ("Gated DeltaNet", "Transformer++")
    ),
    *_axes(),
    *_ablations(),
    Hypothesis("rates", "Each optimum lies inside the grid", _inside),
    Hypothesis("rates", "Recurrences are best at 4e-3 or above, Transformers at 2e-3 or below", _higher),
    Hypothesis("rates", "Two seeds at one rate differ by less than 2 %", _seeds),
    Hypothesis("rates", "At their best rates Gated DeltaNet, KLA and KDA are within 1 %", _level),
    Hypothesis(
        "kla_pretraining",
        "KLA is below Gated DeltaNet by more than 1 %",
        judged([("KLA less Gated DeltaNet", between("kla_pretraining", "KLA", "Gated DeltaNet"), below(LOSS))]),
    ),
    Hypothesis("kla_pretraining", "At equal loss delta rules find more needles than additive rules", _needles),
    *(
        Hypothesis("decoding", f"KLA is as fast as Gated DeltaNet after {length}", _long_prompts(name))
        for name, length in (("32k", "32,768 tokens"), ("131k", "131,072 tokens"))
    ),
    Hypothesis("kernel_benchmarks", "DPLR takes 1.5 to 3 times as long as KDA", _low_rank()),
    Hypothesis(
        "ridge_benchmark",
        "Gated KalmaNet's layer takes within 10 % of flash-linear-attention's Gated DeltaNet layer",
        _kalmanet_layer(),
    ),
    Hypothesis("scaling", "Recurrences are below the Transformer at every size", _scaling("is below")),
    Hypothesis("scaling", "KDA and Gated DeltaNet are equal at every size", _scaling("equals")),
    Hypothesis("scaling", "Their lead shrinks from 25M to 135M", _scaling("shrinks")),
    Hypothesis("mesanet_stability", "With one part it breaks off", _mesanet("with one part it breaks off")),
    Hypothesis("mesanet_stability", "With two parts it does not", _mesanet("with two parts it does not")),
)
