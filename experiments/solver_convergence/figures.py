"""Pictures of the results; titles say what is shown, and which of the paper's figures it answers."""

import pathlib
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.solver_convergence.config import PRECISIONS

COLORS = {
    "Chebyshev": "C0",
    "Chebyshev, as printed": "C4",
    "Chebyshev, implicit": "C0",
    "Chebyshev, automatic": "C9",
    "Chebyshev, reversed": "C4",
    "Chebyshev, weights reversed": "C9",
    "conjugate gradients": "C3",
    "conjugate gradients, implicit": "C3",
    "conjugate gradients, automatic": "C1",
    "conjugate gradients, FLA": "C5",
    "conjugate gradients, FLA, implicit": "C5",
    "Nesterov": "C2",
    "gradient descent": "C7",
}
DASHED = (
    "Chebyshev, as printed",
    "Chebyshev, automatic",
    "conjugate gradients, automatic",
    "Chebyshev, weights reversed",
)
_TITLES = {
    "float32": "float32",
    "bfloat16 products": "float32, solver's products bfloat16",
    "bfloat16": "bfloat16 activations and products",
}


def _curve(ax: Axes, x: Any, y: Any, label: str) -> None:
    ax.semilogy(x, y, label=label, color=COLORS[label], linestyle="--" if label in DASHED else "-", linewidth=1.6)


def _finish(figure: Figure, path: pathlib.Path, title: str) -> None:
    figure.suptitle(title, fontsize="large")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def residual_figure(results: dict[str, Any], path: pathlib.Path) -> None:
    """Figure 1a, in two arithmetics."""
    config, curves = results["config"], results["residuals"]
    figure, axes = plt.subplots(1, 2, figsize=(12, 5), sharey=True, layout="constrained")
    for ax, (arithmetic, by_solver) in zip(axes, curves.items()):
        for label, history in by_solver.items():
            if label == "Chebyshev, as printed" and arithmetic == "float32":
                continue  # it lies on the other
            _curve(ax, range(len(history["largest"])), history["largest"], label)
        ax.set(title=arithmetic, xlabel="iteration", ylim=(1e-7, 3))
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("largest residual norm $\\|(H_t + \\lambda_t) x - q_t\\|$, $\\|q_t\\| = 1$")
    axes[1].legend(fontsize="small")
    systems = config["batch"] * config["length"] * config["heads"]
    _finish(
        figure,
        path,
        f"Forward pass: worst of {systems} systems, K = {config['size']}, ridge {config['ridge']} (paper: figure 1a)",
    )


def gradient_figure(results: dict[str, Any], key: str, title: str, path: pathlib.Path) -> None:
    """Figures 1b to 1e: relative differences from the exact solver in float64."""
    curves = results[key]
    figure, axes = plt.subplots(1, 3, figsize=(15, 5), sharey=True, layout="constrained")
    for ax, precision in zip(axes, PRECISIONS):
        for label, values in curves[precision].items():
            if label == "exact":
                ax.axhline(values, color="black", linewidth=1, linestyle=":", label="exact solver")
            else:
                _curve(ax, curves["iterations"], [np.nan if v is None else v for v in values], label)
        ax.set(title=_TITLES[precision], xlabel="iterations", ylim=(1e-7, 1e3))
        ax.grid(alpha=0.3)
    axes[0].legend(fontsize="small")
    axes[0].set_ylabel("relative gradient difference from the exact solver in float64")
    _finish(figure, path, title)


def backwards_figure(results: dict[str, Any], path: pathlib.Path) -> None:
    """Figure 5, and what the divisors do to the iterates recovered."""
    b, config = results["backwards"], results["config"]
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.6), layout="constrained")
    left.semilogx(b["condition_number"], b["chebyshev_lower_bound"], "k--", label="bound $\\omega^*_1 - 1$")
    left.semilogx(b["condition_number"], b["chebyshev_largest"], color="C0", label="largest measured")
    left.semilogx(b["condition_number"], b["chebyshev_smallest"], color="C9", label="smallest measured")
    left.axvline(1 + 1 / config["ridge"], color="grey", linewidth=1, linestyle=":", label=f"ridge {config['ridge']}")
    left.axhline(0.25, color="grey", linewidth=1)
    left.set(title="Chebyshev: divisor $\\omega_i - 1$ (paper: 5a)", xlabel="condition number L / μ", ylabel="divisor")
    iterations = np.arange(1, len(b["conjugate_gradient_smallest"]) + 1)
    middle.semilogy(iterations, b["conjugate_gradient_largest"], color="C3", label="largest over systems")
    middle.semilogy(iterations, b["conjugate_gradient_smallest"], color="C1", label="smallest over systems")
    middle.set(
        title="conjugate gradients: divisor $\\beta_i$, float32 (paper: 5b)", xlabel="iteration", ylabel="divisor"
    )
    for arithmetic, style in (("float32", "-"), ("float64", "--")):
        for label, errors in b["recovered"][arithmetic].items():
            shown = [max(error, 1e-17) if np.isfinite(error) else np.nan for error in errors]
            right.semilogy(range(len(shown)), shown, style, color=COLORS[label], label=f"{label}, {arithmetic}")
    right.set(
        title=f"iterates recovered from iteration {config['reversed_iterations']}",
        xlabel="iterate",
        ylabel="worst error / norm of the solution",
        ylim=(1e-16, 1e2),
    )
    for ax in (left, middle, right):
        ax.grid(alpha=0.3)
        ax.legend(fontsize="small")
    _finish(figure, path, "Running the iterations backwards: what is divided by, and what comes out")


def strength_figure(results: dict[str, Any], path: pathlib.Path) -> None:
    """Figure 8, and the residual without the ridge."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.8), layout="constrained")
    for color, (ridge, history) in zip(("C3", "C1", "C2", "C0"), results["strengths"].items()):
        left.semilogy(history["largest"], color=color, label=f"ridge {ridge}")
        right.plot(history["bare"], color=color, label=f"ridge {ridge}")
    left.set(title="with the ridge (paper: figure 8)", ylabel="largest $\\|(H_t + \\lambda_t) x - q_t\\|$")
    right.set(title="without: what the regression misses", ylabel="median $\\|H_t x - q_t\\|$", ylim=(0, None))
    for ax in (left, right):
        ax.set_xlabel("iteration")
        ax.grid(alpha=0.3)
        ax.legend()
    _finish(figure, path, "Chebyshev, float32: residuals for ridges $\\lambda_t / \\|H_t\\|_F$")


def draw(results: dict[str, Any], folder: pathlib.Path) -> list[pathlib.Path]:
    """All pictures of `results`, as PNG files in `folder`; their paths."""
    config = results["config"]
    residual_figure(results, folder / "residuals.png")
    shape = f"T = {config['gradient_length']}, {config['gradient_heads']} heads of {config['size']}"
    gradient_figure(
        results,
        "single_layer",
        f"Gradients of queries and keys through one layer, {shape} (paper: figures 1b, 1d)",
        folder / "gradients_layer.png",
    )
    gradient_figure(
        results,
        "model",
        f"Gradients of all weights of a {config['model_layers']}-layer model, {shape} (paper: figures 1c, 1e)",
        folder / "gradients_model.png",
    )
    backwards_figure(results, folder / "backwards.png")
    strength_figure(results, folder / "strengths.png")
    return sorted(folder.glob("*.png"))
