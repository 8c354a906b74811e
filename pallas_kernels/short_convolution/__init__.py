"""The short causal convolution over time, with bias, SiLU and the L2 norm of heads in the same kernel.

    a_t = bias + sum_i kernel[W - 1 - i] x_{t - i}      h_t = silu(a_t)      y_t = h_t / sqrt(|h_t|^2 + eps)

| kernel (in `triton`) | reads | writes | grid |
|---|---|---|---|
| `short_convolution` | x, kernel, bias, first inputs | y | blocks of channels, parts of the sequence, rows |
| `short_convolution_reverse` | the same, dy | dx; parts of d kernel and d bias | the same |
| `short_convolution_one_token` (in `one_token`) | some streams | y, states in place | all channels, rows |

A program goes over some tokens of some channels with the last W inputs in registers. The backward computes `a` again:
nothing but the arguments is saved for it. Parts of the filter's gradient are added up in a fixed order. The time is
that of reading x and writing y once.
"""
