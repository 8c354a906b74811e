"""Differences between our results, with intervals, from the tables."""

import functools
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from experiments.harness.records import Record
from experiments.harness.study import Setting
from experiments.harness.tables import EXPERIMENTS, table_path
from experiments.harness.verdicts import Interval, between_counts, between_readings, between_seeds, of_one_run
from experiments.language_modelling.command import load_study
from experiments.language_modelling.report import chosen
from experiments.long_context.report import finished, rise_of_perplexity
from experiments.ridge_benchmark.config import PEER_LAYER
from experiments.sweep.command import whole_study
from experiments.sweep.outcomes import Outcome, choose, count_solved
from experiments.sweep.results import read_runs
from experiments.throughput.report import find, read_results

Measure = Callable[[], Interval | None]

LOSS = 0.01
"""Of bits per byte: less counts as equal."""
SEEDS_OF_LOSS = 0.02
"""What two trainings of one model may differ by, for models with one seed: reruns differed by 0.6 %, nobody measured
seeds at this size."""
SHARE = 0.2
"""Of solved seeds: less counts as equal."""
ACCURACY = 0.02
"""Of accuracy: less counts as equal."""
TIME = 0.02
"""Of time: less counts as equal."""


@functools.cache
def _bits(setting: str) -> dict[str, float]:
    plan = load_study("language_modelling", setting)
    length = str(plan.train.data.sequence_length)
    found = chosen(plan, table_path("language_modelling", setting))
    return {label: runs[0]["test"][length]["bits_per_byte"] for label, runs in found.items()}


def bits(setting: str, ours: str, theirs: str) -> Measure:
    """Bits per byte of one language model against another's, each at its better rate; one seed each."""
    return lambda: of_one_run(_bits(setting)[ours], _bits(setting)[theirs], SEEDS_OF_LOSS)


def between(study: str, ours: str, theirs: str, setting: str = "real") -> Measure:
    """Bits per byte of two models of a planned study, over reporting seeds; one has an allowance for seeds."""

    def measure() -> Interval | None:
        plan = load_study(study, setting)
        runs = chosen(plan, table_path(study, setting))
        length = str(plan.train.data.sequence_length)
        if ours not in runs or theirs not in runs:
            return None
        first, second = ([run["test"][length]["bits_per_byte"] for run in runs[label]] for label in (ours, theirs))
        if min(len(first), len(second)) < 2:
            return of_one_run(first[0], second[0], SEEDS_OF_LOSS)
        return between_seeds(first, second)

    return measure


def outcome(study: str, cell: str, label: str, setting: Setting = "real") -> Outcome | None:
    """A mixer's outcome in a cell of a study."""
    plan = whole_study(study, setting)
    (mixer,) = (mixer for mixer in plan.mixers if mixer.label == label)
    (own,) = (one for one in plan.cells if one.name == cell)
    return choose(plan, table_path(study, setting), mixer, own)


def solved(study: str, cell: str, ours: str, theirs: str, setting: Setting = "real") -> Measure:
    """Share of seeds that solve a cell, of one mixer less another's."""

    def measure() -> Interval | None:
        found = [outcome(study, cell, label, setting) for label in (ours, theirs)]
        return None if None in found else between_counts(*(one.solved for one in found if one is not None))

    return measure


def solved_at_all_rates(study: str, cell: str, ours: str, theirs: str, setting: Setting = "real") -> Measure:
    """Share of runs at every rate that solve a cell's validation, of one mixer less another's: no rate is chosen."""

    def measure() -> Interval | None:
        found = [outcome(study, cell, label, setting) for label in (ours, theirs)]
        return None if None in found else between_counts(*(one.tried for one in found if one is not None))

    return measure


def solved_so_far(study: str, cell: str, ours: str, theirs: str, setting: Setting = "real") -> Measure:
    """As `solved_at_all_rates`, where seeds are missing: of the choosing runs that both mixers have."""

    def measure() -> Interval | None:
        plan = whole_study(study, setting)
        (own,) = (one for one in plan.cells if one.name == cell)
        mixers = {mixer.label: mixer for mixer in plan.mixers}
        runs = [read_runs(table_path(study, setting), mixers[label], own) for label in (ours, theirs)]
        lanes = [lane for lane in plan.lanes(own) if all(lane in done for done in runs)]
        if not lanes:
            return None
        ours_solved, theirs_solved = (
            count_solved([done[lane]["validation"][plan.metric] for lane in lanes]) for done in runs
        )
        return between_counts(ours_solved, theirs_solved)

    return measure


