"""Attention of one new token of some texts to the keys and values of those before it, in a ring of fixed size.

    s_i = scale q k_i  for the new token and every token i of the ring in its segment
    out = sum_i exp(s_i) v_i / sum_i exp(s_i)

| kernel | reads | writes | grid |
|---|---|---|---|
| `token_attention` | q, the token's k and v, the ring | out or sums, the token's slot | key heads, parts, rows |
| `store_token` | q, the token's k and v, segments of the ring | q turned, the token's slot, tokens seen | rows |

The time is that of reading the ring once, as far as it is filled. A program keeps a running maximum and sums (Milakov
and Gimelshein, 2018, arXiv 1805.02867), as in FlashAttention (Dao et al., 2022, arXiv 2205.14135). Where rows and heads
do not fill a card, each program has a part of a ring, and XLA adds up their sums (Flash-Decoding, Dao et al., 2023). No
program reads the slot that the new token takes, so that it is written while others read. Query heads are the rows of
one product, of at least 16 rows.

`ring_token_attention` is the same for many rows on a Hopper card: after `store_token`, a kernel in Mosaic GPU
(`pallas_kernels.attention.mosaic_gpu.decode`) reads the ring.
"""
