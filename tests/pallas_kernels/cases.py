"""Inputs and references that the kernels' tests share."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from pallas_kernels import operators
from rnnlib import ops
from tests.compiling import loop_jit

NO, SCALAR, CHANNEL, SHARED = None, "scalar", "channel", "shared"


@dataclasses.dataclass(frozen=True)
class Case:
    """A shape and which optional arguments are given, each `None`, `"scalar"` or `"channel"`.

    `shift` makes the decay milder: it is added to the logits whose log-sigmoid the log decay is. `gate_dtype` is of
    erase and write gate; None is `dtype`. With `write="shared"` gates are tied, the erase gate is both, and some of its
    numbers are 0 or next to it. `diagonal` is the rows of a token, with a gate on what a token reads of itself; some of
    its write gates are then 0.
    """

    shape: tuple[int, ...]  # B, T, H, HV, K, V
    decay: str | None = SCALAR
    erase: str | None = SCALAR
    write: str | None = SCALAR
    write_key: bool = False
    initial_state: bool = True
    packed: bool = False
    extreme: bool = False
    shift: float = 0.0
    online: bool = True
    segments: int = 1
    dtype: Any = jnp.float32
    gate_dtype: Any = None
    diagonal: int = 0

    def __str__(self) -> str:
        parts = [f"{name}={value}" for name, value in vars(self).items() if value != getattr(type(self), name, None)]
        return ",".join(str(p) for p in parts).replace(" ", "")

    @property
    def operator(self) -> str:
        return "gated_delta_rule" if self.online else "linear_attention"


def make_inputs(case: Case, seed: int = 0) -> tuple[dict[str, jax.Array], jax.Array | None]:
    """Differentiable arguments, and segment ids or None."""
    batch, length, heads, value_heads, key_size, value_size = case.shape
    random = np.random.default_rng(seed)
    normal = random.standard_normal

    def unit(*shape):
        x = normal(shape)
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    def sigmoid(kind, size):
        shape = (batch, length, value_heads, *((size,) if kind == CHANNEL else ()))
        return 1 / (1 + np.exp(-normal(shape)))

    arrays = {
        "q": unit(batch, length, heads, key_size),
        "k": unit(batch, length, heads, key_size),
        "v": normal((batch, length, value_heads, value_size)),
    }
    if case.online and case.erase:
        arrays["erase"] = sigmoid(case.erase, key_size)
    if case.write == SHARED:
        dice = random.random(arrays["erase"].shape)
        arrays["erase"] = np.where(dice < 0.1, 0.0, np.where(dice < 0.2, 1e-30, arrays["erase"]))
    elif case.write:
        arrays["write"] = sigmoid(case.write, value_size)
    if case.write_key:
        arrays["write_key"] = unit(batch, length, heads, key_size)
    if case.initial_state:
        arrays["initial_state"] = normal((batch, value_heads, key_size, value_size))
    dtypes = dict.fromkeys(("erase", "write"), case.gate_dtype or case.dtype)
    arrays = {name: jnp.asarray(x, dtypes.get(name, case.dtype)) for name, x in arrays.items()}
    if case.decay:
        log_decay = -np.log1p((1 / sigmoid(case.decay, key_size) - 1) * np.exp(-case.shift))
        if case.extreme:
            dice = random.random(log_decay.shape)
            for limit, value in ((0.3, 0.0), (0.12, -20.0), (0.07, -1000.0), (0.02, -np.inf)):
                log_decay = np.where(dice < limit, value, log_decay)
        arrays["log_decay"] = jnp.asarray(log_decay, jnp.float32)
    if "initial_state" in arrays:
        arrays["initial_state"] = arrays["initial_state"].astype(jnp.float32)
    ids = None
    if case.packed:
        ids = jnp.asarray(np.cumsum(random.random((batch, length)) < 0.06, axis=1), jnp.int32)
    if case.diagonal:
        arrays["diagonal"] = jnp.asarray(sigmoid(SCALAR, 1), jnp.float32)
        if "write" in arrays:
            arrays["write"] = jnp.where(random.random(arrays["write"].shape) < 0.1, 0.0, arrays["write"])
        if ids is not None:
            ids = jnp.repeat(ids[:, :: case.diagonal], case.diagonal, axis=1)
    return arrays, ids


def kernel_of(case: Case) -> Any:
    """The public function of `pallas_kernels` for the case's operator."""
    return operators.delta_rule.gated_delta_rule if case.online else operators.linear_attention.linear_attention


