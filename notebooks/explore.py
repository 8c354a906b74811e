"""What the notebooks show: a picture with controls that redraw it in place, and the pictures themselves.

`explore` shows a figure below its controls; functions named `draw_...` make figures of the data that they are given.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise

import ipywidgets
import matplotlib.pyplot as plt
import numpy as np
from IPython import get_ipython
from IPython.display import display
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from matplotlib_inline.backend_inline import set_matplotlib_formats
from numpy.typing import ArrayLike

from rnnlib import analysis
from rnnlib.analysis import LayerReport, LayerActivations, plots

type Rows = Sequence[Mapping[str, float]]


def all_matter(**values: object) -> Collection[str]:
    """No control is without effect."""
    return ()


def explore(
    draw: Callable[..., Figure],
    *,
    without_effect: Callable[..., Collection[str]] = all_matter,
    **controls: ipywidgets.Widget,
) -> None:
    """Shows the figure that a function returns, below the controls that give its arguments.

    The first figure is a picture of its own, so that it is also seen where no widget runs, as on a code host. A
    setting that cannot be drawn shows its error in the picture's place.

    Args:
        draw: gets the value of each control by name.
        without_effect: gets the same and returns names of controls that change nothing then; these are disabled.
        **controls: widgets. The same widget may stand above several pictures and then redraws all of them.
    """

    def picture() -> Figure:
        values = {name: control.value for name, control in controls.items()}
        for name, control in controls.items():
            control.disabled = name in without_effect(**values)
        figure = draw(**values)
        plt.close(figure)  # or the notebook would show it a second time
        return figure

    display(ipywidgets.HBox(list(controls.values()), layout=ipywidgets.Layout(flex_flow="row wrap")))
    shown = display(picture(), display_id=True)

    def redraw(_) -> None:
        try:
            shown.update(picture())
        except ValueError as error:
            shown.update({"text/plain": str(error)}, raw=True)

    for control in controls.values():
        control.observe(redraw, "value")


def slider(description: str, value: float, low: float, high: float, step: float) -> ipywidgets.FloatSlider:
    """A slider that redraws when it is let go: a picture takes half a second."""
    return ipywidgets.FloatSlider(value, min=low, max=high, step=step, description=description, continuous_update=False)


def whole_slider(description: str, value: int, low: int, high: int) -> ipywidgets.IntSlider:
    """The same for whole numbers."""
    return ipywidgets.IntSlider(value, min=low, max=high, description=description, continuous_update=False)


def sharp_figures() -> None:
    """Figures in the notebook itself, of twice the pixels, with texts that can be read."""
    get_ipython().run_line_magic("matplotlib", "inline")
    set_matplotlib_formats("retina")
    plt.rcParams.update({"figure.dpi": 80, "font.size": 9, "figure.constrained_layout.use": True})


def grid(count: int, *, height: float = 2.7) -> tuple[Figure, Sequence[Axes]]:
    """A figure of so many axes that share their y axis, at most four a row."""
    columns = min(4, count)
    rows = -(-count // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(max(3.0 * columns, 4.5), height * rows), sharey=True, squeeze=False
    )
    flat = list(axes.ravel())
    for ax in flat[count:]:
        ax.set_axis_off()
    return figure, flat[:count]


# Training


def draw_losses(
    validation: Mapping[str, Rows], *, training: Rows | None = None, guessing: float | None = None, title: str
) -> Figure:
    """Bits per byte over the bytes that models were trained on.

    Args:
        validation: rows of `validation.csv`, by the curve's name.
        training: rows of `metrics.csv` of one of them.
        guessing: the bits of a model that guesses.
        title: of the picture.
    """
    figure, ax = plt.subplots(figsize=(7, 3))
    if training is not None:
        ax.plot(*_bits_per_byte(training), color="C0", alpha=0.4, label="training, each step")
    for number, (name, rows) in enumerate(validation.items(), start=training is not None):
        ax.plot(*_bits_per_byte(rows), "o-", color=f"C{number}", label=name)
    if guessing is not None:
        ax.axhline(guessing, color="grey", linestyle=":", label=f"guessing: {guessing:g} bits")
        ax.set_ylim(0, guessing + 0.5)
    ax.set(xlabel="bytes trained on", ylabel="loss (bits per byte)", title=title)
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.legend()
    return figure


def _bits_per_byte(rows: Rows) -> tuple[list[float], list[float]]:
    return [row["tokens"] for row in rows], [row["bits_per_byte"] for row in rows]


def draw_byte_costs(bits: np.ndarray, characters: Sequence[str], *, high: float = 4.0) -> Figure:
    """The bits that each byte of a line costs; those above `high` in red."""
    figure, ax = plt.subplots(figsize=(11, 2.6))
    ax.bar(range(len(bits)), bits, color=["C3" if b > high else "C0" for b in bits])
    ax.set_xticks(range(len(bits)), characters, fontfamily="monospace")
    ax.set(xlabel="byte", ylabel="bits", xlim=(-0.6, len(bits) - 0.4))
    ax.set_title(f"Bits of each byte, red above {high:g}; mean {bits.mean():.2f}")
    return figure


def draw_context_costs(edges: Sequence[int], means: Sequence[float]) -> Figure:
    """Mean bits of a byte by how many were read before it: `means[i]` from `edges[i]` to `edges[i + 1] - 1`."""
    figure, ax = plt.subplots(figsize=(6, 2.8))
    ax.bar([f"{low} to {high - 1}" for low, high in pairwise(edges)], means)
    ax.set(xlabel="bytes read before in this document or row", ylabel="bits per byte")
    ax.set_title("Loss by the length of the context, validation text")
    return figure


def draw_probabilities(probabilities: np.ndarray, labels: Sequence[str], *, xlabel: str, title: str) -> Figure:
    """A bar a token."""
    figure, ax = plt.subplots(figsize=(8, 2.6))
    ax.bar(range(len(labels)), probabilities)
    ax.set_xticks(range(len(labels)), labels, fontfamily="monospace")
    ax.set(xlabel=xlabel, ylabel="probability", ylim=(0, 1), title=title)
    return figure


# The recurrences' inputs, layer by layer


def half_lives(activations: LayerActivations) -> np.ndarray:
    """`[H]`, or `[H, K]` of decays per channel: tokens after which the mean decay leaves a half."""
    logs = np.log(np.maximum(analysis.decays(activations), 1e-30)).mean(axis=(0, 1))
    return np.log(0.5) / np.minimum(logs, -1e-9)


def draw_half_lives(layers: Sequence[LayerActivations], quantile: float = 1.0) -> Figure:
    """Each head's half-life: the median of its channels, and a line over the middle of them."""
    figure, ax = plt.subplots(figsize=(7, 2.8))
    for activations in layers:
        values = half_lives(activations).reshape(activations.erase.shape[2], -1)
        low, high = np.quantile(values, [1 - quantile, quantile], axis=1)
        place = activations.layer + np.linspace(-0.3, 0.3, len(values))
        ax.vlines(place, low, high, color="C0", alpha=0.5)
        ax.plot(place, np.median(values, axis=1), "o", color="C0", markersize=4)
    ax.set(yscale="log", xlabel="layer, its heads side by side", ylabel="half-life (tokens)")
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
    ax.yaxis.set_major_formatter("{x:g}")  # 0.3 and 30, no powers of ten
    ax.yaxis.set_minor_formatter("")
    ax.set_xticks([activations.layer for activations in layers])
    if all(half_lives(activations).ndim == 1 for activations in layers):
        ax.set_title("Half-life of each head's state")
    else:
        ax.set_title(f"Half-lives: median and middle {2 * quantile - 1:.0%} of each head's channels")
    return figure


