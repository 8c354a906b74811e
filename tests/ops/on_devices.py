"""Run by `test_sharding.py` in a process of its own, which has four devices: prints relative errors, JSON."""

import functools
import json
import os

if __name__ == "__main__":  # before jax is imported
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from rnnlib import ops
from rnnlib.layers import Experts
from rnnlib.models import DecoderLM, ModelConfig
from rnnlib.ops.sharding import is_split
from tests.ops.rules import relative_error

B, T, H, HV, K = 4, 20, 2, 4, 8
MODELS = ("pkda", "gated_kalmanet", "mamba3", "sliding_window_attention")


def arguments():
    """Random arguments by the names that operators have for them, and each one's axes of rows and heads."""
    random = np.random.default_rng(0)

    def unit(*shape):
        x = random.standard_normal(shape)
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    tokens = {
        "q": unit(B, T, H, K),
        "k": unit(B, T, H, K),
        "v": random.standard_normal((B, T, HV, K)),
        "beta": random.uniform(size=(B, T, HV)),
        "log_decay": -random.exponential(0.1, (B, T, HV, K)),
        "head_decay": -random.exponential(0.1, (B, T, HV)),
        "wide_q": unit(B, T, HV, K),
        "wide_k": unit(B, T, HV, K),
    }
    x = {name: (value, ("rows", None, "heads")) for name, value in tokens.items()}
    x["x"] = random.standard_normal((B, T, HV * K)), ("rows", None, "heads")
    x["kernel"] = random.standard_normal((4, HV * K)), (None, "heads")
    x["center"] = random.standard_normal(HV), (None,)  # whole: the operator takes each device's part
    x["state"] = random.standard_normal((B, HV, K, K)), ("rows", "heads")
    return {name: (jnp.asarray(value, jnp.float32), axes) for name, (value, axes) in x.items()}


IDS = jnp.asarray(np.arange(T) // 7 + np.arange(B)[:, None] * 9, jnp.int32)

OPERATORS = {
    "gated_delta_rule": lambda a: ops.gated_delta_rule(
        a["q"], a["k"], a["v"], beta=a["beta"], log_decay=a["log_decay"], initial_state=a["state"], segment_ids=IDS
    ),
    "linear_attention": lambda a: ops.linear_attention(a["q"], a["k"], a["v"], scale=jnp.sum(a["center"])),
    "ridge_solve": lambda a: ops.ridge_solve(a["wide_q"], a["wide_k"], log_decay=a["head_decay"]),
    "precondition_key": lambda a: ops.precondition_key(a["wide_k"], log_decay=a["log_decay"], center=a["center"]),
    "precondition_query": lambda a: ops.precondition_query(a["wide_q"], a["wide_k"], gain=a["beta"]),
    "sherman_morrison_key": lambda a: ops.sherman_morrison_key(a["wide_k"], log_decay=a["head_decay"]),
    "exact_preconditioner": lambda a: ops.exact_preconditioner(a["wide_q"], a["wide_k"], gain=a["beta"]),
    "dplr": lambda a: ops.dplr(a["q"], a["k"], a["v"], a=-a["k"], b=a["k"]),
    "short_convolution": lambda a: ops.short_convolution(a["x"], a["kernel"], activation="silu", norm_size=K),
    "row by row": lambda a: jax.vmap(lambda *x: ops.gated_delta_rule(*(y[None] for y in x)))(a["q"], a["k"], a["v"]),
    "causal_attention": lambda a: ops.causal_attention(a["wide_q"], a["k"], a["k"], window=5),
}


def largest_error(function, whole, split):
    """Of value and gradients between arrays that are whole and the same ones split over devices."""
    run, error = jax.jit(jax.value_and_grad(function)), functools.partial(relative_error, smallest=1e-30)
    return max(jax.tree.leaves(jax.tree.map(error, run(*split), run(*whole))))


def by_heads(path, weight):
    """Which axis of a weight goes with heads, or with a feed-forward block's channels: the last one, mostly."""
    names = {str(name) for name in path}
    if weight.ndim == 3 or "router" in names:  # of experts, which each device has
        return P()
    if not names & {"mixer", "feed_forward"} or names & {"norm", "feed_forward_norm", "latent", "latent_norm"}:
        return P()
    if "output" in names or {"feed_forward", "down"} <= names:
        return P(*(None,) * (weight.ndim - 2), "model", None)
    return P() if "down" in names else P(*(None,) * (weight.ndim - 1), "model")


def main():
    mesh = jax.make_mesh((2, 2), ("data", "model"))
    errors = {}
    for name, operator in OPERATORS.items():

        def loss(a, operator=operator):
            return sum(jnp.sum(jnp.sin(1.3 * y)) for y in jax.tree.leaves(operator(a)))

        given, over = arguments(), {"rows": "data", "heads": "model"}
        whole = {key: value for key, (value, _) in given.items()}
        split = {
            key: jax.device_put(value, NamedSharding(mesh, P(*(over.get(axis) for axis in axes))))
            for key, (value, axes) in given.items()
        }
        errors[name] = largest_error(loss, (whole,), (split,))
    for name in MODELS:
        config = ModelConfig(
            vocabulary_size=32,
            width=16,
            num_layers=2,
            num_heads=2,
            mixers=(name, "latent_attention") if name == "sliding_window_attention" else name,
            window=8,
            scan_layers=name == "pkda",
            feed_forwards=Experts(4, 2, 8, shared_width=8) if name == "sliding_window_attention" else "dense",
        )
        graph, parameters = nnx.split(DecoderLM(config, rngs=nnx.Rngs(0)))
        rows = jax.random.randint(jax.random.key(0), (4, 17), 0, 32)
        ids = jnp.cumsum(rows % 5 == 0, axis=1)

        def loss_of_model(parameters, rows, ids, graph=graph):
            logits = nnx.merge(graph, parameters)(rows[:, :-1], segment_ids=ids[:, :-1])
            return -jnp.take_along_axis(jax.nn.log_softmax(logits), rows[:, 1:, None], axis=-1).mean()

        by_rows = [jax.device_put(x, NamedSharding(mesh, P("data"))) for x in (rows, ids)]
        placed = nnx.map_state(
            # One key head serves all value heads of Mamba-3, whose weights each device has.
            lambda path, x: x.replace(
                jax.device_put(x[...], NamedSharding(mesh, P() if name == "mamba3" else by_heads(path, x[...])))
            ),
            parameters,
        )
        assert any(map(is_split, jax.tree.leaves(placed))) == (name != "mamba3")
        errors[name] = largest_error(loss_of_model, (parameters, rows, ids), (placed, *by_rows))
    print(json.dumps(errors))


if __name__ == "__main__":
    main()
