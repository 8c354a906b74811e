"""Gradients of a single layer and of a model against those of the exact solver in float64 (figure 1b to 1e)."""

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array

from experiments.solver_convergence.config import GRADIENTS, PRECISIONS, SolverConvergenceConfig
from rnnlib import ops
from rnnlib.layers import NoDecay, RidgeRegression
from rnnlib.models import DecoderLM, ModelConfig
from rnnlib.models.config import DtypeName
from rnnlib.ops.ridge_solve import LinearSolver

EXACT = "exact"


def relative_difference(gradient: Any, reference: Any) -> float:
    """`||g - g*|| / ||g*||` over all leaves, in float64."""
    pairs = [
        (np.asarray(one, np.float64), np.asarray(other, np.float64))
        for one, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(reference), strict=True)
    ]
    difference = sum(float(np.sum((one - other) ** 2)) for one, other in pairs)
    return float(np.sqrt(difference / sum(float(np.sum(other**2)) for _, other in pairs)))


def _curves(
    config: SolverConvergenceConfig, gradient: Callable[[LinearSolver, int, DtypeName], Any], labels: Sequence[str]
) -> dict[str, Any]:
    """Relative differences by precision, label and number of iterations; the exact solver's own as a floor.

    Args:
        config: of the study.
        gradient: from solver, iterations and dtype to the gradients.
        labels: of `GRADIENTS`; where activations are bfloat16, the implicit ones among them.
    """
    exact = LinearSolver("exact")
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # compilation takes most of the time, and a core each
        reference = pool.submit(gradient, exact, 1, "float64")

        def difference(solver: LinearSolver, iterations: int, dtype: DtypeName) -> Future[float]:
            return pool.submit(lambda: relative_difference(gradient(solver, iterations, dtype), reference.result()))

        floors = {"float32": difference(exact, 1, "float32"), "bfloat16": difference(exact, 1, "bfloat16")}
        differences: dict[str, Any] = {}
        for precision in PRECISIONS:
            dtype: DtypeName = "bfloat16" if precision == "bfloat16" else "float32"
            differences[precision] = {EXACT: floors[dtype]}
            for label in labels:
                if precision == "bfloat16" and not label.endswith("implicit"):
                    continue
                product_dtype = None if precision == "float32" else "bfloat16"
                solver = dataclasses.replace(GRADIENTS[label], product_dtype=product_dtype)
                differences[precision][label] = [
                    difference(solver, iterations, dtype) for iterations in config.gradient_iterations
                ]
        curves = jax.tree.map(lambda future: future.result(), differences)
    return {"iterations": list(config.gradient_iterations), **curves}


def single_layer(config: SolverConvergenceConfig) -> dict[str, Any]:
    """Gradients of queries and keys for a random gradient of the solutions."""
    shape = (1, config.gradient_length, config.gradient_heads, config.size)
    rng = np.random.default_rng(config.seed + 1)
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in rng.standard_normal((2, *shape)))
    # Numbers that bfloat16 holds, so that all precisions solve the same systems.
    q, k, d_x = (np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64) for x in (q, k, rng.standard_normal(shape)))

    @functools.partial(jax.jit, static_argnames=("solver", "iterations"))
    def run(q: Array, k: Array, d_x: Array, solver: LinearSolver, iterations: int) -> Any:
        def solve(q: Array, k: Array) -> Array:
            return ops.ridge_solve(q, k, ridge=config.ridge, iterations=iterations, solver=solver)[0]

        return jax.vjp(solve, q, k)[1](d_x)

    def gradient(solver: LinearSolver, iterations: int, precision: DtypeName) -> Any:
        with jax.enable_x64(precision == "float64"):
            arguments = (jnp.asarray(x, precision) for x in (q, k, d_x))
            return jax.tree.map(np.asarray, run(*arguments, solver, iterations))

    return _curves(config, gradient, tuple(GRADIENTS))


def model_config(
    config: SolverConvergenceConfig, solver: LinearSolver, iterations: int, precision: DtypeName
) -> ModelConfig:
    """A LLaMA-like model whose attention is replaced by the plain ridge regression, without gates or convolution."""
    width = config.gradient_heads * config.size
    options = {
        "decay": NoDecay(),
        "convolution": None,
        "feature_map": "identity",
        "value_map": "identity",
        "output_projection.gate": "none",
        "solve": RidgeRegression(
            ridge=config.ridge,
            solver=solver.method,
            iterations=iterations,
            differentiation=solver.differentiation,
            product_dtype=None if solver.product_dtype is None else str(solver.product_dtype),
            epsilon=solver.epsilon,
            alpha_connection=False,
        ),
    }
    return ModelConfig(
        vocabulary_size=config.vocabulary,
        width=width,
        num_layers=config.model_layers,
        num_heads=config.gradient_heads,
        mixers=("gated_kalmanet",),
        mixer_overrides={"gated_kalmanet": options},
        dtype=precision,
        param_dtype="float64" if precision == "float64" else "float32",
        remat=solver.method == "exact",
        scan_layers=True,
    )


def model(config: SolverConvergenceConfig) -> dict[str, Any]:
    """Gradients of all weights for the next-token loss of random tokens."""
    tokens = np.random.default_rng(config.seed + 2).integers(0, config.vocabulary, (1, config.gradient_length + 1))
    initial = model_config(config, LinearSolver(), 1, "float32")
    weights = jax.tree.map(
        np.asarray, nnx.to_pure_dict(nnx.state(DecoderLM(initial, rngs=nnx.Rngs(config.seed)), nnx.Param))
    )

    def gradient(solver: LinearSolver, iterations: int, precision: DtypeName) -> Any:
        settings = model_config(config, solver, iterations, precision)
        with jax.enable_x64(precision == "float64"):
            graph, state = nnx.split(nnx.eval_shape(lambda: DecoderLM(settings, rngs=nnx.Rngs(config.seed))))
            dtype = settings.storage_dtype

            @jax.jit
            def run(weights: Any) -> Any:
                def loss(weights: Any) -> Array:
                    nnx.replace_by_pure_dict(state, weights)
                    logits = nnx.merge(graph, state)(jnp.asarray(tokens[:, :-1], jnp.int32))
                    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))

                return jax.grad(loss)(weights)

            return jax.tree.map(np.asarray, run(jax.tree.map(lambda x: jnp.asarray(x, dtype), weights)))

    # Reversed iterations are compared as a single layer; here only what the paper shows.
    return _curves(config, gradient, tuple(label for label in GRADIENTS if "reversed" not in label))
