"""One token: the recurrence itself, in one kernel that reads the state once and writes it once.

The new state is written over the old one. A loop that carries the state, or a step that it is donated to, needs no
copy; XLA copies the old state first for a caller who keeps it. `decode_delayed` has the step that seldom writes the
state.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.common.config import KernelConfig
from pallas_kernels.common.triton.backend import Operand, call, product
from pallas_kernels.common.triton.kernel_shape import KernelShape
from pallas_kernels.delta_rule.inputs import Inputs
from pallas_kernels.delta_rule.triton.wy import load_wide


class Write(NamedTuple):
    """What a token does to the state: `S <- Diag(decay) S + key value^T`.

    Attributes:
        decay: a number, `[K]` or None.
        key: `[K]`.
        value: `[block of V]`.
    """

    decay: Array | None
    key: Array
    value: Array


def decayed(state: Array, decay: Array | None) -> Array:
    """The state `[K, block of V]` times a decay, one number or one a key channel; None is none."""
    if decay is None:
        return state
    return product(state, decay if decay.ndim == 0 else decay[:, None])


def written(state: Array, key: Array, value: Array) -> Array:
    """The state with `key value^T` added."""
    return state + product(key[:, None], value[None, :])


class Token(NamedTuple):
    """What a program reads of a token, in float32; None for what there is not. `v`, `write` are of its value block."""

    q: Array
    k: Array
    write_key: Array | None
    erase: Array | None
    log_decay: Array | None
    v: Array
    write: Array | None


def load_token(r) -> Token:
    """The token. It is loaded before the state: a program that loads it behind waits for memory twice."""
    return Token(*(load_wide(getattr(r, name)) for name in Token._fields))


def token_step(r, token: Token, state: Array, kernel_shape: KernelShape) -> tuple[Array, Write]:
    """Stores the output of the token in `r`; returns the state `[K, block of V]` after it, and what it wrote."""
    decay = None if token.log_decay is None else jnp.exp(token.log_decay)
    state = decayed(state, decay)
    key = token.k if token.write_key is None else token.write_key
    residual = token.v if token.write is None else token.v * token.write
    if kernel_shape.online:
        erased = token.k if token.erase is None else token.k * token.erase
        residual = residual - jnp.sum(state * erased[:, None], axis=0)
    state = written(state, key, residual)
    out = jnp.sum(state * token.q[:, None], axis=0)
    r.out[...] = (kernel_shape.scale * out).astype(r.out.dtype)
    return state, Write(decay, key, residual)


def _decode_kernel(r, *, kernel_shape: KernelShape, width: int, continues: bool):
    token, fresh = load_token(r), (kernel_shape.key_size, width)  # [K, block of V]
    state = r.before_final_state[...] if continues else jnp.zeros(fresh, jnp.float32)
    r.final_state[...], _ = token_step(r, token, state, kernel_shape)


def token_operands(p: KernelShape, x: Inputs, width: int) -> tuple[dict[str, Operand | None], Operand]:
    """What `load_token` reads and the output that `token_step` stores, on a grid of value blocks, heads and rows."""

    def at_key(c, h, b):
        return b, 0, h, 0

    def at_value(c, h, b):
        return b, 0, h, c

    inputs = {
        "q": p.of_one_token(x.q, at_key),
        "k": p.of_one_token(x.k, at_key),
        "write_key": p.of_one_token(x.write_key, at_key),
        "erase": p.of_one_token(x.erase, at_key),
        "log_decay": p.of_one_token(x.log_decay, at_key),
        "v": p.of_one_token(x.v, at_value, width),
        "write": p.of_one_token(x.write, at_value, width),
    }
    out = p.of_one_token(jax.ShapeDtypeStruct(x.v.shape, x.v.dtype), at_value, width)
    assert out is not None
    return inputs, out


def decode(kernel_shape: KernelShape, inputs: Inputs, launch: KernelConfig) -> tuple[Array, Array]:
    """Output `[B, 1, HV, V]` and state `[B, HV, K, V]` after one token; sizes are powers of two."""
    p, x = kernel_shape, inputs
    width = min(launch.block, p.value_size)

    def of_state(array):
        return p.of_head(array, (p.key_size, width), lambda c, h, b: (b, h, 0, c))

    state = None if x.initial_state is None else of_state(x.initial_state.astype(jnp.float32))
    arguments, out = token_operands(p, x, width)
    final = p.per_head(p.key_size, p.value_size, dtype=jnp.float32)
    results = call(
        _decode_kernel,
        "delta_decode",
        (p.value_size // width, p.value_heads, p.batch),
        arguments,
        {"out": out, "final_state": of_state(final)},
        launch,
        updates={} if state is None else {"final_state": state},
        kernel_shape=p,
        width=width,
        continues=x.initial_state is not None,
    )
    return results["out"], results["final_state"]  # type: ignore[return-value]