def draw_gates(activations: LayerActivations) -> Figure:
    """Histograms of a layer's decays and gates, of its first four heads."""
    figure, axes = plt.subplots(1, 3, figsize=(11, 2.6))
    gates = {"decay": analysis.decays(activations), "erase gate": activations.erase, "write gate": activations.write}
    for ax, (name, given) in zip(axes, gates.items()):
        values = np.asarray(given, np.float64)
        bounds = (0.0, max(1.0, float(values.max())))
        _draw_heads(ax, analysis.distribution(values, head_axis=2, bounds=bounds, bins=40))
        ax.set(xlabel=name, title=f"{name}: mean {values.mean():.2f}")
    axes[-1].legend(fontsize="small")
    figure.suptitle(f"layer {activations.layer} ({activations.mixer})")
    return figure


def _draw_heads(ax: Axes, shown: analysis.Distribution) -> None:
    for head in range(min(len(shown.counts), 4)):
        plots.plot_distribution(ax, shown, head=head, label=f"head {head}")


def draw_spectra(layers: Sequence[LayerActivations], *, head: int, tokens: int, name: str) -> Figure:
    """A head's key Gram in each layer: sorted eigenvalues and diagonal, over the first row's first tokens."""
    figure, axes = grid(len(layers), height=2.9)
    for ax, activations in zip(axes, layers):
        valid = None if activations.valid is None else activations.valid[:, :tokens]
        spectrum = analysis.gram_spectrum(analysis.key_gram(activations.key[:, :tokens], valid))
        plots.plot_spectrum(ax, spectrum, head=head)
        eigenvalues = np.maximum(spectrum.eigenvalues[0, head], 1e-12)
        share = eigenvalues / eigenvalues.sum()
        rank = np.exp(-np.sum(share * np.log(share)))
        ax.set_title(
            f"layer {activations.layer}: correlation {spectrum.correlation[0, head]:.2f},\n"
            f"diagonal share {spectrum.diagonal_share[0, head]:.2f}, effective rank {rank:.1f} of {len(share)}",
            fontsize="small",
        )
        ax.legend(fontsize="x-small")
    figure.suptitle(f"{name}, head {head}, first {tokens} tokens")
    return figure


