"""`generate` and `stream`: prompts of any lengths are read in parallel, then one compiled loop continues them all."""

import functools
import reprlib
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from rnnlib.fields import PositiveInteger, Range, check_value
from rnnlib.inference.delayed_updates import after_tokens, delay_updates, flushed
from rnnlib.inference.engine import Engine
from rnnlib.inference.prompts import PROMPT_BUCKET, expect_no_tracing, pad_prompts, prompt_positions, rounded_up
from rnnlib.inference.sampling import NaNLogitsError, Sampling, Seed, draw, have_nan, likeliest_token, seed_key
from rnnlib.models.decoder import DecoderCache, DecoderLM


class Generated(NamedTuple):
    """What `generate` gives with log-probabilities.

    Attributes:
        tokens: `[B, max_new_tokens]` int32, the new tokens alone; what follows a row's stop token is that token again.
        log_probabilities: `[B, max_new_tokens]` float32 of each new token under the model: the log-softmax of its
            logits, before temperature, `top_k` and `top_p`; 0 for what follows a row's stop token.
        lengths: `[B]` int32, new tokens of each row, its stop token among them.
    """

    tokens: Int[Array, "B max_new_tokens"]
    log_probabilities: Float[Array, "B max_new_tokens"]
    lengths: Int[Array, " B"]


@overload
def generate(
    model: DecoderLM,
    prompt_tokens: Int[Array | np.ndarray, "B T"] | Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float | int | Sequence[float | int] = 1.0,
    top_k: int | Sequence[int | None] | None = None,
    top_p: float | int | Sequence[float | int | None] | None = None,
    seed: int | Sequence[int] = 0,
    end_token: int | None = None,
    stop_tokens: Sequence[int] | Sequence[Sequence[int]] = (),
    log_probabilities: Literal[False] = False,
) -> Int[Array, "B max_new_tokens"]: ...


@overload
def generate(
    model: DecoderLM,
    prompt_tokens: Int[Array | np.ndarray, "B T"] | Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float | int | Sequence[float | int] = 1.0,
    top_k: int | Sequence[int | None] | None = None,
    top_p: float | int | Sequence[float | int | None] | None = None,
    seed: int | Sequence[int] = 0,
    end_token: int | None = None,
    stop_tokens: Sequence[int] | Sequence[Sequence[int]] = (),
    log_probabilities: Literal[True],
) -> Generated: ...


def generate(
    model: DecoderLM,
    prompt_tokens: Int[Array | np.ndarray, "B T"] | Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: Any = 1.0,
    top_k: Any = None,
    top_p: Any = None,
    seed: Any = 0,
    end_token: int | None = None,
    stop_tokens: Any = (),
    log_probabilities: bool = False,
) -> Any:
    """Continues prompts.

    What a row gets depends on its prompt, its place in the batch, the seed and the options, not on the other rows
    (up to rounding). With a seed of its own a row's place does not matter either: it gets what it would get alone. It
    compiles what it runs by itself and is not called under `jax.jit` or `jax.vmap`; inside of a function of your own,
    `jax.lax.scan` over `model.extend` decodes.

    Args:
        model: the language model.
        prompt_tokens: one prompt a row, of one length (an array `[B, T]`) or several (lists of token numbers); each
            of at least one token. Shorter ones are padded on the left, which changes no logit but for rounding.
        max_new_tokens: tokens to add to each.
        temperature: see `Sampling`; 0 is greedy. One number, or one a row.
        top_k: see `Sampling`; one, or one a row.
        top_p: see `Sampling`; one, or one a row.
        seed: of the draws, in [0, 2**63); one, or one a row.
        end_token: a row stops after this token, and decoding once all have; None never stops.
        stop_tokens: a row stops after any of these too; token ids, or those of each row, at most eight.
        log_probabilities: give log-probabilities and lengths beside the tokens.

    Returns:
        The new tokens alone, `[B, max_new_tokens]` int32; with `log_probabilities` a `Generated`. What follows the
        token that a row stopped after is that token again.

    Raises:
        ValueError: for an empty prompt, a token outside the vocabulary, or an option out of range or not one a row.
        NaNLogitsError: the model's logits are NaN; a ValueError.
        TypeError: under `jax.jit` or `jax.vmap`.
    """
    if not hasattr(stop_tokens, "__len__"):
        raise ValueError(f"generate: stop_tokens is {stop_tokens!r}, expected token ids, or those of each row")
    each_row = any(isinstance(value, Sequence | np.ndarray) for value in (temperature, top_k, top_p, seed))
    if not each_row and not len(stop_tokens) and not log_probabilities:
        options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed, "end_token": end_token}
        blocks = stream(model, prompt_tokens, max_new_tokens=max_new_tokens, block_size=max_new_tokens, **options)
        tokens = next(blocks)
        missing = max_new_tokens - tokens.shape[1]
        return jnp.pad(tokens, ((0, 0), (0, missing)), constant_values=0 if end_token is None else end_token)
    generated = _generate_rows(
        model,
        prompt_tokens,
        max_new_tokens,
        {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed},
        end_token,
        stop_tokens,
    )
    return generated if log_probabilities else generated.tokens


