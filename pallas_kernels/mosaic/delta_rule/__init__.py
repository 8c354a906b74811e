"""Stages of the gated delta rule: the first one, the passes over chunks, and the gradients of arguments.

The equations, and the other stages, are in `pallas_kernels.triton.delta_rule`. A pass has one program for each block of
64 or 128 value channels, value head, and segment of each sequence. Each warpgroup that computes keeps 64 rows of the
transposed state, `[64, K]`: the left operand of the products with a chunk's keys and queries, straight from registers.

| module | kernel | in place of Triton's |
|---|---|---|
| `chunk_factors` | `delta_chunk_factors` | `delta_prepare` |
| `channel_factors` | `delta_channel_factors` | the same under a channel-wise decay, but for extreme chunks |
| `segments` | `delta_segment_maps` | `delta_segment_maps` |
| `states` | `delta_output` | `delta_output` |
| | `delta_states` | `delta_states` |
| `state_gradients` | `delta_reverse_offsets` | `delta_reverse_offsets` |
| | `delta_reverse` | `delta_reverse` |
| `argument_gradients` | `delta_gradients` | `delta_pair_gradients` and `delta_gradients` |
| `channel_gradients` | `delta_channel_gradients` | the same under a channel-wise decay, but for extreme chunks |

`chunk_walk` is how the first stage goes over all chunks, its inverse too. `operands` has what passes read and how it
comes there, and what bfloat16 leaves out of R, `walk` how the last two go over all chunks. All serve bfloat16 with
K = V = 128 and a write gate of one number a token; the first stage and the last two also ask for an erase gate of one
number a token. `deferred` is no stage: it is one token of a loop, in place of Triton's module of that name.
"""