def draw_alignments(models: Mapping[str, Sequence[LayerReport]], channels: int) -> Figure:
    """Each layer's alignment of the key Gram's eigenvectors with the axes, a picture a model."""
    figure, axes = plt.subplots(1, len(models), figsize=(5.5 * len(models), 3), sharey=True, squeeze=False)
    for ax, (name, reports) in zip(axes[0], models.items()):
        alignments = np.stack([report.spectrum.alignment for report in reports])
        plots.plot_alignment(ax, alignments, channels, layers=[report.layer for report in reports])
        ax.set_title(name)
    return figure


def draw_products(layers: Sequence[LayerActivations], *, title: str) -> Figure:
    """Histograms of read key times write key, of each layer's first four heads."""
    figure, axes = grid(len(layers))
    for ax, activations in zip(axes, layers):
        shown = _of_valid(activations, analysis.key_products(activations))
        _draw_heads(ax, shown)
        ax.axvline(1.0, color="grey", linewidth=1)
        ax.set(xlabel="k . k~", title=f"layer {activations.layer}: mean {np.mean(shown.mean):.2f}")
    axes[0].legend(fontsize="small")
    figure.suptitle(title)
    return figure


def _of_valid(activations: LayerActivations, values: ArrayLike) -> analysis.Distribution:
    values = np.asarray(values)
    valid = np.asarray(activations.valid).reshape(*values.shape[:2], *(1,) * (values.ndim - 2))
    return analysis.distribution(np.where(valid, values, np.nan), head_axis=2)


def draw_transitions(models: Mapping[str, Sequence[LayerReport]]) -> Figure:
    """Decays, gains and write eigenvalues of all tokens, layers and heads; counts on a logarithmic axis."""
    figure, axes = plt.subplots(1, 3, figsize=(11, 2.8))
    for name, reports in models.items():
        for ax, field in zip(axes, ("decay", "gain", "write_eigenvalue")):
            parts = [getattr(report, field) for report in reports]
            # Gains above 1 have wider histograms: all on the widest one's bins.
            edges = max((part.edges for part in parts), key=lambda edges: edges[-1])
            counts = sum(np.histogram(part.edges[:-1], edges, weights=part.counts.sum(0))[0] for part in parts)
            total = parts[0]._replace(edges=edges, counts=counts[None])
            plots.plot_distribution(ax, total, label=f"{name}: mean {np.mean([part.mean for part in parts]):.2f}")
            ax.set(xlabel=field.replace("_", " "), yscale="log", title=field.replace("_", " ") + " of all tokens")
    for ax in axes:
        ax.legend(fontsize="small")
    return figure


