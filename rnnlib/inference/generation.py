"""Generation: parallel prefill of ragged prompts, then decoding with a constant-size cache in one compiled loop."""

import dataclasses
import functools
import math
import reprlib
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from rnnlib.fields import PositiveInteger, Range, check_fields, check_value
from rnnlib.inference.delayed_updates import after_tokens, delay_updates, flushed
from rnnlib.models.decoder import DecoderCache, DecoderLM

# Prompts are padded on the left to a multiple of this, and room for new tokens is rounded up to one, so that all
# lengths share a few compiled functions.
PROMPT_BUCKET = 64


# Temperatures are raised to this, at which sampling is greedy but for exact ties. Float32 cannot hold the reciprocal of
# much lower ones.
_LOWEST_TEMPERATURE = 1e-30


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is drawn from the logits.

    Attributes:
        temperature: divides the logits; 0 takes the largest (greedy), and ignores the rest.
        top_k: draw among the `top_k` likeliest tokens only; None for all.
        top_p: draw among the fewest likeliest tokens whose probabilities, after `temperature` and `top_k`, sum to at
            least `top_p` (nucleus sampling); None for all.
    """

    temperature: Annotated[float | int, Range(at_least=0, below=math.inf)] = 1.0
    top_k: PositiveInteger | None = None
    top_p: Annotated[float | int, Range(above=0, at_most=1)] | None = None

    def __post_init__(self):
        check_fields(self)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, with no draw."""
        return self.temperature == 0

    @property
    def divisor(self) -> float | None:
        """What divides the logits; None where the likeliest token is taken."""
        return None if self.greedy else max(self.temperature, _LOWEST_TEMPERATURE)


class NaNLogitsError(ValueError):
    """There is no token to draw: a model's logits are NaN, for which its weights or its arithmetic are the reason."""


class _Carry(NamedTuple):
    """What decoding goes on from: the logits of the next token, and the cache that they came with.

    The likeliest token is the first whose logit is NaN, if there is one: logits are read once for both.
    """

    step: Int[Array, ""]
    logits: Float[Array, "B vocabulary"]
    likeliest: Int[Array, " B"]
    finished: Bool[Array, " B"]
    cache: DecoderCache


def sample(logits: Float[Array, "B vocabulary"], keys: Any, sampling: Sampling) -> Int[Array, " B"]:
    """Draws one token a row.

    Args:
        logits: `[B, vocabulary]`.
        keys: one random key a row, as from `jax.random.split(key, B)`; not used when greedy.
        sampling: how to draw.

    Returns:
        Token numbers `[B]`, int32.
    """
    return _draw(logits, keys, sampling.divisor, sampling.top_k, sampling.top_p)


def _draw(
    logits: Array, keys: Any, divisor: Array | float | None, top_k: Array | int | None, top_p: Array | float | None
) -> Array:
    """`sample` with the options as numbers or arrays: calls that differ only in arrays' values share a compilation."""
    if divisor is None:
        return likeliest_token(logits)
    # The largest logit becomes 0, so that division by a small temperature does not make it infinite.
    logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / divisor
    if top_k is None and top_p is None:
        return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)
    return draw_filtered(keys, logits, top_k, top_p)


def likeliest_token(logits: Float[Array, "B vocabulary"]) -> Int[Array, " B"]:
    """The likeliest token of each row, `[B]` int32; the first whose logit is NaN, if there is one."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def have_nan(logits: Float[Array, "B vocabulary"], likeliest: Int[Array, " B"]) -> Bool[Array, " B"]:
    """Rows with a NaN among their logits, which is then their `likeliest_token`'s: nothing else is read."""
    return jnp.isnan(jnp.take_along_axis(logits, likeliest[:, None], axis=-1)[:, 0])


def draw_filtered(keys: Any, logits: Array, top_k: Array | int | None, top_p: Array | float | None) -> Array:
    """Draws one token a row among the `top_k` likeliest, and of those the fewest that reach `top_p`.

    Args:
        keys: one random key a row.
        logits: `[B, vocabulary]`, divided by the temperature.
        top_k: one number, or `[B, 1]`; None for all.
        top_p: one number, or `[B, 1]`; None for all, as is any above 1.

    Returns:
        Token numbers `[B]`, int32.
    """
    # Draws by rank and not by a threshold on the logits, which would let ties through.
    by_rank = jnp.argsort(logits, axis=-1, descending=True, stable=True)
    ranked = jnp.take_along_axis(logits, by_rank, axis=-1)
    if top_k is not None:
        ranked = jnp.where(jnp.arange(ranked.shape[-1]) < top_k, ranked, -jnp.inf)
    if top_p is not None:
        probabilities = jax.nn.softmax(ranked, axis=-1)
        likelier = jnp.cumsum(probabilities, axis=-1) - probabilities
        # The likeliest token stays whatever rounding does.
        ranked = jnp.where((likelier < top_p).at[:, 0].set(True), ranked, -jnp.inf)
    ranks = jax.vmap(jax.random.categorical)(keys, ranked)
    return jnp.take_along_axis(by_rank, ranks[:, None], axis=-1)[:, 0].astype(jnp.int32)


