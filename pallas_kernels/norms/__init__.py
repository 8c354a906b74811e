"""RMS norm of rows, with an output gate or beside a residual stream, each direction in one pass over memory.

    r_n = 1 / sqrt(mean_f x_nf^2 + eps)      y_nf = scale_f x_nf r_n (act(z_nf + bias_hf))

| kernel (in `triton`) | reads | writes | grid |
|---|---|---|---|
| `rms_norm` | x, scale, z, bias | y | groups of rows |
| `rms_norm_reverse` | the same, dy, what else reaches x | dx, dz, a program's part of d scale and d bias | the same |

XLA reads rows twice, once for their sums and once to scale them, in both directions. Here a row is in registers
in between. The backward computes `r` again: nothing but the arguments is saved for it. Parts of the scale's
and the bias's gradient are added up in a fixed order.
"""
