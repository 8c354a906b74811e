"""The papers' mixers, each a choice on every axis. A preset's docstring names its paper and gives its equation.

An axis that a preset leaves out is as in DeltaNet: no decay, a sigmoid gain, plain keys, and the delta rule.

Below, `S` is `[K, V]` per head, `q, k` are rows of K and `v` of V channels, and `o = scale * S^T q` with
`scale = K**-0.5` unless said otherwise. The papers' equations have no scale (`scale=1.0`); their code uses
flash-linear-attention's, which is this one. The output norm does not cancel the scale: a new model's `o` is so small
(1e-4 to 2e-3) that the norm's `eps` matters, and scale 1 makes a mixer's first outputs 1.4 to 8 times as large.

Every choice can be overridden: `mixer_preset("gated_deltanet", decay=SoftplusDecay(channelwise=True))` is KDA's
recurrence in Gated DeltaNet's layer.
"""

import dataclasses
import difflib
import inspect
from collections.abc import Callable
from typing import Any

from rnnlib.layers.attention import AttentionConfig
from rnnlib.layers.base import MixerConfig
from rnnlib.layers.convolution import ConvolutionConfig
from rnnlib.layers.decay import FixedDecay, KeyDecay, LogSigmoidDecay, SoftplusDecay
from rnnlib.layers.gain import (
    ChannelGain,
    CombaGain,
    EFLAGain,
    GainConfig,
    KaczmarzGain,
    LonghornGain,
    NLMSGain,
    SigmoidGain,
    StepGain,
    UnitGain,
)
from rnnlib.layers.initializers import Initializer
from rnnlib.layers.keys import OutputCorrection
from rnnlib.layers.latent_attention import LatentAttentionConfig
from rnnlib.layers.mixer import RecurrentMixerConfig
from rnnlib.layers.output_projection import OutputProjectionConfig
from rnnlib.layers.rotary import Rotary
from rnnlib.layers.rwkv7 import ChannelMixConfig, RWKV7Config
from rnnlib.layers.shared_transformer import SharedInputMixerConfig
from rnnlib.layers.slots import GatedSlots
from rnnlib.layers.solve import LinearAttention


@dataclasses.dataclass(frozen=True)
class MixerPreset:
    """A preset of the registry.

    Attributes:
        name: what `mixer_preset` takes.
        title: the model's name in its paper.
        paper: where it is from.
        config: its configuration.
        description: the preset's docstring: paper, equation, choices.
        module: that registered it.
    """

    name: str
    title: str
    paper: str
    config: MixerConfig
    description: str
    module: str


_PRESETS: dict[str, MixerPreset] = {}


def register_preset(title: str, paper: str) -> Callable[[Callable[[], MixerConfig]], Callable[[], MixerConfig]]:
    """Registers the decorated function, under its name, as a preset: it returns the configuration.

    Models and files refer to a preset by its name, so register it before code or a command reads them. A function that
    is defined again, as when a notebook's cell is run twice, replaces itself.

    Examples:
        >>> @register_preset("KDA with a decay per head", "composition, 2026")
        ... def kda_per_head() -> MixerConfig:
        ...     '''Kimi Delta Attention, but for its decay.'''
        ...     return mixer_preset("kda", decay=SoftplusDecay())

    Args:
        title: the model's name in its paper.
        paper: author, year and arXiv number.

    Raises:
        ValueError: another module has a preset of this name already, or the function has no docstring.
    """

    def register(function: Callable[[], MixerConfig]) -> Callable[[], MixerConfig]:
        name = function.__name__
        present = _PRESETS.get(name)
        if present is not None and present.module != function.__module__:
            raise ValueError(f"register_preset: there is a preset {name!r} already, of {present.module}")
        description = inspect.getdoc(function)
        if not description:
            raise ValueError(f"register_preset: {name!r} has no docstring, expected its paper and equation")
        _PRESETS[name] = MixerPreset(name, title, paper, function(), description, function.__module__)
        return function

    return register


