"""The time of one token of every text, and the bytes that it must move."""

import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx

from experiments.decoding.study import DecodingStudy
from rnnlib.inference import stream
from rnnlib.layers import AttentionCache, LatentCache
from rnnlib.models import DecoderLM, ModelConfig, abstract_model
from rnnlib.training.flops import BANDWIDTH


def random_model(config: ModelConfig) -> DecoderLM:
    """A model whose weights are normal numbers: what is in them costs no time, and initialising takes long."""
    graph, state = nnx.split(abstract_model(config))
    rng = np.random.default_rng(0)
    return nnx.merge(graph, jax.tree.map(lambda p: jax.device_put(_normal(rng, p)), state))


def _normal(rng: np.random.Generator, like: Any) -> np.ndarray:
    return (0.02 * rng.standard_normal(like.shape, np.float32)).astype(like.dtype)


def bytes_of_a_token(model: DecoderLM, batch: int, length: int) -> dict[str, int]:
    """Bytes that a new token of all texts must read and write.

    All weights once (the embedding only where it is the head too), and the caches: states are read and written,
    attention's keys and values read (of them a token writes its own, which is not counted).

    Args:
        model: the model, or its shapes.
        batch: texts together.
        length: tokens of each text, which attention's cache holds.
    """

    def size(tree: Any) -> int:
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))

    weights = size(nnx.state(model, nnx.Param))
    if model.head is not None:
        weights -= size(model.embedding[...])
    caches = 0
    for cache in jax.eval_shape(lambda: model.init_cache(batch, length)):
        caches += size(cache) if isinstance(cache, AttentionCache | LatentCache) else 2 * size(cache)
    return {"weights": weights, "caches": caches}


def token_blocks(config: ModelConfig, batch: int, plan: DecodingStudy) -> tuple[DecoderLM, Iterator[jax.Array]]:
    """A model with random weights, and the blocks of tokens with which it continues random prompts greedily."""
    model = random_model(config)
    prompts = np.random.default_rng(1).integers(config.vocabulary_size, size=(batch, plan.prompt)).astype(np.int32)
    count = plan.block * plan.blocks
    return model, stream(model, prompts, max_new_tokens=count, block_size=plan.block, temperature=0)


def seconds_to_read(model: DecoderLM, batch: int, plan: DecodingStudy) -> list[float]:
    """Seconds from prompts to their first new tokens, of each reading after one that compiles."""
    prompts = (
        np.random.default_rng(2).integers(model.config.vocabulary_size, size=(batch, plan.prompt)).astype(np.int32)
    )
    seconds = []
    for _ in range(plan.readings + 1):
        start = time.perf_counter()
        np.asarray(next(stream(model, prompts, max_new_tokens=1, block_size=1, temperature=0)))
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def time_model(config: ModelConfig, batch: int, plan: DecodingStudy) -> dict[str, Any]:
    """Times greedy decoding of a model with random weights.

    Returns:
        Seconds of a token of every text, of each block after the first; tokens a second of all texts together, from
        the median block; bytes that a token moves, the seconds that this takes at the card's stated bandwidth, and the
        share of them in what was measured, both None where that bandwidth is not known; with `plan.readings`, the
        seconds to the first new tokens of each.
    """
    model, blocks = token_blocks(config, batch, plan)
    np.asarray(next(blocks))
    seconds, start = [], time.perf_counter()
    for block in blocks:
        np.asarray(block)
        end = time.perf_counter()
        seconds.append((end - start) / plan.block)
        start = end
    median = float(np.median(seconds))
    # Attention reads as many tokens as there are: in the blocks that are timed, so many on average.
    moved = bytes_of_a_token(model, batch, plan.prompt + plan.block * (1 + plan.blocks) // 2)
    bandwidth = BANDWIDTH.get(jax.devices()[0].device_kind)
    limit = None if bandwidth is None else sum(moved.values()) / bandwidth
    read = {"reading_seconds": [round(s, 6) for s in seconds_to_read(model, batch, plan)]} if plan.readings else {}
    return read | {
        "batch": batch,
        "prompt": plan.prompt,
        "token_seconds": [round(s, 8) for s in seconds],
        "tokens_per_second": round(batch / median, 1),
        "bytes": moved,
        "limit_seconds": limit,
        "of_limit": None if limit is None else round(limit / median, 4),
    }
