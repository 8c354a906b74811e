"""Feed-forward experts: each token goes through the few experts chosen for it, and no token is dropped."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int

from rnnlib.ops.arguments import check_array, check_rank, check_shape, floating_arrays
from rnnlib.ops.sharding import mesh_of

_NAME = "expert_mixture"


def expert_mixture(
    x: Float[Array, "B T M"],
    choices: Int[Array, "B T S"],
    weights: Float[Array, "B T S"],
    gate: Float[Array, "E M F"] | None,
    up: Float[Array, "E M F"],
    down: Float[Array, "E F M"],
    *,
    activation: Callable[[Array], Array] = jax.nn.silu,
) -> Float[Array, "B T M"]:
    """`sum_s weights_s * down_e (silu(gate_e x) * up_e x)` over a token's experts `e = choices_s`.

    Without `gate` an expert is `down_e silu(up_e x)`.

    Tokens are sorted by expert, and each expert multiplies its own tokens (`jax.lax.ragged_dot`). Experts have no
    capacity limit, so no token is dropped. Products are in `x`'s dtype; the sum over experts is in float32 or wider.

    Args:
        x: activations.
        choices: the S different experts of each token, as indices in `[0, E)`.
        weights: the factor on each chosen expert's output.
        gate: E matrices from M channels to F, whose products go through `activation`; None for experts without.
        up: E matrices from M channels to F.
        down: E matrices from F channels to M.
        activation: of the gate's products, or of `up`'s without a gate; SiLU by default.

    Returns:
        The sum `[B, T, M]` in `x`'s dtype.

    Raises:
        ValueError: a shape is none of those above.
        TypeError: an array is not floating, or `choices` is not of integers.
    """
    x, weights, gate, up, down = floating_arrays(_NAME, x=x, weights=weights, gate=gate, up=up, down=down)
    check_rank(_NAME, "x", x, 3, axes="[B, T, M]")
    name, first = ("up", up) if gate is None else ("gate", gate)
    check_rank(_NAME, name, first, 3, axes="[E, M, F]")
    check_array(_NAME, "choices", choices)
    if not jnp.issubdtype(choices.dtype, jnp.integer):
        raise TypeError(f"{_NAME}: choices has dtype {choices.dtype}, expected an integer dtype")
    batch, length, width = x.shape
    experts, _, hidden = first.shape
    check_rank(_NAME, "choices", choices, 3, axes="[B, T, S]")
    chosen = choices.shape[2]
    check_shape(_NAME, "choices", choices, (batch, length, chosen), axes="[B, T, S]")
    check_shape(_NAME, "weights", weights, (batch, length, chosen), axes="[B, T, S]")
    check_shape(_NAME, name, first, (experts, width, hidden), axes="[E, M, F]")
    check_shape(_NAME, "up", up, (experts, width, hidden), axes="[E, M, F]")
    check_shape(_NAME, "down", down, (experts, hidden, width), axes="[E, F, M]")

    arrays = (x, choices, weights, up, down) + (() if gate is None else (gate,))
    mixture = functools.partial(_mixture, activation)
    sharding = jax.typeof(x).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return mixture(*arrays)
    # Sorting and ragged products have no sharding rules for Explicit axes: each device runs all experts on its rows.
    mesh, rows = mesh_of(x), P(sharding.spec[0])
    specs = (rows,) * 3 + (P(),) * (len(arrays) - 3)
    own = [jax.sharding.reshard(jnp.asarray(y), NamedSharding(mesh, spec)) for y, spec in zip(arrays, specs)]
    return jax.shard_map(mixture, mesh=mesh, in_specs=specs, out_specs=rows)(*own)


def _mixture(
    activation: Callable[[Array], Array],
    x: Array,
    choices: Array,
    weights: Array,
    up: Array,
    down: Array,
    gate: Array | None = None,
) -> Array:
    batch, length, chosen = choices.shape
    width, experts = x.shape[-1], up.shape[0]
    flat = choices.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    # Counts by comparison: counting by index is a scatter-add, which a GPU runs element by element.
    sizes = jnp.sum(flat[:, None] == jnp.arange(experts), axis=0, dtype=jnp.int32)
    rows = _permuted(jnp.repeat(x.reshape(-1, width), chosen, axis=0), order)

    def product(rows: Array, matrices: Array) -> Array:
        return jax.lax.ragged_dot(rows, matrices.astype(x.dtype), sizes)

    raised = product(rows, up)
    hiddens = activation(raised) if gate is None else activation(product(rows, gate)) * raised
    out = _permuted(product(hiddens, down), jnp.argsort(order))
    wide = jnp.promote_types(x.dtype, jnp.float32)
    out = out.reshape(batch, length, chosen, width).astype(wide) * weights[..., None].astype(wide)
    return jnp.sum(out, axis=2).astype(x.dtype)


def _permuted(rows: Array, order: Array) -> Array:
    """`rows[order]` for a permutation: its gradient is a scatter without collisions, and so deterministic."""
    return rows.at[order].get(unique_indices=True, mode="promise_in_bounds")
