"""Linear attention: sums over earlier (or later) tokens, one kernel for the output and for each gradient.

With `G_r` the inclusive cumulative log decay, one number a token,

    o_r  = scale * sum_{s <= r} exp(G_r - G_s) (q_r . k_s)      w_s v_s
    dq_r = scale * sum_{s <= r} exp(G_r - G_s) (do_r . v_s)     w_s k_s
    dk_s = scale * sum_{r >= s} exp(G_r - G_s) (v_s . do_r) w_s q_r
    dv_s = scale * sum_{r >= s} exp(G_r - G_s) (k_s . q_r)  w_s do_r

are one sum, `out_r = sum_s weight_rs (reader_r . key_s) value_s`, with other arrays in the three places. A program goes
over the chunks of a split and keeps the state, `sum key value^T` over the chunks before, in registers. No chunk's
state goes to memory. The states at the splits' starts come from an elementwise scan over what each split adds.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.common.config import KernelConfig
from pallas_kernels.common.decay import split_gate
from pallas_kernels.common.kernel_shape import CHUNK, split_range
from pallas_kernels.common.triton.backend import Operand, call, dot, dot_halves, dot_nt, dot_tn, iota, load_tile
from pallas_kernels.common.triton.chunks import keep_factor, load_row, loop, product, sequence_grid
from pallas_kernels.common.triton.decay import ChunkDecay, causal_mask
from pallas_kernels.common.triton.decay_rows import Rows, decay_rows, loaded_decay
from pallas_kernels.common.triton.kernel_shape import KernelShape
from pallas_kernels.common.triton.pairs import diagonal, weigh_pairs
from pallas_kernels.delta_rule.inputs import Inputs
from pallas_kernels.linear_attention.row_shards import boundary_of_shard


class Places(NamedTuple):
    """The arrays of one sum.

    Attributes:
        reader: `[B, T, heads, A]`.
        key: `[B, T, heads, A]`.
        value: `[B, T, heads, D]`.
    """

    reader: Array
    key: Array
    value: Array


class Sums(NamedTuple):
    """Results of one sum. C is the number of blocks of value channels.

    Attributes:
        out: `[B, T, HV, D]`.
        end: what all tokens add up to, `[B, HV, A, D]` float32.
        products: `product_with . out`, `[C, B, T, HV]` float32, where asked for. In `reverse` the second factor of
            `split_gate` is not in it. A token's pair with itself is not in it where `keeps_own_apart` is set.
        far_products: the part of `products` from other chunks, where `states` are given; `products` is then the rest.
        states: what the tokens before each chunk add up to, `[B, HV, N, A, D]`, where asked for.
        crossed: what is left of the given `states` at the chunks' ends, times this sum there, `[C, B, HV, N]` float32.
    """

    out: Array
    end: Array
    products: Array | None
    far_products: Array | None
    states: Array | None
    crossed: Array | None


def rows_of(kernel_shape: KernelShape, inputs: Inputs) -> Rows:
    """The numbers of a call's decay."""
    return decay_rows(kernel_shape, inputs.log_decay, inputs.resets, name="linear_rows", num_warps=2)


def _addition(key: Array, value: Array, factor: Array | None) -> Array:
    """What a chunk adds, `[A, D]` float32."""
    if factor is not None:
        value = (factor[:, None] * value.astype(jnp.float32)).astype(value.dtype)
    return dot_tn(key, value)


def _increments_kernel(r, *, kernel_shape: KernelShape, block: int, reverse: bool, parts: int):
    """The sum that one split adds to the state, and the factor by which the state decays over it."""
    split = lax.rem(pl.program_id(2), parts) + (kernel_shape.num_splits - parts if reverse else 0)
    first, count = split_range(kernel_shape, split)

    def body(m, carry):
        added, kept = carry
        n = first + (count - 1 - m if reverse else m)
        rows = pl.ds(n * CHUNK, CHUNK)
        key, value = r.key[rows, :], r.value[rows, :]
        addition = _addition(key, value, product(load_row(r.writes, rows), load_row(r.gate, rows)))
        keeps = keep_factor(r.kept, n)
        return keeps * added + addition, keeps * kept

    zero = jnp.zeros((kernel_shape.key_size, block), jnp.float32)
    added, kept = loop(count, body, (zero, jnp.ones((), jnp.float32)))
    r.added[...] = added
    if r.kept_of_split is not None:
        r.kept_of_split[...] = kept


