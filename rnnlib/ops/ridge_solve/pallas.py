"""The ridge solve on NVIDIA GPUs: the kernels of `pallas_kernels.ridge`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from rnnlib.ops.derivatives import with_further_derivatives
from rnnlib.ops.kernels import kernel_operators, unsupported_reason
from rnnlib.ops.ridge_solve.inputs import RidgeInputs, SolveOptions
from rnnlib.ops.ridge_solve.solvers import LinearSolver
from rnnlib.ops.ridge_solve.xla_chunked import ridge_solve_chunked


def _precision(solver: LinearSolver, inputs: RidgeInputs) -> str | None:
    """The kernels' name for the precision of products; None leaves the choice to them."""
    if solver.product_dtype is None:
        return None
    name = jnp.dtype(solver.product_dtype).name
    if name == "float32":  # 16 significant bits of each factor, or all bits
        return "split" if inputs.k.dtype == jnp.bfloat16 else None
    return name


def ridge_unsupported_reason(inputs: RidgeInputs, options: SolveOptions, chunk_size: int) -> str | None:
    """Why the Triton kernels can't serve a call, as a noun phrase, or None if they can."""
    solver = options.solver
    if solver.differentiation != "implicit":
        return f"differentiation {solver.differentiation!r} (only 'implicit')"
    arguments = {
        "solver": solver.method,
        "precision": _precision(solver, inputs),
        "adaptive": options.adaptive,
        "chunk_size": chunk_size,
    }
    return unsupported_reason(lambda kernels: kernels.ridge.unsupported_reason(inputs.q, inputs.k, **arguments))


@functools.partial(jax.jit, static_argnames=("options", "chunk_size"), inline=True)
def ridge_solve_triton(
    inputs: RidgeInputs,
    initial_gram: Array | None,
    segment_ids: Array | None,
    *,
    options: SolveOptions,
    chunk_size: int,
) -> tuple[Array, Array]:
    """Evaluates the ridge solve by kernels; arguments and results as `ridge_solve_scan`.

    Args:
        inputs: arguments by token, and the ridge.
        initial_gram: None (zero) or `[B, H, K, K]`.
        segment_ids: None or `[B, T]`.
        options: of the solve; differentiation is implicit, the method is not `"exact"`.
        chunk_size: tokens in a chunk.
    """
    solver = options.solver

    def keywords(inputs, initial_gram, segment_ids) -> dict[str, Any]:
        return {
            "q": inputs.q,
            "k": inputs.k,
            "ridge": jnp.broadcast_to(inputs.ridge, (inputs.q.shape[2], inputs.ridge.shape[1])),
            "adaptive": options.adaptive,
            "log_decay": inputs.log_decay,
            "iterations": options.iterations,
            "solver": solver.method,
            "epsilon": solver.epsilon,
            "precision": _precision(solver, inputs),
            "initial_gram": initial_gram,
            "segment_ids": segment_ids,
            "chunk_size": chunk_size,
        }

    kernels = kernel_operators().ridge

    def vjp(arrays: Any, segment_ids: Array | None) -> tuple[Any, Any, Any]:
        names = ("q", "k", "ridge", "log_decay", "initial_gram")

        def differentiated(inputs: RidgeInputs, initial_gram: Array | None) -> dict[str, Any]:
            own = keywords(inputs, initial_gram, segment_ids)
            return {name: own[name] for name in names}

        given, pull_given = jax.vjp(differentiated, *arrays)
        others = {key: x for key, x in keywords(arrays[0], arrays[1], segment_ids).items() if key not in names}
        results, norm, pull_back = kernels.ridge_solve_vjp(**others, **given)
        pull = jax.tree_util.Partial(lambda first, last, *saved: last(first(*saved)), pull_back, pull_given)
        return results, norm, pull

    reference = functools.partial(ridge_solve_chunked, options=options, chunk_size=chunk_size)
    run = with_further_derivatives(kernels.ridge_solve, keywords, reference, vjp=vjp, name="solution")
    return run(inputs, initial_gram, segment_ids)
