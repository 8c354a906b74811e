"""Kernels in Pallas on its Triton backend, for NVIDIA GPUs; interpreted on a CPU.

One folder an operator, each of which opens with its equations and its stages: `delta_rule`, `linear_attention`,
`diagonal_preconditioner`, `log_sum_exp`, `ridge_solve`, `rms_norm`, `short_convolution`, `softplus_decay`,
`thin_products`, `token_attention`. `common` is what they share; `tune` measures schedules.
"""

from pallas_kernels.schedule import Schedule
from pallas_kernels.triton.delta_rule.deferred import (
    deferral_unsupported,
    deferred_token,
    mosaic_deferral_unsupported,
    settle_writes,
)
from pallas_kernels.triton.delta_rule.gated_delta_rule import gated_delta_rule, mosaic_unsupported, unsupported
from pallas_kernels.triton.diagonal_preconditioner import readouts as preconditioner_readouts
from pallas_kernels.triton.diagonal_preconditioner.gram_readout import (
    GramSchedule,
    diagonal_gram_readout,
    gram_unsupported,
)
from pallas_kernels.triton.linear_attention.linear_attention import linear_attention
from pallas_kernels.triton.log_sum_exp.log_sum_exp import LogSumExpSchedule, log_sum_exp, log_sum_exp_unsupported
from pallas_kernels.triton.ridge_solve.problem import RidgeSchedule
from pallas_kernels.triton.ridge_solve.ridge_solve import ridge_solve, ridge_solve_unsupported
from pallas_kernels.triton.rms_norm.rms_norm import NormSchedule, norm_unsupported, rms_norm, rms_norm_of_sum
from pallas_kernels.triton.short_convolution.one_token import (
    TokenStream,
    one_token_convolutions,
    token_convolutions_unsupported,
)
from pallas_kernels.triton.short_convolution.short_convolution import (
    ConvolutionPrograms,
    ConvolutionSchedule,
    ConvolutionStream,
    convolution_unsupported,
    joined_convolutions,
    joined_unsupported,
    short_convolution,
)
from pallas_kernels.triton.short_convolution.short_convolution import Finish as ConvolutionFinish
from pallas_kernels.triton.softplus_decay.softplus_decay import DecaySchedule, decay_unsupported, softplus_decay
from pallas_kernels.triton.thin_products.thin_products import Finish as ThinFinish
from pallas_kernels.triton.thin_products.thin_products import (
    ThinSchedule,
    thin_product_parts,
    thin_products,
    thin_splits,
    thin_unsupported,
)
from pallas_kernels.triton.token_attention.token_attention import (
    TokenAttentionSchedule,
    ring_token_attention,
    ring_token_attention_unsupported,
    token_attention,
    token_attention_unsupported,
)

__all__ = [
    "ConvolutionFinish",
    "ConvolutionPrograms",
    "ConvolutionSchedule",
    "ConvolutionStream",
    "DecaySchedule",
    "GramSchedule",
    "LogSumExpSchedule",
    "NormSchedule",
    "RidgeSchedule",
    "Schedule",
    "ThinFinish",
    "ThinSchedule",
    "TokenAttentionSchedule",
    "TokenStream",
    "convolution_unsupported",
    "decay_unsupported",
    "deferral_unsupported",
    "deferred_token",
    "diagonal_gram_readout",
    "gated_delta_rule",
    "gram_unsupported",
    "joined_convolutions",
    "joined_unsupported",
    "linear_attention",
    "log_sum_exp",
    "log_sum_exp_unsupported",
    "mosaic_deferral_unsupported",
    "mosaic_unsupported",
    "norm_unsupported",
    "one_token_convolutions",
    "preconditioner_readouts",
    "ridge_solve",
    "ridge_solve_unsupported",
    "ring_token_attention",
    "ring_token_attention_unsupported",
    "rms_norm",
    "rms_norm_of_sum",
    "settle_writes",
    "short_convolution",
    "softplus_decay",
    "thin_product_parts",
    "thin_products",
    "thin_splits",
    "thin_unsupported",
    "token_attention",
    "token_attention_unsupported",
    "token_convolutions_unsupported",
    "unsupported",
]