def _scan_kernel(r, *, num_splits: int, ahead: int, reverse: bool):
    """What the splits before each one (`reverse`: after it) add up to."""
    state = jnp.zeros(r.split_states.shape[1:], jnp.float32)
    if r.boundary is not None:
        state = r.boundary[...].astype(jnp.float32)
    last = r.added.shape[0]
    pieces = last // (num_splits - 1)
    for start in range(0, last + 1, ahead):
        steps = range(start, min(start + ahead, last + 1))
        places = {m: last - 1 - m if reverse else m for m in steps if m < last}
        added = {m: r.added[place, :, :] for m, place in places.items()}  # all loads before what waits for them
        for m in steps:
            if m % pieces == 0:
                n = m // pieces
                r.split_states[num_splits - 1 - n if reverse else n, :, :] = state
            if m < last:
                state = (1.0 if r.kept is None else r.kept[places[m]]) * state + added[m]


def _is_own(size: int) -> Array:
    """The pairs of a token of `size` rows with itself, `[C, C]`."""
    row, column = (lax.div(iota((CHUNK, CHUNK), axis), jnp.int32(size)) for axis in (0, 1))
    return row == column


def _sums_kernel(
    r,
    *,
    kernel_shape: KernelShape,
    block: int,
    reverse: bool,
    transposed: bool,
    keeps_own_apart: bool,
    diagonal_size: int,
):
    split = lax.rem(pl.program_id(2), kernel_shape.num_splits)
    first, count = split_range(kernel_shape, split)
    state = jnp.zeros((kernel_shape.key_size, block), jnp.float32)
    if r.boundary is not None:
        state = r.boundary[...].astype(jnp.float32)
        state = state.T if transposed else state

    def body(m, state):
        n = first + (count - 1 - m if reverse else m)
        rows = pl.ds(n * CHUNK, CHUNK)
        gate, factor, rest = load_row(r.gate, rows), load_row(r.reads, rows), None
        reader, key, value = (load_tile(ref, rows, r.is_lean) for ref in (r.reader, r.key, r.value))
        if r.states is not None:
            r.states[n, :, :] = state.astype(r.states.dtype)
        far = dot(reader, state.astype(reader.dtype))
        unweighted = dot_nt(reader, key)
        pairs = weigh_pairs(unweighted, loaded_decay(r, rows), strict=False, reverse=reverse)
        diagonal_gate = load_row(r.diagonal, rows)
        if gate is not None and reverse and diagonal_gate is not None:
            pairs, factor = pairs * gate[:, None], product(gate, factor)  # `with_divisible_gate`
        elif gate is not None and reverse:
            # On the pairs before they are rounded, as in the other direction: in the decay's gradient they cancel.
            divisor, rest = split_gate(gate)
            pairs, factor = pairs * divisor[:, None], product(divisor, factor)
        elif gate is not None:
            pairs = pairs * gate[None, :]
        own = own_pairs = None
        if diagonal_gate is not None:
            is_own = _is_own(diagonal_size)
            own_pairs = jnp.where(is_own, unweighted * jnp.expand_dims(diagonal_gate, 0 if reverse else 1), 0.0)
            pairs = jnp.where(is_own, 0.0 if keeps_own_apart else own_pairs, pairs)
        elif keeps_own_apart:
            own = kernel_shape.scale * diagonal(pairs, axis=1)
            pairs = jnp.where(causal_mask(ChunkDecay(None, None, None), strict=True, reverse=reverse), pairs, 0.0)
        far = kernel_shape.scale * product(factor, far)
        near = kernel_shape.scale * dot_halves(pairs, value)
        if r.products is not None:
            other = r.product_with[rows, :].astype(jnp.float32)
            if r.far_products is None:
                r.products[rows] = jnp.sum((far + near) * other, axis=1)
            else:
                r.products[rows] = jnp.sum(near * other, axis=1)
                r.far_products[rows] = jnp.sum(far * other, axis=1)
        out = far + near
        if own is not None:
            out = out + own[:, None] * value.astype(jnp.float32)
        if own_pairs is not None and keeps_own_apart:
            out = out + kernel_shape.scale * dot_halves(own_pairs, value)
        r.out[rows, :] = product(rest, out).astype(r.out.dtype)
        keeps = keep_factor(r.kept, n)
        if r.crossed is not None:
            crossed = state * r.states_before[n, :, :].astype(jnp.float32)
            r.crossed[n] = keeps * jnp.sum(jnp.sum(crossed, axis=0), axis=0)
        return keeps * state + _addition(key, value, product(load_row(r.writes, rows), None if reverse else gate))

    state = loop(count, body, state)

    @pl.when(split == (0 if reverse else kernel_shape.num_splits - 1))
    def _():
        r.end[...] = state


