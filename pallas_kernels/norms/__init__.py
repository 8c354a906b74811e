"""RMS norm of rows, with an output gate, a skip or beside a residual stream, each direction in one pass over memory.

    r_n = 1 / sqrt(mean_f u_nf^2 + eps)
    gate behind the norm:   u = x + skip_h v                          y_nf = scale_hf u_nf r_n act(z_nf + bias_hf)
    gate before the norm:   u = (x + skip_h v) act(z + bias_h)        y_nf = scale_hf u_nf r_n

| kernel (in `triton`) | reads | writes | grid |
|---|---|---|---|
| `rms_norm` | x, v, z, and by head scale, skip, bias | y | groups of rows |
| `rms_norm_reverse` | the same, dy, what else reaches x | dx, dz, parts of d scale, d skip and d bias | the same |

XLA reads rows twice, once for their sums and once to scale them, in both directions. Here a row is in registers
in between. The backward computes `r` again: nothing but the arguments is saved for it. Programs' parts of the
gradients in what heads have are added up in a fixed order. The gradient in v is skip times that in x, a product that
XLA adds to what else reaches v.
"""
