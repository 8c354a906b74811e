"""What kernels of Pallas' Triton backend share; nothing here knows an operator.

| module | what it has |
|---|---|
| `backend` | all that is particular to Pallas on Triton: `call`, products, loads, special functions |
| `kernel_shape` | where a program finds its part of each array |
| `decay`, `pairs` | a decay of one number a token inside a chunk; products of pairs of tokens under it |
| `decay_rows` | the same decay added up once, for kernels that visit a chunk more than once |
| `chunks` | loops over the chunks of a sequence |
"""
