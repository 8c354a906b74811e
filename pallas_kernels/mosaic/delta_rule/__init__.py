"""Passes over the chunks of the gated delta rule, with the state or its gradient in registers.

The equations, and the other stages, are in `pallas_kernels.triton.delta_rule`. Here is one program for each block of
64 or 128 value channels, value head, and segment of each sequence. Each warpgroup that computes keeps 64 rows of the
transposed state, `[64, K]`: the left operand of the products with a chunk's keys and queries, straight from registers.

| module | kernel | in place of Triton's |
|---|---|---|
| `states` | `delta_output_mosaic` | `delta_output` |
| | `delta_states_mosaic` | `delta_states` |
| `state_gradients` | `delta_reverse_offsets_mosaic` | `delta_reverse_offsets` |
| | `delta_reverse_mosaic` | `delta_reverse` |

`operands` has what they read. They serve bfloat16 with K = V = 128 and a write gate of one number a token.
"""
