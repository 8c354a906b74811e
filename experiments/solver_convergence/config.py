"""What the study measures."""

import pathlib
from dataclasses import dataclass

from rnnlib.analysis.ridge_solvers import CHEBYSHEV_AS_PRINTED
from rnnlib.ops.ridge_solve import LinearSolver

# "Conjugate gradients, FLA" has the divisors of flash-linear-attention's MesaNet; "as printed" is the paper's algorithm
# 1, whose iterates the library computes by increments.
SOLVERS: dict[str, LinearSolver | str] = {
    "Chebyshev": LinearSolver("chebyshev"),
    "Chebyshev, as printed": CHEBYSHEV_AS_PRINTED,
    "conjugate gradients": LinearSolver("conjugate_gradient"),
    "conjugate gradients, FLA": LinearSolver("conjugate_gradient", epsilon=1e-5),
    "Nesterov": LinearSolver("nesterov"),
    "gradient descent": LinearSolver("gradient_descent"),
}
GRADIENTS = {
    "Chebyshev, implicit": LinearSolver("chebyshev"),
    "Chebyshev, automatic": LinearSolver("chebyshev", "unrolled"),
    "Chebyshev, reversed": LinearSolver("chebyshev", "reversed"),
    "conjugate gradients, implicit": LinearSolver("conjugate_gradient"),
    "conjugate gradients, automatic": LinearSolver("conjugate_gradient", "unrolled"),
    "conjugate gradients, FLA, implicit": LinearSolver("conjugate_gradient", epsilon=1e-5),
}
# What is rounded to bfloat16: nothing; the factors of the solvers' products; these, and all activations.
PRECISIONS = ("float32", "bfloat16 products", "bfloat16")


@dataclass(frozen=True)
class SolverConvergenceConfig:
    """Measures convergence of the ridge solvers; writes results.json and pictures."""

    output: pathlib.Path = pathlib.Path(__file__).parent / "results"
    """Folder of the results."""
    from_json: bool = False
    """Measure nothing: make the pictures again from results.json."""

    batch: int = 1
    """Sequences of the residuals' systems (the paper: 8)."""
    length: int = 2048
    """Tokens of each, a system a token; a multiple of 64."""
    heads: int = 8
    """Heads of each."""
    size: int = 128
    """Channels K of a head."""
    ridge: float = 0.02
    """lambda / ||H||_F."""
    ridges: tuple[float, ...] = (0.01, 0.02, 0.05, 0.1)
    """Strengths compared (figure 8)."""
    iterations: int = 60
    """Up to which residuals are measured."""
    reversed_iterations: int = 30
    """Run there and back."""

    gradient_length: int = 512
    """Tokens T of the gradients' layer and model (the paper: 2048)."""
    gradient_heads: int = 2
    """Heads of both."""
    gradient_iterations: tuple[int, ...] = (5, 10, 20, 30, 50, 100)
    """After how many iterations gradients are taken."""
    model_layers: int = 5
    """Layers of the model."""
    vocabulary: int = 5000
    """Its vocabulary; tokens are random."""
    seed: int = 0
    """Of everything random."""