def stream(
    model: DecoderLM,
    prompt_tokens: Int[Array | np.ndarray, "B T"] | Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    block_size: int = 16,
    temperature: float | int = 1.0,
    top_k: int | None = None,
    top_p: float | int | None = None,
    seed: int = 0,
    end_token: int | None = None,
) -> Iterator[Int[Array, "B block"]]:
    """`generate` in blocks, for showing text while it is made: the same tokens, whatever the block's size.

    Args:
        model: the language model.
        prompt_tokens: as in `generate`.
        max_new_tokens: as in `generate`.
        block_size: tokens that one compiled loop makes before they are handed over.
        temperature: as in `generate`, one for all rows.
        top_k: as in `generate`, one for all rows.
        top_p: as in `generate`, one for all rows.
        seed: as in `generate`, one for all rows.
        end_token: as in `generate`.

    Returns:
        An iterator over int32 arrays `[B, n]`, `n <= block_size`, `max_new_tokens` columns in all, fewer when every
        row has ended. The arguments are checked, and the prompt is read, when this is called.

    Raises:
        ValueError: as in `generate`, NaN logits when the iterator comes to their block.
        TypeError: as in `generate`.
    """
    graphdef, state = nnx.split(model)
    expect_no_tracing(prompt_tokens, state)
    for name, value in (("max_new_tokens", max_new_tokens), ("block_size", block_size)):
        check_value("generate", name, value, PositiveInteger)
    check_value("generate", "seed", seed, Annotated[int, Range(at_least=0, below=2**63)])
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    vocabulary_size = model.config.vocabulary_size
    token = Annotated[int, Range(at_least=0, below=vocabulary_size)]
    check_value("generate", "end_token", end_token, token | None)
    tokens, segment_ids = pad_prompts(prompt_tokens, vocabulary_size, multiple=PROMPT_BUCKET)
    cache = model.init_cache(tokens.shape[0], tokens.shape[1] + _rounded_up(max_new_tokens, PROMPT_BUCKET))
    carry = _prefill(graphdef, state, tokens, segment_ids, cache)
    is_filtered = top_k is not None or top_p is not None
    values = {
        "divisor": None if sampling.greedy else jnp.float32(sampling.divisor),
        "top_k": jnp.int32(min(top_k or vocabulary_size, vocabulary_size)) if is_filtered else None,
        "top_p": None if top_p is None else jnp.float32(top_p),
        "end_token": None if end_token is None else jnp.int32(end_token),
    }
    size = _rounded_up(min(block_size, max_new_tokens), PROMPT_BUCKET)
    decode = functools.partial(_decode, graphdef, size, state, values)
    return _blocks(decode, carry, seed_key(int(seed)), max_new_tokens, block_size)


def expect_no_tracing(prompt_tokens: Any, state: Any) -> None:
    """TypeError within a function that JAX traces."""
    # What is made here is traced under jit, but not under vmap, which shows in what is given.
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((jnp.zeros([]), prompt_tokens, state))):
        raise TypeError(
            "generate: called while jax traces a function, expected no jit or vmap around it: it compiles what it "
            "runs, for many prompts at once; jax.lax.scan over model.extend decodes inside of a function"
        )


