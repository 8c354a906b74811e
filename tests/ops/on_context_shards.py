"""Run by `test_context_parallel.py` in a process of its own with eight devices: prints relative errors, JSON.

Its arguments are names of operators.
Each case is rows whose tokens are split over all devices, against the same operator on whole rows in float64.
"""

import functools
import json
import os
import re
import sys
from unittest import mock

if __name__ == "__main__":  # before jax is imported
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from rnnlib import ops
from tests.ops.rules import relative_error

DEVICES, STRETCH = 8, 5
B, T, H, HV, K, V = 2, DEVICES * STRETCH, 2, 4, 8, 4


def tokens(random):
    """Random arguments by the names that operators have for them, `[B, T, ...]`."""

    def unit(*shape):
        x = random.standard_normal(shape)
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    return {
        "q": unit(B, T, H, K),
        "k": unit(B, T, H, K),
        "v": random.standard_normal((B, T, HV, V)),
        "beta": random.uniform(size=(B, T, HV)),
        "erase": random.uniform(size=(B, T, HV, K)),
        "write": random.uniform(size=(B, T, HV, V)),
        "write_key": unit(B, T, HV, K),
        "head_decay": -random.exponential(0.1, (B, T, HV)),
        "log_decay": -random.exponential(0.1, (B, T, HV, K)),
        "wide_q": unit(B, T, HV, K),
        "wide_k": unit(B, T, HV, K),
        "x": random.standard_normal((B, T, HV * K)),
    }


def shared(random):
    """Arguments that every device has whole."""
    return {
        "state": random.standard_normal((B, HV, K, V)),
        "gram": random.standard_normal((B, HV, K, K)),
        "gram_diagonal": random.uniform(size=(B, HV, K)),
        "tail": random.standard_normal((B, 3, HV * K)),
        "kernel": random.standard_normal((4, HV * K)),
        "scale": np.asarray(0.3),
    }


def documents(random):
    """Ids of packed rows: documents that begin at a boundary, beside it, within a shard, and that fill several."""
    starts = random.uniform(size=(B, T)) < random.choice([0.02, 0.1, 0.4])
    starts[0, [STRETCH, 2 * STRETCH + 1, 3 * STRETCH - 1]] |= random.uniform(size=3) < 0.7
    # Two documents of one row may have the same id.
    return (np.cumsum(starts, axis=1) % 3).astype(np.int32)


# What devices exchange does not depend on the implementation: the scan compiles fastest.
SCAN = {"implementation": "scan"}


def rule(a, ids, **options):
    options |= {"initial_state": a["state"], "scale": a["scale"], "segment_ids": ids}
    return ops.gated_delta_rule(a["q"], a["k"], a["v"], beta=a["beta"], log_decay=a["head_decay"], **options)


def rule_with_all_gates(a, ids):
    gates = {name: a[name] for name in ("erase", "write", "write_key", "log_decay")}
    return ops.gated_delta_rule(a["q"], a["k"], a["v"], **gates, initial_state=a["state"], segment_ids=ids, **SCAN)


def linear_attention(a, ids):
    gates = {name: a[name] for name in ("write", "log_decay")}
    return ops.linear_attention(a["q"], a["k"], a["v"], **gates, initial_state=a["state"], segment_ids=ids, **SCAN)


def dplr(a, ids):
    vectors = {"a": a["write_key"], "b": 0.5 * a["write_key"], "log_decay": a["log_decay"]}
    return ops.dplr(a["q"], a["k"], a["v"], **vectors, initial_state=a["state"], segment_ids=ids, **SCAN)


def ridge_solve(a, ids):
    gram = a["gram"] @ jnp.swapaxes(a["gram"], -1, -2)
    options = {"log_decay": a["head_decay"], "initial_gram": gram, "segment_ids": ids, "iterations": 4}
    return ops.ridge_solve(a["wide_q"], a["wide_k"], **options)


def attention(value_heads, **options):
    """A shard has 5 tokens: a window of up to 6 reads the device before, a longer one all of them."""

    def call(a, ids):
        return (ops.causal_attention(a["wide_q"], a["k"], a["v"][:, :, :value_heads], segment_ids=ids, **options),)

    return call


def attention_by_queries(a, ids):
    with mock.patch.object(sys.modules[ops.causal_attention.__module__], "_QUERIES", 1):
        return attention(H)(a, ids)


