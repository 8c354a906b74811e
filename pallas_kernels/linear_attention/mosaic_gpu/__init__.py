"""Linear attention with one decay a token or none, in Mosaic GPU kernels for Hopper cards.

| kernel, one program a block of values, head and part of a sequence | reads | writes |
|---|---|---|
| `linear_increments` | keys, values, decay | what the part adds to the state |
| `linear_sums` | readers, keys, values, decay, states | out and final state; or one gradient |

What lies between them is elementwise and short. Kernels in Triton do it, each in one launch where XLA takes several:

| kernel | reads | writes |
|---|---|---|
| `linear_rows` (`decay`) | decay and gates | the numbers that a chunk is multiplied by |
| `linear_scan` (`pallas_kernels.linear_attention.triton`) | what parts add | the state at each part's start |
| `linear_decay_gradient` (`decay_gradient`) | what the sums of two gradients leave | the decay's gradient |

The equations are in `pallas_kernels.linear_attention`. As there, the backward runs `linear_sums` three times. The
gradient of the decay needs the product of each chunk's state with its gradient. Every fourth state is stored for it,
and the chunks between follow from what they read and write.
"""
