"""Pictures of a run: time against length, ours against peers, and both against the roofline.

They are as wide as a page that shows them (about 830 pixels), so that text of 10 points stays legible there.
"""

import pathlib
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

from experiments.kernel_benchmarks.operators import OPERATORS
from experiments.kernel_benchmarks.peers import PEERS
from experiments.kernel_benchmarks.report import title_of
from experiments.kernel_benchmarks.roofline import moved_bytes, operations
from experiments.kernel_benchmarks.view import PASSES, View, head_sizes_text

# One colour a subject, told apart under the common colour-vision deficiencies; peers keep theirs in all pictures.
OPERATOR_COLORS = {
    "linear_attention": "#7f7f7f",
    "simple_gla": "#a6761d",
    "gla": "#e7298a",
    "deltanet": "#0072b2",
    "gated_deltanet": "#009e73",
    "kda": "#d55e00",
    "gated_deltanet2": "#cc79a7",
    "write_key": "#56b4e9",
    "pdn": "#1b4f72",
    "pgdn": "#b2a000",
    "pkda": "#7b3294",
}
STYLES = {
    "ours": ("-", "o"),
    "triton": ("-", "o"),
    "fla": ("--", "s"),
    "flash_qla": (":", "D"),
    "cudnn": ("--", "v"),
    "flashinfer": ("-.", "P"),
    "fla_safe_gate": ("--", "X"),
    "jla": ("-", "*"),
    "chunked": ("-.", "^"),
}
WIDTH, DPI = 8.3, 200
PEER_COLORS = {
    "fla": "#e69f00",
    "flash_qla": "#6a3d9a",
    "cudnn": "#17a2b8",
    "flashinfer": "#c2185b",
    "fla_safe_gate": "#8c564b",
    "jla": "#0072b2",
    "chunked": "#999999",
}


def _title(view: View, what: str, results: dict[str, Any]) -> str:
    sizes = head_sizes_text(view.head_sizes)
    commits = view.commit.split(", ")
    # All of many are in the page's tables.
    commit = f"commit {view.commit}" if len(commits) < 5 else f"{len(commits)} commits, {commits[0]} to {commits[-1]}"
    return f"{what}\n{results['device']}, {view.config['dtype']}, {sizes}, {commit}"


def _color(operator: str) -> str:
    return OPERATOR_COLORS.get(operator, "black")


def _has_sweep(view: View, filled: bool) -> bool:
    """Whether any operator was timed at several lengths."""
    times = [
        [view.time(view.ours, operator, shape, "forward_backward") for shape in view.sweep_shapes(filled=filled)]
        for operator in view.config["sweep_operators"]
    ]
    return any(sum(t is not None for t in row) > 1 for row in times)


def _lengths_panel(axes: Axes, view: View, run: str, *, filled: bool) -> None:
    for operator in view.config["sweep_operators"]:
        for name in (view.ours, *PEERS):
            points = []
            for shape in view.sweep_shapes(filled=filled):
                t = view.time(name, operator, shape, run)
                if t is not None:
                    per = shape[0] * shape[1] * shape[2]
                    points.append((shape[1], t * 1e6 / per if filled else t))
            if not points:
                continue
            line, marker = STYLES[name]
            label = f"{OPERATORS[operator].title}, {title_of(view, name)}"
            axes.plot(*zip(*points), line, marker=marker, markersize=4, color=_color(operator), label=label)
    lengths = view.config["sweep_lengths"]
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    heads = view.config["sweep_heads"]
    if filled:
        axes.set_ylim(bottom=0)
        axes.set_ylabel("ns a token and head")
        axes.set_title(f"{PASSES[run]}, B T = {view.config['sweep_tokens']}, H = {heads}", fontsize=10)
    else:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_ylabel("device time, ms")
        axes.set_title(f"{PASSES[run]}, B = 1, H = {heads}", fontsize=10)


def time_against_length(results: dict[str, Any], path: pathlib.Path) -> None:
    """Device time against T at B = 1, and time a token at a fixed number of tokens."""
    view = View(results)
    rows = [filled for filled in (False, True) if _has_sweep(view, filled)]
    figure, panels = plt.subplots(
        len(rows), 2, figsize=(WIDTH, 1.2 + 2.8 * len(rows)), sharex=True, squeeze=False, layout="constrained"
    )
    for column, run in enumerate(PASSES):
        for row, filled in enumerate(rows):
            _lengths_panel(panels[row, column], view, run, filled=filled)
        panels[-1, column].set_xlabel("sequence length T")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=2)
    figure.suptitle(_title(view, "Time against sequence length", results), fontsize=11)
    figure.savefig(path, dpi=DPI)
    plt.close(figure)