def call_operator(module: Any, case: Case, arrays: dict[str, jax.Array], **options) -> tuple[jax.Array, jax.Array]:
    """The case's operator of a module."""
    if case.write == SHARED:
        if module is ops:
            arrays = {"beta" if name == "erase" else name: x for name, x in arrays.items()}
        else:
            options["tied_gates"] = True
    if case.diagonal:
        options["diagonal_size"] = case.diagonal
    function = getattr(ops, case.operator) if module is ops else kernel_of(case)
    return function(**arrays, **options)


def scan(case: Case, arrays: dict[str, jax.Array], ids: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """The case's definition. Some heads after others where there are many: the gradient keeps every token's state."""
    batch, length, heads, _, _, _ = case.shape
    parts = math.gcd(heads, 12) if batch * length * heads > 2000 else 1

    def call(arrays):
        return call_operator(ops, case, arrays, segment_ids=ids, implementation="scan")

    if parts == 1:
        return call(arrays)
    axes = {name: 1 if name == "initial_state" else 2 for name in arrays}
    split = {name: jnp.stack(jnp.split(x, parts, axes[name])) for name, x in arrays.items()}
    out, state = jax.lax.map(jax.checkpoint(call), split)
    return jnp.concatenate(out, axis=2), jnp.concatenate(state, axis=1)


def value_and_gradients(function, arrays, out_shape, state_shape, seed: int = 1, jit=jax.jit):
    """Output, final state, and the gradients of a random linear form of both."""
    random = np.random.default_rng(seed)
    d_out, d_state = random.standard_normal(out_shape), random.standard_normal(state_shape)

    def loss(arrays):
        out, state = function(**arrays)
        dtype = jnp.promote_types(out.dtype, jnp.float32)
        return jnp.sum(out.astype(dtype) * d_out.astype(dtype)) + jnp.sum(state * d_state.astype(state.dtype)), (
            out,
            state,
        )

    (_, results), gradients = jit(jax.value_and_grad(loss, has_aux=True))(arrays)
    return results, gradients


def errors(case: Case, seed: int = 0, jit=jax.jit, **options) -> dict[str, float]:
    """Relative error of output, final state and every gradient against the scan in float64."""
    arrays, ids = make_inputs(case, seed)
    batch, _, _, value_heads, key_size, value_size = case.shape
    shapes = arrays["v"].shape, (batch, value_heads, key_size, value_size)
    with jax.enable_x64(True):
        doubles = {name: x.astype(jnp.float64) for name, x in arrays.items()}
        reference = value_and_gradients(
            lambda **x: scan(case, x, ids),
            doubles,
            *shapes,
            jit=loop_jit if case.shape[1] > 200 else jax.jit,
        )
        reference = jax.tree.map(np.asarray, reference)
    results = value_and_gradients(
        lambda **x: call_operator(operators, case, x, segment_ids=ids, **options), arrays, *shapes, jit=jit
    )
    named = {"out": (results[0][0], reference[0][0]), "state": (results[0][1], reference[0][1])}
    named |= {f"d_{name}": (x, reference[1][name]) for name, x in results[1].items()}
    return {name: relative_error(*pair) for name, pair in named.items()}


def relative_error(x, reference) -> float:
    """`||x - reference|| / ||reference||`; NaN never passes."""
    x, reference = np.asarray(x, np.float64), np.asarray(reference, np.float64)
    return float(np.linalg.norm(x - reference) / max(np.linalg.norm(reference), 1e-30))


def assert_transformations_agree(loss, arrays):
    """The gradient of `loss` of arrays `[B, T, H, ...]` is the same row by row under `vmap`, and under `shard_map`."""
    expected = jax.jit(jax.grad(loss))(arrays)

    def per_row(arrays):
        return jax.vmap(lambda row: loss(jax.tree.map(lambda x: x[None], row)))(arrays).sum()

    mesh = jax.make_mesh((1, 1), ("batch", "heads"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharded = jax.shard_map(
        lambda x: loss(x)[None, None],
        mesh=mesh,
        in_specs=({name: P("batch", None, "heads") for name in arrays},),
        out_specs=P("batch", "heads"),
        check_vma=False,
    )
    for function in (per_row, lambda arrays: sharded(arrays).sum()):
        found = jax.jit(jax.grad(function))(arrays)
        for name, gradient in found.items():
            assert relative_error(gradient, expected[name]) < 1e-5, name
