"""Mamba-3's layers before and after linear attention's diagonal: `python -m experiments.ridge_benchmark.diagonal`.

Makes the picture from the committed results.
"""

import json
import pathlib
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RESULTS = pathlib.Path(__file__).parent / "results" / "h200_diagonal.json"
PASSES = {"forward": "forward", "both": "forward + backward"}
BARS = (
    ("Mamba-2", "mamba2", "new"),
    ("Mamba-3, before", "mamba3", "old"),
    ("Mamba-3", "mamba3", "new"),
    ("four pairs, before", "mamba3_mimo", "old"),
    ("four pairs", "mamba3_mimo", "new"),
)
COLORS = {"old": "#999999", "new": "#0072b2"}


def write_figure(results: dict[str, Any], path: pathlib.Path) -> None:
    """Times of layers, a panel for each pass."""
    trees = {commit: name for name, commit in results["trees"].items()}
    best = {(r["preset"], trees[r["tree"]], r["part"]): r["best"] for r in results["records"] if r["kind"] == "layer"}
    figure, panels = plt.subplots(1, 2, figsize=(9, 2.8), layout="constrained", sharey=True)
    for axes, (part, title) in zip(panels, PASSES.items(), strict=True):
        times = [best[preset, tree, part] for _, preset, tree in BARS]
        bars = axes.barh([name for name, *_ in BARS], times, color=[COLORS[tree] for *_, tree in BARS])
        axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
        axes.set(title=title, xlabel=f"ms a layer, {results['device']}", xlim=(0, 1.15 * max(times)))
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].invert_yaxis()
    figure.savefig(path, dpi=150, metadata={"Software": None})
    plt.close(figure)


if __name__ == "__main__":
    write_figure(json.loads(RESULTS.read_text()), RESULTS.with_suffix(".png"))
