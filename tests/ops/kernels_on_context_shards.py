"""Run by `test_context_parallel.py` in a process of its own with three devices: prints relative errors, JSON.

Its arguments are names of operators. Kernels are interpreted on rows whose tokens are split over the devices, against
the same operator token by token on whole rows in float64. A shard has three chunks in two segments, or a part of one.
"""

import functools
import json
import os
import sys

if __name__ == "__main__":  # before jax is imported
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=3"

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.short_convolution.branch import ConvolutionBranch, Epilogue
from rnnlib import ops
from rnnlib.ops.short_convolution.fused import fused_convolutions
from tests.ops.rules import relative_error

DEVICES = 3
B, H, HV, K, V = 2, 1, 2, 16, 32


def tokens(random, length):
    """Random arguments by the names that operators have for them, `[B, T, ...]`."""

    def unit(*shape):
        x = random.standard_normal(shape)
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    return {
        "q": unit(B, length, H, K),
        "k": unit(B, length, H, K),
        "v": random.standard_normal((B, length, HV, V)),
        "beta": random.uniform(size=(B, length, HV)),
        "erase": random.uniform(size=(B, length, HV, K)),
        "write": random.uniform(size=(B, length, HV, V)),
        "gate": random.uniform(size=(B, length, HV)),
        "diagonal": random.uniform(size=(B, length, HV)),
        "write_key": unit(B, length, HV, K),
        "decay": -random.exponential(0.02, (B, length, HV)),
        "channel_decay": -random.exponential(0.02, (B, length, HV, K)),
        "strong_decay": -random.exponential(1.0, (B, length, HV, K)),
    }


def rule(*names, decay=None, beta=True, operator=ops.gated_delta_rule):
    def call(a, state, ids, implementation):
        options = {"write" if name == "gate" else name: a[name] for name in names}
        options |= {"beta": a["beta"]} if beta else {}
        if decay is not None:
            options["log_decay"] = a[decay]
        options |= {"segment_ids": ids, "implementation": implementation}
        return operator(a["q"], a["k"], a["v"], initial_state=state, **options)

    return call


def dplr(least_log_decay):
    def call(a, state, ids, implementation):
        vectors = {"a": a["write_key"], "b": 0.5 * a["write_key"], "log_decay": jnp.maximum(a["channel_decay"], -1.5)}
        options = {"segment_ids": ids, "implementation": implementation, "least_log_decay": least_log_decay}
        return ops.dplr(a["q"], a["k"], a["v"], **vectors, initial_state=state, **options)

    return call


def filters(width, channels):
    return jnp.cos(jnp.arange(width * channels, dtype=jnp.float32)).reshape(width, channels)


def convolutions(a, state, ids, implementation):
    """Of values, of queries and keys, whose columns lie side by side; the initial state gives the tokens before."""
    wide, narrow = (jnp.concatenate(x, axis=2).reshape(*x[0].shape[:2], -1) for x in ((a["v"],), (a["q"], a["k"])))
    before = jnp.moveaxis(state, 2, 1).reshape(B, K, -1)
    streams = [
        ConvolutionBranch(filters(width, x.shape[2]), None, past, Epilogue("silu"))
        for width, x, past in ((4, wide, before[:, :3]), (3, narrow, before[:, 3:5, : narrow.shape[2]]))
    ]
    if implementation == "triton":
        x = jnp.concatenate((wide, narrow), axis=2)
        results, _ = fused_convolutions(x, streams, segment_ids=ids)
    else:
        results = [
            ops.short_convolution(x, s.kernel, initial_state=s.initial_state, segment_ids=ids, activation="silu")
            for x, s in zip((wide, narrow), streams)
        ]
    outs, lasts = zip(*results)
    return jnp.concatenate(outs, axis=2), jnp.concatenate([x.reshape(B, -1) for x in lasts], axis=1)


def convolution(a, state, ids, implementation):
    x, before = a["v"].reshape(*a["v"].shape[:2], -1), jnp.moveaxis(state, 2, 1).reshape(B, K, -1)
    options = {"initial_state": before[:, :3], "segment_ids": ids, "implementation": implementation}
    return ops.short_convolution(x, filters(4, x.shape[2]), **options)


OPERATORS = {
    "no decay": rule(),
    "decay": rule(decay="decay"),
    "all gates": rule("erase", "write", "write_key", decay="channel_decay", beta=False),
    "strong decay": rule(decay="strong_decay"),
    "dplr": dplr(-1.5),
    "dplr, two steps": dplr(-5.0),
    "convolution": convolution,
    "convolutions side by side": convolutions,
    "linear attention": rule(beta=False, operator=ops.linear_attention),
    "linear attention, decay": rule("diagonal", decay="decay", beta=False, operator=ops.linear_attention),
    "linear attention, gates": rule("gate", "diagonal", decay="decay", beta=False, operator=ops.linear_attention),
    "linear attention, decay by channel": rule(decay="channel_decay", beta=False, operator=ops.linear_attention),
}


def loss_of(out, final, part):
    return jnp.sum(jnp.sin(1.3 * out + 0.3)) + part * jnp.sum(jnp.sin(1.3 * final + 0.3))


def on_whole_rows(operator):
    def loss(arguments, state, ids):
        results = operator(arguments, state, ids, "chunked")
        return loss_of(*results, 1.0), results

    return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))


def split(mesh, operator):
    """The same on shards: each device's loss is that of its own outputs, and of its part of the final state."""
    over = P(None, "context")

    def on_shard(arguments, state, ids):
        def loss(arguments, state):
            with ops.context_axis("context"):
                results = operator(arguments, state, ids, "triton")
            return loss_of(*results, 1 / DEVICES), results

        (gradients, d_state), results = jax.grad(loss, argnums=(0, 1), has_aux=True)(arguments, state)
        return (gradients, lax.psum(d_state, "context")), results

    in_specs, out_specs = (over, P(), over), ((over, P()), (over, P()))
    # The interpreter of kernels asks for `check_vma=False`.
    return jax.jit(jax.shard_map(on_shard, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))


def error(mesh, name, shard):
    """The largest relative error of results and gradients, where a device has `shard` tokens of packed rows."""
    random, length = np.random.default_rng(len(name)), shard * DEVICES
    starts = random.uniform(size=(B, length)) < 0.005
    starts[0] = False
    starts[0, [shard, 2 * shard + 1]] = True  # a document that begins with a shard, and one that crosses shards
    ids = np.cumsum(starts, axis=1).astype(np.int32)
    arguments, state = tokens(random, length), random.standard_normal((B, HV, K, V))
    expected = on_whole_rows(OPERATORS[name])(arguments, state, ids)
    narrow = jax.tree.map(lambda x: np.asarray(x, np.float32), (arguments, state))
    over, whole = (NamedSharding(mesh, spec) for spec in (P(None, "context"), P()))
    given = *jax.device_put(narrow, (over, whole)), jax.device_put(ids, over)
    found = split(mesh, OPERATORS[name])(*given)
    errors = jax.tree.map(functools.partial(relative_error, smallest=1e-30), found, expected)
    return max(jax.tree.leaves(errors))


def main(names):
    jax.config.update("jax_enable_x64", True)
    mesh = jax.make_mesh((DEVICES,), ("context",))
    cases = [(name, shard) for name in names for shard in (192, 40)]
    print(json.dumps({f"{name}, {shard}": error(mesh, name, shard) for name, shard in cases}))


if __name__ == "__main__":
    main(sys.argv[1:])
