"""A branch of a recurrent mixer: from the mixer's input to the heads of its queries, keys or values."""

from collections.abc import Sequence
from typing import Any, Literal

from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from pallas_kernels.short_convolution.branch import ConvolutionBranch, Epilogue
from rnnlib.layers.base import MixerShape
from rnnlib.layers.convolution import ConvolutionConfig, ShortConvolution
from rnnlib.layers.feature_maps import ACTIVATIONS, FeatureMap, FeatureMapConfig, HeadMap
from rnnlib.layers.input_projection import ColumnReader, ProjectedInput
from rnnlib.layers.normalization import RMSNorm, l1_normalize, l2_normalize, norm_of_rows, sum_normalize
from rnnlib.ops.short_convolution.fused import fused_convolutions, fused_convolutions_support
from rnnlib.ops.short_convolution.one_token import Call, one_launch_supports, one_token_convolutions

BranchNorm = Literal["none", "l2", "rms", "l1", "sum"]

_NORMS = {"l1": l1_normalize, "l2": l2_normalize, "sum": sum_normalize}


class QKVBranch(nnx.Module, ColumnReader):
    """One of queries, keys and values: convolution, feature map, heads, norm of its columns of the input projection."""

    def __init__(
        self,
        name: str,
        shape: MixerShape,
        heads: int,
        size: int,
        *,
        convolution: ConvolutionConfig | None,
        feature_map: FeatureMap,
        norm: BranchNorm,
        use_bias: bool = False,
        borrows_map: bool = False,
        scale: float = 1.0,
        rngs: nnx.Rngs,
    ):
        self.heads = heads
        self.size = size
        self.norm_kind = norm
        # The activation that the convolution's operator applies: the convolution's own, or else the feature map.
        self.activation: Literal["silu"] | None = None
        if convolution is not None and convolution.activation == "silu":
            self.activation = "silu"
        elif convolution is not None and feature_map == "silu":
            self.activation, feature_map = "silu", "identity"
        features = feature_map.features(size) if isinstance(feature_map, FeatureMapConfig) else size
        self.norm = (
            RMSNorm(features, eps=1e-5, dtype=shape.dtype, param_dtype=shape.param_dtype) if norm == "rms" else None
        )
        self.name = name
        self.read_columns(**{name: shape.project(heads * size, use_bias=use_bias, rngs=rngs)})
        self.convolution = (
            None if convolution is None else ShortConvolution(heads * size, convolution, shape, scale=scale, rngs=rngs)
        )
        # The map, the name of an activation, or None if each call passes another branch's map.
        own: HeadMap | str | None = feature_map if isinstance(feature_map, str) else None
        if not isinstance(feature_map, str) and not borrows_map:
            own = feature_map.build(size, shape, rngs=rngs)
        self.feature_map = own

    def __call__(
        self,
        inputs: ProjectedInput,
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        tail: Float[Array, "B S C"] | None = None,
        feature_map: HeadMap | str | None = None,
    ) -> tuple[Float[Array, "B T H X"], Float[Array, "B S C"] | None]:
        """The branch's heads, and the convolution's next tail; `feature_map` is another branch's map to use."""
        y = inputs[self.name]
        chosen = self._chosen(feature_map)
        if self.convolution is not None:
            options: dict[str, Any] = {"activation": self.activation, "norm_size": self._norm_size(chosen)}
            y, tail = self.convolution(y, segment_ids=segment_ids, state=tail, **options)
        return self._heads_of(y, chosen), tail

    def _chosen(self, borrowed: HeadMap | str | None) -> HeadMap | str:
        chosen = self.feature_map if borrowed is None else borrowed
        assert chosen is not None
        return chosen

    def _norm_size(self, chosen: HeadMap | str) -> int | None:
        """Channels per head, if the convolution's operator applies the norm in the same pass over memory; else None."""
        return self.size if self.norm_kind == "l2" and chosen == "identity" else None  # with `l2_normalize`'s eps

    def _heads_of(self, y: Float[Array, "B T C"], chosen: HeadMap | str) -> Float[Array, "B T H X"]:
        """The steps after the convolution: heads, feature map, norm."""
        y = y.reshape(*y.shape[:2], self.heads, self.size)
        y = ACTIVATIONS[chosen](y) if isinstance(chosen, str) else chosen(y)
        if self.norm is not None:
            return norm_of_rows(self.norm, y)
        is_done = self.convolution is not None and self._norm_size(chosen) is not None
        return y if is_done or self.norm_kind not in _NORMS else _NORMS[self.norm_kind](y)

    def _epilogue(self, chosen: HeadMap | str) -> Epilogue:
        """The convolution's options."""
        return Epilogue(self.activation, self._norm_size(chosen), 1e-6)

    def _call(self, inputs: ProjectedInput, tail: Array | None, chosen: HeadMap | str) -> Call:
        """The convolution's arrays and options."""
        assert self.convolution is not None
        return self.convolution.inputs(inputs[self.name], tail), self._epilogue(chosen)

    def _fused(self, tail: Array | None, chosen: HeadMap | str) -> ConvolutionBranch:
        """The same, for inputs that lie beside other branches'."""
        assert self.convolution is not None
        return ConvolutionBranch(*self.convolution.filter(), tail, self._epilogue(chosen))

    def init_tail(self, batch_size: int, dtype: DTypeLike) -> Array | None:
        """The convolution's tail before the first token."""
        return None if self.convolution is None else self.convolution.init_state(batch_size, dtype)


