"""Products of few rows with several matrices: what a model computes for the next token of some texts.

    y_i = f_i(x_i W_i)  for every i,  or  y = silu(x W_0) * (x W_1),  or  y = added + x W
    f(y) = y,  or  bound sigmoid(y),  or  -e^a softplus(y + bias)

| kernel (in `triton`) | reads | writes | grid |
|---|---|---|---|
| `skinny_matmuls` | x_i, W_i, a, bias, added | all y_i, or y | rows, columns of all matrices, parts of the inner axis |

With few rows the time is that of reading the matrices once. A program has few columns, so that all processors read at
once. A program waits for memory in every step of its loop, so a processor needs several programs. Where one result has
too few columns for that, programs share its inner axis, and XLA adds up their sums, with what is added or gated.
One launch serves matrices that are too small to fill a card, whose inputs may differ, also in their inner axis. Small
functions of a result, which would be launches of their own, end its program; they take the product as it would be
stored, and give float32. XLA turns a product of one row into an elementwise product, which it writes to memory rounded,
and a sum.
"""
