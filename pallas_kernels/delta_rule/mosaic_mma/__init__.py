"""The forward of the gated delta rule by `mma.sync` and `cp.async`, for cards without wgmma: A100 to RTX 5090.

Written in Pallas' Mosaic GPU dialect, for the day when jax's Triton backend goes (docs/triton.md). No card has run
these kernels: they are compiled for sm_80, sm_86, sm_89, sm_90 and sm_120 and interpreted in tests, and serve only
calls that name `backend="mosaic_mma"`.

| module | kernel | in place of Triton's |
|---|---|---|
| `wy` | `delta_mma_factors` | `delta_prepare` |
| `fwd` | `delta_mma_output` | `delta_output` |

They serve bfloat16 with 64 or 128 key and value channels, decay and gates of one number a token or none, documents and
an initial state, in one split. The backward is Triton's.
"""
