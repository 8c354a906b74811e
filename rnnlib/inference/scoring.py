"""Log-probabilities of given continuations, with the states of what contexts share read once."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from rnnlib.fields import PositiveInteger, check_value
from rnnlib.inference.cache_rows import gather_rows
from rnnlib.inference.prompts import pad_prompts, prompt_positions, rounded_up
from rnnlib.inference.sampling import NaNLogitsError
from rnnlib.models.decoder import DecoderCache, DecoderLM

# Most logits that are held at once: a quarter of a gigabyte in float32.
_BLOCK_LOGITS = 1 << 26
# Shortest padded lengths of what contexts share and of what is scored.
_SHORTEST_PREFIX, _SHORTEST_ENDING = 64, 16
# A shorter context is read together with what is scored, which is one call less.
_WORTH_A_CALL = 16


class Scores(NamedTuple):
    """What a model gives to the tokens of a continuation.

    Attributes:
        log_probabilities: float32 `[N]`, natural logarithm, of each token after all before it.
        greedy: bool `[N]`, whether the token has the largest logit.
    """

    log_probabilities: np.ndarray
    greedy: np.ndarray


class _Row(NamedTuple):
    """A request as the model reads it: `tokens` are all but the last one."""

    number: int
    tokens: tuple[int, ...]
    targets: tuple[int, ...]

    @property
    def shareable(self) -> int:
        """Tokens before the first whose logits are asked for."""
        return len(self.tokens) - len(self.targets)


class _Group(NamedTuple):
    """Rows that begin with the same `prefix` tokens."""

    prefix: int
    rows: list[_Row]


def score(
    model: DecoderLM,
    requests: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    batch_size: int | None = None,
    tokens_per_batch: int = 16384,
    piece_size: int = 4096,
    progress: Callable[[int], object] | None = None,
) -> list[Scores]:
    """Log-probabilities of continuations.

    Requests whose contexts begin alike are grouped where that saves tokens: their common beginning is read once, and
    each goes on from its state. Lengths are padded to few sizes, each of which compiles once; padding changes no
    result but for rounding. Logits are computed for the continuations alone, a block of tokens at a time.

    Args:
        model: the language model.
        requests: pairs of a context, of at least one token, and its continuation.
        batch_size: rows that are read together; None takes as many as `tokens_per_batch` allows, 64 at most.
        tokens_per_batch: padded tokens of a batch where `batch_size` is None.
        piece_size: longer rows are read in pieces of so many tokens.
        progress: is called with the number of requests after each batch.

    Returns:
        The scores of each continuation, in the order of the requests.

    Raises:
        ValueError: a context is empty, a token is outside the vocabulary, or an option is no integer of at least 1.
        NaNLogitsError: the model's logits are NaN.
    """
    for name, value in (("tokens_per_batch", tokens_per_batch), ("piece_size", piece_size)):
        check_value("score", name, value, PositiveInteger)
    check_value("score", "batch_size", batch_size, PositiveInteger | None)
    rows = [_row(i, *request, model.config.vocabulary_size) for i, request in enumerate(requests)]
    empty = Scores(np.zeros(0, np.float32), np.zeros(0, bool))
    results = [empty] * len(rows)
    rows = [row for row in rows if row.targets]
    parts = nnx.split(model)
    most = batch_size or 64
    waiting: dict[tuple[int, int], list[_Group]] = {}
    for group in _groups(rows, most):
        ending = max(len(row.tokens) for row in group.rows) - group.prefix
        sizes = (_padded(group.prefix, _SHORTEST_PREFIX, piece_size), _padded(ending, _SHORTEST_ENDING, piece_size))
        waiting.setdefault(sizes, []).append(group)
    if progress is not None and len(rows) < len(results):
        progress(len(results) - len(rows))
    # The longest first: what does not fit into memory says so at once.
    for sizes in sorted(waiting, reverse=True):
        number = sum(len(group.rows) for group in waiting[sizes])
        held = batch_size or min(most, max(1, tokens_per_batch // sum(sizes)))
        held = min(held, 1 << (number - 1).bit_length())
        for batch in _batches(waiting[sizes], held):
            scored = _score_batch(model, parts, batch, held, sizes, piece_size)
            for row, result in scored:
                results[row.number] = result
            if progress is not None:
                progress(len(scored))
    return results


def _row(index: int, context: Sequence[int], continuation: Sequence[int], vocabulary_size: int) -> _Row:
    tokens = (*map(int, context), *map(int, continuation))
    if not len(context):
        raise ValueError(f"score: request {index} has an empty context, expected at least one token")
    if min(tokens) < 0 or max(tokens) >= vocabulary_size:
        raise ValueError(
            f"score: request {index} has tokens from {min(tokens)} to {max(tokens)}, expected them in "
            f"[0, {vocabulary_size})"
        )
    return _Row(index, tokens[:-1], tokens[len(context) :])


def _groups(rows: list[_Row], most: int) -> list[_Group]:
    """Rows in groups of at most `most` that share a prefix, where reading it once saves tokens."""
    groups: list[_Group] = []
    for row in sorted(rows, key=lambda row: row.tokens):
        prefix = row.shareable if row.shareable >= _WORTH_A_CALL else 0
        if groups and len(groups[-1].rows) < most:
            last = groups[-1]
            common = min(_common(last.rows[-1].tokens, row.tokens), last.prefix, row.shareable)
            # Alone, the row would have its own prefix read; in the group, all read what is behind the common part.
            if common >= _WORTH_A_CALL and len(last.rows) * (last.prefix - common) < common:
                groups[-1] = _Group(common, [*last.rows, row])
                continue
        groups.append(_Group(prefix, [row]))
    return groups


def _common(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """How many tokens two rows begin with alike."""
    size = min(len(first), len(second))
    differ = np.flatnonzero(np.asarray(first[:size]) != np.asarray(second[:size]))
    return int(differ[0]) if differ.size else size


def _padded(length: int, shortest: int, piece_size: int) -> int:
    """The length that is compiled: 0, a power of two, one and a half of it, or a number of pieces."""
    if length == 0:
        return 0
    power = max(shortest, 1 << (length - 1).bit_length())
    padded = power * 3 // 4 if power > shortest and length <= power * 3 // 4 else power
    return padded if padded <= piece_size else rounded_up(length, piece_size)


def _batches(groups: list[_Group], size: int) -> list[list[_Group]]:
    batches: list[list[_Group]] = []
    held = size
    for group in groups:
        for start in range(0, len(group.rows), size):
            part = _Group(group.prefix, group.rows[start : start + size])
            if held + len(part.rows) > size:
                batches.append([])
                held = 0
            batches[-1].append(part)
            held += len(part.rows)
    return batches


def _score_batch(
    model: DecoderLM, parts, batch: list[_Group], size: int, sizes: tuple[int, int], piece_size: int
) -> list[tuple[_Row, Scores]]:
    """The rows of a batch with their scores; `size` rows of padded lengths `sizes` are computed."""
    rows = [(number, group.prefix, row) for number, group in enumerate(batch) for row in group.rows]
    capacity = sum(sizes)
    cache = model.init_cache(size, capacity)
    if sizes[0]:
        cache = _read_prefixes(model, parts, batch, size, sizes[0], capacity, piece_size)
        # Rows that fill up the batch go on from any state.
        cache = gather_rows(cache, [number for number, _, _ in rows] + [0] * (size - len(rows)))
    tokens, targets = np.zeros([2, size, sizes[1]], np.int32)
    for i, (_, prefix, row) in enumerate(rows):
        own = row.tokens[prefix:]
        tokens[i, : len(own)] = own
        targets[i, len(own) - len(row.targets) : len(own)] = row.targets
    found: list[tuple[np.ndarray, np.ndarray]] = []
    for start in range(0, sizes[1], piece_size):
        piece = slice(start, start + piece_size)
        *scores, cache = _score_piece(*parts, tokens[:, piece], targets[:, piece], cache)
        found.append((np.asarray(scores[0]), np.asarray(scores[1])))
    log_probabilities = np.concatenate([piece[0] for piece in found], axis=1)
    greedy = np.concatenate([piece[1] for piece in found], axis=1)
    scored = []
    for i, (_, prefix, row) in enumerate(rows):
        end = len(row.tokens) - prefix
        own_part = slice(end - len(row.targets), end)
        if np.isnan(log_probabilities[i, own_part]).any():
            raise NaNLogitsError.of("score", f"request {row.number}")
        scored.append((row, Scores(log_probabilities[i, own_part].copy(), greedy[i, own_part].copy())))
    return scored


def _read_prefixes(
    model: DecoderLM, parts, batch: list[_Group], size: int, length: int, capacity: int, piece_size: int
) -> DecoderCache:
    """The cache behind each group's prefix, of few numbers of rows."""
    prompts = [group.rows[0].tokens[: group.prefix] for group in batch]
    few = -(-size // 4)
    prompts += [prompts[0]] * ((few if len(prompts) <= few else size) - len(prompts))
    tokens, segment_ids = pad_prompts(prompts, model.config.vocabulary_size, multiple=length)
    positions = prompt_positions(segment_ids)  # all padding is in the first piece
    cache = model.init_cache(len(prompts), capacity)
    for start in range(0, length, piece_size):
        piece = slice(start, start + piece_size)
        cache = _read(*parts, tokens[:, piece], segment_ids[:, piece], positions[:, piece], cache)
    return cache


@functools.partial(jax.jit, static_argnums=0, donate_argnums=5)
def _read(graphdef, state, tokens: Array, segment_ids: Array, positions: Array, cache: DecoderCache) -> DecoderCache:
    model = nnx.merge(graphdef, state)
    return model.extend_hidden(tokens, cache, segment_ids=segment_ids, positions=positions)[1]


@functools.partial(jax.jit, static_argnums=0)
def _score_piece(graphdef, state, tokens: Array, targets: Array, cache: DecoderCache):
    """Log-probabilities of the targets and whether each has the largest logit, both `[B, T]`, and the new cache."""
    model = nnx.merge(graphdef, state)
    hidden, cache = model.extend_hidden(tokens, cache)
    rows, length = tokens.shape
    allowed = max(1, _BLOCK_LOGITS // (rows * model.config.vocabulary_size))
    # A power of two that divides the length, which has few other factors.
    block = min(1 << (allowed.bit_length() - 1), math.gcd(length, 1 << 30))

    def of_block(start):
        logits = model.logits(jax.lax.dynamic_slice_in_dim(hidden, start, block, axis=1))
        wanted = jax.lax.dynamic_slice_in_dim(targets, start, block, axis=1)
        chosen = jnp.take_along_axis(logits, wanted[..., None], axis=-1)[..., 0]
        log_probability = chosen - jax.nn.logsumexp(logits, axis=-1)
        return log_probability.astype(jnp.float32), jnp.argmax(logits, axis=-1) == wanted

    found = jax.lax.map(of_block, jnp.arange(0, length, block))  # [blocks, B, block]
    log_probabilities, greedy = (jnp.moveaxis(x, 0, 1).reshape(rows, length) for x in found)
    return log_probabilities, greedy, cache
