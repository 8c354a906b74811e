"""Operators on arrays: pure functions, each with a token-by-token definition and faster implementations.

The path of a call from the public function to a kernel, for the delta rule (each line is one frame of a traceback):

    rnnlib.ops.sharding            call                     each device's rows and heads (see below)
    rnnlib.ops.gated_delta_rule    gated_delta_rule         checks; the implementation: scan, chunked, triton or mosaic
        .pallas                    gated_delta_rule_triton  compiled once by `jax.jit`
    rnnlib.ops.derivatives         run                      derivatives beyond the first, by way of `chunked`
    pallas_kernels.delta_rule.api  gated_delta_rule         dtypes, schedule, padding
        .vjp                       chunked_pass             forward and backward: the stages, in order
        .triton.wy                 prepare                  one stage: where each program finds its arrays
    pallas_kernels.common.triton   call                     `pl.pallas_call`

The other operators follow the same path: `api` checks the arguments and chooses an implementation, `reference` is the
definition (`"scan"`), `xla_chunked` runs in XLA on any device (`"chunked"`), and `pallas` calls the kernels
(`"triton"`; for `"mosaic"` some of their stages are Pallas' Mosaic GPU kernels, for Hopper GPUs). Rules with a state
`[K, V]` share the code in `token_scan` and `chunk`; on a TPU `chunk_blocks` runs chunk forms block by block.

Arrays may be sharded by rows and heads over mesh axes of type Explicit (see `sharding`), and within `jax.shard_map` by
tokens (see `sequence`).
"""

from rnnlib.ops.causal_attention import causal_attention as causal_attention
from rnnlib.ops.checking import check_numerics as check_numerics
from rnnlib.ops.context_parallel import context_axis as context_axis
from rnnlib.ops.diagonal_preconditioner import diagonal_gram as diagonal_gram
from rnnlib.ops.diagonal_preconditioner import diagonal_preconditioner as diagonal_preconditioner
from rnnlib.ops.diagonal_preconditioner import precondition_key as precondition_key
from rnnlib.ops.diagonal_preconditioner import precondition_query as precondition_query
from rnnlib.ops.diagonal_preconditioner import sherman_morrison_key as sherman_morrison_key
from rnnlib.ops.diagonal_preconditioner import squash_to_interval as squash_to_interval
from rnnlib.ops.diagonal_preconditioner import write_key_normalization as write_key_normalization
from rnnlib.ops.dplr import dplr as dplr
from rnnlib.ops.exact_preconditioner import exact_preconditioner as exact_preconditioner
from rnnlib.ops.experts import expert_mixture as expert_mixture
from rnnlib.ops.gains import efla_gain as efla_gain
from rnnlib.ops.gains import kaczmarz_gain as kaczmarz_gain
from rnnlib.ops.gains import longhorn_gain as longhorn_gain
from rnnlib.ops.gains import nlms_gain as nlms_gain
from rnnlib.ops.gated_delta_rule import gated_delta_rule as gated_delta_rule
from rnnlib.ops.linear_attention import linear_attention as linear_attention
from rnnlib.ops.ridge_solve import ridge_solve as ridge_solve
from rnnlib.ops.short_convolution import short_convolution as short_convolution
