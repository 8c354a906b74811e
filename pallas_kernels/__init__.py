"""GPU kernels of `rnnlib.ops`, one folder a backend: arrays in, arrays out, and nothing of `rnnlib` is imported.

| module | what it has |
|---|---|
| `problem` | the arrays of a call, its static facts, padding: what every backend starts from |
| `schedule` | how a call is cut into programs, and in how many segments a sequence runs |
| `platform`, `varying` | the device that is traced for; `jax.shard_map` and `jax.vmap` |
| `triton` | kernels in Pallas on its Triton backend, one folder an operator |

Imports run down only: operators' folders, then a backend's `common`, then the modules here.
"""
