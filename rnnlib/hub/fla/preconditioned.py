"""`precond_gated_deltanet` and `precond_kda`: Preconditioned (Gated) DeltaNet and Kimi Delta Attention."""

from typing import Any

from rnnlib.hub.config_reader import ConfigKeys
from rnnlib.hub.fla.common import Options, fla_family, read_streams, write_streams
from rnnlib.hub.fla.kda import read_lower_bound, write_lower_bound
from rnnlib.hub.fla.rows import CHANNEL_DECAY, CONVOLUTIONS, DECAY, LOW_RANK_OUTPUT, OUTPUT, STREAMS
from rnnlib.hub.weight_mapping import linear, row
from rnnlib.layers.gain import SigmoidGain
from rnnlib.layers.mixer import RecurrentMixerConfig
from rnnlib.layers.preconditioner import ApplyToKey

_PRECONDITIONER = (
    *linear("attn.b_proj", "mixer.input_projection.write_gate"),
    *linear("attn.b_atk_proj", "mixer.input_projection.gram_write_gate"),
    row("attn.A_log_atk", "mixer.keys.gram.decay.A_log"),
    row("attn.dt_bias_atk", "mixer.keys.gram.decay.dt_bias"),
    row("attn.log_atk_scale", "mixer.keys.center"),
)

GATED_ROWS = (
    *STREAMS,
    *CONVOLUTIONS,
    *DECAY,
    *_PRECONDITIONER,
    *linear("attn.a_atk_proj", "mixer.input_projection.gram_decay"),
    *OUTPUT,
)

KDA_ROWS = (
    *STREAMS,
    *CONVOLUTIONS,
    *CHANNEL_DECAY,
    *_PRECONDITIONER,
    *linear("attn.a_proj", "mixer.input_projection.gram_decay"),
    *LOW_RANK_OUTPUT,
)


def _read_preconditioner(keys: ConfigKeys) -> Options:
    keys.ignore("a_log_init_lower", "log_atk_scale_init", "output_gate_activation")  # the models ignore the last too
    # For negative eigenvalues beta is doubled, regardless of the preconditioner's bound x. The factor is 2, not the
    # 2 / x of `PreconditionedGain`.
    return {
        "gain": SigmoidGain(negative_eigenvalues=keys.flag("allow_neg_eigval", False)),
        "keys.bound": keys.number("squash_x", 1.5),
        "keys.eps": keys.number("squash_eps", 1e-6),
    }


def _write_preconditioner(mixer: RecurrentMixerConfig) -> dict[str, Any]:
    if not isinstance(mixer.keys, ApplyToKey):
        raise ValueError(f"keys is {type(mixer.keys).__name__}, expected ApplyToKey")
    return {
        "allow_neg_eigval": getattr(mixer.gain, "negative_eigenvalues", False),
        "squash_x": mixer.keys.bound,
        "squash_eps": mixer.keys.eps,
    }


def _read_gated(keys: ConfigKeys, width: int) -> Options:
    return {
        **read_streams(keys, 2.0),
        **_read_preconditioner(keys),
        "output_projection.gate": "silu" if keys.flag("use_gate", True) else "none",
        "output_projection.eps": keys.number("norm_eps", 1e-6),
    }


def _write_gated(mixer: RecurrentMixerConfig, width: int) -> dict[str, Any]:
    return {
        **write_streams(mixer),
        **_write_preconditioner(mixer),
        "use_gate": mixer.output_projection.gate != "none",
    }


def _read_kda(keys: ConfigKeys, width: int) -> Options:
    sizes, options = read_streams(keys, 1.0), _read_preconditioner(keys)
    if sizes["value_heads"] != sizes["key_heads"]:
        # The preconditioner is per value head, the gain per key head.
        options |= {"keys.gram.heads": "value", "gain.heads": "key"}
    return {
        **sizes,
        **read_lower_bound(keys),
        **options,
        "output_projection.eps": keys.number("norm_eps", 1e-6),
    }


def _write_kda(mixer: RecurrentMixerConfig, width: int) -> dict[str, Any]:
    return {
        **write_streams(mixer),
        **write_lower_bound(mixer),
        **_write_preconditioner(mixer),
    }


PRECOND_GATED_DELTANET = fla_family(
    "precond_gated_deltanet",
    "pgdn",
    "PrecondGatedDeltaNetForCausalLM",
    rows=GATED_ROWS,
    read=_read_gated,
    write=_write_gated,
    num_heads=6,
    head_dim=256,
    num_hidden_layers=21,
)
PRECOND_KDA = fla_family(
    "precond_kda",
    "pkda",
    "PrecondKDAForCausalLM",
    rows=KDA_ROWS,
    read=_read_kda,
    write=_write_kda,
    num_heads=16,
    head_dim=128,
)
