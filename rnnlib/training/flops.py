"""The floating-point operations that a training step needs by its mathematics, whatever the kernels do."""

import dataclasses
from typing import Any

from rnnlib.layers import (
    RWKV7,
    Attention,
    ChannelMix,
    DeltaRule,
    GatedSlots,
    LatentAttention,
    LinearAttention,
    RidgeRegression,
    Trapezoidal,
)
from rnnlib.models import DecoderLM, ModelConfig, abstract_model, count_parameters
from rnnlib.training.tpu import TPUS

PEAK = {
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989.4e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989.4e12,
    "NVIDIA B200": 2250e12,
    **{tpu.device_kind: tpu.flops for tpu in TPUS.values()},
}
"""Dense bfloat16 operations a second of a device, by JAX's name for it; NVIDIA's data sheets, Google's pages."""

# Of their memory, bytes a second, the same data sheets.
BANDWIDTH = {"NVIDIA H200": 4.8e12, "NVIDIA H100 80GB HBM3": 3.35e12}


@dataclasses.dataclass(frozen=True)
class StepFlops:
    """Operations of forward and backward pass for one token.

    Attributes:
        weights: `6 N`: two for each weight forward, four backward. N counts the head, tied or not, not the look-up.
        mixing: of attention or recurrence, three times the forward pass's.
    """

    weights: float
    mixing: float

    @property
    def total(self) -> float:
        """Both."""
        return self.weights + self.mixing


def step_flops(model: DecoderLM | ModelConfig, length: int) -> StepFlops:
    """Operations for one token of a row of `length`.

    Forward, a head and token: causal attention `2 K T`, half of `q k^T` and of `p v`, and with a window W of the mean
    number of tokens seen in place of T / 2; linear attention `4 K V` (write and read of the state), Mamba-3 as
    much for each of its R pairs; the delta rule `6 K V` (the erased value is read too); a ridge solve by n iterations
    `4 K V + 2 K^2 + 2 n K^2`. The recurrences are counted token by token, which is the least that the mathematics asks
    for: chunked kernels do several times more, so that their products show up as a lower utilisation. Convolutions,
    norms and gates are left out. What layers share counts in each. RWKV-7: `8 K V`. Gated slots: `4 M (K + V)`.

    Args:
        model: the model, or its configuration; its shapes are enough.
        length: tokens a row.

    Raises:
        TypeError: a mixer of unknown kind.
    """
    model = abstract_model(model) if isinstance(model, ModelConfig) else model
    count = count_parameters(model, each_use=True)
    weights = count.total if model.config.tie_embeddings else count.without_embedding
    mixing = 0.0
    mixers: list[Any] = [mixer for block in model.blocks for mixer in block.mixers]
    for mixer in mixers:
        if isinstance(mixer, ChannelMix):
            continue
        shape = mixer.shape
        pairs = shape.key_size * shape.value_size
        if isinstance(mixer, Attention | LatentAttention):
            window = min(getattr(mixer.config, "window", None) or length, length)
            seen = (window * (window + 1) / 2 + (length - window) * window) / length  # mean over the row
            forward = 2 * seen * (shape.key_size + shape.value_size)
        elif isinstance(mixer, RWKV7):
            forward = 8 * pairs
        elif isinstance(mixer.config.solve, DeltaRule):
            forward = 6 * pairs
        elif isinstance(mixer.config.solve, LinearAttention):
            forward = 4 * pairs
        elif isinstance(mixer.config.solve, GatedSlots):
            forward = 4 * mixer.config.solve.num_slots * (shape.key_size + shape.value_size)
        elif isinstance(mixer.config.solve, Trapezoidal):
            forward = 4 * pairs * mixer.config.solve.rank
        elif isinstance(mixer.config.solve, RidgeRegression):
            forward = 4 * pairs + 2 * (1 + mixer.config.solve.iterations) * shape.key_size**2
        else:
            raise TypeError(f"step_flops: no count for the solve axis {mixer.config.solve!r}")
        mixing += 3 * forward * shape.value_heads
    return StepFlops(weights=6.0 * weights, mixing=mixing)
