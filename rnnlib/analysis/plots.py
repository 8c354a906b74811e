"""Small pictures of the statistics: each function draws on the matplotlib axes that it is given."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from rnnlib.analysis.distribution import Distribution
from rnnlib.analysis.gram import ConditionNumbers, GramSpectrum
from rnnlib.analysis.saturation import Saturation
from rnnlib.extras import from_extra

with from_extra("train", "rnnlib.analysis.plots"):
    from matplotlib.axes import Axes

_LINES = ("-", "--", "-.", ":")


def plot_spectrum(ax: Axes, spectrum: GramSpectrum, *, sequence: int = 0, head: int = 0) -> None:
    """Sorted eigenvalues of a key Gram and its sorted diagonal (figure 1, left)."""
    eigenvalues, diagonal = spectrum.eigenvalues[sequence, head], spectrum.diagonal[sequence, head]
    index = np.arange(1, len(eigenvalues) + 1)
    ax.semilogy(index, np.maximum(eigenvalues, 1e-6 * eigenvalues[0]), label="key Gram: eigenvalues")
    ax.semilogy(index, np.maximum(diagonal, 1e-6 * eigenvalues[0]), "--", label="key Gram: diagonal")
    ax.set(xlabel="index, sorted", ylabel="value")
    ax.set_title(f"correlation {spectrum.correlation[sequence, head]:.2f}")
    ax.legend()


def plot_alignment(ax: Axes, alignments: ArrayLike, channels: int, *, layers: Sequence[int]) -> None:
    """Eigenvalue-weighted axis alignment of each layer's heads (figure 1, right), between `K**-0.5` and 1.

    Args:
        ax: where to draw.
        alignments: `[L, ...]`, whatever follows the layers is shown as points and averaged.
        channels: K.
        layers: numbers of the L layers.

    Raises:
        ValueError: there is no layer, as in a model of attention alone.
    """
    _check_layers("plot_alignment", layers)
    values = np.asarray(alignments).reshape(len(layers), -1)
    for layer, row in zip(layers, values):
        ax.plot(np.full(len(row), layer), row, "o", color="C0", alpha=0.3, markersize=4)
    ax.plot(layers, values.mean(axis=1), color="C0", label="mean over heads and sequences")
    ax.axhline(1.0, color="grey", linewidth=1)
    ax.axhline(channels**-0.5, color="grey", linewidth=1, linestyle=":", label="$1/\\sqrt{K}$: no alignment")
    random = random_alignment(channels)
    ax.axhline(random, color="C3", linewidth=1, linestyle="--", label="random eigenvectors")
    ax.set(xlabel="layer", ylabel="axis alignment", ylim=(0, 1.05), xticks=list(layers))
    ax.legend(fontsize="small")


def random_alignment(channels: int, *, samples: int = 200) -> float:
    """The mean largest absolute entry of a random unit vector of K channels: the alignment of a random basis."""
    vectors = np.random.default_rng(0).normal(size=(samples, channels))
    return float(np.mean(np.abs(vectors).max(axis=1) / np.linalg.norm(vectors, axis=1)))


def plot_distribution(
    ax: Axes, distribution: Distribution, *, head: int | None = None, label: str | None = None, color: str | None = None
) -> None:
    """A histogram as a density: of one head, or of all together. Several in one picture have lines of their own."""
    counts = distribution.counts.sum(axis=0) if head is None else distribution.counts[head]
    density = counts / max(counts.sum(), 1) / np.diff(distribution.edges)
    before = len(ax.patches)
    color = f"C{before % 10}" if color is None else color
    # Areas on top of each other hide each other: a light area, and an outline that shows through.
    line = _LINES[before % len(_LINES)]
    outline = ax.stairs(density, distribution.edges, fill=True, label=label, linestyle=line, linewidth=1.4)
    outline.set(facecolor=(color, 0.15), edgecolor=color)
    ax.set_ylabel("density")


def plot_saturation(ax: Axes, saturation: Saturation) -> None:
    """Saturation of both squash functions over the sequence, averaged over sequences and heads (figure 12, right)."""
    for name, values in (("r / (1 + |r|)", saturation.rational), ("tanh r", saturation.tanh)):
        ax.plot(np.arange(1, values.shape[1] + 1), np.ma.masked_invalid(values).mean(axis=(0, 2)), label=name)
    ax.set(xlabel="token", ylabel="mean |s|", ylim=(0, 1))
    ax.legend()


def plot_squash(ax: Axes, bound: float = 1.5) -> None:
    """Both squash functions from log A to B (figure 12, left)."""
    r = np.linspace(-6, 6, 400)
    for name, s in (("r / (1 + |r|)", r / (1 + np.abs(r))), ("tanh r", np.tanh(r))):
        ax.plot(r, bound**-s, label=name)
    ax.axhline(1.0, color="grey", linewidth=1)
    ax.set(xlabel="r = log A - center", ylabel="B")
    ax.legend()


def plot_heads(ax: Axes, values: ArrayLike, *, layers: Sequence[int], label: str) -> None:
    """One number per layer and head, as a heat map (figure 11).

    Args:
        ax: where to draw.
        values: `[L, H]`.
        layers: numbers of the L layers.
        label: what the numbers are.

    Raises:
        ValueError: there is no layer.
    """
    _check_layers("plot_heads", layers)
    values = np.asarray(values)
    image = ax.imshow(values, aspect="auto", cmap="viridis")
    middle = (values.min() + values.max()) / 2
    for (row, column), value in np.ndenumerate(values):
        color = "white" if value <= middle else "black"
        ax.text(column, row, f"{value:.2f}", ha="center", va="center", color=color, fontsize="small")
    ax.set(xlabel="head", ylabel="layer", xticks=range(values.shape[1]), yticks=range(len(layers)))
    ax.set_yticklabels([str(layer) for layer in layers])
    ax.figure.colorbar(image, ax=ax, label=label)


def plot_conditions(ax: Axes, conditions: ConditionNumbers, *, head: int | None = None) -> None:
    """Effective condition numbers over time: medians over sequences, and over heads unless one is named."""
    rows = (
        ("key Gram", conditions.plain),
        ("with B", conditions.preconditioned),
        ("with 1 / diagonal", conditions.jacobi),
    )
    for name, values in rows:
        if values is not None:
            chosen = values if head is None else values[..., head : head + 1]
            ax.loglog(conditions.times, np.ma.median(np.ma.masked_invalid(chosen), axis=(1, 2)), "o-", label=name)
    ax.set(xlabel="tokens", ylabel="effective condition number")
    ax.legend()


def _check_layers(name: str, layers: Sequence[int]) -> None:
    if not len(layers):
        raise ValueError(f"{name}: layers is empty, expected the number of at least one recurrent layer")