# PyTorch's default filter roughly keeps its input's size; N(0, 0.02), the default here, makes it fifteen times smaller.
# Gains that depend on the keys' length (Longhorn's, EFLA's) need it, and models whose code sets no other start from it.
_LENGTH_PRESERVING = ConvolutionConfig(initializer=Initializer("fan_in_uniform", 1.0))


# Queries, keys and values as their projections give them.
_BRANCHES_AS_PROJECTED: dict[str, Any] = {
    "convolution": None,
    "feature_map": "identity",
    "value_map": "identity",
    "query_norm": "none",
    "key_norm": "none",
}


def _deltanet_of_long_keys(gain: GainConfig) -> MixerConfig:
    """DeltaNet's layer with another gain, and keys that keep their length."""
    output_projection = OutputProjectionConfig(gate="none")
    return RecurrentMixerConfig(
        gain=gain, output_projection=output_projection, convolution=_LENGTH_PRESERVING, key_norm="none"
    )


@register_preset("Linear attention", "Katharopoulos et al. 2020, arXiv 2006.16236")
def linear_attention() -> MixerConfig:
    """Linear attention, Katharopoulos et al. 2020; `S_t = S_{t-1} + k_t v_t^T` (GDN-2 paper, equation 1).

    Identity feature map and no denominator, as in the later papers; `feature_map="elu_plus_one"` is the original map.
    """
    return RecurrentMixerConfig(
        gain=UnitGain(),
        solve=LinearAttention(),
        output_projection=OutputProjectionConfig(gate="none"),
        **_BRANCHES_AS_PROJECTED,
    )


@register_preset("RetNet", "Sun et al. 2023, arXiv 2307.08621")
def retnet() -> MixerConfig:
    """Retention, Sun et al. 2023; `S_t = gamma S_{t-1} + k_t v_t^T`, `gamma_h = 1 - 2^(-5-h)`, q and k rotated.

    Values twice as wide as keys, norm per head and SiLU gate; no convolution.
    """
    return RecurrentMixerConfig(
        decay=FixedDecay(),
        gain=UnitGain(),
        solve=LinearAttention(),
        output_projection=OutputProjectionConfig(gate="silu"),
        **_BRANCHES_AS_PROJECTED,
        rotary=Rotary(),
        value_expansion=2.0,
    )


@register_preset("Mamba-2", "Dao and Gu 2024, arXiv 2405.21060")
def mamba2() -> MixerConfig:
    """Mamba-2, Dao and Gu 2024; `S_t = exp(-A dt_t) S_{t-1} + dt_t k_t v_t^T`, `o_t = S_t^T q_t + D v_t`.

    One query and key head (B and C of the paper, state size 128) for all value heads, `dt = softplus(W x + dt_bias)`,
    convolution with bias, `norm(o * silu(z))` over all heads, scale 1. Values are twice the model's width: the paper's
    heads of 64 channels are `num_heads = width / 32`.
    """
    return RecurrentMixerConfig(
        decay=SoftplusDecay(rate=(1.0, 16.0)),
        gain=StepGain(),
        solve=LinearAttention(),
        output_projection=OutputProjectionConfig(gate="silu", gate_first=True, norm="all", eps=1e-5, skip=True),
        convolution=ConvolutionConfig(use_bias=True, initializer=Initializer("fan_in_uniform", 1.0)),
        query_norm="none",
        key_norm="none",
        key_expansion=2.0,
        value_expansion=2.0,
        key_heads=1,
        key_head_dim=128,
        scale=1.0,
    )


@register_preset("GLA", "Yang et al. 2023, arXiv 2312.06635")
def gla() -> MixerConfig:
    """Gated Linear Attention, Yang et al. 2023; `S_t = Diag(alpha_t) S_{t-1} + k_t v_t^T`.

    `alpha_t = sigmoid(W_2 W_1 x + b)^(1/16)` through rank 16; keys half as wide as values; no convolution, SiLU gate.
    """
    return RecurrentMixerConfig(
        decay=LogSigmoidDecay(channelwise=True, rank=16, divisor=16.0),
        gain=UnitGain(),
        solve=LinearAttention(),
        output_projection=OutputProjectionConfig(gate="silu"),
        **_BRANCHES_AS_PROJECTED,
        key_expansion=0.5,
    )


