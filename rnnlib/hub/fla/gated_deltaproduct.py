"""`gated_deltaproduct`: Gated DeltaProduct, and without a forget gate DeltaProduct: several delta steps a token."""

from typing import Any

from rnnlib.hub.config_reader import ConfigKeys
from rnnlib.hub.fla.common import Options, fla_family, read_streams, write_streams
from rnnlib.hub.fla.rows import DECAY, OUTPUT
from rnnlib.hub.weight_layouts import FILTER, SAME, TRANSPOSED, StepsFirst
from rnnlib.hub.weight_mapping import filter_, linear, row
from rnnlib.layers.decay import NoDecay, SoftplusDecay
from rnnlib.layers.mixer import RecurrentMixerConfig

ROWS = (
    *linear("attn.q_proj", "mixer.input_projection.query"),
    *filter_("attn.q_conv1d", "mixer.query.convolution"),
    row("attn.k_proj.weight", "mixer.input_projection.key.kernel", StepsFirst(TRANSPOSED)),
    row("attn.k_conv1d.weight", "mixer.key.convolution.kernel", StepsFirst(FILTER)),
    row("attn.k_conv1d.bias", "mixer.key.convolution.bias", StepsFirst(SAME)),
    row("attn.v_proj.weight", "mixer.input_projection.value.kernel", StepsFirst(TRANSPOSED)),
    row("attn.v_conv1d.weight", "mixer.value.convolution.kernel", StepsFirst(FILTER)),
    row("attn.v_conv1d.bias", "mixer.value.convolution.bias", StepsFirst(SAME)),
    row("attn.b_proj.weight", "mixer.input_projection.write_gate.kernel", StepsFirst(TRANSPOSED)),
    *DECAY,
    *OUTPUT,
)


def _read(keys: ConfigKeys, width: int) -> Options:
    return {
        **read_streams(keys, 2.0),
        "steps": keys.size("num_householder", 1),
        "decay": SoftplusDecay() if keys.flag("use_forget_gate", False) else NoDecay(),
        "gain.negative_eigenvalues": keys.flag("allow_neg_eigval", False),
        "output_projection.gate": "silu" if keys.flag("use_output_gate", True) else "none",
        "output_projection.eps": keys.number("norm_eps", 1e-6),
    }


def _write(mixer: RecurrentMixerConfig, width: int) -> dict[str, Any]:
    keys = write_streams(mixer)
    if keys.pop("num_v_heads") is not None:
        raise ValueError(f"value_heads is {mixer.value_heads}, expected key_heads = {mixer.key_heads}")
    return {
        **keys,
        "num_householder": mixer.steps,
        "use_forget_gate": isinstance(mixer.decay, SoftplusDecay),
        "allow_neg_eigval": getattr(mixer.gain, "negative_eigenvalues", False),
        "use_output_gate": mixer.output_projection.gate != "none",
    }


GATED_DELTAPRODUCT = fla_family(
    "gated_deltaproduct",
    "gated_deltaproduct",
    "GatedDeltaProductForCausalLM",
    rows=ROWS,
    read=_read,
    write=_write,
    mixers=("deltaproduct",),
    num_heads=6,
    head_dim=256,
    num_hidden_layers=21,
)