def prompt_positions(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Positions of prompts padded on the left: they count from the first token, not from the padding before it."""
    return jnp.maximum(jnp.cumsum(segment_ids, axis=1, dtype=jnp.int32) - 1, 0)


def seed_key(seed: int) -> Array:
    """The key of a seed below `2**63`, which `jax.random.key` cuts to 32 bits unless 64-bit types are enabled."""
    key = jax.random.key(seed % 2**32)
    return jax.random.fold_in(key, seed >> 32) if seed >> 32 else key


def _rounded_up(tokens: int, multiple: int) -> int:
    return -(-tokens // multiple) * multiple


def _blocks(decode, carry: _Carry, key: Array, max_new_tokens: int, block_size: int) -> Iterator[Array]:
    done = 0
    while done < max_new_tokens:
        block, made, stuck, carry = decode(carry, key, min(block_size, max_new_tokens - done))
        block = block[:, : int(made)]
        done += block.shape[1]
        if stuck.any():
            stuck_rows = reprlib.repr(np.flatnonzero(stuck).tolist())
            raise NaNLogitsError(
                f"generate: the model's logits are NaN for row(s) {stuck_rows} after {done} new tokens, expected "
                "numbers: are its weights finite?"
            )
        yield block
        if bool(carry.finished.all()):
            return


def pad_prompts(
    prompts: Int[Array | np.ndarray, "B T"] | Sequence[Sequence[int]], vocabulary_size: int, *, multiple: int = 1
) -> tuple[Int[Array, "B length"], Int[Array, "B length"]]:
    """Prompts as one array, padded on the left, with the padding a segment of its own.

    Args:
        prompts: token numbers, one row or sequence each.
        vocabulary_size: tokens are checked against it.
        multiple: the common length is rounded up to a multiple of this.

    Returns:
        Tokens `[B, length]` int32 and segment ids `[B, length]` int32: 0 for padding, 1 for the prompt.
    """
    rows = [np.asarray(row) for row in prompts]
    if not rows:
        raise ValueError("prompt_tokens is empty: expected at least one prompt")
    for index, row in enumerate(rows):
        if row.ndim != 1 or row.size == 0:
            raise ValueError(f"prompt_tokens[{index}] has shape {row.shape}: expected a row of at least one token")
        if not np.issubdtype(row.dtype, np.integer):
            raise TypeError(f"prompt_tokens[{index}] has dtype {row.dtype}: expected integers")
        if row.min() < 0 or row.max() >= vocabulary_size:
            raise ValueError(
                f"prompt_tokens[{index}] has tokens from {row.min()} to {row.max()}: "
                f"expected them in [0, {vocabulary_size})"
            )
    length = _rounded_up(max(row.size for row in rows), multiple)
    tokens = np.zeros([len(rows), length], np.int32)
    segment_ids = np.zeros([len(rows), length], np.int32)
    for index, row in enumerate(rows):
        tokens[index, length - row.size :] = row
        segment_ids[index, length - row.size :] = 1
    return jnp.asarray(tokens), jnp.asarray(segment_ids)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=4)
def _prefill(graphdef, state, tokens: Array, segment_ids: Array, cache: DecoderCache) -> _Carry:
    model = nnx.merge(graphdef, state)
    positions = prompt_positions(segment_ids)
    hidden, cache = model.extend_hidden(tokens, cache, segment_ids=segment_ids, positions=positions)
    logits = model.logits(hidden[:, -1:])[:, 0]
    return _Carry(jnp.int32(0), logits, likeliest_token(logits), jnp.zeros(tokens.shape[0], bool), cache)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=4)
def _decode(
    graphdef,
    size: int,
    state,
    values: dict[str, Any],
    carry: _Carry,
    key: Array,
    limit: Int[Array, ""] | int,
) -> tuple[Array, Array, Array, _Carry]:
    """Makes at most `limit <= size` tokens a row, and stops where one has NaN for logits.

    What it goes on from is donated: states of many rows fill a GPU, and are not there twice.

    Returns:
        The tokens in `[B, size]`; how many; the rows, `[B]` bool, that have no next token; what to go on from.
    """
    batch = carry.logits.shape[0]
    rows = jnp.arange(batch)
    end_token = values["end_token"]
    filler = 0 if end_token is None else end_token

    def stuck(carry):
        return have_nan(carry.logits, carry.likeliest) & ~carry.finished

    def unfinished(loop):
        made, _, carry = loop
        return (made < limit) & ~carry.finished.all() & ~stuck(carry).any()

    def step(loop):
        made, tokens, carry = loop
        keys = jax.vmap(functools.partial(jax.random.fold_in, jax.random.fold_in(key, carry.step)))(rows)
        token = carry.likeliest
        if values["divisor"] is not None:
            token = _draw(carry.logits, keys, values["divisor"], values["top_k"], values["top_p"])
        token = jnp.where(carry.finished, filler, token)
        finished = carry.finished if end_token is None else carry.finished | (token == end_token)
        model = nnx.merge(graphdef, state)
        logits, cache = model.extend(token[:, None], after_tokens(model, carry.cache, made))
        carry = _Carry(carry.step + 1, logits[:, 0], likeliest_token(logits[:, 0]), finished, cache)
        return made + 1, tokens.at[:, made].set(token), carry

    model = nnx.merge(graphdef, state)
    carry = carry._replace(cache=delay_updates(model, carry.cache))
    made, tokens, carry = jax.lax.while_loop(
        unfinished, step, (jnp.int32(0), jnp.full([batch, size], filler, jnp.int32), carry)
    )
    return tokens, made, stuck(carry) & (made < limit), carry._replace(cache=flushed(model, carry.cache, made))
