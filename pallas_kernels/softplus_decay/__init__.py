"""A log decay by channel from its projection, each direction in one pass over memory.

    g_nf = -rate_f softplus(p_nf + bias_f)

| kernel (in `triton`) | reads | writes | grid |
|---|---|---|---|
| `softplus_decay` | p, rate, bias | g | blocks of channels, groups of rows |
| `softplus_decay_reverse` | g, rate, dg | dp; parts of d rate and d bias | the same |

XLA's own forward spends more instructions on the softplus than memory leaves time for, and its backward writes the
gradient of the softplus in float32 between two passes. The backward finds the slope from g: p is not kept for it.
"""
