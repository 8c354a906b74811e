"""Ridge regression on the past keys, solved at every token by iterations (Gated KalmaNet, MesaNet).

    H_t = exp(log_decay_t) H_{t-1} + k_t k_t^T        (H_t + lambda_t) x_t = q_t
    lambda_t = ridge * ||H_t||_F  (adaptive)  or  ridge

Only the matrices `H_0` at the chunks' starts are formed. Inside a chunk a product with all 64 matrices is

    H_t x_t = exp(G_t) H_0 x_t + sum_{s <= t} exp(G_t - G_s) (k_s . x_t) k_s

The gradient is that of the equation's solution: one more solve, `(H_t + lambda_t) g_t = dx_t`, and then sums over its
results (Gated KalmaNet, table 1 and equations 6 to 10).

| module | kernel | reads | writes | grid |
|---|---|---|---|---|
| `kernel_shape` | `ridge_decay` | decay | the decay added up inside chunks | chunk |
| `gram_states` | `ridge_increments` | k | what each chunk adds to the Gram matrix | chunk |
| | `ridge_scan` | what chunks add | `H_0` of each chunk, its squared norm | rows of H, heads, rows |
| `iterations` | `ridge_chebyshev` and others | q, k, `H_0`, ridge | x and the norm of each `H_t` | chunk |
| | `ridge_conjugate_gradient_mild` | the same | the same, of chunks in float16; which these are | chunk |
| backward: `iterations` | the same | dx, k, `H_0`, norms | g = dq | chunk |
| `bwd_dh` | `ridge_start_gradients` | x, g, k, `H_0` | what each chunk adds to H's gradient, d ridge | chunk |
| `gram_states` | `ridge_reverse_scan` | what chunks add | H's gradient after each chunk | rows of H, heads, rows |
| `bwd_dqkg` | `ridge_boundary_gradients` | k, `H_0`, dH | dk and d decay through chunks' ends | chunk |
| | `ridge_gradients` | k, x, g | dk and d decay through pairs of the chunk's tokens | chunk |

Grid *chunk* is a program for each chunk of each head. `products` has matrix products at each precision; `ridge_solve`
puts the stages together and has the public function. Saved for the backward: k, the ridge, x, the norms, and (unless
`RidgeConfig.keeps_states` is false) the matrices `H_0`. Most of the time is the two solves: each of 30 iterations is
three products, one after another.
"""