def _generate_rows(
    model: DecoderLM,
    prompt_tokens: Any,
    max_new_tokens: int,
    options: dict[str, Any],
    end_token: int | None,
    stop_tokens: Any,
) -> Generated:
    """`generate` with options of each row, through an `Engine` of as many slots."""
    expect_no_tracing(prompt_tokens, nnx.state(model))
    check_value("generate", "max_new_tokens", max_new_tokens, PositiveInteger)
    vocabulary = Annotated[int, Range(at_least=0, below=model.config.vocabulary_size)]
    check_value("generate", "end_token", end_token, vocabulary | None)
    pad_prompts(prompt_tokens, model.config.vocabulary_size)  # checks them
    prompts = [np.asarray(row).tolist() for row in prompt_tokens]
    batch = len(prompts)
    own_seeds = isinstance(options["seed"], Sequence | np.ndarray)
    columns = {name: _of_rows(name, value, batch) for name, value in options.items()}
    nested = any(isinstance(entry, Sequence | np.ndarray) for entry in stop_tokens)
    stops = _of_rows("stop_tokens", stop_tokens, batch) if nested else [stop_tokens] * batch
    ends = () if end_token is None else (end_token,)
    engine = Engine(model, slots=batch, max_length=max(map(len, prompts)) + max_new_tokens)
    texts = engine.add_all(
        [
            {
                "prompt_tokens": prompts[row],
                "max_new_tokens": max_new_tokens,
                **{name: column[row] for name, column in columns.items()},
                "stop_tokens": tuple(dict.fromkeys((*ends, *stops[row]))),
                "place": 0 if own_seeds else row,
            }
            for row in range(batch)
        ],
        owner="generate",
    )
    try:
        while engine.active:
            engine.step(max_new_tokens)
    except NaNLogitsError:
        stuck = [row for row, text in enumerate(texts) if text.finish_reason == "nan"]
        done = min(len(texts[row].tokens) for row in stuck)
        raise NaNLogitsError.of("generate", f"row(s) {stuck} after {done} new tokens") from None
    tokens = np.zeros([batch, max_new_tokens], np.int32)
    scores = np.zeros([batch, max_new_tokens], np.float32)
    for row, text in enumerate(texts):
        made = len(text.tokens)
        tokens[row, :made], scores[row, :made] = text.tokens, text.log_probabilities
        tokens[row, made:] = text.tokens[-1]
    lengths = np.asarray([len(text.tokens) for text in texts], np.int32)
    return Generated(jnp.asarray(tokens), jnp.asarray(scores), jnp.asarray(lengths))


def _of_rows(name: str, value: Any, batch: int) -> list[Any]:
    """An option of each row, from one for all or one a row."""
    if not isinstance(value, Sequence | np.ndarray):
        return [value] * batch
    if len(value) != batch:
        raise ValueError(f"generate: {name} has {len(value)} entries, expected one, or one for each of {batch} rows")
    return [entry.item() if isinstance(entry, np.generic) else entry for entry in value]


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
    check_value("generate", "seed", seed, Seed)
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    vocabulary_size = model.config.vocabulary_size
    token = Annotated[int, Range(at_least=0, below=vocabulary_size)]
    check_value("generate", "end_token", end_token, token | None)
    tokens, segment_ids = pad_prompts(prompt_tokens, vocabulary_size, multiple=PROMPT_BUCKET)
    cache = model.init_cache(tokens.shape[0], tokens.shape[1] + rounded_up(max_new_tokens, PROMPT_BUCKET))
    carry = _prefill(graphdef, state, tokens, segment_ids, cache)
    is_filtered = top_k is not None or top_p is not None
    values = {
        "divisor": None if sampling.greedy else jnp.float32(sampling.divisor),
        "top_k": jnp.int32(min(top_k or vocabulary_size, vocabulary_size)) if is_filtered else None,
        "top_p": None if top_p is None else jnp.float32(top_p),
        "end_token": None if end_token is None else jnp.int32(end_token),
    }
    size = rounded_up(min(block_size, max_new_tokens), PROMPT_BUCKET)
    decode = functools.partial(_decode, graphdef, size, state, values)
    return _blocks(decode, carry, seed_key(int(seed)), max_new_tokens, block_size)


class _Carry(NamedTuple):
    """What decoding goes on from: the logits of the next token, and the cache that they came with.

    The likeliest token is the first whose logit is NaN, if there is one: logits are read once for both.
    """

    step: Int[Array, ""]
    logits: Float[Array, "B vocabulary"]
    likeliest: Int[Array, " B"]
    finished: Bool[Array, " B"]
    cache: DecoderCache


def _blocks(decode, carry: _Carry, key: Array, max_new_tokens: int, block_size: int) -> Iterator[Array]:
    done = 0
    while done < max_new_tokens:
        block, made, stuck, carry = decode(carry, key, min(block_size, max_new_tokens - done))
        block = block[:, : int(made)]
        done += block.shape[1]
        if stuck.any():
            stuck_rows = reprlib.repr(np.flatnonzero(stuck).tolist())
            raise NaNLogitsError.of("generate", f"row(s) {stuck_rows} after {done} new tokens")
        yield block
        if bool(carry.finished.all()):
            return


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
            token = draw(carry.logits, keys, values["divisor"], values["top_k"], values["top_p"])
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
