"""Prints which kernels write float8 arrays in a loop of float8 products, compiled for an H200 without a card.

Run by `test_float8.py` in a process of its own, since a described card needs variables of the environment.
"""

import json
import re

import jax
import jax.numpy as jnp

from experiments.kernel_benchmarks.offline.cards import CARDS
from rnnlib.ops.float8 import float8_product
from rnnlib.training.loop_invariants import hoist

ROWS, SIZES = (2, 2048), (1024, 2048)


def gradients(kernel, x):
    """Of a map between two functions of numbers."""

    def loss(kernel, x):
        y = float8_product(jnp.sin(x), kernel.astype(x.dtype), (((2,), (0,)), ((), ())))
        return jnp.sum(jnp.sin(y.astype(jnp.float32)))

    return jax.grad(loss, argnums=(0, 1))(kernel, x)


def accumulated(kernel, parts):
    """The sum of the kernel's gradients over parts, as in a training step, and the parts' own gradients."""
    before, turn = hoist(gradients, kernel, jax.ShapeDtypeStruct(parts.shape[1:], parts.dtype))
    values = before(kernel)

    def add_part(total, x):
        d_kernel, d_x = turn(values, kernel, x)
        return total + d_kernel, d_x

    return jax.lax.scan(add_part, jnp.zeros_like(kernel), parts)


def main() -> None:
    """Prints a list for each kernel in the loop that writes float8: shapes of all that it writes."""
    sharding, mesh = CARDS["sm_90"].alone()
    arguments = (
        jax.ShapeDtypeStruct(SIZES, jnp.float32, sharding=sharding),
        jax.ShapeDtypeStruct((4, *ROWS, SIZES[0]), jnp.bfloat16, sharding=sharding),
    )
    with jax.sharding.use_abstract_mesh(mesh):
        text = jax.jit(accumulated).trace(*arguments).lower(lowering_platforms=("cuda",)).compile().as_text()
    match = re.search(r" while\(.*body=%?([\w.\-]+)", text)
    assert match is not None
    body = text[text.index(f"\n%{match[1]} ") :]
    body = body[: body.index("\n}")]
    results = re.findall(r" = (\([^=]*?\)|\S+) (?:fusion|copy|transpose|custom-call)\(", body)
    written = [re.findall(r"f8\w+\[[\d,]*\]", shapes) for shapes in results]
    print(json.dumps([shapes for shapes in written if shapes]))


if __name__ == "__main__":
    main()
