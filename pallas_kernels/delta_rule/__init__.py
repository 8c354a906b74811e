r"""The gated delta rule in chunks of C = 64 tokens, forward and backward.

Per value head, with the state S `[K, V]`, the decay `D = Diag(exp(g))`, the erase key `e = erase * k`, the value
`z = write * v` and the write key `k~`:

    S_t = D_t S_{t-1} + k~_t (z_t - (D_t S_{t-1})^T e_t)^T        o_t = scale * S_t^T q_t

Let `G_r` be the log decay added up in the chunk to token r, `Ebar_r = exp(G_r) e_r`, `Kbar_s = exp(-G_s) k~_s` and
`Q_G` the queries times `exp(G)`. A chunk takes the state `S_0` before it to `S_C` after it by

    A = (I + tril(Ebar Kbar^T, -1))^-1      P = scale * tril(Q_G Kbar^T)      K_tail_r = exp(G_C - G_r) k~_r
    R = A (Z - Ebar S_0)      O = scale * Q_G S_0 + P R      S_C = Diag(exp(G_C)) S_0 + K_tail^T R

(equations 21 to 24 of Gated DeltaNet-2, arXiv 2605.22791). `Kbar` is never formed: see `common.triton.decay` and
`triton.channel_decay`.

Stages in the order in which they run. Grids: *chunk* is a program for each chunk of each value head; *pass* is one for
each block of value channels, value head, and split of each sequence, which goes over the split's chunks in order.

| module | kernel | reads | writes | grid |
|---|---|---|---|---|
| `wy` | `delta_prepare` | q, k, k~, erase, decay | A, P, decay factors | chunk |
| `extreme_chunks` | `delta_list_extreme` | marks of chunks | a list of those with an extreme decay by channel | one |
| `wy` | `delta_prepare_extreme` | as `delta_prepare` | A, P of these | listed chunk |
| `split_sequence` | `delta_segment_maps` | A, factors, k, v, write | each split's affine map of the state | pass |
| | `delta_fold_segments` | maps, first state | the state at each split's start | value blocks, heads, rows |
| | `delta_compose_segments` | maps | the map of a shard of a row | value and key blocks, heads, rows |
| `fwd` | `delta_output` | A, P, factors, q, k, v, write, split states | out, final state | pass |
| backward: `fwd` | `delta_states` | as `delta_output`, without q and P | `S_0` and R of each chunk | pass |
| `bwd_dh` | `delta_reverse_offsets` | dO, A, P, factors, q, k | each split's map of the gradient | pass |
| `split_sequence` | `delta_fold_segments` | maps, dS | the gradient at each split's end | as above |
| `bwd_dh` | `delta_reverse` | dO, A, P, factors, v, write | `dS_C` of chunks, dv, d write | pass, reversed |
| `bwd_pairs` | `delta_pair_gradients` | dO, R, dW | gradients of P and of A's matrix | chunk |
| `bwd_dqkg` | `delta_gradients` | all of the above | dq, dk, dk~, d erase, d decay | chunk, key blocks |
| | `delta_gradients_extreme` | the same | the same, of chunks with an extreme decay | listed chunk, key blocks |
| `closed_gates` | `delta_zero_closed` | gates | zeros in dv, dk, dk~ where a gate is 0 | chunk |
| `decode` | `delta_decode` | one token, the state | out, the state in its place | value blocks, heads, rows |
| `decode_delayed` | `delta_decode_delayed` | a token, the state, delayed updates | out, a write, the state | the same |
| | `delta_flush` | the state, delayed updates | the state in its place | the same |

`delta_segment_maps`, `delta_fold_segments` and `delta_reverse_offsets` run only where heads are too few to fill the
card, or where devices share rows (`row_shards`): each then composes its maps by `delta_compose_segments`, and in the
backward the offsets of the gradient. Kernels of extreme chunks run only with a channel-wise decay. `channel_decay`,
`bwd_dqkg_channel` and `triangular_inverse` are parts of kernels; `vjp` puts the stages together; `api` has the public
function. The table is of Triton's kernels; `mosaic_gpu` has those that replace some of them on Hopper cards.

`dplr` is the recurrence of RWKV-7 by the same stages: with a second key, along which values are written (`value_key`),
they take two more `[64, 64]` matrices a chunk, and K_tail of that key.

Saved for the backward: the arguments, A and P (two `[64, 64]` matrices a chunk), factors of one number a token, and the
splits' maps and starting states. States, residuals and factors as large as the inputs are computed again.

Where the time goes (H200, bfloat16, K = V = 128, `[8, 4096, 16]`; `experiments/kernel_benchmarks/BOUNDS.md`): a quarter
of forward and backward is the forward. Half of the backward is gradients of the arguments, for which registers are the
limit; the passes wait for memory and for the chain of products from chunk to chunk.
"""
