"""Tables and pictures of the language models, from their results."""

import math
import pathlib
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from experiments.harness.page import made_with, markdown_table, write_between_marks
from experiments.harness.pictures import pyplot, save
from experiments.language_modelling.runs import best_rate, read_run, read_runs
from experiments.language_modelling.state import state_numbers
from experiments.language_modelling.study import WIDTHS, LanguageStudy, study

IN_COLOR = {
    "Gated DeltaNet": "#0072b2",
    "KDA": "#d55e00",
    "KLA": "#009e73",
    "Gated DeltaNet-2": "#cc79a7",
    "DeltaNet": "#e69f00",
    "Mamba-2": "#56b4e9",
    "Transformer++": "#000000",
}
"""Mixers that pictures tell apart by color, the same in all; others are grey."""


def by_rate(plan: LanguageStudy, results: pathlib.Path) -> dict[str, dict[float, list[dict[str, Any]]]]:
    """For each mixer that has any, its runs of all seeds at each of the study's rates that has them all."""
    found: dict[str, dict[float, list[dict[str, Any]]]] = {}
    for mixer in plan.mixers:
        for rate in plan.learning_rates:
            runs = [run for seed in plan.seeds if (run := read_run(plan, results, mixer, rate, seed)) is not None]
            if len(runs) == len(plan.seeds):
                found.setdefault(mixer.label, {})[rate] = runs
    return found


def _validation_bits(runs: list[dict[str, Any]]) -> float:
    bits = statistics.fmean(run["validation"]["bits_per_byte"] for run in runs)
    return bits if math.isfinite(bits) else math.inf


def chosen(plan: LanguageStudy, results: pathlib.Path) -> dict[str, list[dict[str, Any]]]:
    """For each mixer with a finished rate: the seeds of the one with the fewest bits per byte in validation.

    Where other seeds report, those at that rate, once all are there.
    """
    if plan.report_seeds:
        rates = {mixer: best_rate(plan, [results], mixer) for mixer in plan.mixers}
        found = {
            mixer.label: [read_run(plan, results, mixer, rate, seed) for seed in plan.report_seeds]
            for mixer, rate in rates.items()
            if rate is not None
        }
        return {label: [run for run in runs if run] for label, runs in found.items() if all(runs)}
    return {label: min(runs.values(), key=_validation_bits) for label, runs in by_rate(plan, results).items()}


def lacking_rates(plan: LanguageStudy, results: pathlib.Path) -> set[str]:
    """Labels of the mixers that were not run at every rate that others were: they stand at no choice of rates."""
    tried = by_rate(plan, results)
    every = {rate for rates in tried.values() for rate in rates}
    return {label for label, rates in tried.items() if set(rates) != every}


def write(plan: LanguageStudy, results: pathlib.Path, folder: pathlib.Path, *, page: bool) -> str:
    """Writes a setting's figure and, on the page, its tables.

    Args:
        plan: the study at the setting.
        results: its table of results.
        folder: of the study.
        page: whether to write into its README.

    Returns:
        The tables.
    """
    if found := chosen(plan, results):
        path = folder / "figures" / f"{results.stem}.png"
        length = plan.train.data.sequence_length
        figure(found, path, length, by_rate(plan, results), lacking_rates(plan, results))
    if results.stem in WIDTHS:
        widths_figure(folder)
    text = tables(plan, results)
    if page:
        write_between_marks(folder / "README.md", results.stem, text)
    return text


def tables(plan: LanguageStudy, results: pathlib.Path) -> str:
    """All of a setting's tables, Markdown: what stands between its marks on the page."""
    found = chosen(plan, results)
    return table(plan, found, lacking_rates(plan, results)) + rates_table(plan, results) + more_runs(plan, results)


