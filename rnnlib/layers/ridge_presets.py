"""The mixers that solve a ridge regression at test time: Gated KalmaNet and MesaNet.

Notation as in `rnnlib.layers.presets`; `H_t` is the Gram matrix of the keys, `U_t` linear attention's state.
"""

from rnnlib.layers.base import MixerConfig
from rnnlib.layers.convolution import ConvolutionConfig
from rnnlib.layers.decay import LogSigmoidDecay, SoftplusDecay
from rnnlib.layers.gain import SigmoidGain, UnitGain
from rnnlib.layers.initializers import Initializer
from rnnlib.layers.mixer import RecurrentMixerConfig
from rnnlib.layers.output_projection import OutputProjectionConfig
from rnnlib.layers.presets import register_preset
from rnnlib.layers.ridge import RidgeRegression


@register_preset("Gated KalmaNet", "Peng et al. 2025, arXiv 2511.21016")
def gated_kalmanet() -> MixerConfig:
    """Gated KalmaNet, Peng et al. 2025; `(H_t + 0.02 ||H_t||_F) x_t = q_t`, `o_t = scale * U_t^T x'_t` (equation CH).

    `H_t = gamma_t H_{t-1} + k_t k_t^T`, `U_t = gamma_t U_{t-1} + k_t v_t^T`, `x' = q + alpha (x - q)`. 30 Chebyshev
    iterations. Around it Gated DeltaNet's layer: convolution, SiLU and L2 norm of q and k, its decay per head, norm per
    head and SiLU gate (figure 2). The authors' code also has a key gain: `gain=SigmoidGain(use_bias=True)` with
    `{"solve.squared_gain": True}`. `{"solve.sketch_size": 32}` is appendix H.
    """
    return RecurrentMixerConfig(
        decay=SoftplusDecay(),
        gain=UnitGain(),
        solve=RidgeRegression(),
        output_projection=OutputProjectionConfig(gate="silu"),
    )


@register_preset("MesaNet", "von Oswald et al. 2025, arXiv 2506.05233")
def mesanet() -> MixerConfig:
    """MesaNet, von Oswald et al. 2025; `(H_t + Diag(lambda)) x_t = q_t`, `o_t = U_t^T x_t`.

    `H_t = gamma_t H_{t-1} + beta_t k_t k_t^T`, `U_t = gamma_t U_{t-1} + beta_t k_t v_t^T`, both gates sigmoids with
    bias per head; `lambda = 0.25 + softplus(p)` per channel, starting at 1; 30 steps of conjugate gradients.
    Convolution and SiLU on q and k, none on v; norm per head, no output gate.

    Its decays begin at about one half a token, from which it hardly learns recall; `decay.divisor=16.0` begins at 0.96
    and does (`experiments/ablations`, small setting).
    """
    return RecurrentMixerConfig(
        decay=LogSigmoidDecay(channelwise=False, rank=None, divisor=1.0),
        gain=SigmoidGain(use_bias=True),
        solve=RidgeRegression(
            ridge=1.0,
            adaptive=False,
            learned=True,
            lower_bound=0.25,
            solver="conjugate_gradient",
            alpha_connection=False,
        ),
        output_projection=OutputProjectionConfig(gate="none", eps=1e-5),
        convolution=ConvolutionConfig(value=False, initializer=Initializer("fan_in_uniform", 1.0)),
        value_map="identity",
        scale=1.0,
    )
