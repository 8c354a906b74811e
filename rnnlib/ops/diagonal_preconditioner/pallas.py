"""The diagonal Gram and its readouts on NVIDIA GPUs: the kernels of `pallas_kernels.preconditioner`."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from rnnlib.ops.derivatives import with_further_derivatives
from rnnlib.ops.diagonal_preconditioner import readouts
from rnnlib.ops.diagonal_preconditioner.inputs import DiagonalGramInputs
from rnnlib.ops.diagonal_preconditioner.read_gram import read_gram
from rnnlib.ops.diagonal_preconditioner.xla_chunked import diagonal_gram_chunked
from rnnlib.ops.kernels import kernel_operators, unsupported_reason


def _of_kernels(kernels: Any, readout: Any) -> Any:
    """A readout as the kernels take it."""
    kinds = {
        readouts.Gram: kernels.Gram,
        readouts.Preconditioner: kernels.Preconditioner,
        readouts.PreconditionedQuery: kernels.PreconditionedQuery,
        readouts.ShermanMorrisonKey: kernels.ShermanMorrisonKey,
    }
    return kinds[type(readout)](**dataclasses.asdict(readout))


def gram_unsupported_reason(
    inputs: DiagonalGramInputs,
    x: Array | None,
    parameter: Array | None,
    initial_state: Array | None,
    *,
    readout: Any,
    like: Array | None,
    backend: str,
) -> str | None:
    """Why a backend's kernels can't serve a call, as a noun phrase, or None if they can; arguments as `evaluate`."""

    def ask(kernels: Any) -> str | None:
        of_kernels = _of_kernels(kernels.preconditioner_readouts, readout)
        options = {"readout": of_kernels, "stored": None if like is None else like.dtype, "backend": backend}
        k, log_decay, gain = inputs
        return kernels.preconditioner.unsupported_reason(k, x, parameter, log_decay, gain, initial_state, **options)

    return unsupported_reason(ask)


@functools.partial(jax.jit, static_argnames=("readout", "dtype", "with_key", "backend"), inline=True)
def diagonal_gram_triton(
    inputs: DiagonalGramInputs,
    x: Array | None,
    parameter: Array | None,
    initial_state: Array | None,
    segment_ids: Array | None,
    *,
    readout: Any,
    like: Array | None,
    dtype: Any,
    with_key: bool,
    backend: str = "triton",
) -> tuple[Array, Array, Array]:
    """Evaluates a readout by kernels; arguments and results as `evaluate`, and the kernels' backend."""
    operators = kernel_operators()
    of_kernels = _of_kernels(operators.preconditioner_readouts, readout)
    stored = jnp.float32 if like is None else like.dtype
    dtype = stored if dtype is None else dtype

    def keywords(inputs, x, parameter, initial_state, segment_ids) -> dict[str, Any]:
        arrays = {**inputs._asdict(), "x": x, "parameter": parameter, "initial_state": initial_state}
        options = {"readout": of_kernels, "dtype": dtype, "stored": stored, "with_key": with_key}
        options["backend"] = backend
        return {**arrays, "segment_ids": segment_ids, **options}

    def reference(inputs, *rest):
        results = read_gram(diagonal_gram_chunked, inputs, *rest, readout=readout, dtype=dtype)
        return (*results, inputs.k) if with_key else results

    run = with_further_derivatives(operators.preconditioner.diagonal_gram_readout, keywords, reference)
    out, final, *key = run(inputs, x, parameter, initial_state, segment_ids)
    return out, final, (key[0] if key else inputs.k)