def table(plan: LanguageStudy, found: dict[str, list[dict[str, Any]]], lacking: Collection[str] = ()) -> str:
    """Bits per byte at each length, Markdown; the rates of mixers that are `lacking` others have a star."""
    if not found:
        return "No results yet.\n"
    head = [
        "mixer",
        "parameters",
        "tokens a parameter",
        "state",
        "rate",
        *(f"T={n}" for n in plan.lengths),
        "training loss",
        "tokens/s",
        "memory, GB",
    ]
    rows = []
    trained = plan.train.data.sequence_length
    models = {mixer.label: plan.model(mixer) for mixer in plan.mixers}
    for label, runs in sorted(found.items(), key=lambda entry: _bits(entry[1], trained)):
        first = runs[0]
        row = [label, f"{first['num_parameters'] / 1e6:.1f}M", f"{first['train_tokens'] / first['num_parameters']:.1f}"]
        row.append(f"{state_numbers(models[label], trained) / 1e6:.2f}M")
        row.append(f"{first['learning_rate']:g}" + "*" * (label in lacking))
        row += [f"{_bits(runs, n):.4f}" for n in plan.lengths]
        row.append(f"{statistics.fmean(_last_loss(run) for run in runs):.3f}")
        speed, peak = first["median_tokens_per_second"], first.get("peak_bytes")
        row += ["" if speed is None else f"{speed:,}", "" if peak is None else f"{peak / 1e9:.1f}"]
        rows.append(row)
    every = [run for runs in found.values() for run in runs]
    texts = {(run["corpus"]["fingerprint"], run["corpus"]["tokens"], run["corpus"]["bytes"]) for run in every}
    text = "; ".join(f"{tokens:,} tokens of {size:,} bytes, hash {name[:8]}" for name, tokens, size in sorted(texts))
    count = len(plan.report_seeds or plan.seeds)
    note = " * Not run at every rate that others were." if lacking else ""
    return "\n".join(markdown_table(head, rows)) + (
        f"\n\nBits per byte of held-out text by tokens a row (trained at {trained}), mean over "
        f"{count} seed(s), best first, after {every[0]['train_tokens']:,} tokens; state: numbers that a model keeps of "
        f"{trained} tokens; training loss in nats a "
        f"token, mean of the last tenth.{note} Text: {text}. {made_with(every)}.\n"
    )


def rates_table(plan: LanguageStudy, results: pathlib.Path) -> str:
    """Bits per byte of the validation half at every learning rate of the study that was run, Markdown; "" with one."""
    found = by_rate(plan, results)
    bits = {label: {rate: _validation_bits(seeds) for rate, seeds in runs.items()} for label, runs in found.items()}
    tried = [rate for rate in plan.learning_rates if any(rate in rates for rates in bits.values())]
    if len(tried) < 2:
        return ""
    rows = [
        [label, *(f"{rates[rate]:.4f}" if rate in rates else "not run" for rate in tried)]
        for label, rates in sorted(bits.items(), key=lambda entry: min(entry[1].values()))
    ]
    head = ["mixer, validation half", *(f"rate {rate:g}" for rate in tried)]
    return "\n" + "\n".join(markdown_table(head, rows)) + "\n"


def more_runs(plan: LanguageStudy, results: pathlib.Path) -> str:
    """All runs of mixers that were trained at other rates or seeds than the study's too, Markdown."""
    length = plan.train.data.sequence_length
    rows = []
    for mixer in plan.mixers:
        runs = read_runs(plan, results, mixer)
        if any(run["learning_rate"] not in plan.learning_rates or run["seed"] not in plan.seeds for run in runs):
            for run in runs:
                bits = [
                    run["validation"]["bits_per_byte"],
                    *(run["test"][str(n)]["bits_per_byte"] for n in plan.lengths),
                ]
                row = [mixer.label, f"{run['learning_rate']:g}", str(run["seed"]), *(f"{b:.4f}" for b in bits)]
                rows.append([*row, f"{_last_loss(run):.3f}"])
    if not rows:
        return ""
    head = ["mixer, every run", "rate", "seed", f"validation half, T={length}", *(f"T={n}" for n in plan.lengths)]
    head.append("training loss")
    return "\n" + "\n".join(markdown_table(head, rows)) + "\n"


def _bits(runs: list[dict[str, Any]], length: int) -> float:
    return statistics.fmean(run["test"][str(length)]["bits_per_byte"] for run in runs)