def draw_conditions(reports: Sequence[LayerReport], *, name: str) -> Figure:
    """Each layer's effective condition numbers over time."""
    figure, axes = grid(len(reports))
    for ax, report in zip(axes, reports):
        plots.plot_conditions(ax, report.conditions)
        ax.set_title(f"layer {report.layer}: {report.mixer}")
        ax.legend(fontsize="x-small")
    for ax in axes[1:]:
        ax.set_ylabel("")
    figure.suptitle(f"{name}: median over sequences and heads")
    return figure


def draw_head(activations: LayerActivations, *, head: int, tokens: int, name: str) -> Figure:
    """One head's decay and write eigenvalue, token by token over the first row."""
    alpha = analysis.decays(activations)[0, :tokens, head]
    per_channel = alpha.ndim == 2
    alpha = np.exp(np.log(np.maximum(alpha, 1e-30)).mean(axis=-1)) if per_channel else alpha
    written = analysis.write_eigenvalues(activations)[0, :tokens, head]
    figure, (ax, side) = plt.subplots(1, 2, figsize=(10, 2.8), sharey=True, width_ratios=(4, 1))
    places = range(1, len(alpha) + 1)
    ax.plot(places, alpha, label="decay" + " (geometric mean over channels)" * per_channel)
    ax.plot(places, written, ".", label="write eigenvalue")
    ax.axhline(0.0, color="grey", linewidth=1)
    ax.set(xlabel="token of the first row", ylabel="eigenvalue", ylim=(-1.05, 1.05))
    ax.set_title(f"{name}, layer {activations.layer} ({activations.mixer}), head {head}: {np.mean(written < 0):.1%} negative")
    ax.legend(fontsize="small")
    for number, values in enumerate((alpha, written)):
        side.hist(
            values, bins=np.linspace(-1, 1, 41), orientation="horizontal", histtype="step", linestyle="-:"[number]
        )
    side.set(xlabel="tokens")
    return figure


def draw_transition_of_head(activations: LayerActivations, *, head: int, name: str) -> Figure:
    """One head's key Gram spectrum, squared lengths of keys, and eigenvalues along them, which lie from 0 to 1."""
    energies = np.sum(np.asarray(activations.key, np.float64) ** 2, axis=-1)
    eigenvalues = analysis.write_eigenvalues(activations)
    figure, axes = plt.subplots(1, 3, figsize=(12, 2.8))
    plots.plot_spectrum(axes[0], analysis.gram_spectrum(analysis.key_gram(activations.key, activations.valid)), head=head)
    axes[0].set_title("Key Gram matrix: " + axes[0].get_title())
    axes[0].legend(fontsize="x-small")
    plots.plot_distribution(axes[1], analysis.distribution(energies, head_axis=2), head=head)
    axes[1].set(xlabel="k . k", title=f"Squared length of keys, mean {energies[:, :, head].mean():.2f}")
    plots.plot_distribution(axes[2], analysis.distribution(eigenvalues, head_axis=2, bounds=(0.0, 1.0)), head=head)
    axes[2].set(xlabel="eigenvalue", title=f"Transition along the key, mean {eigenvalues[:, :, head].mean():.2f}")
    figure.suptitle(f"{name}, layer {activations.layer}, head {head}")
    return figure


def draw_eigenvalues(values: Mapping[str, np.ndarray]) -> Figure:
    """Histograms of eigenvalues from 0 to 1, one a model."""
    figure, ax = plt.subplots(figsize=(7, 2.8))
    for name, found in values.items():
        shown = analysis.distribution(found[None], head_axis=0, bounds=(0.0, 1.0))
        plots.plot_distribution(ax, shown, label=f"{name}: mean {found.mean():.2f}")
    ax.set(xlabel="eigenvalue of the transition along the key", title="How much of a key's old value is kept")
    ax.legend()
    return figure


# Bounded preconditioners


def log_grams(activations: LayerActivations) -> tuple[analysis.Distribution, float, float]:
    """`log A` of the tokens that count, and the skewness of A and of log A."""
    gram = np.asarray(activations.preconditioner.gram)[np.asarray(activations.valid)].reshape(1, -1)
    logs = analysis.distribution(analysis.log_gram(gram, activations.preconditioner.eps), head_axis=0)
    return logs, analysis.distribution(gram, head_axis=0).skewness[0], logs.skewness[0]


