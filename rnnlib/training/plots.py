"""The picture of a run's losses."""

import io
import os
from pathlib import Path

import numpy as np

from rnnlib.files import write_atomically
from rnnlib.training.metrics import TRAIN_FILE, VALIDATION_FILE, read_csv


def plot_losses(folder: str | os.PathLike, *, title: str = "") -> Path:
    """Draws bits per byte against tokens, training and validation, into `<folder>/loss.png`.

    The training curve is a running mean over 2% of the steps on top of the single steps.

    Args:
        folder: A run's folder, with its metrics.
        title: title of the picture.

    Returns:
        The picture's path.

    Raises:
        ValueError: if no step is recorded.
        OSError: it cannot be written; the picture before it stays.
    """
    # The object interface: no global state, and no display needed.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    folder = Path(folder)
    train, validation = read_csv(folder / TRAIN_FILE), read_csv(folder / VALIDATION_FILE)
    if not train:
        raise ValueError(f"{folder / TRAIN_FILE} records no step to draw")
    tokens = np.array([row["tokens"] for row in train])
    losses = np.array([row["bits_per_byte"] for row in train])
    window = max(1, len(losses) // 50)
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(tokens, losses, color="C0", alpha=0.25, linewidth=0.8, label="training, each step")
    if window > 1:
        mean = np.convolve(losses, np.ones(window) / window, mode="valid")
        axes.plot(tokens[window - 1 :], mean, color="C0", label=f"training, mean of {window} steps")
    if validation:
        axes.plot(
            [row["tokens"] for row in validation],
            [row["bits_per_byte"] for row in validation],
            color="C1",
            marker="o",
            markersize=3,
            label=f"validation, {validation[-1]['bits_per_byte']:.3f} at the end",
        )
    finite = losses[np.isfinite(losses)]
    if len(finite):
        # The first steps' losses would squeeze the rest into a line.
        lowest = min([finite.min(), *(row["bits_per_byte"] for row in validation)])
        axes.set_ylim(lowest * 0.95, max(np.quantile(finite, 0.97), lowest * 1.1) * 1.05)
    axes.set_title(title or folder.name)
    axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
    axes.set_xlabel("training tokens")
    axes.set_ylabel("loss (bits per byte)")
    axes.grid(alpha=0.3)
    axes.legend()
    path, content = folder / "loss.png", io.BytesIO()
    figure.savefig(content, dpi=120)
    write_atomically(path, content.getvalue())
    return path