def solves(study: str, cell: str, label: str, setting: Setting = "real") -> Measure:
    """Share of seeds that solve a cell, less all of them."""

    def measure() -> Interval | None:
        found = outcome(study, cell, label, setting)
        if found is None:
            return None
        right, count = found.solved
        whole = between_counts((right, count), (count, count))
        return Interval(right / count - 1, whole.low, min(whole.high, 0.0))

    return measure


def accuracy(study: str, cell: str, test: str, ours: str, theirs: str | float, setting: Setting = "real") -> Measure:
    """Accuracy of one mixer less another's, or less a number; over seeds."""

    def measure() -> Interval | None:
        plan = whole_study(study, setting)
        found = [outcome(study, cell, label, setting) for label in (ours, theirs) if isinstance(label, str)]
        if None in found:
            return None
        values = [[x / 100 for x in one.values(plan.metric, test)] for one in found if one is not None]
        if isinstance(theirs, str):
            return _absolute(*values)
        return _absolute(values[0], [theirs] * len(values[0]))

    return measure


def cells(study: str, label: str, ours: tuple[str, str], theirs: tuple[str, str]) -> Measure:
    """Accuracy of a mixer in one cell and test less that in another, over seeds."""

    def measure() -> Interval | None:
        metric = whole_study(study, "real").metric
        found = [(outcome(study, cell, label), test) for cell, test in (ours, theirs)]
        values = [[x / 100 for x in own.values(metric, test)] for own, test in found if own is not None]
        return _absolute(*values) if len(values) == 2 else None

    return measure


def reads_on(label: str) -> Measure:
    """Rise of perplexity a token from 4096 to 32,768 tokens of context, on the same tokens."""

    def measure() -> Interval | None:
        plan = load_study("long_context", "real")
        row = finished(plan, table_path("long_context", "real")).get(label)  # type: ignore[arg-type]
        return None if row is None else rise_of_perplexity(row["blocks"], "4096", "32768")

    return measure


def _absolute(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    # The difference itself, which `between_seeds` gives in parts of the second mean: one that cannot be 0.
    shifted = between_seeds([x + 1 for x in ours], [x + 1 for x in theirs])
    scale = 1 + float(np.mean(theirs))
    return Interval(*(scale * end for end in (shifted.estimate, shifted.low, shifted.high)))


def steps(table: str, ours: tuple[str, int], theirs: tuple[str, int], **options: Any) -> Measure:
    """Tokens a second of one case against another's, from single steps: the middle nine tenths of them.

    Args:
        table: of the throughput study.
        ours: label and tokens a row.
        theirs: likewise.
        **options: of the case, where they are not as `Case` has them.
    """

    def measure() -> Interval | None:
        rows = read_results(EXPERIMENTS / "throughput" / "results" / f"{table}.jsonl")
        found = []
        for label, length in (ours, theirs):
            own = find(rows, label, length, **options)
            if own is None or "error" in own:
                return None
            found.append(np.asarray(own["step_seconds"]) / (own["rows"] * length))
        (a_low, a_high), (b_low, b_high) = (np.quantile(seconds, [0.05, 0.95]) for seconds in found)
        middle = float(np.median(found[1]) / np.median(found[0]) - 1)
        return Interval(middle, min(middle, float(b_low / a_high - 1)), max(middle, float(b_high / a_low - 1)))

    return measure


def number(path: str, read: Callable[[Any], float], spread: float = 0.0) -> Measure:
    """A number from a file of results under `experiments`, with what it may be off by."""

    def measure() -> Interval | None:
        found: pathlib.Path = EXPERIMENTS / path
        value = read(json.loads(found.read_text()))
        return Interval(value, value - spread, value + spread)

    return measure


def of_times(file: str, ours: Record, theirs: Record) -> Measure:
    """Wall time of one record of a run over another's, from the medians and quantiles of their calls.

    Args:
        file: the results, under `experiments`.
        ours: fields that choose one record.
        theirs: likewise.
    """

    def measure() -> Interval | None:
        path = EXPERIMENTS / file
        records = json.loads(path.read_text())["records"] if path.exists() else []
        readings = []
        for wanted in (ours, theirs):
            found = [r for r in records if all(r.get(key) == value for key, value in wanted.items())]
            if not found:
                return None
            (record,) = found
            low, high = record["wall_ms_quantiles"]
            readings.append((low, record["wall_ms"], high))
        return between_readings(*readings)

    return measure


def layer_beside_peer(run: str) -> Measure:
    """Our Gated KalmaNet's layer over flash-linear-attention's Gated DeltaNet layer, in one of the passes."""
    what = {"kind": "layer", "pass": run}
    theirs = what | {"layer": PEER_LAYER, "implementation": "fla"}
    return of_times("ridge_benchmark/results/layers.json", what | {"layer": "Gated KalmaNet"}, theirs)