def draw_log_gram(layers: Sequence[LayerActivations]) -> Figure:
    """Histograms of log A, and normal densities of the same mean and deviation."""
    figure, axes = grid(len(layers))
    for ax, activations in zip(axes, layers):
        logs, raw_skewness, log_skewness = log_grams(activations)
        plots.plot_distribution(ax, logs, label="log A")
        x, deviation = np.linspace(logs.edges[0], logs.edges[-1], 200), logs.deviation[0]
        density = np.exp(-(((x - logs.mean[0]) / deviation) ** 2) / 2) / (deviation * np.sqrt(2 * np.pi))
        ax.plot(x, density, color="C3", label="normal")
        ax.set(xlabel="log A")
        ax.set_title(f"layer {activations.layer}: skewness of A {raw_skewness:.1f},\nof log A {log_skewness:.1f}")
    axes[0].legend(fontsize="small")
    return figure


def draw_applied(layers: Sequence[LayerActivations], *, title: str) -> Figure:
    """Histograms of B, of each layer's first four heads."""
    figure, axes = grid(len(layers))
    for ax, activations in zip(axes, layers):
        shown = _of_valid(activations, activations.preconditioner.applied)
        _draw_heads(ax, shown)
        ax.axvline(1.0, color="grey", linewidth=1)
        ax.set(
            xlabel="B", title=f"layer {activations.layer}: B from {shown.minimum.min():.2f} to {shown.maximum.max():.2f}"
        )
        ax.set_xlim(min(0.65, ax.get_xlim()[0]), max(1.52, ax.get_xlim()[1]))
    axes[0].legend(fontsize="small")
    figure.suptitle(title)
    return figure


def draw_saturation(saturation: analysis.Saturation, bound: float, *, name: str) -> Figure:
    """Both squash functions, and how far a model's preconditioners are into their flat parts."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3))
    plots.plot_squash(axes[0], bound)
    axes[0].set_title(f"Both squash functions, x = {bound:.2f}")
    plots.plot_saturation(axes[1], saturation)
    axes[1].set_title(f"{name}: mean {np.nanmean(saturation.rational):.2f} and {np.nanmean(saturation.tanh):.2f}")
    return figure


def draw_centers(centers: np.ndarray, layers: Sequence[int], *, name: str) -> Figure:
    """The learned centers `[L, H]`."""
    figure, ax = plt.subplots(figsize=(4.5, 2.6))
    plots.plot_heads(ax, centers, layers=layers, label="center")
    ax.set_title(f"{name}: learned centers")
    return figure


def draw_preconditioner(activations: LayerActivations, *, head: int, token: int, name: str) -> Figure:
    """One head's log A and B at one token, over its channels and the sequences."""
    part, at = activations.preconditioner, slice(token - 1, token)
    product = analysis.key_products(activations)[:, at, head].ravel()
    figure, axes = plt.subplots(1, 2, figsize=(9, 2.8))
    logs = analysis.distribution(analysis.log_gram(part.gram[:, at], part.eps), head_axis=2, bins=20)
    plots.plot_distribution(axes[0], logs, head=head)
    axes[0].axvline(float(part.center[head]), color="C3", label="center")
    axes[0].set(xlabel="log A", title=f"{name}, layer {activations.layer}, head {head}, token {token}")
    axes[0].legend()
    shown = analysis.distribution(part.applied[:, at], head_axis=2, bounds=(1 / 2, 2.0), bins=40)
    plots.plot_distribution(axes[1], shown, head=head)
    axes[1].set(xlabel="B", title=f"k . k~ of {len(product)} sequences: {product.min():.2f} to {product.max():.2f}")
    return figure


# Curves over iterations