def run_branches(
    branches: Sequence[QKVBranch],
    inputs: ProjectedInput,
    *,
    segment_ids: Int[Array, "B T"] | None,
    tails: Sequence[Array | None],
    feature_maps: Sequence[HeadMap | str | None],
) -> tuple[list[tuple[Float[Array, "B T H X"], Array | None]], ProjectedInput]:
    """Runs all branches, where kernels serve with joint work.

    Of one token all convolutions are one launch. Of many tokens the convolutions read their columns in place in the
    product of the input projection's shared kernel.

    Args:
        branches: what reads queries, keys and values.
        inputs: the columns of the input projection.
        segment_ids: as for a branch.
        tails: of each branch.
        feature_maps: that each borrows.

    Returns:
        Each branch's heads and next tail, and the inputs as the other parts are to read them.
    """
    chosen = [branch._chosen(borrowed) for branch, borrowed in zip(branches, feature_maps)]
    results: Sequence[tuple[Array, Array | None]] | None = None
    if inputs.x.shape[1] == 1 and all(branch.convolution is not None for branch in branches):
        calls = [branch._call(inputs, tail, one) for branch, tail, one in zip(branches, tails, chosen)]
        results = one_token_convolutions(calls) if one_launch_supports(calls) else None
    if results is None and inputs.fused is not None:
        results, inputs = _in_place(branches, inputs, segment_ids, tails, chosen)
    if results is not None:
        return [(s._heads_of(y, one), tail) for s, (y, tail), one in zip(branches, results, chosen)], inputs
    every = zip(branches, tails, feature_maps)
    found = [s(inputs, segment_ids=segment_ids, tail=tail, feature_map=borrowed) for s, tail, borrowed in every]
    return found, inputs


def columns_in_place(branches: Sequence[QKVBranch]) -> list[str]:
    """The order of the branches' columns in a shared kernel, for convolutions that read them in place; empty without.

    Wide branches come first: each begins at a multiple of its channels, if those of wider ones are multiples of them.
    """
    if any(branch.convolution is None for branch in branches):
        return []
    return [branch.name for branch in sorted(branches, key=lambda branch: -branch.heads * branch.size)]


def _in_place(
    branches: Sequence[QKVBranch],
    inputs: ProjectedInput,
    segment_ids: Array | None,
    tails: Sequence[Array | None],
    chosen: Sequence[HeadMap | str],
) -> tuple[list[tuple[Array, Array | None]] | None, ProjectedInput]:
    """Each branch's convolution and next tail, and the inputs after it; None where no kernel serves."""
    order = columns_in_place(branches)
    if not order or inputs.fused is None or [name for name, _, _ in inputs.places[: len(order)]] != order:
        return None, inputs
    joined = {s.name: s._fused(tail, one) for s, tail, one in zip(branches, tails, chosen)}
    in_order = [joined[name] for name in order]
    if not fused_convolutions_support(inputs.fused, in_order):
        return None, inputs
    results, rest = fused_convolutions(inputs.fused, in_order, segment_ids=segment_ids)
    by_name = dict(zip(order, results))
    columns = sum(branch.kernel.shape[1] for branch in in_order)
    return [by_name[branch.name] for branch in branches], inputs.after(columns, rest)
