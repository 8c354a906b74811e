"""Keys and queries of value heads with a bias, whose channel pairs turn; by kernels for large arrays on a GPU."""

import math
from typing import Literal

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from pallas_kernels.common.platform import platform
from rnnlib.ops.derivatives import with_further_derivatives
from rnnlib.ops.heads import rotate_pairs
from rnnlib.ops.kernels import kernel_operators, unsupported_reason
from rnnlib.ops.sharding import is_split

# Smallest number of elements of the results for which the kernels are faster, despite their launches.
_LEAST = 1 << 20


def rotated_keys_support(query: Array, key: Array, query_bias: Array, key_bias: Array, turns: Array) -> bool:
    """Whether `rotated_keys` of these arrays is faster by kernels: large ones of bfloat16 on a GPU."""
    arrays = (query, key, query_bias, key_bias, turns)
    return (
        platform() == "gpu"
        and query.dtype == key.dtype == jnp.bfloat16
        and unsupported_reason(lambda kernels: kernels.rotated_keys.unsupported_reason(*arrays)) is None
        and query.size // query.shape[2] * turns.shape[2] >= _LEAST
        and not any(map(is_split, arrays))
    )


def rotated_keys(
    query: Float[Array, "B T H R K"],
    key: Float[Array, "B T H R K"],
    query_bias: Float[Array, "HV R K"],
    key_bias: Float[Array, "HV R K"],
    turns: Float[Array, "B T HV P"],
    *,
    implementation: Literal["xla", "triton"] | None = None,
) -> tuple[Float[Array, "B T HV R K"], Float[Array, "B T HV R K"]]:
    """Queries and keys of each value head, plus a bias, with the first P channel pairs `(i, i + K/2)` turned.

    `R_t (k_t + b)` of Mamba-3 (arXiv 2603.15569). Value head `j` has the rows of key head `j // (HV // H)`.

    Args:
        query: R rows of each key head.
        key: likewise.
        query_bias: of each value head, row and channel.
        key_bias: likewise.
        turns: by how much pairs turn, in revolutions, float32 at least.
        implementation: `"xla"`, `"triton"`, or None for the kernels where `rotated_keys_support`. XLA rounds the sum
            with the bias to the queries' dtype, the kernels compute all in float32 and round once.

    Returns:
        Queries and keys, in their dtypes.

    Raises:
        NotImplementedError: the kernels are asked for and do not support the call.
    """
    arrays = (query, key, query_bias, key_bias, turns)
    if implementation is None:
        implementation = "triton" if rotated_keys_support(*arrays) else "xla"

    def reference(query: Array, key: Array, query_bias: Array, key_bias: Array, turns: Array, _: None) -> tuple:
        radians = 2.0 * math.pi * turns[:, :, :, None]
        value_heads = turns.shape[2]

        def turned(y: Array, bias: Array) -> Array:
            of_values = y if y.shape[2] == value_heads else jnp.repeat(y, value_heads // y.shape[2], axis=2)
            return rotate_pairs(of_values + bias.astype(y.dtype), radians)

        return turned(query, query_bias), turned(key, key_bias)

    if implementation == "xla":
        return reference(*arrays, None)

    def keywords(*given: Array | None) -> dict[str, Array | None]:
        return dict(zip(("query", "key", "query_bias", "key_bias", "turns"), given))

    def kernel(**given: Array) -> tuple[Array, Array]:
        # The kernels write a token's rows before its heads, as linear attention reads them: there is no copy then.
        query, key = kernel_operators().rotated_keys.rotated_keys(**given)
        return jnp.moveaxis(query, 2, 3), jnp.moveaxis(key, 2, 3)

    return with_further_derivatives(kernel, keywords, reference)(*arrays, None)
