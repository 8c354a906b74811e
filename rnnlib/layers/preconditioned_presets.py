"""The mixers of Preconditioned DeltaNet, and compositions of its preconditioners with the other papers' rules.

Notation as in `rnnlib.layers.presets`; `A_t` is the diagonal Gram, `B_t` the stable preconditioner in [1/x, x], where x
is 1.5. With `negative_eigenvalues=True` the gain of the delta rules here reaches `2 / x`; override `gain.bound`
together with `keys.bound`.
"""

from rnnlib.layers.base import MixerConfig
from rnnlib.layers.decay import LogSigmoidDecay
from rnnlib.layers.gain import ChannelGain, KaczmarzGain, UnitGain
from rnnlib.layers.preconditioner import (
    ApplyToBoth,
    ApplyToKey,
    ApplyToQuery,
    GramConfig,
    ImplicitWriteGain,
    PreconditionedGain,
)
from rnnlib.layers.presets import mixer_preset, register_preset
from rnnlib.layers.solve import LinearAttention

_PAPER = "Tumma et al. 2026, arXiv 2604.21100"
_COMPOSITION = "composition, 2026"


@register_preset("Preconditioned DeltaNet", _PAPER)
def pdn() -> MixerConfig:
    """Preconditioned DeltaNet, Tumma et al. 2026; `S_t = S_{t-1} + beta_t B_t k_t (v_t - S_{t-1}^T k_t)^T`.

    Equation 9; `A_t = a_t A_{t-1} + b_t k_t^2` with gates of its own. The rest is DeltaNet's. The center may be
    negative, as in the authors' code; the paper's is positive, `ApplyToKey(positive_center=True)`.
    """
    return mixer_preset("deltanet", gain=PreconditionedGain(), keys=ApplyToKey())


@register_preset("Preconditioned Gated DeltaNet", _PAPER)
def pgdn() -> MixerConfig:
    """Preconditioned Gated DeltaNet, Tumma et al. 2026; PDN with `alpha_t S_{t-1}` for `S_{t-1}` (section 3.5).

    Gated DeltaNet without its output gate, as the paper trains both (appendix E.1).
    """
    return mixer_preset("gated_deltanet", gain=PreconditionedGain(), keys=ApplyToKey(), output_gate=False)


@register_preset("Preconditioned Kimi Delta Attention", _PAPER)
def pkda() -> MixerConfig:
    """Preconditioned KDA, Tumma et al. 2026; PDN with `Diag(alpha_t) S_{t-1}` for `S_{t-1}` (section 3.5)."""
    return mixer_preset("kda", gain=PreconditionedGain(), keys=ApplyToKey())


@register_preset("Preconditioned linear attention", _PAPER)
def pla() -> MixerConfig:
    """Preconditioned linear attention, Tumma et al. 2026; `S_t = S_{t-1} + k_t v_t^T`, `q~_t = q_t / (A_t + ridge)`.

    Equation 8 with `A_t = A_{t-1} + k_t^2`. The layer around the rule is DeltaNet's, as throughout the paper.
    """
    return mixer_preset("deltanet", gain=UnitGain(), keys=ApplyToQuery(), solve=LinearAttention())


@register_preset("Preconditioned Mamba-2", _PAPER)
def pmamba2() -> MixerConfig:
    """P-Mamba-2, Tumma et al. 2026; `S_t = alpha_t S_{t-1} + beta_t k_t v_t^T`, `q~_t = q_t / (A_t + ridge)`.

    `A_t = alpha_t A_{t-1} + beta_t k_t^2` with the same gates. "Mamba-2 with a gain term added to the write" in Gated
    DeltaNet's layer: what table 6 compares (appendix E.3, which writes the same gates for both; whether its models had
    them is not said).
    """
    return mixer_preset("gated_deltanet", keys=ApplyToQuery(), solve=LinearAttention(), output_gate=False)


