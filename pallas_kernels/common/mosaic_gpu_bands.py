"""Bands for kernels in Mosaic GPU: matrices of 128 columns of which each warp of a warpgroup holds whole rows.

What adds up along rows, or has one number for each row, stays within a warp then.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.mosaic.gpu.fragmented_array import Replicated, Tiling
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common.mosaic_gpu import WARPS, interpreted, sums_over_rows

BAND = 16
"""Rows of a band where nothing else is said."""
_COLUMNS = 128  # as many as a warpgroup has threads


def _band(rows: int) -> Any:
    """The layout of a band of `rows` rows, a multiple of `WARPS`."""
    if rows == WARPS:
        return plgpu.Layout.TILED(Tiling(((rows, _COLUMNS), (4,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
    tiling = Tiling(((rows, _COLUMNS), (rows // WARPS, _COLUMNS), (4,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-2,), vector_dim=-1)


def load_band(ref: Any) -> Array:
    """A matrix of 128 columns whose rows lie in shared memory, each as a whole; each warp takes as many whole rows."""
    return plgpu.load(ref, layout=_band(ref.shape[0]), optimized=False)


def zero_band(rows: int = BAND) -> Array:
    """A band of zeros."""
    return plgpu.layout_cast(jnp.zeros((rows, _COLUMNS), jnp.float32), _band(rows))


def zero_band_row(rows: int) -> Array:
    """A zero for each column of a band."""
    return plgpu.layout_cast(jnp.zeros(_COLUMNS, jnp.float32), _band(rows).reduce(0))


def begin_pieces(ref: Any) -> Array:
    """Begins to load `[4, n]` from global memory, n a part of 32: a warp has a row, a thread one of its numbers."""
    pieces, count = ref.shape
    lanes = Replicated(32 // count), -2
    layout = plgpu.Layout.TILED(Tiling(((pieces, count), (1,))), warp_dims=(-3,), lane_dims=lanes, vector_dim=-1)
    return plgpu.load(ref, layout=layout, optimized=False) * jnp.ones((), ref.dtype)  # as in `mosaic_gpu.load_state`


def load_band_column(ref: Any) -> Array:
    """One number for each row of a band, from shared memory, or begins to load it from global memory."""
    return plgpu.load(ref, layout=_band(ref.shape[0]).reduce(1), optimized=False)


def load_band_row(ref: Any, rows: int = BAND) -> Array:
    """One number for each column of a band, likewise."""
    return plgpu.load(ref, layout=_band(rows).reduce(0), optimized=False)


def along_rows(x: Array) -> Array:
    """A band whose rows have one number each."""
    rows = x.shape[0]
    return plgpu.layout_cast(lax.broadcast_in_dim(x, (rows, _COLUMNS), [0]), _band(rows))


def along_columns(x: Array, rows: int = BAND) -> Array:
    """A band whose columns have one number each."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, (rows, _COLUMNS), [1]), _band(rows))


def band_rows(rows: int) -> Array:
    """The numbers of a band's rows, int32."""
    return plgpu.broadcasted_iota(jnp.int32, (rows,), 0, layout=_band(rows).reduce(1))


def band_reciprocal(x: Array) -> Array:
    """`1 / x` of a band, within 1.2e-7 of its value, by the special function alone: a quotient is exact and slow."""
    if interpreted():
        return 1.0 / x
    layout = _band(x.shape[0])

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=layout))
    def reciprocal(_, band):
        return band._pointwise(band._lift_fast_instr("rcp.approx.ftz.f32"))

    return reciprocal(x)


def band_sums(x: Array, buffer: Any) -> Array:
    """The sum of each column of a band, in a fixed order; `buffer` as for `column_sums`."""
    return sums_over_rows(x, buffer, _band(x.shape[0]))
