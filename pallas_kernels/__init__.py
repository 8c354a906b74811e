"""GPU kernels of `rnnlib.ops`, one folder an operator: arrays in, arrays out, and nothing of `rnnlib` is imported.

| folder | operators |
|---|---|
| `delta_rule` | the gated delta rule, and tokens whose writes wait beside the state |
| `linear_attention` | linear attention with decay |
| `ridge` | the ridge solve |
| `preconditioner` | the diagonal of the keys' Gram matrix, and what is read from it |
| `short_convolution` | the short causal convolution, of a sequence and of one token |
| `softplus_decay` | a log decay by channel from a projection |
| `float8` | a matrix rounded to float8, and its transpose |
| `norms` | RMS norms with an output gate or a sum before them |
| `attention` | one token's attention to a cache; the backward pass of causal attention |
| `skinny_gemm` | products of few rows with matrices |
| `cross_entropy` | the logarithm of a sum of exponentials |
| `common` | what they share: platform, launches, utilities of each backend |

In a folder `api` is the public function, `vjp` its derivative, and `triton` and `mosaic_gpu` are the kernels of each
Pallas backend. Stages have the same name in both. Triton's kernels run on NVIDIA GPUs and, interpreted, on a CPU;
those in Mosaic GPU on Hopper cards. `autotune` measures launches.

Imports run one way: an operator's `api`, its `vjp`, its backends, `common`; `linear_attention` and `ridge` also use
`delta_rule`.
"""