@register_preset("HGRN-2", "Qin et al. 2024, arXiv 2404.07904")
def hgrn2() -> MixerConfig:
    """HGRN-2, Qin et al. 2024; `S_t = Diag(alpha_t) S_{t-1} + (1 - alpha_t) v_t^T`, `alpha_t = sigmoid(W x_t)`.

    The key is what the decay forgets. SiLU of queries, norm over all heads, no gate. Lower bounds of `alpha` that rise
    from layer to layer are `KeyDecay(num_layers=..., layer=...)`.
    """
    return RecurrentMixerConfig(
        decay=KeyDecay(),
        gain=UnitGain(),
        solve=LinearAttention(),
        output_projection=OutputProjectionConfig(gate="none", norm="all", eps=1e-5),
        **_BRANCHES_AS_PROJECTED | {"feature_map": "silu", "key_feature_map": "identity"},
    )


@register_preset("Gated slot attention", "Zhang et al. 2024, arXiv 2409.07146")
def gsa() -> MixerConfig:
    """Gated slot attention, Zhang et al. 2024; `o_t = V_t^T softmax(K_t q_t)` over 64 slots a head.

    `K_t = Diag(a_t) K_{t-1} + (1 - a_t) k_t^T`, likewise V; `a_t = sigmoid(W x_t)^(1/8)`, one decay a slot. SiLU of
    queries, keys and values; the output goes through SiLU and a norm over all heads.
    """
    return RecurrentMixerConfig(
        decay=LogSigmoidDecay(channelwise=True, rank=None, divisor=8.0, use_bias=False, heads="shared"),
        gain=UnitGain(),
        solve=GatedSlots(),
        output_projection=OutputProjectionConfig(activation="silu", gate="none", norm="all", eps=1e-5),
        **_BRANCHES_AS_PROJECTED | {"feature_map": "silu", "value_map": "silu"},
    )


@register_preset("DeltaNet", "Yang et al. 2024, arXiv 2406.06484")
def deltanet() -> MixerConfig:
    """DeltaNet, Yang et al. 2024; `S_t = (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T` (GDN-2 paper, equation 5).

    q and k: convolution, SiLU, L2 norm (section 3.3). Norm per head, no output gate.
    """
    return RecurrentMixerConfig(output_projection=OutputProjectionConfig(gate="none"))


@register_preset("Gated DeltaNet", "Yang et al. 2024, arXiv 2412.06464")
def gated_deltanet() -> MixerConfig:
    """Gated DeltaNet, Yang et al. 2024; `S_t = alpha_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T` (GDN-2, 6).

    `alpha_t = exp(-exp(A_log) softplus(W x + dt_bias))` per head, SiLU gate. The authors' code also offers
    `key_expansion=0.75, value_expansion=1.5`; Preconditioned DeltaNet compares with `output_gate=False`.
    """
    return RecurrentMixerConfig(decay=SoftplusDecay(), output_projection=OutputProjectionConfig(gate="silu"))


@register_preset("DeltaProduct", "Siems et al. 2025, arXiv 2502.10297")
def deltaproduct() -> MixerConfig:
    """DeltaProduct, Siems et al. 2025; DeltaNet with n delta steps a token.

    `S_{t,j} = (I - beta_j k_j k_j^T) S_{t,j-1} + beta_j k_j v_j^T` for j = 1 to n, from `S_{t,0} = S_{t-1,n}`. Two
    steps, beta up to 2 (equation 6; products of reflections rotate), SiLU gate as in the authors' code.
    """
    return RecurrentMixerConfig(
        gain=SigmoidGain(negative_eigenvalues=True), output_projection=OutputProjectionConfig(gate="silu"), steps=2
    )


