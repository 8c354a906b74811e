"""Rows shared by the tables of several mixers of flash-linear-attention."""

from rnnlib.hub.rows import filter_rows, stream_rows
from rnnlib.hub.weight_mapping import linear, row

STREAMS = stream_rows("attn")
CONVOLUTIONS = filter_rows("attn")

# The decay per head, `-exp(A_log) softplus(W x + dt_bias)`.
DECAY = (
    *linear("attn.a_proj", "mixer.input_projection.decay"),
    row("attn.A_log", "mixer.decay.A_log"),
    row("attn.dt_bias", "mixer.decay.dt_bias"),
)

# The decay per key channel of Kimi Delta Attention, from a low-rank projection.
CHANNEL_DECAY = (
    *linear("attn.f_proj.0", "mixer.input_projection.decay.down"),
    *linear("attn.f_proj.1", "mixer.input_projection.decay.up"),
    row("attn.A_log", "mixer.decay.A_log"),
    row("attn.dt_bias", "mixer.decay.dt_bias"),
)

OUTPUT = (
    *linear("attn.g_proj", "mixer.input_projection.output_gate"),
    row("attn.o_norm.weight", "mixer.output_projection.norm.scale"),
    *linear("attn.o_proj", "mixer.output_projection.output"),
)

LOW_RANK_OUTPUT = (
    *linear("attn.g_proj.0", "mixer.input_projection.output_gate.down"),
    *linear("attn.g_proj.1", "mixer.input_projection.output_gate.up"),
    row("attn.o_norm.weight", "mixer.output_projection.norm.scale"),
    *linear("attn.o_proj", "mixer.output_projection.output"),
)
