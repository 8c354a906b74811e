"""Stages of the gated delta rule: the first one, the passes over chunks, and the gradients of arguments.

The equations are in `pallas_kernels.delta_rule`, the other stages in its `triton`. A pass has one program for each
block of 64 or 128 value channels, value head, and split of each sequence. Each warpgroup that computes keeps 64 rows
of the transposed state, `[64, K]`: the left operand of the products with a chunk's keys and queries, straight from
registers.

| module | kernel | in place of Triton's |
|---|---|---|
| `wy` | `delta_chunk_factors` | `delta_prepare` |
| `wy_channel` | `delta_channel_factors` | the same under a channel-wise decay, but for extreme chunks |
| `split_sequence` | `delta_segment_maps` | `delta_segment_maps` |
| `fused_fwd` | `delta_forward` | both stages of a forward without a gradient, where heads fill the card |
| `fwd` | `delta_output` | `delta_output` |
| | `delta_states` | `delta_states` |
| `bwd_dh` | `delta_reverse_offsets` | `delta_reverse_offsets` |
| | `delta_reverse` | `delta_reverse` |
| `bwd_dqkg` | `delta_gradients` | `delta_pair_gradients` and `delta_gradients` |
| `bwd_dqkg_channel` | `delta_channel_gradients` | the same under a channel-wise decay, but for extreme chunks |

Linear attention under a channel-wise decay takes that decay's kernels without what erases (`KernelShape.online`): a
token writes its value, P is the only matrix of pairs, nothing is inverted, and a split's map is a diagonal. The decay's
gradient has four more bits of the states than bfloat16 (`rounded_rests`).

`stages` brings a call's arrays to them. `wy_tile_scheduler` is how the first stage goes over all chunks; its inverse
and the sums of its log decay are each warp's own (`triangular_inverse`, `prefix_sum`). `pipeline` has what passes read
and how it comes there, and what bfloat16 leaves out of R, `bwd_tile_scheduler` how the last two go over all chunks. All
serve bfloat16 with K = V = 128; under one decay a head the first stage and the last two ask for an erase gate of one
number a token. `decode_delayed` is no stage: it is one token of a loop, in place of Triton's module of that name.
"""
