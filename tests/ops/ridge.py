"""Random cases of the ridge solve, and what every implementation of it is held to: the scan in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from jax import Array

from rnnlib import ops
from rnnlib.ops.ridge_solve import LinearSolver
from tests.compiling import LOOP_OPTIONS

EXTREME_LOG_DECAYS = (0.0, -0.01, -1.0, -20.0, -1000.0, -np.inf)


@dataclasses.dataclass(frozen=True)
class Call:
    """What a compiled call depends on: sizes and options. Cases of one call differ in numbers only."""

    shape: tuple[int, int, int, int] = (2, 37, 2, 8)  # B, T, H, K
    solver: LinearSolver = LinearSolver()  # noqa: RUF009 (frozen)
    adaptive: bool = True
    iterations: int = 30
    by_channel: bool = False
    bare: bool = False  # neither decay, nor initial Gram, nor segments

    def arguments(self, dtype, *, seed: int = 0, values: str = "random", segments: str = "random") -> dict[str, Array]:
        """Arguments with keys of unit length; `values` may be "random", "extreme", "zero keys" or "repeated keys"."""
        batch, length, heads, size = self.shape
        rng = np.random.default_rng(seed)

        def unit(*shape: int) -> np.ndarray:
            x = rng.standard_normal(shape)
            return x / np.linalg.norm(x, axis=-1, keepdims=True)

        arguments = {
            "q": unit(batch, length, heads, size),
            "k": unit(batch, length, heads, size),
            "ridge": rng.uniform(0.05, 0.2, (heads, size) if self.by_channel else (heads,)),
            "log_decay": -rng.exponential(0.1, (batch, length, heads)),
        }
        factor = rng.standard_normal((batch, heads, size, 3))
        arguments["initial_gram"] = factor @ np.swapaxes(factor, -1, -2)
        if values == "extreme":
            arguments["log_decay"] = rng.choice(EXTREME_LOG_DECAYS, (batch, length, heads))
        if values == "zero keys":
            arguments["k"] = arguments["k"] * (rng.uniform(size=(batch, length, heads, 1)) < 0.3)
            arguments["initial_gram"] = np.zeros_like(arguments["initial_gram"])
        if values == "repeated keys":
            arguments["k"] = np.broadcast_to(arguments["k"][:, :1], arguments["k"].shape)
            arguments["log_decay"] = np.zeros((batch, length, heads))
        if self.bare:
            arguments = {name: arguments[name] for name in ("q", "k", "ridge")}
        arguments = {name: jnp.asarray(x, dtype) for name, x in arguments.items()}
        if not self.bare:
            starts = {"one": np.zeros((batch, length)), "every": np.ones((batch, length))}
            start = starts.get(segments, rng.uniform(size=(batch, length)) < 0.08)
            arguments["segment_ids"] = jnp.asarray(np.cumsum(start, axis=1), jnp.int32)
        return arguments

    def cotangents(self, dtype) -> tuple[Array, Array]:
        """Gradients of the solutions and of the final Gram matrix, which is not symmetric."""
        batch, _, heads, size = self.shape
        rng = np.random.default_rng(99)
        shapes = (self.shape, (batch, heads, size, size))
        return tuple(jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)


def given_cases(*calls: Call):
    """Draws a test's arguments: one of `calls`, and which numbers it is given."""
    return given(
        call=st.sampled_from(calls),
        values=st.sampled_from(("random", "extreme", "zero keys", "repeated keys")),
        segments=st.sampled_from(("one", "random", "every")),
        seed=st.integers(0, 2**16),
    )


def results(arguments: dict[str, Array], cotangents, call: Call, implementation: str, chunk_size: int):
    """Solutions, final Gram matrix, and the gradient in every float argument."""
    compiled = _compiled_loop if implementation == "scan" and call.shape[1] > 100 else _compiled
    return compiled(arguments, cotangents, call, implementation, chunk_size)


def _results(arguments, cotangents, call, implementation, chunk_size):
    fixed = {"segment_ids": arguments["segment_ids"]} if "segment_ids" in arguments else {}
    floats = {name: x for name, x in arguments.items() if name != "segment_ids"}

    def solve(floats):
        return ops.ridge_solve(
            **floats,
            **fixed,
            adaptive=call.adaptive,
            iterations=call.iterations,
            solver=call.solver,
            chunk_size=chunk_size,
            implementation=implementation,
        )

    (x, gram), pullback = jax.vjp(solve, floats)
    (gradients,) = pullback((cotangents[0].astype(x.dtype), cotangents[1].astype(gram.dtype)))
    return {"x": x, "gram": gram, **{f"d_{name}": gradient for name, gradient in gradients.items()}}


# Without optimization: half the time to compile, which is most of these tests'.
_compiled, _compiled_loop = (
    jax.jit(
        _results,
        static_argnames=("call", "implementation", "chunk_size"),
        compiler_options={"xla_backend_optimization_level": 0} | options,
    )
    for options in ({}, LOOP_OPTIONS)
)


def run(call: Call, implementation: str, arguments: dict[str, Array], *, chunk_size: int = 64) -> dict[str, np.ndarray]:
    """`results` in the arguments' precision."""
    return jax.tree.map(
        np.asarray, results(arguments, call.cotangents(arguments["k"].dtype), call, implementation, chunk_size)
    )


def reference(call: Call, arguments: dict[str, Array]) -> dict[str, np.ndarray]:
    """The scan in float64 on the very numbers in `arguments`; derivatives of reversed iterations are the unrolled's."""
    if call.solver.differentiation == "reversed":
        call = dataclasses.replace(call, solver=LinearSolver(call.solver.method, "unrolled"))
    with jax.enable_x64(True):
        exact = {
            name: jnp.asarray(x) if name == "segment_ids" else jnp.asarray(np.asarray(x, np.float64))
            for name, x in arguments.items()
        }
        return run(call, "scan", exact)


def relative_error(actual, expected, scale=1.0) -> float:
    """`||actual - expected|| / ||expected||` in float64; relative to `scale` where the expected norm is below it."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return float(np.linalg.norm(actual - expected) / max(np.linalg.norm(expected), scale))


def assert_close(actual: dict, expected: dict, tolerance: float) -> None:
    """Holds every result to `tolerance` relative to its norm."""
    assert actual.keys() == expected.keys()
    # A decay's gradient is one number, a sum of terms like the keys' gradients that cancel where decay hardly matters.
    scales = {"d_log_decay": np.linalg.norm(np.asarray(expected["d_k"], np.float64))} if "d_k" in expected else {}
    errors = {name: relative_error(actual[name], expected[name], scales.get(name, 1.0)) for name in expected}
    assert all(error < tolerance for error in errors.values()), errors
