"""Operators on arrays: pure functions, each with a token-by-token definition and faster forms of it.

Arrays may be sharded by rows and heads over mesh axes of type Explicit (see `sharding`).
"""

from rnnlib.ops.causal_attention import causal_attention as causal_attention
from rnnlib.ops.diagonal_preconditioner import diagonal_gram as diagonal_gram
from rnnlib.ops.diagonal_preconditioner import diagonal_preconditioner as diagonal_preconditioner
from rnnlib.ops.diagonal_preconditioner import precondition_key as precondition_key
from rnnlib.ops.diagonal_preconditioner import precondition_query as precondition_query
from rnnlib.ops.diagonal_preconditioner import sherman_morrison_key as sherman_morrison_key
from rnnlib.ops.diagonal_preconditioner import squash_to_interval as squash_to_interval
from rnnlib.ops.diagonal_preconditioner import write_key_normalization as write_key_normalization
from rnnlib.ops.dplr import dplr as dplr
from rnnlib.ops.exact_preconditioner import exact_preconditioner as exact_preconditioner
from rnnlib.ops.gains import efla_gain as efla_gain
from rnnlib.ops.gains import kaczmarz_gain as kaczmarz_gain
from rnnlib.ops.gains import longhorn_gain as longhorn_gain
from rnnlib.ops.gains import nlms_gain as nlms_gain
from rnnlib.ops.gated_delta_rule import gated_delta_rule as gated_delta_rule
from rnnlib.ops.linear_attention import linear_attention as linear_attention
from rnnlib.ops.ridge_solve import ridge_solve as ridge_solve
from rnnlib.ops.short_convolution import short_convolution as short_convolution