OPERATORS = {
    "gated_delta_rule": functools.partial(rule, **SCAN),
    "float32": rule,
    "all gates": rule_with_all_gates,
    "wider than kernels, whole documents": lambda a, ids: ops.gated_delta_rule(
        a["q"], a["k"], jnp.tile(a["v"], 64), write=jnp.tile(a["write"], 64), **SCAN
    ),
    "linear_attention": linear_attention,
    "dplr": dplr,
    "short_convolution": lambda a, ids: ops.short_convolution(
        a["x"], a["kernel"], initial_state=a["tail"], activation="silu", norm_size=K, segment_ids=ids
    ),
    "precondition_key": lambda a, ids: ops.precondition_key(
        a["wide_k"], log_decay=a["log_decay"], segment_ids=ids, **SCAN
    )[1:],
    "sherman_morrison_key": lambda a, ids: ops.sherman_morrison_key(
        a["wide_k"], gain=a["beta"], initial_state=a["gram_diagonal"], segment_ids=ids, **SCAN
    ),
    "ridge_solve": ridge_solve,
    "causal_attention": attention(H),
    "attention, a query at a time": attention_by_queries,
    "window": attention(H, window=4),
    "wide window": attention(H, window=13),
}
# Other arguments of operators that are here already.
SLOW = ("float32", "wider than kernels, whole documents", "attention, a query at a time", "wide window")


def results_of(operator, arguments, common, ids):
    """Results, and the gradients of a number that depends on every entry of them."""

    def loss(arguments, common):
        out, *final = operator({**arguments, **common}, ids)
        return sum(jnp.sum(jnp.sin(1.3 * y + 0.3)) for y in (out, *final)), [out, final]

    return jax.grad(loss, argnums=(0, 1), has_aux=True)(arguments, common)


@functools.cache
def on_whole_rows(operator):
    return jax.jit(functools.partial(results_of, operator))


def split(mesh, operator, check_vma):
    """`results_of` on shards: each device's loss is that of its own outputs, and of an eighth of the final state."""
    over = P(None, "context")

    def loss_and_results(arguments, common, ids):
        def loss(arguments, common):
            with ops.context_axis("context"):
                out, *final = operator({**arguments, **common}, ids)
            own = jnp.sum(jnp.sin(1.3 * out + 0.3))
            last = sum(jnp.sum(jnp.sin(1.3 * y + 0.3)) for y in final) / lax.axis_size("context")
            return lax.psum(own + last, "context") if check_vma else own + last, [out, final]

        (gradients, common_gradients), results = jax.grad(loss, argnums=(0, 1), has_aux=True)(arguments, common)
        if not check_vma:  # with it, JAX sums the gradient of what devices share
            common_gradients = lax.psum(common_gradients, "context")
        return (gradients, common_gradients), results

    return jax.jit(
        jax.shard_map(
            loss_and_results,
            mesh=mesh,
            in_specs=(over, P(), over),
            out_specs=((over, P()), [over, P()]),
            check_vma=check_vma,
        )
    )


def exchanged(mesh, operator, shard):
    """Of the compiled gradient: the results of its collectives, as text, where a device has `shard` tokens."""
    random = np.random.default_rng(0)
    arguments = {name: x[:, :1].repeat(shard * DEVICES, axis=1) for name, x in tokens(random).items()}
    ids = np.zeros((B, shard * DEVICES), np.int32)
    over, whole = (NamedSharding(mesh, spec) for spec in (P(None, "context"), P()))
    given = jax.device_put((arguments, shared(random), ids), (over, whole, over))
    text = split(mesh, operator, False).lower(*given).compile().as_text()
    kinds = "all-gather|all-reduce|collective-permute|all-to-all|reduce-scatter"
    return sorted(re.findall(rf"= (\S.*?) ((?:{kinds})(?:-start)?)\(", text))


def main(names):
    jax.config.update("jax_enable_x64", True)
    mesh = jax.make_mesh((DEVICES,), ("context",))
    errors = {}
    for number, (name, operator) in enumerate(OPERATORS.items()):
        if name not in names:
            continue
        dtype = jnp.float32 if name == "float32" else jnp.float64
        whole = on_whole_rows(operator)
        shards = split(mesh, operator, check_vma=number % 2 == 0)
        errors[name] = 0.0
        for seed in range(4):
            random = np.random.default_rng(seed)
            given = [{n: np.asarray(x, dtype) for n, x in f(random).items()} for f in (tokens, shared)]
            ids = documents(random)
            own, ids_of_own = jax.device_put((given[0], ids), NamedSharding(mesh, P(None, "context")))
            everywhere = jax.device_put(given[1], NamedSharding(mesh, P()))
            expected = whole(*jax.tree.map(lambda x: x.astype(np.float64), given), jnp.asarray(ids))
            found = jax.tree.map(
                functools.partial(relative_error, smallest=1e-30), shards(own, everywhere, ids_of_own), expected
            )
            errors[name] = max(errors[name], *jax.tree.leaves(found))

    def layer(a, ids):
        """All that a preconditioned mixer exchanges."""
        x = ops.short_convolution(a["x"], a["kernel"], segment_ids=ids)[0].reshape(a["wide_k"].shape)
        k, write_key, _ = ops.precondition_key(x, log_decay=a["head_decay"], segment_ids=ids, **SCAN)
        return ops.gated_delta_rule(k, k, a["v"], write_key=write_key, beta=a["beta"], segment_ids=ids, **SCAN)

    traffic = [exchanged(mesh, layer, shard) for shard in (8, 16)]
    print(json.dumps({"errors": errors, "traffic": traffic}))


if __name__ == "__main__":
    main(sys.argv[1:])
