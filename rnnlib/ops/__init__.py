"""Operators on arrays: pure functions, each with a reference implementation token by token and faster implementations.

Where an operator's parts stand, here for the delta rule:

    rnnlib/ops/gated_delta_rule/api.py           the public function: checks, choice of an implementation
                               reference.py      the recurrence token by token ("scan")
                               xla_chunked.py    the chunk form in XLA, for any device ("chunked")
                               pallas.py         the call of the kernels ("triton", "mosaic")
    pallas_kernels/delta_rule/api.py             what kernels support; dtypes, launch configurations, padding
                              config.py          launch configurations; those tuned for a GPU in tuned/
                              vjp.py             the forward and the backward pass: the stages, in order
                              triton/            a file a stage, for NVIDIA GPUs
                              mosaic_gpu/        the same stages for Hopper GPUs
    tests/ops/, tests/pallas_kernels/delta_rule/

The other operators have the same files. Kernels of linear attention share `delta_rule`'s config. Rules with a state
`[K, V]` share the code in `token_scan` and `chunk`; on a TPU `chunk_blocks` runs chunk forms block by block.

The path of a call from the public function to a kernel; each line is one frame of a traceback:

    rnnlib/ops/sharding.py                       call                      each device's rows and heads
    rnnlib/ops/gated_delta_rule/api.py           gated_delta_rule
    rnnlib/ops/gated_delta_rule/pallas.py        gated_delta_rule_triton
    rnnlib/ops/derivatives.py                    run                       second derivatives, by way of "chunked"
    pallas_kernels/delta_rule/api.py             gated_delta_rule
    pallas_kernels/delta_rule/vjp.py             chunked_pass
    pallas_kernels/delta_rule/triton/wy.py       wy_factors                the first of the stages
    pallas_kernels/common/triton/backend.py      call                      `pl.pallas_call`

Arrays may be sharded by rows and heads over mesh axes of type Explicit (see `sharding`), and within `jax.shard_map` by
tokens (see `context_parallel`).
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
