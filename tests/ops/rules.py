"""Random cases of the recurrent rules, and what every implementation of them is held to: the scan in float64."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import Array

from rnnlib import ops
from tests.compiling import loop_jit

# (B, T, H, HV, K, V) with (decay, erase, write, write_key). Shapes: one token, a length below a chunk, an exact
# multiple, a tail; grouped heads; K != V; odd sizes. Few structures, because each is compiled; values vary within one.
STRUCTURES = (
    ((1, 1, 1, 1, 16, 16), ("head", "head", "head", None)),
    ((2, 37, 2, 2, 8, 12), (None, "head", None, None)),
    ((1, 128, 1, 2, 16, 24), ("head", None, "channel", "key")),
    ((1, 150, 2, 4, 20, 16), ("channel", "channel", "head", "value")),
    ((1, 70, 2, 4, 20, 16), ("channel", "head", "channel", None)),
)
EXTREME_LOG_DECAYS = (0.0, -0.01, -1.0, -20.0, -1000.0, -np.inf)


@dataclasses.dataclass(frozen=True)
class Case:
    """One random call of a rule."""

    shape: tuple[int, int, int, int, int, int]
    decay: str | None  # None, "head", "channel"
    erase: str | None  # None, "head", "channel"; only the delta rule has it
    write: str | None
    write_key: str | None  # None, "key", "value" (one per value head)
    segments: str  # "one", "random", "every"
    values: str  # "random", "extreme", "zero keys", "repeated keys"
    seed: int

    def arguments(self, dtype: jnp.dtype, *, delta: bool) -> dict[str, Array]:
        """The call's arguments but for `segment_ids`; keys have unit norm (or are zero)."""
        batch, length, heads, value_heads, key_size, value_size = self.shape
        rng = np.random.default_rng(self.seed)

        def unit(*shape: int) -> np.ndarray:
            x = rng.standard_normal(shape)
            return x / np.linalg.norm(x, axis=-1, keepdims=True)

        def gate(kind: str, channels: int) -> np.ndarray:
            extra = (channels,) if kind == "channel" else ()
            return rng.uniform(0, 1, (batch, length, value_heads, *extra))

        arguments = {
            "q": unit(batch, length, heads, key_size),
            "k": unit(batch, length, heads, key_size),
            "v": rng.standard_normal((batch, length, value_heads, value_size)),
        }
        if self.decay is not None:
            shape = gate(self.decay, key_size).shape
            if self.values == "extreme":
                arguments["log_decay"] = rng.choice(EXTREME_LOG_DECAYS, shape)
            else:
                arguments["log_decay"] = -rng.exponential(0.3, shape)
        if self.write is not None:
            arguments["write"] = gate(self.write, value_size)
        if delta and self.erase is not None:
            arguments["erase"] = gate(self.erase, key_size)
        if delta and self.write_key is not None:
            key_heads = heads if self.write_key == "key" else value_heads
            arguments["write_key"] = unit(batch, length, key_heads, key_size)
        arguments["initial_state"] = rng.standard_normal((batch, value_heads, key_size, value_size))
        if self.values == "zero keys":
            arguments["k"] = arguments["k"] * (rng.uniform(size=(batch, length, heads, 1)) < 0.5)
        if self.values == "repeated keys":
            # A run of equal tokens, gates of 1, no decay: the hardest case for the triangular inverse.
            arguments["k"] = np.broadcast_to(arguments["k"][:, :1], arguments["k"].shape)
            for name, value in (("log_decay", 0.0), ("erase", 1.0)):
                if name in arguments:
                    arguments[name] = np.full_like(arguments[name], value)
            if self.write_key is not None and delta:
                arguments["write_key"] = np.repeat(arguments["k"], key_heads // heads, axis=2)
        return {name: jnp.asarray(x, dtype) for name, x in arguments.items()}

    def segment_ids(self) -> Array:
        batch, length = self.shape[:2]
        rng = np.random.default_rng(self.seed + 1)
        if self.segments == "one":
            return jnp.zeros((batch, length), jnp.int32)
        if self.segments == "every":
            return jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
        return jnp.asarray(np.cumsum(rng.uniform(size=(batch, length)) < 0.08, axis=1), jnp.int32)


def cases() -> st.SearchStrategy[Case]:
    """Cases of few distinct shapes, so that compiled functions are shared."""
    return st.builds(
        lambda structure, **values: Case(structure[0], *structure[1], **values),
        st.sampled_from(STRUCTURES),
        segments=st.sampled_from(("one", "random", "every")),
        values=st.sampled_from(("random", "extreme", "zero keys", "repeated keys")),
        seed=st.integers(0, 2**16),
    )


def weighted_loss(out: Array, state: Array) -> Array:
    """A scalar that depends on every entry of the results, with gradients of order one."""
    return jnp.sum(jnp.sin(out.astype(state.dtype) + 0.3)) + jnp.sum(jnp.cos(state + 0.2))


def outputs_and_gradients(
    rule: Callable, arguments: dict[str, Array], segment_ids, implementation: str, chunk_size: int
):
    """Output, final state and the gradient of `weighted_loss` in every float argument."""
    compiled = _compiled_loop if implementation == "scan" else _compiled
    return compiled(rule, arguments, segment_ids, implementation, chunk_size)


def _outputs_and_gradients(rule, arguments, segment_ids, implementation, chunk_size):

    def loss(arguments):
        options = {"implementation": implementation, "chunk_size": chunk_size}
        out, state = rule(**arguments, segment_ids=segment_ids, **options)
        return weighted_loss(out, state), (out, state)

    (_, (out, state)), gradients = jax.value_and_grad(loss, has_aux=True)(arguments)
    return {"out": out, "state": state, **{f"d_{name}": gradient for name, gradient in gradients.items()}}


_compiled, _compiled_loop = (
    jit(_outputs_and_gradients, static_argnames=("rule", "implementation", "chunk_size")) for jit in (jax.jit, loop_jit)
)


def relative_error(actual: Array, expected: Array, smallest: float = 1e-3) -> float:
    """`||actual - expected|| / ||expected||` in float64, with at least `smallest` in place of the expected norm."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return float(np.linalg.norm(actual - expected) / max(np.linalg.norm(expected), smallest))


def reference(rule: Callable, arguments: dict[str, Array], segment_ids) -> dict[str, np.ndarray]:
    """Results of the scan in float64 on the very numbers in `arguments`."""
    with jax.enable_x64(True):
        exact = {name: jnp.asarray(np.asarray(x, np.float64)) for name, x in arguments.items()}
        results = outputs_and_gradients(rule, exact, segment_ids, "scan", 64)
        return {name: np.asarray(x) for name, x in results.items()}


def assert_matches_reference(
    rule: Callable, case: Case, implementation: str, tolerance: float, *, dtype=jnp.float32, chunk_size: int = 64
) -> None:
    """Holds output, final state and every gradient of an implementation to the scan in float64."""
    arguments = case.arguments(dtype, delta=rule is ops.gated_delta_rule)
    expected = reference(rule, arguments, case.segment_ids())
    actual = outputs_and_gradients(rule, arguments, case.segment_ids(), implementation, chunk_size)
    assert actual["out"].dtype == dtype
    # With one token a gradient is one number, and nearly 0 in some cases, where its terms cancel: terms are of order 1.
    smallest = {name: 0.1 if name.startswith("d_") else 1e-3 for name in expected}
    errors = {name: relative_error(actual[name], expected[name], smallest[name]) for name in expected}
    wrong = {name: error for name, error in errors.items() if not error < tolerance}
    assert not wrong, f"{implementation} against the float64 scan: {wrong} (all: {errors})"