def _last_loss(run: dict[str, Any]) -> float:
    losses = [loss for _, loss in run["train_loss"]]
    return statistics.fmean(losses[-max(1, len(losses) // 10) :])


def figure(
    found: dict[str, list[dict[str, Any]]],
    path: pathlib.Path,
    length: int,
    tried: Mapping[str, Mapping[float, list[dict[str, Any]]]],
    lacking: Collection[str] = (),
) -> None:
    """Bits per byte of every run, best mixer first; training loss, bits by length and by position, a few in color.

    Args:
        found: the chosen runs of each mixer.
        path: of the picture.
        length: tokens of the rows that mixers are compared at.
        tried: all runs of each mixer by rate, which are drawn hollow.
        lacking: mixers that were not run at every rate that others were: they stand with a star.
    """
    ranked = sorted(found.items(), key=lambda entry: _bits(entry[1], length))
    drawing, panels = pyplot().subplot_mosaic(
        [["ranking", "training"], ["ranking", "length"], ["ranking", "position"]],
        figsize=(11, max(7.0, 1.6 + 0.25 * len(found))),
        layout="constrained",
        width_ratios=(1.1, 1),
    )
    colors = {label: color for label, color in IN_COLOR.items() if label in found}
    if len(colors) < min(3, len(found)):
        colors = dict(zip(found, IN_COLOR.values()))
    _draw_ranking(panels["ranking"], ranked, length, tried, colors, lacking)
    lengths = sorted(map(int, ranked[0][1][0]["test"]))
    for label, runs in sorted(ranked, key=lambda entry: entry[0] in colors):  # color above grey
        style: dict[str, Any] = {"color": colors.get(label, "0.8"), "linewidth": 1.3 if label in colors else 0.7}
        steps, losses = zip(*runs[0]["train_loss"])
        window = max(1, len(losses) // 40)  # the mean of a few points, or the noise of batches hides the models
        smooth = [statistics.fmean(losses[max(0, j - window) : j + 1]) for j in range(len(losses))]
        panels["training"].plot(steps, smooth, **style)
        style |= {"marker": "o", "markersize": 3}
        panels["length"].plot(lengths, [_bits(runs, n) for n in lengths], **style)
        points = dict(runs[0]["test"][str(lengths[-1])]["by_position"])
        trained = max((end for end in points if end <= length), default=max(points))
        later = {end: 100 * (bits / points[trained] - 1) for end, bits in points.items() if end >= trained / 16}
        panels["position"].plot(list(later), list(later.values()), **style)
    final = [_last_loss(runs[0]) for runs in found.values()]
    panels["training"].set(xlabel="step", ylabel="training loss, nats a token")
    panels["training"].set_ylim(min(final) - 0.2, statistics.median(final) + 1.7)
    panels["length"].set(xlabel="tokens a row in the test", ylabel="bits per byte", ylim=_limits(ranked, length))
    panels["position"].set(
        xlabel=f"position in the document, up to (rows of {lengths[-1]} tokens)",
        ylabel=f"% above those up to {length}",
        ylim=(-12, 32),
    )
    for name in ("length", "position"):
        panels[name].set_xscale("log", base=2)
        panels[name].axvline(length, color="0.6", linestyle=":", linewidth=1)
    panels["training"].set_title("in color: mixers as on the left", fontsize=9)
    for panel in panels.values():
        panel.grid(alpha=0.3)
        panel.xaxis.label.set_size(9)
        panel.yaxis.label.set_size(9)
    sizes = [runs[0]["num_parameters"] / 1e6 for runs in found.values()]
    tokens = next(iter(found.values()))[0]["train_tokens"] / 1e6
    size = "-".join(dict.fromkeys(f"{x:.1f}" for x in (min(sizes), max(sizes))))
    note = " (* not run at every learning rate)" if lacking else ""
    drawing.suptitle(f"Language models of {size}M parameters after {tokens:.1f}M tokens, best first{note}")
    save(drawing, path)


def _limits(ranked: Sequence[tuple[str, list[dict[str, Any]]]], length: int) -> tuple[float, float]:
    """Of bits per byte: one model that is far behind would press all others together, so what is beyond is cut off."""
    bits = [_bits(runs, length) for _, runs in ranked]
    top = min(bits[-1], bits[0] + 4 * max(statistics.median(bits) - bits[0], 0.02))
    margin = 0.08 * max(top - bits[0], 0.01)
    return bits[0] - 2 * margin, top + margin


def _draw_ranking(
    panel: Any,
    ranked: Sequence[tuple[str, list[dict[str, Any]]]],
    length: int,
    tried: Mapping[str, Mapping[float, list[dict[str, Any]]]],
    colors: Mapping[str, str],
    lacking: Collection[str],
) -> None:
    """A row a mixer: every seed at the chosen rate, and hollow what other rates gave."""
    low, high = _limits(ranked, length)
    for row, (label, runs) in enumerate(ranked):
        chosen_rate = runs[0]["learning_rate"]
        others = [run for rate, own in tried.get(label, {}).items() if rate != chosen_rate for run in own]
        for own, face in ((others, "none"), (runs, colors.get(label, "0.55"))):
            bits = [_bits([run], length) for run in own]
            edge = colors.get(label, "0.55")
            panel.plot(bits, [row] * len(bits), "o", color=edge, markerfacecolor=face, markersize=5, clip_on=True)
        if min(_bits([run], length) for run in runs) > high:
            panel.text(
                high, row, f"{_bits(runs, length):.2f} \N{RIGHTWARDS ARROW} ", ha="right", va="center", fontsize=8
            )
    labels = [label + " *" * (label in lacking) for label, _ in ranked]
    panel.set_yticks(range(len(labels)), labels, fontsize=8)
    panel.set(xlim=(low, high), ylim=(len(labels) - 0.5, -0.5))
    panel.set_xlabel(f"bits per byte, rows of {length} tokens (hollow: other learning rates)")


def _tables_of_widths(output: pathlib.Path) -> list[pathlib.Path]:
    return [output / "results" / f"{setting}.jsonl" for setting in WIDTHS]


def at_every_width(output: pathlib.Path) -> dict[str, list[list[dict[str, Any]]]]:
    """For each mixer, the runs of every width of `WIDTHS`: of the rates compared at, each width's better one.

    The widths' rates are as many, in one order: what one width has at its other rate has no partner, and a mixer
    without any partners is left out.
    """
    plans = [study(setting) for setting in WIDTHS]
    tables = list(map(by_rate, plans, _tables_of_widths(output)))
    partners = list(zip(*(plan.learning_rates for plan in plans), strict=True))  # [rates][widths]
    found = {}
    for label in tables[-1]:
        of_widths = [table.get(label, {}) for table in tables]
        compared = [rates for rates in partners if all(r in runs for r, runs in zip(rates, of_widths, strict=True))]
        if compared:
            found[label] = [
                min((runs[rate] for rate in rates), key=_validation_bits)
                for runs, rates in zip(of_widths, zip(*compared), strict=True)
            ]
    return found


def widths_figure(output: pathlib.Path) -> None:
    """Bits per byte of each mixer at the widths that were trained on as many tokens; no picture while one has none.

    Mixers that lack rates which others have at some width are drawn with open marks.

    Args:
        output: the study's folder of results and figures.
    """
    plans = [study(setting) for setting in WIDTHS]
    found = at_every_width(output)
    if not found:
        return
    lacking = set().union(*map(lacking_rates, plans, _tables_of_widths(output)))
    length = plans[-1].train.data.sequence_length
    bits = {label: [_bits(runs, length) for runs in of_widths] for label, of_widths in found.items()}
    ranked = sorted(found, key=lambda label: bits[label][-1], reverse=True)  # the first row is at the bottom
    rows = range(len(ranked))
    drawing, panel = pyplot().subplots(figsize=(8, 1.6 + 0.22 * len(ranked)), layout="constrained")
    for row, label in zip(rows, ranked):
        panel.plot(bits[label], [row] * len(WIDTHS), color="0.75", linewidth=1.5, zorder=1)
    for i, (plan, color, marker) in enumerate(zip(plans, ("#e69f00", "#0072b2"), ("o", "s"), strict=True)):
        sizes = [runs[i][0]["num_parameters"] / 1e6 for runs in found.values()]
        name = f"width {plan.train.model.width}, {min(sizes):.0f}M to {max(sizes):.0f}M parameters"
        fill = ["white" if label in lacking else color for label in ranked]
        panel.scatter([bits[label][i] for label in ranked], rows, c=fill, edgecolors=color, marker=marker, s=28)
        panel.scatter([], [], color=color, marker=marker, s=28, label=name)
    if lacking & set(ranked):
        panel.scatter([], [], c="white", edgecolors="0.3", s=28, label="open: not run at every learning rate")
    # What is far behind would press all others together: its numbers stand at the edge.
    values = [value for both in bits.values() for value in both]
    edge = max(value for value in values if value < 1.5 * statistics.median(values))
    left, right = min(values) - 0.03, edge + 0.1 * (edge - min(values))
    for row, label in zip(rows, ranked):
        if max(bits[label]) > edge:
            panel.text(right, row, ", ".join(f"{b:.3f}" for b in bits[label]) + " \u2192 ", ha="right", va="center")
    panel.set_xlim(left, right)
    panel.set_yticks(rows, ranked)
    panel.set_ylim(-0.7, len(ranked) - 0.3)
    panel.set_xlabel(f"bits per byte of held-out text, rows of {length} tokens (less is better)")
    tokens = found[ranked[0]][-1][0]["train_tokens"] / 1e6
    panel.set_title(f"Language models after {tokens:.0f}M tokens of Python text, one seed each", fontsize=11)
    panel.grid(alpha=0.3, axis="x")
    panel.legend(fontsize=9, loc="upper right")
    save(drawing, output / "figures" / "widths.png")