def draw_curves(
    panels: Mapping[str, Mapping[str, ArrayLike]],
    *,
    x: ArrayLike | None = None,
    xlabel: str = "iteration",
    ylabels: Sequence[str],
    floor: float = 1e-17,
    marked: float | None = None,
    ylim: tuple[float, float] | None = None,
    line: str = "-",
    linear: Collection[str] = (),
) -> Figure:
    """Positive curves on logarithmic axes, a panel a title.

    Args:
        panels: values by the curve's name, by the panel's title. A curve keeps its colour in all panels.
        x: where the values stand; 0, 1, 2, ... where it is left out.
        xlabel: of all panels.
        ylabels: one, of the first panel of axes that are shared, or one a panel.
        floor: smaller values are drawn there.
        marked: where a vertical line stands.
        ylim: of all panels.
        line: how curves are drawn.
        linear: titles of panels whose axis is linear, from 0.
    """
    shared = len(ylabels) == 1
    width = {1: 6.0, 2: 5.0, 3: 4.0}[len(panels)]
    figure, axes = plt.subplots(1, len(panels), figsize=(width * len(panels), 3.2), sharey=shared, squeeze=False)
    for ax, (title, curves) in zip(axes[0], panels.items()):
        for name, values in curves.items():
            values = np.maximum(np.asarray(values, np.float64), floor)
            ax.semilogy(np.arange(len(values)) if x is None else x, values, line, label=name)
        if marked is not None:
            ax.axvline(marked, color="grey", linewidth=1)
        ax.set(xlabel=xlabel, title=title)
        if title in linear:
            ax.set(yscale="linear", ylim=(0, None))
        if ylim is not None:
            ax.set_ylim(*ylim)
        ax.grid(alpha=0.3)
    for ax, label in zip(axes[0], ylabels):
        ax.set_ylabel(label)
    axes[0, 0].legend(fontsize="small")
    return figure


def draw_bars(values: Mapping[str, float], *, low: float, xlabel: str, title: str) -> Figure:
    """A bar a name on a logarithmic axis from `low` to 1."""
    figure, ax = plt.subplots(figsize=(7, 2.6))
    ax.barh(list(values), np.maximum(list(values.values()), low), color=[f"C{i}" for i in range(len(values))])
    ax.set(xscale="log", xlim=(low, 1), xlabel=xlabel, title=title)
    ax.invert_yaxis()
    return figure


def draw_weights(curves: Mapping[float, tuple[ArrayLike, float]], *, chosen: float) -> Figure:
    """Chebyshev's weights less 1 by condition number, and their limits; the chosen one's line is wide."""
    figure, ax = plt.subplots(figsize=(6, 3))
    for number, (condition, (weights, limit)) in enumerate(curves.items()):
        width = 2.5 if condition == chosen else 1.0
        ax.plot(
            weights, "o-", color=f"C{number}", markersize=3, linewidth=width, label=f"condition number {condition:.0f}"
        )
        ax.axhline(limit, color=f"C{number}", linewidth=1, linestyle=":")
    ax.set(xlabel="iteration", ylabel=r"$\omega_i - 1$", ylim=(0, 1.05))
    ax.set_title("What undoing an iteration divides by; dotted: its limit")
    ax.legend(fontsize="small")
    return figure


def draw_error_left(x: np.ndarray, curves: Mapping[str, ArrayLike]) -> Figure:
    """What is left of a token's error after its write, from -1 to 1, over the step's size."""
    figure, ax = plt.subplots(figsize=(7, 3))
    for number, (name, values) in enumerate(curves.items()):
        ax.plot(x, values, color=f"C{number}", linestyle=("-", "--", ":")[number // 4], label=name)
    ax.set(xlabel="$x = b\\,k^T k$", ylabel="error left after the token", ylim=(-1, 1.05))
    ax.set_title("Eigenvalue of the transition along the key")
    ax.legend(fontsize="small")
    return figure


def draw_errors(errors: Mapping[str, np.ndarray], *, allowed: float, title: str) -> Figure:
    """A point a case, a column a result, on a logarithmic axis; the largest error that is allowed is a line."""
    figure, ax = plt.subplots(figsize=(7, 2.8))
    for column, found in enumerate(errors.values()):
        ax.semilogy(np.full(len(found), column), np.maximum(found, 1e-9), "o", alpha=0.5)
    ax.axhline(allowed, color="C3", linestyle="--", label="allowed")
    ax.set_xticks(range(len(errors)), list(errors))
    ax.set(ylabel="relative error", title=title)
    ax.legend()
    return figure
