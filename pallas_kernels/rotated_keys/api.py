"""Keys and queries of value heads, with a bias and turned channel pairs, forward and backward."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from pallas_kernels.common.config import KernelConfig
from pallas_kernels.common.kernel_shape import cdiv
from pallas_kernels.common.refusal import refuse
from pallas_kernels.common.triton.backend import call, interpreted, unsupported_arrays, whole
from pallas_kernels.common.vma import pvary_together
from pallas_kernels.rotated_keys.triton import Cut, reverse_rotated_keys_kernel, rotated_keys_kernel

_MAX_NUMBERS = 1 << 14  # of value heads times half a head's channels: a program's threads hold several such tiles
_MAX_ELEMENTS = 1 << 31  # of an array, for kernels count in 32 bits


@dataclasses.dataclass(frozen=True)
class RotationConfig:
    """How a call is cut into programs.

    Attributes:
        programs: at least, where each has `fewest` tokens or more.
        fewest: tokens of a program.
        most: tokens of a program.
        numbers: of half the channels of a key head's value heads, for a warp.
    """

    programs: int = 4096
    fewest: int = 8
    most: int = 32
    numbers: int = 512

    def blocks(self, tokens: int, others: int) -> int:
        """Tokens of a program, of so many, where the grid has so many places beside."""
        return min(self.most, max(self.fewest, tokens * others // self.programs))


class RotationInputs(NamedTuple):
    """Arguments.

    Attributes:
        query: `[N, H * R, K]`.
        key: likewise.
        query_bias: `[HV, R, K]`.
        key_bias: likewise.
        turns: `[N, HV, P]`, float32.
    """

    query: Array
    key: Array
    query_bias: Array
    key_bias: Array
    turns: Array


def _cut(config: RotationConfig, inputs: RotationInputs) -> tuple[Cut, tuple[int, int, int], KernelConfig]:
    """A kernel's static facts, its grid and its launch."""
    tokens, rows, size = inputs.query.shape
    value_heads, rank, _ = inputs.query_bias.shape
    key_heads = rows // rank
    blocks = config.blocks(tokens, rank * key_heads)
    cut = Cut(tokens, rank, value_heads // key_heads, size // 2, inputs.turns.shape[2], blocks)
    warps = min(8, max(1, cut.heads * cut.half // config.numbers))
    return cut, (cdiv(tokens, blocks), rank, key_heads), KernelConfig(num_warps=warps, num_stages=1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(config: RotationConfig, inputs: RotationInputs) -> tuple[Array, Array]:
    cut, grid, launch = _cut(config, inputs)
    heads, rank, size = inputs.query_bias.shape
    turned = whole(jax.ShapeDtypeStruct((cut.tokens, rank, heads, size), inputs.query.dtype))
    operands = {name: whole(x) for name, x in inputs._asdict().items()}
    outputs = {"turned_query": turned, "turned_key": turned}
    results = call(rotated_keys_kernel, "rotated_keys", grid, operands, outputs, launch, cut=cut)
    return results["turned_query"], results["turned_key"]  # type: ignore[return-value]


def _forward(config: RotationConfig, inputs: RotationInputs) -> tuple[tuple[Array, Array], RotationInputs]:
    return _run(config, inputs), inputs


def _backward(config: RotationConfig, inputs: RotationInputs, d_turned: tuple[Array, Array]) -> tuple[RotationInputs]:
    cut, grid, launch = _cut(config, inputs)
    like = {name: whole(jax.ShapeDtypeStruct(x.shape, x.dtype)) for name, x in inputs._asdict().items()}
    parts = whole(jax.ShapeDtypeStruct((grid[0], *inputs.query_bias.shape), jnp.float32))
    results = call(
        reverse_rotated_keys_kernel,
        "rotated_keys_reverse",
        grid,
        {name: whole(x) for name, x in inputs._asdict().items()}
        | {"d_turned_query": whole(d_turned[0]), "d_turned_key": whole(d_turned[1])},
        {"d_query": like["query"], "d_key": like["key"], "d_query_bias": parts, "d_key_bias": parts}
        | {"d_turns": whole(jax.ShapeDtypeStruct((cut.rank, *inputs.turns.shape), jnp.float32))},
        launch,
        cut=cut,
    )
    gradients = {name: results[f"d_{name}"] for name in RotationInputs._fields}
    for name in ("query_bias", "key_bias", "turns"):
        gradients[name] = jnp.sum(gradients[name], axis=0).astype(getattr(inputs, name).dtype)  # type: ignore[arg-type]
    if cut.rank > 1:  # or XLA sums up rows again in every step of the angles' sum over tokens
        gradients["turns"] = jax.lax.optimization_barrier(gradients["turns"])
    return (RotationInputs(**gradients),)  # type: ignore[arg-type]


_run.defvjp(_forward, _backward)


def unsupported_reason(query: Array, key: Array, query_bias: Array, key_bias: Array, turns: Array) -> str | None:
    """Why `rotated_keys` can't serve a call, as a noun phrase, or None if it can; arguments as its."""
    *tokens, key_heads, rank, size = query.shape
    value_heads, pairs = turns.shape[-2:]
    if turns.dtype != jnp.float32:
        return f"turns of dtype {turns.dtype} (only float32)"
    if size & (size - 1) or not 0 < pairs <= size // 2:
        return f"{pairs} pairs of keys of {size} channels (a power of two, with at most its half)"
    of_key = value_heads // key_heads
    if value_heads % key_heads or of_key & (of_key - 1) or of_key * size // 2 > _MAX_NUMBERS:
        limits = f"a power of two of each, with at most {2 * _MAX_NUMBERS} channels together"
        return f"{value_heads} value heads of {key_heads} key heads of {size} channels ({limits})"
    reason = unsupported_arrays(query=query, key=key, query_bias=query_bias, key_bias=key_bias, turns=turns)
    elements = value_heads * rank * size
    for n in tokens if reason is None else ():
        elements *= n
    return f"{elements} numbers of queries (below {_MAX_ELEMENTS})" if elements >= _MAX_ELEMENTS else reason


def rotated_keys(
    query: Float[Array, "*tokens H R K"],
    key: Float[Array, "*tokens H R K"],
    query_bias: Float[Array, "HV R K"],
    key_bias: Float[Array, "HV R K"],
    turns: Float[Array, "*tokens HV P"],
    *,
    config: RotationConfig | None = None,
) -> tuple[Float[Array, "*tokens R HV K"], Float[Array, "*tokens R HV K"]]:
    """Queries and keys of each value head, plus a bias, with channel pairs `(i, i + K/2)` turned; computed in float32.

    Value head `j` has the rows of key head `j // (HV // H)`. The gradient of the turns is found from the rounded
    results. Sines and cosines are those of the special function unit, within 1e-6.

    Args:
        query: bfloat16 or float32, R rows of each key head.
        key: likewise.
        query_bias: of each value head, row and channel.
        key_bias: likewise.
        turns: by how much the first P pairs turn, in revolutions, float32.
        config: how the call is cut into programs.

    Returns:
        Queries and keys, rounded once, with a token's rows before its heads.

    Raises:
        NotImplementedError: there is an `unsupported_reason`.
    """
    refuse("rotated_keys", unsupported_reason(query, key, query_bias, key_bias, turns))
    if config is None:
        config = RotationConfig(programs=2, fewest=2, most=4) if interpreted() else RotationConfig()
    tokens, size = query.shape[:-3], query.shape[-1]
    rows = query.shape[-3] * query.shape[-2]
    flat_query, flat_key = (x.reshape(-1, rows, size) for x in (query, key))
    inputs = RotationInputs(flat_query, flat_key, query_bias, key_bias, turns.reshape(-1, *turns.shape[-2:]))
    turned = _run(config, pvary_together(inputs))
    shape = (*tokens, query.shape[-2], turns.shape[-2], size)
    return turned[0].reshape(shape), turned[1].reshape(shape)
