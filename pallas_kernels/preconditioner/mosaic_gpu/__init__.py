"""The diagonal Gram in one pass a direction, for Hopper cards: each array is read once and each result written once.

A program has one head of one row and goes over its tokens in chunks of 32, which the computing warpgroups take in
turn. In a chunk each warp has a piece of 8 tokens in a row, and a thread 4 channels of it. What a piece does to A is an
affine map, which the warps of a warpgroup tell each other through shared memory; what a chunk leaves goes on to the
next warpgroup. So a warpgroup waits for the one before it for the length of one map, not of a chunk:

    local_i = decay_i local_{i-1} + gain_i k_i^2    passes_i = decay_i passes_{i-1}    A_i = passes_i start + local_i

The gradient goes the same way from the last token to the first, and the forward leaves A before each chunk for it. One
more warpgroup copies tiles to shared memory and loads the gates, a chunk ahead; results leave through the tiles that
they were made of.

| kernel | reads | writes |
|---|---|---|
| `gram_forward` (`forward`) | k, decay, gain | out, A after the last token, A before each chunk |
| `gram_backward` (`backward`) | k, decay, gain, dout, the passed keys' gradient, A before chunks | the gradients |

This is for readouts of each channel alone that do not look at A before the token, of keys in bfloat16 with 128
channels, under gates of one number a token. There must be heads enough for the card's processors: nothing else is
split.
"""
