"""The look-up of token embeddings, with a gradient that is deterministic on every device."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.varying import vary_alike
from rnnlib.ops.sharding import is_split, mesh_of

# Tokens whose gradients are summed in one product: bounds the memory that their one-hot rows take.
_BLOCK = 4096


def look_up(
    table: Float[Array, "vocabulary D"], tokens: Int[Array, "*batch"], dtype: DTypeLike
) -> Float[Array, "*batch D"]:
    """Rows of an embedding table, cast to `dtype`.

    The gradient of indexing is a scatter-add. GPUs sum it in the order of arrival, and XLA's deterministic form of it
    fails to compile or runs token by token, so on a GPU it is a product with one-hot rows, a block of tokens at a time.

    Args:
        table: the embeddings.
        tokens: row numbers; one outside the table gives NaN, and no gradient.
        dtype: of the result.
    """
    if is_split(tokens):  # over Explicit mesh axes: each device looks up its own
        mesh, spec = mesh_of(tokens), jax.typeof(tokens).sharding.spec
        specs = {"mesh": mesh, "in_specs": (P(), spec), "out_specs": P(*spec, None)}
        own_rows = jax.shard_map(lambda table, tokens: look_up(table, tokens, dtype), **specs)
        return own_rows(jax.sharding.reshard(table, NamedSharding(mesh, P())), tokens)
    return _look_up(*vary_alike((table, tokens)), dtype)


def _rows(table: Array, tokens: Array, dtype: DTypeLike) -> Array:
    # Rows are picked before the cast: casting the table would touch all of it at every step.
    # A negative token is outside as well, and not one counted from the table's end.
    rows = jnp.asarray(table).at[tokens].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
    return rows.astype(dtype)


_look_up = jax.custom_vjp(_rows, nondiff_argnums=(2,))


def _forward(table: Array, tokens: Array, dtype: DTypeLike) -> tuple[Array, tuple[Array, Array]]:
    # Not by `_look_up`, so that a gradient can be differentiated forwards (a Hessian times a vector).
    # Of the table only shape and dtype are needed: an empty array has them.
    return _rows(table, tokens, dtype), (tokens, jnp.zeros((table.shape[0], 0), table.dtype))


def _backward(dtype: DTypeLike, residuals: tuple[Array, Array], gradient: Array) -> tuple[Array, np.ndarray]:
    tokens, shape = residuals
    size = shape.shape[0]
    flat, rows = tokens.reshape(-1), gradient.reshape(-1, gradient.shape[-1])
    if jax.default_backend() == "gpu":
        table = sum_rows_by_products(flat, rows, size)
    else:
        known = jnp.where((flat >= 0) & (flat < size), flat, size)
        table = jnp.zeros((size, rows.shape[-1]), accumulator(rows)).at[known].add(rows, mode="drop")
    return table.astype(shape.dtype), np.zeros(tokens.shape, jax.dtypes.float0)


def accumulator(rows: Array) -> jnp.dtype:
    """The dtype that gradients are summed in: float32 at least."""
    return jnp.promote_types(rows.dtype, jnp.float32)


def sum_rows_by_products(
    tokens: Int[Array, "N"], rows: Float[Array, "N D"], vocabulary_size: int
) -> Float[Array, "vocabulary D"]:
    """For each token the sum of its rows, by products with one-hot matrices of a block of tokens at a time."""
    padding = -len(tokens) % min(_BLOCK, len(tokens))
    blocks = (len(tokens) + padding) // min(_BLOCK, len(tokens))
    tokens = jnp.pad(tokens, (0, padding), constant_values=-1).reshape(blocks, -1)
    rows = jnp.pad(rows, ((0, padding), (0, 0))).reshape(blocks, -1, rows.shape[-1])
    dtype = accumulator(rows)

    def add(total: Array, block: tuple[Array, Array]) -> tuple[Array, None]:
        ids, values = block
        # Chosen and not converted: XLA writes a converted comparison to memory twice, once as booleans.
        is_token = ids[:, None] == jnp.arange(vocabulary_size)
        one_hot = jnp.where(is_token, jnp.ones([], values.dtype), jnp.zeros([], values.dtype))
        return total + jnp.einsum(
            "nv,nd->vd", one_hot, values, preferred_element_type=dtype, precision=jax.lax.Precision.HIGHEST
        ), None

    return jax.lax.scan(add, jnp.zeros((vocabulary_size, rows.shape[-1]), dtype), (tokens, rows))[0]


_look_up.defvjp(_forward, _backward)
