"""Kernels in Pallas on its Mosaic GPU backend, for Hopper cards.

The warpgroups of a program here divide its work. One has the card's copy engine bring tiles of the next chunks into
shared memory; the others multiply, and never wait for an address to be computed. Triton has no such division. `backend`
has all that is particular to Mosaic GPU.

| module | what it has |
|---|---|
| `delta_rule` | stages of the gated delta rule, whose other stages are in Triton, and one token whose write waits |
| `attention_gradients` | the backward pass of causal softmax attention, whose forward pass is cuDNN's |
| `token_attention` | one token's attention to a ring of keys and values, for many rows |

The stages are functions of the same arrays as their counterparts in `pallas_kernels.triton`, and round at the same
places. `pallas_kernels.triton.gated_delta_rule` runs them where its argument `backend` is `"mosaic"`.
"""
