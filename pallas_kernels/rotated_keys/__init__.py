"""Keys and queries of value heads: a bias, then channel pairs that turn, each direction in one pass over memory.

    a = x_i + b_i      c = x_(i + K/2) + b_(i + K/2)      y_i = a cos - c sin      y_(i + K/2) = c cos + a sin

with the angle of token, value head and pair; pairs from P on do not turn. A key head's rows are those of all its value
heads.

| kernel (in `triton`) | reads | writes | grid |
|---|---|---|---|
| `rotated_keys` | queries, keys, their biases, turns | both for each value head | groups of tokens, R rows, key heads |
| `rotated_keys_reverse` | the same, both gradients | gradients of queries and keys; parts of the others | the same |

XLA's backward writes the parts of pairs between passes and reads the wide gradients once for each of the sums: over
value heads, over tokens and over rows. Here all three are taken from one reading. The sum over value heads is made
among the threads of a program, the biases' over a program's tokens in registers.
"""
