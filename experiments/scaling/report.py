"""Tables and pictures of each size, and what follows over sizes."""

import pathlib

from experiments.harness.page import markdown_table, write_between_marks
from experiments.harness.verdicts import Interval, Region, Verdict, below, between_seeds, equal, of_one_run
from experiments.language_modelling.needles import needles_table
from experiments.language_modelling.report import chosen
from experiments.language_modelling.report import write as write_size
from experiments.language_modelling.state import state_numbers
from experiments.language_modelling.study import LanguageStudy
from experiments.scaling.matching import parameters
from experiments.scaling.study import BASELINE, GATED_DELTANET, SIZES, study

MARGIN, ALLOWANCE = 0.01, 0.02
"""What counts as equal, and what is allowed for seeds where a size has one; parts of bits per byte."""


def bits_of(setting: str, folder: pathlib.Path) -> dict[str, list[float]]:
    """Bits per byte of the reported seeds at the trained length, by label."""
    plan = study(setting)  # type: ignore[arg-type]
    found = chosen(plan, folder / "results" / f"{setting}.jsonl")
    length = str(plan.train.data.sequence_length)
    return {label: [run["test"][length]["bits_per_byte"] for run in runs] for label, runs in found.items()}


def difference(bits: dict[str, list[float]], label: str, other: str) -> Interval | None:
    """Of two mixers at a size, in parts of the second; None while one of them is missing."""
    if label not in bits or other not in bits:
        return None
    ours, theirs = bits[label], bits[other]
    if min(len(ours), len(theirs)) < 2:
        return of_one_run(ours[0], theirs[0], ALLOWANCE)
    return between_seeds(ours, theirs)


def shrinking(first: Interval, last: Interval) -> Interval:
    """How much of a lead is lost from the first size to the last: what is added to a negative difference."""
    return Interval(last.estimate - first.estimate, last.low - first.high, last.high - first.low)


def verdicts(bits: dict[str, dict[str, list[float]]]) -> list[tuple[str, str, Interval, Verdict]]:
    """The answers to PLAN.md's three questions: what is said, of which size, our difference, what follows."""
    found: list[tuple[str, str, Interval, Verdict]] = []

    def add(says: str, size: str, interval: Interval | None, region: Region) -> None:
        if interval is not None:
            found.append((says, size, interval, region.judge(interval)))

    recurrences = [mixer.label for mixer in study("25m").mixers if mixer != BASELINE]
    for size, of_size in bits.items():
        for label in recurrences:
            add(f"{label} is below {BASELINE.label}", size, difference(of_size, label, BASELINE.label), below(MARGIN))
        add("KDA equals Gated DeltaNet", size, difference(of_size, "KDA", GATED_DELTANET.label), equal(MARGIN))
    for label in recurrences:
        ends = [difference(bits[size], label, BASELINE.label) for size in (SIZES[0], SIZES[-1])]
        if ends[0] is not None and ends[1] is not None:
            region = Region(0.0, float("inf"))
            add(f"the lead of {label} shrinks", f"{SIZES[0]} to {SIZES[-1]}", shrinking(ends[0], ends[1]), region)
    return found


def models_table() -> str:
    """Markdown: parameters, widths of feed-forwards and states at every size; nothing of it is measured."""
    rows = []
    for size in SIZES:
        plan = study(size)
        for mixer in plan.mixers:
            config = plan.model(mixer)
            states = [f"{state_numbers(config, length):,}" for length in (1, plan.train.data.sequence_length)]
            rows.append([size, mixer.label, f"{parameters(config):,}", str(config.feed_forward_width), *states])
    header = ["size", "mixer", "parameters", "feed-forward", "state after 1 token, numbers", "after 4096"]
    return "\n".join(markdown_table(header, rows)) + "\n"


def verdicts_table(folder: pathlib.Path) -> str:
    """Markdown: the answers."""
    answers = verdicts({size: bits_of(size, folder) for size in SIZES})
    if not answers:
        return "No results yet.\n"
    rows = [[says, size, str(interval), verdict.value] for says, size, interval, verdict in answers]
    return "\n".join(markdown_table(["says", "size", "ours (95 %)", "verdict"], rows)) + "\n"


def write(plan: LanguageStudy, results: pathlib.Path, folder: pathlib.Path, *, page: bool) -> str:
    """Writes a size's figure and, on the page, all tables; returns those of the size."""
    text = write_size(plan, results, folder, page=page)
    if page:
        write_between_marks(folder / "README.md", "models", models_table())
        write_between_marks(folder / "README.md", "verdicts", verdicts_table(folder))
        if results.stem in SIZES:  # no additive rule is among these models: shares alone
            needles = needles_table(chosen(plan, results), (), (), plan.train.data.sequence_length)
            write_between_marks(folder / "README.md", f"{results.stem}_needles", needles)
    return text
