"""A run of ours: optax's AdamW on what both libraries get."""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from experiments.beside_fla.material import Material
from experiments.beside_fla.study import FLOAT32, ORDERS, REORDERED
from rnnlib.hub import load_pretrained


def row_order(arm: str, count: int) -> np.ndarray:
    """The places of a batch's rows in a run: as they are, turned around, or shuffled by the order's number."""
    if arm in ORDERS:
        return np.random.default_rng(1 + ORDERS.index(arm)).permutation(count)
    return np.arange(count)[:: -1 if arm == REORDERED else 1]


def train(material: Material, arm: str) -> dict[str, Any]:
    """Losses (nats) and gradient norms before clipping of each step, and the trained model's held-out loss.

    With rows in another order (`row_order`) the sums over a batch's rows change by their rounding alone.
    """
    pretrained = load_pretrained(
        material.weights, dtype="float32" if arm == FLOAT32 else "bfloat16", param_dtype="float32"
    )
    graph, params = nnx.split(pretrained.model)
    rates = jnp.asarray(np.load(material.rates), jnp.float32)
    adamw = optax.adamw(lambda step: rates[step], b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    state = optimizer.init(params)

    def loss_of(params: Any, rows: jax.Array) -> jax.Array:
        logits = nnx.merge(graph, params)(rows[:, :-1]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:]).mean()

    @jax.jit
    def step(params: Any, state: Any, rows: jax.Array) -> tuple[Any, Any, jax.Array, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(params, rows)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss, optax.tree.norm(gradients)

    begin = time.monotonic()
    losses, norms = [], []
    with jax.default_matmul_precision("highest" if arm == FLOAT32 else "default"):
        every = np.load(material.rows)
        for rows in every[:, row_order(arm, every.shape[1])]:
            params, state, loss, norm = step(params, state, rows)
            losses.append(loss)
            norms.append(norm)
        tested = jax.jit(loss_of)
        held_out = [float(tested(params, rows)) for rows in np.load(material.held_out)]
    return {
        "losses": [round(float(loss), 6) for loss in losses],
        "gradient_norms": [round(float(norm), 6) for norm in norms],
        "held_out": sum(held_out) / len(held_out),
        "seconds": round(time.monotonic() - begin, 1),
    }
