"""The logarithm of a sum of exponentials of rows, in one pass over memory.

    L_n = log sum_v exp(x_nv)

| kernel (in `log_sum_exp`) | reads | writes | grid |
|---|---|---|---|
| `log_sum_exp` | x | L | rows |

XLA reads rows twice, once for their largest number and once for the sum. Here each lane of a program keeps the largest
number that it has seen, and its sum relative to that; the lanes are put together at the end.
"""