@register_preset("Gated DeltaProduct", "Siems et al. 2025, arXiv 2502.10297")
def gated_deltaproduct() -> MixerConfig:
    """Gated DeltaProduct, Siems et al. 2025; DeltaProduct whose state decays by `alpha_t` before a token's first step.

    The decay is Gated DeltaNet's; two steps, beta up to 2, SiLU gate.
    """
    return RecurrentMixerConfig(
        decay=SoftplusDecay(),
        gain=SigmoidGain(negative_eigenvalues=True),
        output_projection=OutputProjectionConfig(gate="silu"),
        steps=2,
    )


@register_preset("Kimi Delta Attention", "Kimi Team 2025, arXiv 2510.26692")
def kda() -> MixerConfig:
    """Kimi Delta Attention, 2025; `S_t = (I - beta_t k_t k_t^T) Diag(alpha_t) S_{t-1} + beta_t k_t v_t^T` (GDN-2, 7).

    Decay per key channel and sigmoid output gate, both through rank V.
    """
    return RecurrentMixerConfig(
        decay=SoftplusDecay(channelwise=True, rank="value_size", rate=(1.0, 16.0)),
        output_projection=OutputProjectionConfig(gate="sigmoid", gate_rank="value_size", gate_bias=True),
    )


@register_preset("Gated DeltaNet-2", "Hatamizadeh et al. 2026, arXiv 2605.22791")
def gated_deltanet2() -> MixerConfig:
    """Gated DeltaNet-2, 2026; `S_t = (I - k_t (b_t * k_t)^T) Diag(alpha_t) S_{t-1} + k_t (w_t * v_t)^T` (equation 10).

    Erase gate b per key channel and write gate w per value channel, sigmoids of full-rank maps (equation 11); decay per
    key channel with its key head (equation 12; the authors' code goes through rank V:
    `{"decay.rank": "value_size"}`). SiLU gate through rank V with bias, Xavier-uniform kernels of gain 2^-2.5.
    """
    return RecurrentMixerConfig(
        decay=SoftplusDecay(channelwise=True, heads="key", rate=(1.0, 16.0)),
        gain=ChannelGain(),
        output_projection=OutputProjectionConfig(gate="silu", gate_rank="value_size", gate_bias=True, eps=1e-5),
        convolution=_LENGTH_PRESERVING,
        initializer=Initializer("xavier_uniform", 2.0**-2.5),
    )


@register_preset("Kaczmarz Linear Attention", "Zou et al. 2026, arXiv 2605.08587")
def kla() -> MixerConfig:
    """Kaczmarz Linear Attention, Zou et al. 2026; Gated DeltaNet with `beta_t = eta_t / (k_t.k_t + eps)` (equation 3).

    `eta_t = sigmoid(W x)`, `eps = 1e-6`; keys keep their length, queries are L2-normalised (section 3.3).
    """
    return RecurrentMixerConfig(
        decay=SoftplusDecay(),
        gain=KaczmarzGain(),
        output_projection=OutputProjectionConfig(gate="silu"),
        key_norm="none",
    )


@register_preset("Longhorn", "Liu et al. 2024, arXiv 2407.14207")
def longhorn() -> MixerConfig:
    """Longhorn, Liu et al. 2024; DeltaNet with gain `b_t / (1 + b_t k_t.k_t)` (Preconditioned DeltaNet, table 2).

    The rule in DeltaNet's layer, as the taxonomies compare it; keys keep their length.
    """
    return _deltanet_of_long_keys(LonghornGain())


@register_preset("NLMS", "Wang et al. 2025, arXiv 2501.12352")
def nlms() -> MixerConfig:
    """Normalised least mean squares, test-time regression, Wang et al. 2025; DeltaNet with gain `1 / k_t.k_t`.

    Preconditioned DeltaNet, table 2. `eps = 1e-6` keeps zero keys finite; keys keep their length.
    """
    return _deltanet_of_long_keys(NLMSGain())


