"""The output projection: from a recurrence's output to the mixer's, through skip, gate and norm."""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from rnnlib.fields import PositiveNumber
from rnnlib.layers.base import MixerShape, Rank
from rnnlib.layers.feature_maps import ACTIVATIONS, Activation
from rnnlib.layers.input_projection import ColumnReader, ProjectedInput
from rnnlib.layers.normalization import RMSNorm
from rnnlib.layers.part import PartConfig
from rnnlib.ops.rms_norm import norm_kernel_supports, rms_norm


@dataclasses.dataclass(frozen=True)
class OutputProjectionConfig(PartConfig):
    """How the recurrence's output is read.

    Attributes:
        activation: of the recurrence's output, before gate and norm.
        gate: activation of the output gate `act(W x)`; `"none"` is no gate.
        gate_rank: of the gate's projection: None is full rank, `"value_size"` is V.
        gate_bias: whether the gate's projection has a bias.
        gate_scale: factor on `W x` (a multiplier of muP).
        gate_first: whether the gate is applied before the norm (Mamba-2, `norm(o * silu(z))`) instead of after it.
        norm: RMS norm of each value head, of all heads together, of the value heads that share a key head together
            (`"group"`, Mamba-2 with several groups), or none. Its scale is `[V]` for `"head"`, else `[HV * V]`.
        norm_scale: whether the norm has a learned scale.
        eps: of the norm.
        skip: adds `D v` with a learned `D`, starting at 1, to the recurrence's output (Mamba-2): one per value head, or
            with `"channel"` one per channel of each, `[HV * V]`.
        use_bias: whether the output's projection has a bias.
    """

    activation: Activation = "identity"
    gate: Literal["none", "silu", "sigmoid"] = "silu"
    gate_rank: Rank = None
    gate_bias: bool = False
    gate_scale: PositiveNumber = 1.0
    gate_first: bool = False
    norm: Literal["head", "all", "group", "none"] = "head"
    eps: float = 1e-6
    skip: bool | Literal["channel"] = False
    use_bias: bool = False
    norm_scale: bool = True

    def build(self, shape: MixerShape, *, rngs: nnx.Rngs) -> "OutputProjection":
        """Builds the module. Your own class may build another module with the call signature of `OutputProjection`."""
        return OutputProjection(self, shape, rngs=rngs)


class OutputProjection(nnx.Module, ColumnReader):
    """Skip, gate, norm, output projection."""

    def __init__(self, config: OutputProjectionConfig, shape: MixerShape, *, rngs: nnx.Rngs):
        self.config = config
        self.shape = shape
        features = shape.value_heads * shape.value_size
        skipped = features if config.skip == "channel" else shape.value_heads
        self.skip = nnx.Param(jnp.ones((skipped,), shape.param_dtype)) if config.skip else None
        if config.gate != "none":
            gate = shape.project(features, rank=config.gate_rank, use_bias=config.gate_bias, rngs=rngs)
            self.read_columns(output_gate=gate)
        normalised = shape.value_size if config.norm == "head" else features
        # Over heads of several devices: of all, or of a group that is all.
        over_all = config.norm == "all" or (config.norm == "group" and shape.tp_size_of_keys == 1)
        self.norm = (
            None
            if config.norm == "none"
            else RMSNorm(
                normalised,
                eps=config.eps,
                groups=shape.key_heads if config.norm == "group" else 1,
                use_scale=config.norm_scale,
                tp_size=shape.tp_size if over_all else 1,
                dtype=shape.gate_dtype,
                param_dtype=shape.param_dtype,
            )
        )
        self.output = shape.output(features, use_bias=config.use_bias, rngs=rngs)

    def __call__(
        self, inputs: ProjectedInput, out: Float[Array, "B T HV V"], value: Float[Array, "B T HV V"]
    ) -> Float[Array, "B T D"]:
        """Reads the recurrence's output.

        Args:
            inputs: the module's columns of the input projection by name, and the mixer's input `inputs.x` `[B, T, D]`.
            out: the recurrence's output.
            value: what was written.
        """
        return self.output(self.features(inputs, out, value))

    def features(
        self, inputs: ProjectedInput, out: Float[Array, "B T HV V"], value: Float[Array, "B T HV V"]
    ) -> Float[Array, "B T F"]:
        """What the output projection reads, after skip, norm and gate; arguments as the call's."""
        y = self._features_by_kernel(inputs, out, value)
        if y is not None:
            return y
        y = out.astype(self.shape.gate_dtype)
        if self.skip is not None:
            skip = self.skip[...].astype(y.dtype).reshape(self.shape.value_heads, -1)
            y = y + skip * value.astype(y.dtype)
        y = ACTIVATIONS[self.config.activation](y)
        gate = self._gate(inputs)
        if gate is not None and self.config.gate_first:
            y = y * gate
        if self.norm is not None:
            flat = y if self.config.norm == "head" else y.reshape(*y.shape[:2], -1)
            y = self.norm(flat).reshape(y.shape)
        if gate is not None and not self.config.gate_first:
            y = y * gate
        return y.reshape(*y.shape[:2], -1).astype(self.shape.dtype)

    def _features_by_kernel(self, inputs: ProjectedInput, out: Array, value: Array) -> Array | None:
        """`features` by the norm's kernel; None where it does not serve."""
        config, norm = self.config, self.norm
        gated, of_heads = config.gate != "none", config.norm == "head"
        if norm is None or norm.scale is None or norm.tp_size > 1 or config.activation != "identity":
            return None
        if gated and config.gate_scale != 1:
            return None
        one_token = out.shape[1] == 1
        if one_token and not (of_heads and not config.skip and not (gated and config.gate_first)):
            return None
        supports = functools.partial(norm_kernel_supports, between_kernels=one_token)
        scale = norm.scale[...]
        if not supports(out, scale):
            return None
        # Rows of one norm each, and for each of a token's rows what its heads have.
        groups = self.shape.value_heads if of_heads else norm.groups
        rows = (*out.shape[:2], groups, scale.size if of_heads else scale.size // groups)
        if not of_heads:
            scale = scale.reshape(rows[2:])
        z = bias = v = skip = None
        if self.skip is not None:
            v = value.astype(out.dtype).reshape(rows)
            skip = jnp.broadcast_to(self.skip[...].reshape(self.shape.value_heads, -1), out.shape[2:]).reshape(rows[2:])
        if gated:
            z, bias = inputs.product_and_bias("output_gate")
            z, bias = z.astype(out.dtype).reshape(rows), None if bias is None else bias.reshape(rows[2:])
        x = out.reshape(rows)
        if z is not None and bias is not None and not supports(x, scale, z, bias, v, skip):
            z, bias = z + bias.astype(z.dtype), None
        if not supports(x, scale, z, bias, v, skip):
            return None
        activation: Literal["silu", "sigmoid"] = "sigmoid" if config.gate == "sigmoid" else "silu"
        options: dict[str, Any] = {"activation": activation, "gate_first": config.gate_first, "eps": config.eps}
        options |= {"dtype": self.shape.dtype, "implementation": "triton"}
        y = rms_norm(x, scale, z=z, z_bias=bias, v=v, skip=skip, **options)[0]
        return y.reshape(*y.shape[:2], -1)

    def _gate(self, inputs: ProjectedInput) -> Array | None:
        if self.config.gate == "none":
            return None
        activation = jax.nn.silu if self.config.gate == "silu" else jax.nn.sigmoid
        gate = activation(inputs["output_gate"].astype(self.shape.gate_dtype) * self.config.gate_scale)
        return gate.reshape(*gate.shape[:2], self.shape.value_heads, self.shape.value_size)
