"""What the kernels of all operators share.

| module | what it has |
|---|---|
| `platform` | the device that is traced for |
| `vma` | arrays inside `jax.shard_map` and `jax.vmap` |
| `row_shards` | what devices that share rows exchange |
| `config` | how a kernel is compiled |
| `kernel_shape` | static facts of a call that goes over chunks of a sequence |
| `refusal` | how a call is refused |
| `decay` | limits of decays and gates, and the split of a log decay |
| `triton` | all that is particular to Pallas on Triton, and what kernels there share |
| `mosaic_gpu` | all that is particular to Pallas on Mosaic GPU |
"""