@register_preset("EFLA", "Lei et al. 2025, arXiv 2512.12602")
def efla() -> MixerConfig:
    """Error-free linear attention, Lei et al. 2025; DeltaNet with gain `(1 - exp(-b_t k_t.k_t)) / k_t.k_t`.

    Preconditioned DeltaNet, table 2; keys keep their length.
    """
    return _deltanet_of_long_keys(EFLAGain())


@register_preset("Comba", "Hu et al. 2025, arXiv 2506.02475")
def comba() -> MixerConfig:
    """Comba, Hu et al. 2025; `S_t = (alpha_t I - s beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T`.

    Read by `q_t - d k_t`. `s = sigmoid(b)` and `d` are learned per head; the feedback reads the state before it decays,
    so the erase gate is `s beta_t / alpha_t` (Preconditioned DeltaNet, table 2). Sigmoid output gate. The authors' code
    corrects the query before the norms, and its kernels then normalise `s k`, which takes `s` out again; here the
    equation holds. `CorrectionBeforeNorms` gives theirs.
    """
    return RecurrentMixerConfig(
        decay=SoftplusDecay(),
        gain=CombaGain(),
        keys=OutputCorrection(),
        output_projection=OutputProjectionConfig(gate="sigmoid"),
    )


@register_preset("RWKV-7", "Peng et al. 2025, arXiv 2503.14456")
def rwkv7() -> MixerConfig:
    """RWKV-7's time mixing, Peng et al. 2025; `S_t = (Diag(w_t) - (kk_t * a_t) kk_t^T) S_{t-1} + k_t v_t^T`.

    `kk` has unit length, `k_t` is its raw form weakened by the removal rate `a_t`; scale 1, a norm of each head with a
    bias, the token's own value again, and a gate. `value_rank` mixes values with the first layer's.
    """
    return RWKV7Config()


@register_preset("RWKV channel mixing", "Peng et al. 2025, arXiv 2503.14456")
def rwkv7_channel_mix() -> MixerConfig:
    """RWKV-7's feed-forward; `W_down relu(W_up x')^2`, `x'_t = x_t + (x_{t-1} - x_t) * m`, in a layer of its own.

    A model of RWKV-7 is `mixers=("rwkv7", "rwkv7_channel_mix"), mlp_ratio=0`.
    """
    return ChannelMixConfig()


@register_preset("Zamba2", "Glorioso et al. 2024, arXiv 2411.15242")
def zamba2() -> MixerConfig:
    """Zamba2's hybrid layer, Glorioso et al. 2024; `mamba2(norm(x + W f([x, x_0])))` with the embeddings `x_0`.

    The transformer layer `f` (attention, then a feed-forward, of `[x, x_0]`) is shared by all such layers of a model,
    each with adapters of its own. A model is `mixers=("mamba2",) * 5 + ("zamba2",), mlp_ratio=0`.
    """
    base = mamba2()
    return SharedInputMixerConfig(**{field.name: getattr(base, field.name) for field in dataclasses.fields(base)})


@register_preset("Attention", "Vaswani et al. 2017, arXiv 1706.03762")
def attention() -> MixerConfig:
    """Softmax attention of Transformer++, Vaswani et al. 2017; `o_t = sum_{s <= t} softmax_s(q_t.k_s / sqrt(K)) v_s`.

    Rotary positions, no biases.
    """
    return AttentionConfig()


@register_preset("Sliding-window attention", "Beltagy et al. 2020, arXiv 2004.05150")
def sliding_window_attention() -> MixerConfig:
    """Softmax attention over the last 2048 tokens, Beltagy et al. 2020; `t - 2048 < s <= t` in the sum.

    The local half of hybrids (GDN-2 paper, section 3.5, with this window in its section 4; DeltaNet paper, section 3.4,
    which states no window).
    """
    return AttentionConfig(window=2048)


