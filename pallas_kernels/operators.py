"""The public module of each operator. All of them need Pallas' Triton backend; Mosaic GPU is imported where it runs.

A module has the operator's public function, which takes `backend=` where there are two, and `unsupported_reason` of the
same arrays: why a call can't be served, as a noun phrase, or None if it can.
"""

from pallas_kernels.attention import api as attention
from pallas_kernels.cross_entropy import log_sum_exp as cross_entropy
from pallas_kernels.delta_rule import api as delta_rule
from pallas_kernels.delta_rule import delayed_update
from pallas_kernels.delta_rule import dplr as diagonal_plus_low_rank
from pallas_kernels.float8 import api as float8
from pallas_kernels.linear_attention import api as linear_attention
from pallas_kernels.norms import api as norms
from pallas_kernels.preconditioner import api as preconditioner
from pallas_kernels.preconditioner import readouts as preconditioner_readouts
from pallas_kernels.ridge import api as ridge
from pallas_kernels.rotated_keys import api as rotated_keys
from pallas_kernels.short_convolution import api as short_convolution
from pallas_kernels.short_convolution import decode as token_convolution
from pallas_kernels.skinny_gemm import api as skinny_gemm
from pallas_kernels.softplus_decay import api as softplus_decay

__all__ = [
    "attention",
    "cross_entropy",
    "delayed_update",
    "delta_rule",
    "diagonal_plus_low_rank",
    "float8",
    "linear_attention",
    "norms",
    "preconditioner",
    "preconditioner_readouts",
    "ridge",
    "rotated_keys",
    "short_convolution",
    "skinny_gemm",
    "softplus_decay",
    "token_convolution",
]