def ratios(results: dict[str, Any], path: pathlib.Path) -> None:
    """How many times faster we are than each peer: a row an operator, a point a shape of the table."""
    view = View(results)
    peers = [name for name in PEER_COLORS if view.has(name)]
    points = [
        point
        for point in view.table_points()
        if any(view.time(peer, *point, run) is not None for peer in peers for run in PASSES)
    ]
    operators = list(dict.fromkeys(operator for operator, _ in points))
    apart = min(0.22, 0.8 / max(1, len(peers)))
    height = 1.9 + 0.42 * max(1, len(operators))
    figure, panels = plt.subplots(1, 2, figsize=(WIDTH, height), sharey=True, layout="constrained")
    for axes, run in zip(panels, PASSES):
        for n, peer in enumerate(peers):
            found = []
            for operator, shape in points:
                ours, theirs = view.time(view.ours, operator, shape, run), view.time(peer, operator, shape, run)
                if ours and theirs:  # peers a little apart in a row
                    found.append((theirs / ours, operators.index(operator) + apart * (n - (len(peers) - 1) / 2)))
            if found:
                axes.scatter(
                    *zip(*found),
                    s=30,
                    alpha=0.8,
                    marker=STYLES[peer][1],
                    color=PEER_COLORS[peer],
                    label=title_of(view, peer),
                )
        axes.axvline(1, color="black", linewidth=1)
        axes.set_xscale("log")
        low, high = axes.get_xlim()
        ticks = [t for t in (0.25, 0.5, 1, 2, 4, 8, 16, 32) if low <= t <= high]
        if len(ticks) < 2:  # all between a half and two
            ticks = [t for t in (0.6, 0.7, 0.8, 0.9, 1, 1.2, 1.4, 1.6, 1.8) if low <= t <= high]
        axes.set_xticks(ticks, [f"{t:g}" for t in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.set_title(PASSES[run])
        axes.set_xlabel("device time, theirs / ours (> 1: ours is faster)", fontsize=9)
    panels[0].set_yticks(range(len(operators)), [OPERATORS[operator].title for operator in operators])
    panels[0].set_ylim(max(0, len(operators) - 1) + 0.6, -0.6)
    figure.suptitle(_title(view, "Ours against peers, a point for each (B, T, H)", results), fontsize=11)
    handles = {label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels())}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=max(1, len(peers)))
    figure.savefig(path, dpi=DPI)
    plt.close(figure)


def roofline(results: dict[str, Any], path: pathlib.Path) -> None:
    """Operations a second against operations a byte, under what the card reaches."""
    view = View(results)
    copy, product = view.ceilings
    figure, panels = plt.subplots(1, 2, figsize=(WIDTH, 5.2), sharey=True, layout="constrained")
    for axes, run in zip(panels, PASSES):
        intensities = []
        for operator, shape in view.table_points():
            intensity = operations(operator, shape, run) / moved_bytes(operator, shape, run)
            for name, size in ((view.ours, 42), *((peer, 16) for peer in PEERS)):
                t = view.time(name, operator, shape, run)
                if t:
                    intensities.append(intensity)
                    face = _color(operator) if name == view.ours else "none"
                    reached = operations(operator, shape, run) / t / 1e9
                    style = {"facecolors": face, "marker": STYLES[name][1], "zorder": 2 if name == view.ours else 3}
                    edge = _color(operator) if name == view.ours else "black"
                    axes.scatter(intensity, reached, s=size, edgecolors=edge, linewidths=0.8, **style)
        if copy and intensities:
            x = np.geomspace(min(intensities) / 2, max(max(intensities) * 2, 2e3 * product / copy), 100)
            axes.plot(x, np.minimum(x * copy / 1e3, product), color="black", linewidth=1)
            axes.text(x[-1], product * 1.08, f"{product:.0f} TFLOP/s", ha="right", fontsize=9)
            axes.text(x[2], x[2] * copy / 1e3 * 1.15, f"{copy:.0f} GB/s", fontsize=9, rotation=38)
        axes.set_xscale("log")
        axes.set_yscale("log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter(ScalarFormatter())
            axis.set_minor_formatter(NullFormatter())
        axes.grid(alpha=0.3)
        axes.set_title(PASSES[run])
        axes.set_xlabel("operations a byte that must move")
    panels[0].set_ylabel("TFLOP/s")
    panels[0].set_ylim(top=1.5 * panels[0].get_ylim()[1])  # room for the text above the roof
    handles = [
        panels[0].scatter([], [], color=_color(operator), label=OPERATORS[operator].title)
        for operator in view.config["operators"]
    ]
    for name in (view.ours, *PEERS):
        if view.has(name):
            face = "black" if name == view.ours else "none"
            style = {"facecolors": face, "edgecolors": "black", "marker": STYLES[name][1]}
            handles.append(panels[0].scatter([], [], **style, label=title_of(view, name)))
    figure.legend(handles=handles, loc="outside lower center", ncols=4)
    figure.suptitle(_title(view, "Roofline: each point is a shape of the table", results), fontsize=11)
    figure.savefig(path, dpi=DPI)
    plt.close(figure)


def write_figures(results: dict[str, Any], folder: pathlib.Path, name: str) -> list[pathlib.Path]:
    """Draws the pictures for which there are times as `NAME_*.png` in `folder`."""
    view, written = View(results), []
    drawn = {
        time_against_length: _has_sweep(view, False) or _has_sweep(view, True),
        ratios: any(view.has(peer) for peer in PEER_COLORS),
        roofline: view.ceilings[0] > 0,
    }
    for draw in (draw for draw, has_times in drawn.items() if has_times):
        path = folder / f"{name}_{draw.__name__}.png"
        draw(results, path)
        written.append(path)
    return written