@register_preset("Forgetting attention", "Lin et al. 2025, arXiv 2503.02130")
def forgetting_attention() -> MixerConfig:
    """Softmax attention of the Forgetting Transformer, Lin et al. 2025; `softmax_s(q_t.k_s / sqrt(K) + F_t - F_s)`.

    `F_t = sum_{r <= t} log sigmoid(w.x_r + b)` per head (equation 5); no positions.
    """
    return AttentionConfig(rope_base=None, forget_gate=True)


@register_preset("Multi-head latent attention", "DeepSeek-AI 2024, arXiv 2405.04434")
def latent_attention() -> MixerConfig:
    """Softmax attention of DeepSeek-V2, 2024; keys `[W_UK c_s; r_s]`, values `W_UV c_s`, `c = norm(W_DKV x)` (9 to 19).

    `r = rotate(W_KR x)` is shared by all heads, and the cache keeps c and r. `rope_base=None` is Kimi Linear's, without
    positions; `query_latent_size` puts a latent under the queries too.
    """
    return LatentAttentionConfig()


def mixer_names() -> tuple[str, ...]:
    """Names that `mixer_preset` takes."""
    return tuple(_PRESETS)


def preset_details(name: str) -> MixerPreset:
    """A preset with its title, paper and description.

    Raises:
        ValueError: there is no preset of this name.
    """
    if name not in _PRESETS:
        raise ValueError(f"mixer is {name!r}{nearest_preset(name)}, expected one of {', '.join(_PRESETS)}")
    return _PRESETS[name]


def nearest_preset(name: str) -> str:
    """` (perhaps 'kda'?)` for a name that is almost a preset's, for messages; else an empty string."""
    near = difflib.get_close_matches(str(name), _PRESETS, n=1)
    return f" (perhaps {near[0]!r}?)" if near else ""


def mixer_preset(name: str, **overrides: Any) -> MixerConfig:
    """The configuration of a named mixer.

    Args:
        name: one of `mixer_names()`.
        **overrides: fields to set otherwise: of the configuration (`decay=...`, `head_dim=64`), or of an axis by its
            path (`**{"gain.negative_eigenvalues": True}`). A longer path is set after the shorter ones. Two paths have
            short names: `negative_eigenvalues=True`, and `output_gate=False`, `True` (the preset's own gate, SiLU
            where it has none) or the gate's activation.

    Returns:
        A frozen dataclass; its `build` makes the module.

    Raises:
        ValueError: there is no preset of this name, or it has no such field, or a value is invalid.
    """
    config = preset_details(name).config
    # Attention has a field `output_gate` itself.
    short = {given: path for given, path in _SHORT_NAMES.items() if not hasattr(config, given)}
    paths = [(short.get(path, path).split("."), path, value) for path, value in overrides.items()]
    for path, given, value in sorted(paths, key=lambda entry: len(entry[0])):
        if given == "output_gate" and given in short and isinstance(value, bool):
            value = _gate(config) if value else "none"
        config = _replace_path(config, path, value, name=name)
    return config


_SHORT_NAMES = {"negative_eigenvalues": "gain.negative_eigenvalues", "output_gate": "output_projection.gate"}


def _gate(config: Any) -> str:
    """The activation of a mixer's output gate, or of the one that it gets where it has none."""
    gate = config.output_projection.gate if isinstance(config, RecurrentMixerConfig) else "none"
    return "silu" if gate == "none" else gate


def _replace_path(config: Any, path: list[str], value: Any, *, name: str) -> Any:
    field, *rest = path
    fields = [f.name for f in dataclasses.fields(config)] if dataclasses.is_dataclass(config) else []
    if field not in fields:
        raise ValueError(f"mixer_preset({name!r}): {type(config).__name__} has no field {field!r}, expected {fields}")
    if rest:
        value = _replace_path(getattr(config, field), rest, value, name=name)
    return dataclasses.replace(config, **{field: value})
