"""A stream of a recurrent mixer: from the mixer's input to the heads of its queries, keys or values."""

from typing import Literal

from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from rnnlib.layers.base import MixerShape
from rnnlib.layers.convolution import ConvolutionConfig, ShortConvolution
from rnnlib.layers.feature_maps import ACTIVATIONS, FeatureMap, FeatureMapConfig, HeadMap
from rnnlib.layers.normalization import RMSNorm, l1_normalize, l2_normalize, sum_normalize

StreamNorm = Literal["none", "l2", "rms", "l1", "sum"]

_NORMS = {"l1": l1_normalize, "l2": l2_normalize, "sum": sum_normalize}


class Stream(nnx.Module):
    """One of queries, keys and values: projection, convolution, feature map, heads, norm."""

    def __init__(
        self,
        shape: MixerShape,
        heads: int,
        size: int,
        *,
        convolution: ConvolutionConfig | None,
        feature_map: FeatureMap,
        norm: StreamNorm,
        use_bias: bool = False,
        borrows_map: bool = False,
        rngs: nnx.Rngs,
    ):
        self.heads = heads
        self.size = size
        self.norm_kind = norm
        # What the convolution's operator does itself: its own activation, or else the feature map.
        self.activation: Literal["silu"] | None = None
        if convolution is not None and convolution.activation == "silu":
            self.activation = "silu"
        elif convolution is not None and feature_map == "silu":
            self.activation, feature_map = "silu", "identity"
        features = feature_map.features(size) if isinstance(feature_map, FeatureMapConfig) else size
        self.norm = (
            RMSNorm(features, eps=1e-5, dtype=shape.dtype, param_dtype=shape.param_dtype) if norm == "rms" else None
        )
        self.projection = shape.project(heads * size, use_bias=use_bias, rngs=rngs)
        self.convolution = (
            None if convolution is None else ShortConvolution(heads * size, convolution, shape, rngs=rngs)
        )
        # The map itself, its activation's name, or None where each call is given another stream's.
        own: HeadMap | str | None = feature_map if isinstance(feature_map, str) else None
        if not isinstance(feature_map, str) and not borrows_map:
            own = feature_map.build(size, shape, rngs=rngs)
        self.feature_map = own

    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        tail: Float[Array, "B S C"] | None = None,
        feature_map: HeadMap | str | None = None,
    ) -> tuple[Float[Array, "B T H X"], Float[Array, "B S C"] | None]:
        """The stream's heads, and the convolution's next tail; `feature_map` is one to borrow."""
        y = self.projection(x)
        norm = self.norm_kind
        chosen = self.feature_map if feature_map is None else feature_map
        assert chosen is not None
        if self.convolution is not None:
            # One operator, whose kernel goes over memory once; the norm's eps is `l2_normalize`'s.
            fused = norm == "l2" and chosen == "identity"
            y, tail = self.convolution(
                y,
                segment_ids=segment_ids,
                state=tail,
                activation=self.activation,
                norm_size=self.size if fused else None,
            )
            norm = "none" if fused else norm
        y = y.reshape(*x.shape[:2], self.heads, self.size)
        y = ACTIVATIONS[chosen](y) if isinstance(chosen, str) else chosen(y)
        if self.norm is not None:
            return self.norm(y), tail
        return (_NORMS[norm](y) if norm in _NORMS else y), tail

    def init_tail(self, batch_size: int, dtype: DTypeLike) -> Array | None:
        """The convolution's tail before the first token."""
        return None if self.convolution is None else self.convolution.init_state(batch_size, dtype)
