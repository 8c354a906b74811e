"""The time of one token of every row, and the bytes that it must move."""

import time
from typing import Any

import jax
import numpy as np
from flax import nnx

from experiments.decoding.study import DecodingStudy
from rnnlib.layers import Attention
from rnnlib.models import DecoderLM, ModelConfig, generate

BANDWIDTH = {"NVIDIA H200": 4.8e12, "NVIDIA H100 80GB HBM3": 3.35e12}
"""Bytes a second of a card's memory, as its maker states them."""


def step_bytes(model: DecoderLM, batch: int, length: int) -> int:
    """Bytes that one token of each row moves at the least.

    Each weight is read once, but of an embedding that is not the head too only the rows of the tokens. A recurrent
    state is read and written; keys and values of attention are read. The cache counts at its size after `length`
    tokens.
    """
    weights = jax.tree.leaves(nnx.state(model, nnx.Param))
    moved = sum(x.nbytes for x in weights)
    if not model.config.tie_embeddings:
        table = model.embedding[...].nbytes
        moved -= table - batch * table // model.config.vocabulary_size
    cache = jax.eval_shape(lambda: model.init_cache(batch_size=batch, max_length=length))
    for block, part in zip(model.blocks, cache, strict=True):
        size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(part))
        moved += size if isinstance(block.mixer, Attention) else 2 * size
    return moved


def time_model(config: ModelConfig, batch: int, plan: DecodingStudy) -> dict[str, Any]:
    """Times greedy `generate` of a model with random weights.

    Returns:
        Seconds of a token of every row, from the difference of a long and a short call; seconds of the short call,
        which reads the prompt; bytes that a token moves at the least, and the share of the card's memory speed at which
        it does so, None where that speed is not known.
    """
    model = DecoderLM(config, rngs=nnx.Rngs(0))
    model.eval()
    prompt = np.random.default_rng(0).integers(config.vocabulary_size, size=(batch, plan.prompt))
    seconds = []
    for count in plan.new_tokens:

        def call(count: int = count) -> float:
            begin = time.perf_counter()
            jax.block_until_ready(generate(model, prompt, max_new_tokens=count, temperature=0))
            return time.perf_counter() - begin

        call()  # compiles
        seconds.append(min(call() for _ in range(plan.repeats)))
    (short, long), (few, many) = seconds, plan.new_tokens
    token = (long - short) / (many - few)
    moved = step_bytes(model, batch, plan.prompt + (few + many) // 2)
    bandwidth = BANDWIDTH.get(jax.devices()[0].device_kind)
    return {
        "batch": batch,
        "prompt": plan.prompt,
        "new_tokens": list(plan.new_tokens),
        "parameters": sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param))),
        "token_seconds": token,
        "short_call_seconds": short,
        "tokens_per_second": batch / token,
        "bytes": moved,
        "share_of_bandwidth": None if bandwidth is None else moved / token / bandwidth,
    }