def _gates(kernel_shape: KernelShape, inputs: Inputs, rows: Rows, at, reverse: bool) -> dict[str, Any]:
    """Numbers of the tokens of whole sequences."""
    p = kernel_shape

    def row(x, size):
        return p.of_head(x, (size,), lambda *g: (at(*g)[0], at(*g)[2], 0))

    return {
        "total": row(rows.total, p.length),
        "fine": row(rows.fine, p.length),
        "runs": row(rows.runs, p.length),
        "reads": row(rows.to_end if reverse else rows.from_start, p.length),
        "writes": row(rows.from_start if reverse else rows.to_end, p.length),
        "kept": row(rows.kept, p.chunks),
        "gate": p.of_token(inputs.write, p.length, at),
        "diagonal": p.of_token(inputs.diagonal, p.length, at),
    }


def states_of_splits(
    kernel_shape: KernelShape,
    inputs: Inputs,
    rows: Rows,
    key: Array,
    value: Array,
    boundary: Array | None,
    launches: tuple[KernelConfig, KernelConfig],
    reverse: bool = False,
    context_axis: str | None = None,
) -> Array:
    """What the tokens before each split (`reverse`: after it) add up to: `sum key value^T` under the decay.

    Args:
        kernel_shape: static facts; `key_size` and `value_size` are those of `key` and `value`.
        inputs: arguments of the call, of which the gate is taken.
        rows: its decay.
        key: `[B, T, heads, A]`.
        value: `[B, T, heads, D]`.
        boundary: `[B, HV, A, D]`, what is there before the first token (`reverse`: after the last); None for zero.
        launches: of the two kernels: what splits add, and the scan over them.
        reverse: from the last split to the first.
        context_axis: the mesh axis over which tokens are split. The boundary is then before the first device's tokens,
            but in `reverse` after this device's: later devices add to it.

    Returns:
        `[B, HV, P, A, D]` float32.
    """
    p = kernel_shape
    if p.num_splits == 1 and context_axis is None:
        shape = (p.batch, p.value_heads, 1, p.key_size, p.value_size)
        return jnp.zeros(shape, jnp.float32) if boundary is None else boundary.astype(jnp.float32)[:, :, None]
    increments, scan = launches
    parts = p.num_splits - (1 if context_axis is None else 0)
    block = min(increments.block, p.value_size)

    def at(c, h, z):
        return lax.div(z, parts), 0, h, c

    def place(c, h, z):
        return lax.div(z, parts), h, lax.rem(z, parts)

    added = p.per_head(parts, p.key_size, p.value_size, dtype=jnp.float32)
    kept = None if inputs.log_decay is None else p.per_head(parts, dtype=jnp.float32)
    results = call(
        _increments_kernel,
        "linear_increments",
        (p.value_size // block, p.value_heads, p.batch * parts),
        {
            **_gates(p, inputs, rows, at, reverse),
            **({"gate": None} if reverse else {}),
            "diagonal": None,
            "key": p.of_token(key, p.length, lambda *g: (*at(*g)[:3], 0), p.key_size),
            "value": p.of_token(value, p.length, at, block),
        },
        {
            "added": p.of_head(added, (None, p.key_size, block), lambda c, h, z: (*place(c, h, z), 0, c)),
            "kept_of_split": p.of_head(kept, (None,), place),
        },
        increments,
        kernel_shape=p,
        block=block,
        reverse=reverse,
        parts=parts,
    )
    found, left = results["added"], results["kept_of_split"]
    assert found is not None
    if context_axis is not None:
        return scan_shard(p, found, left, boundary, scan, context_axis, reverse=reverse)
    return scan_splits(p, found, left, boundary, scan, reverse=reverse)


def scan_shard(
    kernel_shape: KernelShape,
    added: Array,
    kept: Array | None,
    boundary: Array | None,
    launch: KernelConfig,
    axis: str,
    *,
    reverse: bool = False,
) -> Array:
    """`scan_splits` on a shard of rows that devices share, from what all splits add.

    Args:
        kernel_shape: static facts.
        added: of all P splits, or of all their pieces.
        kept: likewise; None for all.
        boundary: before the first device's tokens, but in `reverse` after this device's; None for zero.
        launch: as of `scan_splits`.
        axis: the mesh axis over which tokens are split.
        reverse: from the last split, and the last device, to the first.
    """
    p, pieces = kernel_shape, added.shape[2] // kernel_shape.num_splits
    one_more = dataclasses.replace(p, num_splits=p.num_splits + 1)
    last = 0 if reverse else -1  # in the order of the scan
    offset = scan_splits(one_more, added, kept, None, launch, reverse=reverse)[:, :, last]
    boundary = boundary_of_shard(kept, offset, boundary, axis, reverse=reverse)
    if p.num_splits == 1:
        return boundary[:, :, None]
    others = slice(pieces, None) if reverse else slice(None, -pieces)
    kept = None if kept is None else kept[:, :, others]
    return scan_splits(p, added[:, :, others], kept, boundary, launch, reverse=reverse)


def scan_splits(
    kernel_shape: KernelShape,
    added: Array,
    kept: Array | None,
    boundary: Array | None,
    launch: KernelConfig,
    *,
    reverse: bool = False,
) -> Array:
    """What the tokens before each split (`reverse`: after it) add up to, `[B, HV, P, R, S]` float32, P above 1.

    Args:
        kernel_shape: static facts; of any rows and columns.
        added: what splits add, all but the last (`reverse`: the first), `[B, HV, P - 1, R, S]` float32; or what equal
            pieces of them do, several times as many.
        kept: what they leave of the state, `[B, HV, P - 1]` float32 (or as many as `added`); None for all.
        boundary: `[B, HV, R, S]`, what is there before the first token (`reverse`: after the last); None for zero.
        launch: `block` is a number of rows, `inner` the number of splits whose loads are begun together.
        reverse: from the last split to the first.
    """
    p = kernel_shape
    *_, parts, rows, columns = added.shape
    height = min(launch.block, rows)

    def of_states(x, count):
        return p.of_head(x, (count, height, columns), lambda c, h, b: (b, h, 0, c, 0))

    found = call(
        _scan_kernel,
        "linear_scan",
        (rows // height, p.value_heads, p.batch),
        {
            "added": of_states(added, parts),
            "kept": p.of_head(kept, (parts,), lambda c, h, b: (b, h, 0)),
            "boundary": p.of_head(boundary, (height, columns), lambda c, h, b: (b, h, c, 0)),
        },
        {"split_states": of_states(p.per_head(p.num_splits, rows, columns, dtype=jnp.float32), p.num_splits)},
        launch,
        num_splits=p.num_splits,
        ahead=launch.inner,
        reverse=reverse,
    )
    return found["split_states"]  # type: ignore[return-value]


def sums(
    kernel_shape: KernelShape,
    inputs: Inputs,
    rows: Rows,
    places: Places,
    boundary: Array,
    launch: KernelConfig,
    *,
    reverse: bool = False,
    transposed: bool = False,
    dtype: Any = None,
    product_with: Array | None = None,
    keeps_own_apart: bool = False,
    diagonal_size: int = 1,
    with_states: bool = False,
    states: Array | None = None,
) -> Sums:
    """One sum over all tokens.

    Args:
        kernel_shape: static facts; `key_size` and `value_size` are A and D of `places`.
        inputs: arguments of the call, of which the gate is taken.
        rows: its decay.
        places: the arrays.
        boundary: the state at each split's start, `[B, HV, P, A, D]`.
        launch: compilation; `block` is a block of value channels.
        reverse: over later tokens, the gate on what comes out; else over earlier ones, the gate on what goes in.
        transposed: whether `boundary` is `[B, HV, P, D, A]`.
        dtype: of the result; None is that of the inputs.
        product_with: `[B, T, heads, D]`, whose products with the rows of the result are wanted.
        keeps_own_apart: whether these products leave out a token's pair with itself. That pair has no decay. In the
            decay's gradient, a difference of products, only its rounding error would be left.
        diagonal_size: rows of a token, where there is a diagonal.
        with_states: whether what is before each chunk is wanted.
        states: the same of another sum, whose products with this one's are wanted.
    """
    p = kernel_shape
    block = min(launch.block, p.value_size)
    grid, at = sequence_grid(p, p.value_size, block)
    columns = p.value_size // block

    def whole(x):
        return p.of_token(x, p.length, lambda *g: (*at(*g)[:3], 0), p.key_size)

    def blocked(x):
        return p.of_token(x, p.length, at, block)

    def of_states(x):
        return p.of_head(x, (p.chunks, p.key_size, block), lambda c, h, z: (at(c, h, z)[0], h, 0, 0, c))

    def part(shape, seen, where):
        return Operand(jax.ShapeDtypeStruct((columns, *shape), jnp.float32), (None, *seen), where)

    start = (
        p.of_head(boundary, (None, block, p.key_size), lambda c, h, z: (*p.split_at(h, z), c, 0))
        if transposed
        else p.of_head(boundary, (None, p.key_size, block), lambda c, h, z: (*p.split_at(h, z), 0, c))
    )
    out = jax.ShapeDtypeStruct((p.batch, p.length, p.value_heads, p.value_size), dtype or p.dtype)
    end = p.per_head(p.key_size, p.value_size, dtype=jnp.float32)
    of_rows = part((p.batch, p.length, p.value_heads), (None, p.length, None), lambda *g: (g[0], *at(*g)[:3]))
    crossed = part((p.batch, p.value_heads, p.chunks), (None, None, p.chunks), lambda *g: (g[0], at(*g)[0], g[1], 0))
    results = call(
        _sums_kernel,
        "linear_sums",
        grid,
        {
            **_gates(p, inputs, rows, at, reverse),
            "reader": whole(places.reader),
            "key": whole(places.key),
            "value": blocked(places.value),
            "boundary": start,
            "product_with": blocked(product_with),
            "states_before": of_states(states),
        },
        {
            "out": blocked(out),
            "end": p.of_head(end, (p.key_size, block), lambda c, h, z: (at(c, h, z)[0], h, 0, c)),
            "products": None if product_with is None else of_rows,
            "far_products": None if states is None else of_rows,
            # For the decay's gradient alone: products of states cancel.
            "states": of_states(p.per_head(p.chunks, p.key_size, p.value_size, dtype=jnp.float32))
            if with_states
            else None,
            "crossed": None if states is None else crossed,
        },
        launch,
        kernel_shape=p,
        block=block,
        reverse=reverse,
        transposed=transposed,
        keeps_own_apart=keeps_own_apart,
        diagonal_size=diagonal_size,
    )
    return Sums(**results)  # type: ignore[arg-type]
