"""Tables, verdicts and the picture of the same tokens after several contexts."""

import pathlib
from typing import Any

import numpy as np

from experiments.harness.page import made_with, markdown_table, write_between_marks
from experiments.harness.pictures import pyplot, save
from experiments.harness.tables import Row
from experiments.harness.verdicts import Interval, Region, Verdict, above, below, bootstrap
from experiments.language_modelling.runs import read_run
from experiments.long_context.contexts import FOREIGN, bits_per_byte
from experiments.long_context.study import LongContextStudy

MARGIN = 0.01
"""Of bits per byte: less counts as equal."""


def finished(plan: LongContextStudy, results: pathlib.Path) -> dict[str, Row]:
    """The runs that are there, by label, in the order of the plan."""
    found = {run[0].label: read_run(plan, results, *run) for run in plan.runs}
    return {label: row for label, row in found.items() if row is not None}


def change(blocks: dict[str, Any], before: str, after: str) -> Interval:
    """Relative change of bits per byte from one arm to another, with documents drawn again."""
    documents = sorted(set(blocks["document"]))
    sums = np.zeros((2, len(documents)))
    for i, document in enumerate(blocks["document"]):
        sums[:, documents.index(document)] += blocks["nats"][before][i], blocks["nats"][after][i]

    def measure(weights: np.ndarray) -> float:
        first, second = sums @ weights
        return float(second / first - 1)

    return bootstrap(measure, documents)


def rise_of_perplexity(blocks: dict[str, Any], before: str, after: str) -> Interval:
    """Relative change of perplexity a token, likewise."""
    tokens = blocks["size"] * len(blocks["document"])
    nats = sum(blocks["nats"][before]) / tokens
    found = change(blocks, before, after)
    return Interval(*(float(np.exp(nats * part) - 1) for part in (found.estimate, found.low, found.high)))


def questions(plan: LongContextStudy) -> list[tuple[str, str, str, Region]]:
    """What PLAN.md asks of every model: a name, two arms, and where the change of bits per byte is said to lie."""
    first, trained, longest = (str(c) for c in (plan.contexts[0], plan.train.data.sequence_length, plan.contexts[-1]))
    asked = [("reads its trained length", first, trained, below(MARGIN))] if first != trained else []
    asked.append(("reads on beyond it", trained, longest, below(MARGIN)))
    asked.append(("is not hurt beyond it", trained, longest, Region(-float("inf"), MARGIN)))
    return [*asked, ("what is far back is its own document's", longest, FOREIGN, above(MARGIN))]


def verdicts(plan: LongContextStudy, row: Row) -> dict[str, tuple[Interval, Verdict]]:
    """The answer to each question for a model."""
    found = {}
    for name, before, after, region in questions(plan):
        interval = change(row["blocks"], before, after)
        found[name] = interval, region.judge(interval)
    return found


def table(plan: LongContextStudy, rows: dict[str, Row]) -> str:
    """Markdown: bits per byte after each context, then the answers."""
    if not rows:
        return "No results yet.\n"
    head = ["mixer", "parameters", "rate", *(f"{c} before" for c in plan.contexts), "foreign beyond the trained length"]
    cells = []
    for label, row in rows.items():
        bits = [bits_per_byte(row["blocks"], name) for name in (*map(str, plan.contexts), FOREIGN)]
        size, rate = f"{row['num_parameters'] / 1e6:.0f}M", f"{row['learning_rate']:g}"
        cells.append([label, size, rate, *(f"{b:.4f}" for b in bits)])
    names = [name for name, *_ in questions(plan)]
    answers = [
        [label, *(f"{interval}: {verdict.value}" for interval, verdict in verdicts(plan, row).values())]
        for label, row in rows.items()
    ]
    lines = [*markdown_table(head, cells), "", *markdown_table(["mixer", *names], answers)]
    first = next(iter(rows.values()))
    blocks = first["blocks"]
    count, documents = len(blocks["document"]), len(set(blocks["document"]))
    return "\n".join(lines) + (
        f"\n\nBits per byte of the same {count} blocks of {blocks['size']} tokens in {documents} held-out documents, "
        f"each model trained on {first['train_tokens']:,} tokens, {first['train_tokens'] / first['num_parameters']:.1f}"
        f" a parameter, seed {first['seed']}. Second table: change of bits per byte, 95 % interval over documents, and "
        f"what follows of it with {MARGIN:.0%} counted as equal. Text: {first['corpus']['bytes']:,} bytes, hash "
        f"{first['corpus']['fingerprint'][:8]}. {made_with(rows.values())}.\n"
    )


def figure(plan: LongContextStudy, rows: dict[str, Row], path: pathlib.Path) -> None:
    """Bits per byte after each context, and their change from the trained length, close up; foreign contexts beside."""
    drawing, (left, right) = pyplot().subplots(1, 2, figsize=(11, 4.3), layout="constrained")
    trained = plan.train.data.sequence_length
    beside = plan.contexts[-1] * 1.35
    for (label, row), color in zip(rows.items(), ("#d55e00", "#0072b2", "#009e73", "#cc79a7")):
        blocks = row["blocks"]
        left.plot(
            plan.contexts, [bits_per_byte(blocks, str(c)) for c in plan.contexts], "o-", color=color, markersize=4
        )
        found = [
            change(blocks, str(trained), str(c)) if c != trained else Interval(0.0, 0.0, 0.0) for c in plan.contexts
        ]
        low, middle, high = ([100 * getattr(i, end) for i in found] for end in ("low", "estimate", "high"))
        right.plot(plan.contexts, middle, "o-", color=color, markersize=4, label=label)
        right.fill_between(plan.contexts, low, high, color=color, alpha=0.18, lw=0)
        foreign = change(blocks, str(trained), FOREIGN)
        right.plot(beside, 100 * foreign.estimate, "x", color=color)
        left.plot(beside, bits_per_byte(blocks, FOREIGN), "x", color=color)
    right.axhspan(-100 * MARGIN, 100 * MARGIN, color="0.9", zorder=0)
    right.set_ylim(-300 * MARGIN, 300 * MARGIN)
    left.set_ylabel("bits per byte of the same tokens")
    right.set_ylabel(f"change from {trained} before, % (beyond 3: see left)")
    for panel in (left, right):
        panel.axvline(trained, color="0.6", linestyle=":", linewidth=1)
        panel.set_xscale("log", base=2)
        panel.set_xticks(plan.contexts, [str(c) for c in plan.contexts])
        panel.set_xticks([], minor=True)
        panel.set_xlabel("tokens before the scored ones")
        panel.grid(alpha=0.3)
    right.legend(frameon=False, fontsize=9, loc="lower right")
    drawing.suptitle(
        "The same tokens after more or less context. Bands: 95 % over documents; grey: equal; "
        "x: another document's beyond the trained length",
        fontsize=10,
    )
    save(drawing, path)


def write(plan: LongContextStudy, results: pathlib.Path, folder: pathlib.Path, *, page: bool) -> str:
    """Writes the figure and, on the page, the tables; returns them."""
    rows = finished(plan, results)
    if rows:
        figure(plan, rows, folder / "figures" / f"{results.stem}.png")
    text = table(plan, rows)
    if page:
        write_between_marks(folder / "README.md", results.stem, text)
    return text
