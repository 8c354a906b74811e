"""Mamba-3: single-input single-output, and multiple-input multiple-output.

Notation as in `rnnlib.layers.presets`; `k~` is a key after norm, bias and rotation. The recurrence is that of
table 1 of the Gated DeltaNet-2 paper (arXiv 2605.22791) with its equation 16; where that is silent, choices follow the
code of Mamba-3's authors.
"""

from rnnlib.layers.base import MixerConfig
from rnnlib.layers.decay import SoftplusDecay
from rnnlib.layers.gain import TrapezoidalGain
from rnnlib.layers.keys import RotatedKeys
from rnnlib.layers.mixer import RecurrentMixerConfig
from rnnlib.layers.output_projection import OutputProjectionConfig
from rnnlib.layers.presets import mixer_preset, register_preset
from rnnlib.layers.trapezoidal import Trapezoidal

_PAPER = "Lahoti et al. 2026, arXiv 2603.15569"


@register_preset("Mamba-3", _PAPER)
def mamba3() -> MixerConfig:
    """Mamba-3, Lahoti et al. 2026; `S_t = alpha_t S_{t-1} + eta_t k~_{t-1} v_{t-1}^T + zeta_t k~_t v_t^T`.

    `alpha = exp(dt A)`, `eta = (1 - lambda) dt alpha`, `zeta = lambda dt`, keys and queries turned by angles that
    accumulate over the tokens; eta is 0 at a document's first token. Not in the equation: `lambda = sigmoid(W x)` and
    `A = -softplus(W x)` of each token, RMS norm of q and k, then a bias per head, half of the channels turned by
    `pi tanh(W x) dt`, no convolution, skip `D v`, SiLU gate, no norm of the output, scale 1, one query and key head of
    128 channels (64 in the Gated DeltaNet-2 paper: `key_head_dim=64`). Values are twice the model's width: heads of 64
    channels are `num_heads = width / 32`.
    """
    return RecurrentMixerConfig(
        decay=SoftplusDecay(rate=None),
        gain=TrapezoidalGain(),
        keys=RotatedKeys(),
        solve=Trapezoidal(),
        output_projection=OutputProjectionConfig(gate="silu", norm="none", skip=True),
        convolution=None,
        feature_map="identity",
        value_map="identity",
        query_norm="rms",
        key_norm="rms",
        key_expansion=2.0,
        value_expansion=2.0,
        key_heads=1,
        key_head_dim=128,
        scale=1.0,
    )


@register_preset("Mamba-3 (MIMO)", _PAPER)
def mamba3_mimo() -> MixerConfig:
    """Mamba-3 of rank 4; each write becomes a sum over the rank, `sum_r k~_{t,r} v_{t,r}^T` (at equation 16).

    The equation's paper says no more. As in the authors' code, `v_r` is v times a learned vector per head and rank, and
    the outputs of as many queries are summed with learned weights; gate and skip, which that code weighs by rank from
    equal weights on, stand outside the sum.
    """
    return mixer_preset("mamba3", solve=Trapezoidal(rank=4))
