"""GPU kernels of `rnnlib.ops`, one folder a backend: arrays in, arrays out, and nothing of `rnnlib` is imported.

| module | what it has |
|---|---|
| `problem` | the arrays of a call, its static facts, padding: what every backend starts from |
| `decay` | limits of decays and gates, and the split of a log decay |
| `schedule` | how a call is cut into programs, and in how many segments a sequence runs |
| `platform`, `varying` | the device that is traced for; `jax.shard_map` and `jax.vmap` |
| `mosaic` | kernels in Pallas on its Mosaic GPU backend, for Hopper cards |
| `triton` | kernels in Pallas on its Triton backend, one folder an operator; runs the stages of `mosaic` |

Imports run one way: `triton`, then `mosaic`, then the modules here; in a backend its operators' folders, then what they
share.
"""