@register_preset("Key-preconditioned Mamba-2", _PAPER)
def mamba2_atk() -> MixerConfig:
    """Key-preconditioned Mamba-2, Tumma et al. 2026; `S_t = alpha_t S_{t-1} + beta_t B_t k_t v_t^T` (appendix G.3).

    The preconditioner of the online convex programming view for a rule that erases nothing: the stable B_t with gates
    of its own, in the layer of P-Mamba-2.
    """
    return mixer_preset("gated_deltanet", keys=ApplyToKey(), solve=LinearAttention(), output_gate=False)


@register_preset("Preconditioned GLA", _PAPER)
def pgla() -> MixerConfig:
    """PGLA, Tumma et al. 2026; `S_t = Diag(alpha_t) S_{t-1} + k_t v_t^T`, `q~_t = q_t / (A_t + ridge)` (appendix F.2).

    `A_t = Diag(alpha_t) A_{t-1} + k_t^2` with GLA's decay; the layer around the rule is DeltaNet's.
    """
    return mixer_preset(
        "deltanet",
        decay=LogSigmoidDecay(channelwise=True, rank=16, divisor=16.0),
        gain=UnitGain(),
        keys=ApplyToQuery(),
        solve=LinearAttention(),
    )


@register_preset("Preconditioned Longhorn", _PAPER)
def plonghorn() -> MixerConfig:
    """P-Longhorn, Tumma et al. 2026; `S_t = S_{t-1} + e_t B_t k_t (v_t - S_{t-1}^T k_t)^T` (appendix G.2).

    `e_t = b_t / (1 + b_t k_t.B_t k_t)`, the implicit step in the preconditioner's norm, with the paper's B_t (equation
    9). The layer is Longhorn's, whose keys keep their length; A is that of unit keys.
    """
    return mixer_preset("longhorn", gain=ImplicitWriteGain(), keys=ApplyToKey(gram=GramConfig(unit_keys=True)))


@register_preset("PGDN with ATQ", _COMPOSITION)
def pgdn_atq() -> MixerConfig:
    """PGDN that also reads with `q_t / (A'_t + ridge)`: both of the paper's preconditioners (its appendix B).

    `A'_t = alpha_t A'_{t-1} + beta_t k_t^2` with the main recurrence's gates, beside the write key's own A.
    """
    return mixer_preset("gated_deltanet", gain=PreconditionedGain(), keys=ApplyToBoth(), output_gate=False)


@register_preset("Gated DeltaNet-2 with ATK", _COMPOSITION)
def pgdn2() -> MixerConfig:
    """Gated DeltaNet-2's rule written along `B_t k_t`; `S_t = (I - B_t k_t (b_t * k_t)^T) Diag(alpha_t) S_{t-1} + ...`.

    The eigenvalue along the write key is `1 - sum_i b_i B_i k_i^2`, in [1 - x, 1] as in PGDN.
    """
    return mixer_preset("gated_deltanet2", gain=PreconditionedGain(gain=ChannelGain()), keys=ApplyToKey())


@register_preset("Kaczmarz Linear Attention with ATK", _COMPOSITION)
def pkla() -> MixerConfig:
    """Kaczmarz Linear Attention written along `B_t k_t`, gain `eta_t / (k_t.k_t + eps)`; A is that of unit keys.

    `k.B k / k.k` lies in [1/x, x] for keys of any length, so that lemma E.2 holds without their normalisation.
    """
    return mixer_preset(
        "kla", gain=PreconditionedGain(gain=KaczmarzGain()), keys=ApplyToKey(gram=GramConfig(unit_keys=True))
    )


@register_preset("Kaczmarz Linear Attention with ATQ", _COMPOSITION)
def kla_atq() -> MixerConfig:
    """Kaczmarz Linear Attention read with `q_t / (A_t + ridge)`, `A_t = alpha_t A_{t-1} + eta_t k_t^2 / k_t.k_t`."""
    return mixer_preset("kla", keys=ApplyToQuery(gram=GramConfig(gates="tied", unit_keys=True)))
