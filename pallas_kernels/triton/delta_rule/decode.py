"""One token: the recurrence itself, in one kernel that reads the state once and writes it once.

The new state is written over the old one. A loop that carries the state, or a step that it is donated to, needs no
copy; XLA copies the old state first for a caller who keeps it.
"""

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.problem import Inputs
from pallas_kernels.schedule import Launch
from pallas_kernels.triton.common.backend import call
from pallas_kernels.triton.common.problem import Problem
from pallas_kernels.triton.delta_rule.chunk_factors import load_wide


def _decode_kernel(r, *, problem: Problem, width: int, continues: bool):
    fresh = (problem.key_size, width)  # [K, block of V]
    state = r.before_final_state[...] if continues else jnp.zeros(fresh, jnp.float32)
    decay = load_wide(r.log_decay)
    if decay is not None:
        state = state * (jnp.exp(decay) if decay.ndim == 0 else jnp.exp(decay)[:, None])
    k = load_wide(r.k)
    key = k if r.write_key is None else load_wide(r.write_key)
    residual = load_wide(r.v)
    if r.write is not None:
        residual = residual * load_wide(r.write)
    if problem.online:
        erased = k if r.erase is None else k * load_wide(r.erase)
        residual = residual - jnp.sum(state * erased[:, None], axis=0)
    state = state + key[:, None] * residual[None, :]
    out = jnp.sum(state * load_wide(r.q)[:, None], axis=0)
    r.out[...] = (problem.scale * out).astype(r.out.dtype)
    r.final_state[...] = state


def decode(problem: Problem, inputs: Inputs, launch: Launch) -> tuple[Array, Array]:
    """Output `[B, 1, HV, V]` and state `[B, HV, K, V]` after one token; sizes are powers of two."""
    p, x = problem, inputs
    width = min(launch.block, p.value_size)

    def at_key(c, h, b):
        return b, 0, h, 0

    def at_value(c, h, b):
        return b, 0, h, c

    def of_state(array):
        return p.of_head(array, (p.key_size, width), lambda c, h, b: (b, h, 0, c))

    state = None if x.initial_state is None else of_state(x.initial_state.astype(jnp.float32))
    updates = {} if state is None else {"final_state": state}
    final = p.per_head(p.key_size, p.value_size, dtype=jnp.float32)
    results = call(
        _decode_kernel,
        "delta_decode",
        (p.value_size // width, p.value_heads, p.batch),
        {
            "q": p.of_one_token(x.q, at_key),
            "k": p.of_one_token(x.k, at_key),
            "write_key": p.of_one_token(x.write_key, at_key),
            "erase": p.of_one_token(x.erase, at_key),
            "log_decay": p.of_one_token(x.log_decay, at_key),
            "v": p.of_one_token(x.v, at_value, width),
            "write": p.of_one_token(x.write, at_value, width),
        },
        {
            "out": p.of_one_token(jax.ShapeDtypeStruct(x.v.shape, x.v.dtype), at_value, width),
            "final_state": of_state(final),
        },
        launch,
        updates=updates,
        problem=p,
        width=width,
        continues=x.initial_state is not None,
    )
    return results["out"], results["final_state"]  # type: ignore[return-value]
