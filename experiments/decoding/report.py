"""Table and picture of the timed calls."""

import pathlib
import statistics
from typing import Any

import numpy as np

from experiments.decoding.study import BASELINE, KLA, DecodingStudy
from experiments.harness.page import made_with, markdown_table, write_between_marks
from experiments.harness.pictures import pyplot, save
from experiments.harness.tables import read_table
from experiments.harness.verdicts import Interval, Verdict, between_readings, equal

Record = dict[str, Any]
MARGIN = 0.02
"""Of time: less counts as equal."""


def read_results(path: pathlib.Path) -> list[Record]:
    """All records of a folder."""
    return sorted(read_table(path), key=lambda row: row["id"] + ".")


def _find(records: list[Record], label: str, batch: int, peer: bool) -> Record | None:
    found = (r for r in records if (r["model"], r["batch"], "peer" in r) == (label, batch, peer))
    return next(found, None)


def _cells(ours: Record, theirs: Record | None) -> list[str]:
    share = "" if ours["of_limit"] is None else f"{ours['of_limit']:.0%}"
    moved = f"{ours['bytes']['weights'] / 1e9:.2f} + {ours['bytes']['caches'] / 1e9:.2f}"
    milliseconds = 1000 * statistics.median(ours["token_seconds"])
    cells = [f"{milliseconds:.2f}", f"{ours['tokens_per_second']:,.0f}", moved, share]
    if theirs is None:
        return [*cells, "", ""]
    ratio = ours["tokens_per_second"] / theirs["tokens_per_second"]
    return [*cells, f"{theirs['tokens_per_second']:,.0f} ({theirs['peer']})", f"{ratio:.2f}"]


def table(plan: DecodingStudy, records: list[Record]) -> str:
    """Markdown: a row for each model and batch."""
    if not records:
        return "No results yet.\n"
    reading = ["prompt read, ms"] if any("reading_seconds" in r for r in records) else []
    header = ["model", "batch", "ms a token", "tokens/s", "weights + caches, GB a token", "of the bandwidth"]
    header += ["peer's tokens/s", "times the peer's", *reading]
    rows = []
    for label, _ in plan.models:
        for batch in plan.batches:
            ours, theirs = (_find(records, label, batch, peer) for peer in (False, True))
            if ours is not None:
                read = [f"{1000 * statistics.median(ours['reading_seconds']):.1f}"] if reading else []
                rows.append([label, str(batch), *_cells(ours, theirs), *read])
    versions: dict[str, str] = next((r["versions"] for r in records if "peer" in r), {})
    beside = "; " * bool(versions) + ", ".join(f"{name} {version}" for name, version in versions.items())
    lines = [
        *markdown_table(header, rows),
        "",
        f"{made_with(records)}{beside}; prompts of {plan.prompt} tokens, {plan.block * plan.blocks} new ones.",
        "",
    ]
    lines += [f"- {says}: {interval}, {verdict.value}" for says, interval, verdict in answers(records)]
    return "\n".join([*lines, ""] if lines[-1] else lines)


def answers(records: list[Record]) -> list[tuple[str, Interval, Verdict]]:
    """The plan's first hypothesis, where both models were timed with long prompts: KLA reads and writes as fast.

    The interval is from the 5 % to the 95 % quantiles of single readings and blocks.
    """
    found = [_find(records, label, 1, peer=False) for label in (KLA, BASELINE)]
    if None in found or any("reading_seconds" not in r for r in found if r is not None):
        return []
    told = []
    for says, name in (("KLA reads as fast as Gated DeltaNet", "reading_seconds"), ("and writes", "token_seconds")):
        ours, theirs = (list(np.quantile(record[name], (0.05, 0.5, 0.95))) for record in found if record is not None)
        interval = between_readings(ours, theirs)
        told.append((says, interval, equal(MARGIN).judge(interval)))
    return told


def figure(plan: DecodingStudy, records: list[Record], path: pathlib.Path) -> bool:
    """Bars of tokens a second for each batch; False where there is nothing to draw."""
    if not records:
        return False
    batches = [b for b in plan.batches if any(r["batch"] == b for r in records)]
    labels = [label for label, _ in plan.models if any(r["model"] == label for r in records)]
    size = (3.2 * len(batches) + 1.6, 1.4 + 0.45 * len(labels))
    drawing, panels = pyplot().subplots(1, len(batches), figsize=size, sharey=True, squeeze=False, layout="constrained")
    for panel, batch in zip(panels[0], batches):
        for peer, offset, color in ((False, -0.2, "tab:blue"), (True, 0.2, "tab:orange")):
            for row, label in enumerate(labels):
                record = _find(records, label, batch, peer)
                if record is not None:
                    name = f"{record.get('peer', 'rnnlib')}: {record['tokens_per_second']:,.0f}"
                    speed = record["tokens_per_second"]
                    paces = [batch / seconds for seconds in record.get("token_seconds", ())] or [speed]
                    ends = [[max(0.0, speed - min(paces))], [max(0.0, max(paces) - speed)]]
                    panel.barh(row + offset, speed, 0.38, xerr=ends, color=color, alpha=0.7, error_kw={"lw": 0.8})
                    panel.text(speed + ends[1][0], row + offset, f" {name}", va="center", fontsize=7)
        panel.set_title(f"batch {batch}", fontsize=9)
        panel.set_xlabel("tokens a second, all rows together;\nlines: slowest and fastest block", fontsize=8)
        panel.locator_params(axis="x", nbins=5)
        panel.margins(x=0.45)
        panel.set_yticks(range(len(labels)), labels, fontsize=8)
    panels[0][0].set_ylim(len(labels) - 0.5, -0.5)
    device = records[0]["environment"]["device"]
    drawing.suptitle(f"Greedy decoding on {'a CPU' if device == 'cpu' else device}", fontsize=10)
    save(drawing, path)
    return True


def write_report(plan: DecodingStudy, records: list[Record], folder: pathlib.Path, name: str) -> str:
    """Writes the picture and, where the page has a place for it, the table.

    Args:
        plan: models and batches, in the table's order.
        records: of one device.
        folder: with the page and the folder of figures.
        name: of the results.

    Returns:
        The table.
    """
    text = table(plan, records)
    figure(plan, records, folder / "figures" / f"{name}.png")
    write_between_marks(folder / "README.md", name, text)
    return text
