"""The public functions of all operators, which need Pallas' Triton backend."""

from pallas_kernels.attention.triton.decode import (
    TokenAttentionSchedule,
    ring_token_attention,
    ring_token_attention_unsupported,
    token_attention,
    token_attention_unsupported,
)
from pallas_kernels.cross_entropy.log_sum_exp import LogSumExpSchedule, log_sum_exp, log_sum_exp_unsupported
from pallas_kernels.delta_rule.api import gated_delta_rule, mosaic_unsupported, unsupported
from pallas_kernels.delta_rule.config import Schedule
from pallas_kernels.delta_rule.triton.decode_delayed import (
    deferral_unsupported,
    deferred_token,
    mosaic_deferral_unsupported,
    settle_writes,
)
from pallas_kernels.linear_attention.api import linear_attention
from pallas_kernels.norms.api import NormSchedule, norm_unsupported, rms_norm, rms_norm_of_sum
from pallas_kernels.preconditioner import readouts as preconditioner_readouts
from pallas_kernels.preconditioner.api import GramSchedule, diagonal_gram_readout, gram_unsupported
from pallas_kernels.ridge.api import ridge_solve, ridge_solve_unsupported
from pallas_kernels.ridge.problem import RidgeSchedule
from pallas_kernels.short_convolution.api import (
    ConvolutionPrograms,
    ConvolutionSchedule,
    ConvolutionStream,
    convolution_unsupported,
    joined_convolutions,
    joined_unsupported,
    short_convolution,
)
from pallas_kernels.short_convolution.api import Finish as ConvolutionFinish
from pallas_kernels.short_convolution.decode import TokenStream, one_token_convolutions, token_convolutions_unsupported
from pallas_kernels.skinny_gemm.api import Finish as ThinFinish
from pallas_kernels.skinny_gemm.api import (
    ThinSchedule,
    thin_product_parts,
    thin_products,
    thin_splits,
    thin_unsupported,
)
from pallas_kernels.softplus_decay.api import DecaySchedule, decay_unsupported, softplus_decay

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
