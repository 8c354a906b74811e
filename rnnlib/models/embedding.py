"""The look-up of token embeddings, with a gradient that is deterministic on every device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.common.platform import platform
from pallas_kernels.common.vma import pvary_together
from rnnlib.layers.tensor import first_of_shard, sum_over_shards
from rnnlib.ops.sharding import is_split, mesh_of

# Sorted tokens whose gradients are summed in one product. A product does as many operations for each of its rows.
_BLOCK = 128


def look_up(
    table: Float[Array, "vocabulary D"], tokens: Int[Array, "*batch"], dtype: DTypeLike
) -> Float[Array, "*batch D"]:
    """Rows of an embedding table, cast to `dtype`.

    The gradient of indexing is a scatter-add. GPUs sum it in the order of arrival, and XLA's deterministic form of it
    fails to compile or runs token by token, so on a GPU it is `sum_rows_by_products`.

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
    table, tokens = pvary_together((table, tokens))
    if platform() != "gpu" and table.dtype == accumulator(table):
        return _rows(table, tokens, dtype)  # the same gradient, and a derivative forwards
    return _look_up(table, tokens, dtype)


def look_up_in_shards(
    table: Float[Array, "vocabulary D"], tokens: Int[Array, "*batch"], dtype: DTypeLike, tp_size: int
) -> Float[Array, "*batch D"]:
    """`look_up` in a table that is sharded by rows; `table` is this device's shard (`rnnlib.layers.tensor`)."""
    if tp_size == 1:
        return look_up(table, tokens, dtype)
    size = len(table)
    own = tokens - first_of_shard(size, tp_size)
    rows = jnp.where(((own >= 0) & (own < size))[..., None], look_up(table, own, dtype), 0)
    is_known = (tokens >= 0) & (tokens < size * tp_size)
    return jnp.where(is_known[..., None], sum_over_shards(rows, tp_size), jnp.nan)


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
    if platform() == "gpu":
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
    """For each token the sum of its rows, in an order that does not change.

    Rows are sorted by their tokens. A block of them holds at most as many tokens as rows, so the sums within a block
    are a product with a small one-hot matrix. A token that goes on from one block into the next ones has its first sum
    where it begins; those of its other blocks are added to that. A product with one-hot rows of the whole vocabulary,
    without sorting, would do `vocabulary / 128` times the operations.

    Args:
        tokens: of each row; one outside the vocabulary has no sum.
        rows: what is added up, in their dtype's `accumulator`.
        vocabulary_size: rows of the result.
    """
    count, width = rows.shape
    size = min(_BLOCK, count)
    blocks = -(-count // size)
    known = jnp.where((tokens >= 0) & (tokens < vocabulary_size), tokens, vocabulary_size)
    known = jnp.pad(known.astype(jnp.int32), (0, blocks * size - count), constant_values=vocabulary_size)
    ids, order = jax.lax.sort_key_val(known, jnp.minimum(jnp.arange(blocks * size, dtype=jnp.int32), count - 1))
    begins = jnp.concatenate([jnp.ones(1, bool), ids[1:] != ids[:-1]])
    rank = (jnp.cumsum(begins.astype(jnp.int32)) - 1).reshape(blocks, size)
    local = rank - rank[:, :1]  # the number of a row's token among those of its block
    values = rows[order].reshape(blocks, size, width)
    # `where` and not `astype`: XLA would write the converted comparison to memory twice, once as booleans.
    product = functools.partial(
        jnp.einsum, preferred_element_type=accumulator(rows), precision=jax.lax.Precision.HIGHEST
    )
    one, zero = jnp.ones([], rows.dtype), jnp.zeros([], rows.dtype)
    of_token = jnp.where(local[:, None] == jnp.arange(size)[:, None], one, zero)
    sums = product("btn,bnd->btd", of_token, values)
    # A token's sums in later blocks are added to the block in which the token begins, where it is the last token.
    goes_on = ~begins.reshape(blocks, size)[:, 0]
    numbers = jnp.arange(blocks)
    follows = goes_on & (rank[:, -1:] == rank[:, 0]) & (numbers > numbers[:, None])
    later = product("bc,cd->bd", follows.astype(sums.dtype), sums[:, 0])
    place = jnp.searchsorted(ids, jnp.arange(vocabulary_size, dtype=jnp.int32), method="scan_unrolled")
    place = jnp.minimum(place, blocks * size - 1)
    block, within = place // size, local.reshape(-1)[place]
    found = sums.reshape(blocks * size, width)[block * size + within]
    found = found + jnp.where((within == local[block, -1])[:, None], later[block], 0)
    return jnp.where((ids[place] == jnp.arange(vocabulary_size))[:, None], found, 0)


_look_up.defvjp(_forward, _backward)
