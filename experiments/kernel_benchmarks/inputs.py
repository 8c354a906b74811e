"""Random arguments, the same numbers for every framework: drawn by NumPy from a seed, an array's name and its shape."""

import concurrent.futures
import functools
import os
import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np

Shape = tuple[int, int, int, int, int]  # B, T, H, K, V

FLOAT32_ARRAYS = ("head_decay", "channel_decay", "bounded_decay", "gram_decay", "d_state")
"""Arrays that stay in float32; all others are rounded to the dtype that is measured."""

LEAST_LOG_DECAY = -0.61
"""Bound of `bounded_decay`, RWKV-7's: the low-rank rule's own kernels need one."""

CASES = ("random", "repeated keys", "hard resets", "extreme gates", "packed")


def _normal(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng([17 + seed, zlib.crc32(name.encode())]).standard_normal(shape, dtype=np.float32)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def _log_decay(x: np.ndarray) -> np.ndarray:
    # As the peers' benchmarks draw it, shifted to what trained models have: a mean decay of 0.95 a token.
    return -np.log1p(np.exp(-(x + 3)))


def draw(name: str, shape: Shape, case: str = "random", seed: int = 0) -> np.ndarray:
    """An argument in float32.

    Args:
        name: its name in `operators.ARGUMENTS`, or `d_out` and `d_state`, cotangents of the results.
        shape: (B, T, H, K, V).
        case: one of `CASES`.
        seed: of the numbers.

    Returns:
        `[B, T, H, ...]`, or `[B, H, K, V]` for `d_state`.
    """
    batch, length, heads, key_size, value_size = shape
    per_head = (batch, length, heads)
    if name == "d_state":
        return _normal(name, (batch, heads, key_size, value_size), seed)
    if name in ("v", "d_out"):
        return _normal(name, (*per_head, value_size), seed)
    if name == "q":
        return _unit(_normal(name, (*per_head, key_size), seed))
    repeats = case == "repeated keys"
    if name == "b":
        # Along `a` with a gain in (0, 1): the transition D - b a^T is symmetric and its eigenvalues are in (-1, 1].
        return draw("a", shape, case, seed) * draw("beta", shape, case, seed)[..., None]
    if name in ("k", "a", "write_key"):
        keys = _unit(_normal("a" if name == "a" else "k", (batch, 1 if repeats else length, heads, key_size), seed))
        keys = np.broadcast_to(keys, (*per_head, key_size))
        # A diagonal preconditioner's write key: the read key with each channel scaled by up to 1.5 either way.
        return keys if name != "write_key" else keys * np.float32(1.5) ** np.tanh(_normal(name, keys.shape, seed))
    tail = {"erase": (key_size,), "write": (value_size,)}.get(name, ())
    if name in ("channel_decay", "bounded_decay"):
        tail = (key_size,)
    noise = _normal(name, (*per_head, *tail), seed)
    if not name.endswith("decay"):
        return np.ones_like(noise) if repeats else _sigmoid(noise)
    if repeats:
        return np.zeros_like(noise)
    log_decay = _log_decay(noise)
    if name == "bounded_decay":  # what resets and extreme gates are for the others is the bound here
        hard = {"hard resets": noise > 2, "extreme gates": noise > 0}.get(case, np.zeros_like(noise, bool))
        return np.where(hard, np.float32(LEAST_LOG_DECAY), np.maximum(log_decay, np.float32(LEAST_LOG_DECAY)))
    if case == "hard resets":
        return np.where(noise > 2, np.float32(-1000), log_decay)
    if case == "extreme gates":
        return np.where(noise > 0, np.float32(-20), np.float32(0))
    return log_decay


def draw_segments(shape: Shape) -> np.ndarray:
    """Boundaries of packed documents of uneven lengths (single tokens among them): starts, and T last."""
    length = shape[1]
    random = np.random.default_rng(5)
    starts = np.unique(np.concatenate([[0, 1, 2], random.integers(0, length, max(1, length // 150))]))
    return np.append(starts[starts < length], length).astype(np.int32)


def segment_ids(shape: Shape) -> np.ndarray:
    """The same boundaries as ids `[B, T]` int32, equal in all rows."""
    bounds = draw_segments(shape)
    ids = np.repeat(np.arange(len(bounds) - 1, dtype=np.int32), np.diff(bounds))
    return np.broadcast_to(ids, shape[:2])


def compared_rows(shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    """Batch and head indices of the rows that are compared with the float64 scan, first and last among them."""
    batch, _, heads = shape[:3]
    chosen = np.unique(np.linspace(0, batch * heads - 1, 4).round().astype(int))
    return chosen // heads, chosen % heads


def take_rows(name: str, array: Any, shape: Shape) -> Any:
    """The compared rows of an array of any framework: `[R, T, 1, ...]`, or `[R, 1, K, V]` of a state."""
    b, h = compared_rows(shape)
    return array[b, h][:, None] if name in ("d_state", "final_state") else array[b, :, h][:, :, None]


def tile_shape(shape: Shape, tokens: int = 2048) -> Shape:
    """The part of `shape` that is drawn for timing, where the rest repeats it."""
    batch, length, *rest = shape
    length = min(length, tokens)
    return (max(1, min(batch, tokens // length)), length, *rest)  # type: ignore[return-value]


@functools.lru_cache(maxsize=64)
def draw_tile(name: str, tile: Shape) -> np.ndarray:
    """`draw` for timing, where many shapes share a tile."""
    return draw(name, tile)


def relative_errors(results: Iterable[tuple[str, np.ndarray, np.ndarray]]) -> dict[str, float | None]:
    """`||result - reference|| / ||reference||` in float64 by name; None where it is not finite."""
    errors: dict[str, float | None] = {}
    for name, result, reference in results:
        result, reference = np.asarray(result, np.float64), np.asarray(reference, np.float64)
        scale = float(np.linalg.norm(reference))
        error = float(np.linalg.norm(result - reference)) / (scale if scale > 0 else 1.0)
        errors[name] = float(f"{error:.3e}") if np.isfinite(error) else None
    return errors


Drawn = dict[tuple[str, Shape, str, int], np.ndarray]


def draw_all(keys: Iterable[tuple[str, Shape, str, int]]) -> Drawn:
    """`draw` for each of (name, shape, case, seed), on all cores."""
    unique = list(dict.fromkeys(keys))
    with concurrent.futures.ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        return dict(zip(unique, pool.map(lambda key: draw(*key), unique)))
