"""Linear attention with one decay a token or none, in Mosaic GPU kernels for Hopper cards.

| kernel, one program a block of values, head and part of a sequence | reads | writes |
|---|---|---|
| `linear_increments` | keys, values, decay | what the part adds to the state |
| `linear_sums` | readers, keys, values, decay, states | out and final state; or one gradient |

The equations are in `pallas_kernels.linear_attention`. As there, the backward runs `linear_sums` three times. XLA adds
up decays and gates (`decay`). The gradient of the decay needs the product of each chunk's state with its gradient.
Every fourth state is stored for it, and the chunks between follow from what they read and write (`vjp`).
"""
