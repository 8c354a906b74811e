"""Batches of packed rows, as the pipeline gives them, with random tokens and weights."""

import numpy as np


def packed_batch(random, vocabulary, rows, length):
    """Rows of documents that end at about every seventh token."""
    tokens = random.integers(0, vocabulary, (rows, length + 1)).astype(np.int32)
    ids = np.cumsum(tokens[:, :-1] % 7 == 0, 1).astype(np.int32)
    positions = np.tile(np.arange(length, dtype=np.int32), (rows, 1))
    weights = random.uniform(size=(rows, length)).astype(np.float32)
    names = ("inputs", "targets", "segment_ids", "positions", "loss_weights")
    return dict(zip(names, (tokens[:, :-1], tokens[:, 1:], ids, positions, weights)))
