"""Linear attention: sums over pairs of tokens. What a token writes does not depend on the state.

    S_t = exp(g_t) S_{t-1} + k_t (w_t v_t)^T        o_t = scale * S_t^T q_t

With `G_r` the log decay added up to token r, output and gradients are one kind of sum, over other arrays:

    o_r  = scale * sum_{s <= r} exp(G_r - G_s) (q_r . k_s)      w_s v_s
    dq_r = scale * sum_{s <= r} exp(G_r - G_s) (do_r . v_s)     w_s k_s
    dk_s = scale * sum_{r >= s} exp(G_r - G_s) (v_s . do_r) w_s q_r
    dv_s = scale * sum_{r >= s} exp(G_r - G_s) (k_s . q_r)  w_s do_r

| kernel (all in `triton`) | reads | writes | grid |
|---|---|---|---|
| `linear_rows` | decay | the decay added up inside chunks (`common.triton.decay_rows`) | chunks, value heads, rows |
| `linear_increments` | keys, values, gate | what each split adds to the state | value blocks, heads, splits |
| `linear_scan` | what splits add, first state | the state at each split's start | state rows, heads, rows |
| `linear_sums` | readers, keys, values, split states | out and state; or one gradient | value blocks, heads, splits |

The backward runs `linear_sums` three times: for dq, for dk and dv from the last token to the first. Saved for it: the
arguments, the decay's sums and the splits' starting states. The gradient of the decay is a difference of products
that the same kernels leave (`vjp`). With one split there is nothing to add up before, and the two kernels
in the middle do not run, but where devices share rows (`row_shards`) and exchange what their shards add. A
channel-wise decay weighs channels and not pairs: such calls take the kernels of `delta_rule` without the inverse, in
Triton or Mosaic GPU. The time goes to the products, at 60 to 75 % of the bound
(`experiments/kernel_benchmarks/BOUNDS.md`).
"""
