"""The diagonal of the keys' decayed Gram matrix, and preconditioned keys and queries made from it.

    A_t = exp(log_decay_t) A_{t-1} + gain_t k_t^2        out_t = readout(A_{t-1}, A_t, x_t, parameter)

(Preconditioned DeltaNet, arXiv 2604.21100, equations 8 and 9.) A program owns some tokens of one head, a *part* of the
sequence. What a part does to A is an affine map, found first; a program then applies the maps of the parts before its
own and goes through its tokens with A in registers. So A itself never reaches memory.

| kernel (in `triton`) | reads | writes | grid |
|---|---|---|---|
| `gram_sums` | k, decay, gain | each part's map (does not run where there is one part) | heads, parts, rows |
| `gram_apply` | k, x, decay, gain, maps | out, A after the last token, A before each part | heads, parts, rows |
| `gram_reverse_sums` | the same, dout | each part's map of dA; A before each block of tokens | heads, parts, rows |
| `gram_reverse` | the same, maps | dk, dx, d decay, d gain, d parameter | heads, parts, rows |

`readouts` has the readouts, each with its gradient; `api` runs the kernels and has the public function.

Saved for the backward: the arguments, A before each part, and the parts' decays. The time goes to memory (keys are
read twice forward) and, in the backward, to special functions.

On Hopper cards whose processors have a head each, `mosaic_gpu` reads everything once: `gram_forward`, `gram_backward`.
"""
