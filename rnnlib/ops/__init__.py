"""Operators on arrays: pure functions, each with a token-by-token definition and faster forms of it."""

from rnnlib.ops.causal_attention import causal_attention as causal_attention
from rnnlib.ops.gains import efla_gain as efla_gain
from rnnlib.ops.gains import kaczmarz_gain as kaczmarz_gain
from rnnlib.ops.gains import longhorn_gain as longhorn_gain
from rnnlib.ops.gains import nlms_gain as nlms_gain
from rnnlib.ops.gated_delta_rule import gated_delta_rule as gated_delta_rule
from rnnlib.ops.linear_attention import linear_attention as linear_attention
from rnnlib.ops.short_convolution import short_convolution as short_convolution
