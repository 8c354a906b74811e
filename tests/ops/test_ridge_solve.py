"""Every implementation of the ridge solve against its definition: the scan in float64, and a dense solve in NumPy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, settings

from rnnlib import ops
from rnnlib.ops import chunk_blocks
from rnnlib.ops.ridge_solve import LinearSolver
from tests.jaxprs import equations
from tests.ops.ridge import Call, assert_close, given_cases, reference, relative_error, run

GKA = Call()
MESA = Call(shape=(1, 150, 2, 12), solver=LinearSolver("conjugate_gradient"), adaptive=False, by_channel=True)
CALLS = (GKA, MESA)


@settings(max_examples=20)
@given_cases(*CALLS)
@example(call=GKA, values="extreme", segments="random", seed=0)
@example(call=GKA, values="zero keys", segments="every", seed=0)
@example(call=GKA, values="zero keys", segments="one", seed=1)
@example(call=MESA, values="extreme", segments="random", seed=0)
@example(call=MESA, values="zero keys", segments="every", seed=0)
@example(call=MESA, values="repeated keys", segments="one", seed=0)
def test_chunks_are_the_scan(call, values, segments, seed):
    arguments = call.arguments(jnp.float32, seed=seed, values=values, segments=segments)
    # A constant ridge under 150 equal keys has a condition number of 3000, which multiplies float32's epsilon.
    tolerance = 3000 * np.finfo(np.float32).eps if call == MESA and values == "repeated keys" else 1e-5
    assert_close(run(call, "chunked", arguments), reference(call, arguments), tolerance)


@pytest.mark.parametrize(("call", "matrices"), [(GKA, 1), (MESA, 4)], ids=["kalmanet", "mesa"])
def test_blocks_of_a_tpu_are_the_scan(monkeypatch, call, matrices):
    """The loop over blocks of chunks, rows and heads that a TPU runs."""
    monkeypatch.setattr(chunk_blocks, "platform", lambda: "tpu")
    monkeypatch.setattr(chunk_blocks, "_MATRICES", matrices)
    call = dataclasses.replace(call, shape=(2, *call.shape[1:]))
    arguments = call.arguments(jnp.float32, seed=0, values="random", segments="random")
    assert_close(run(call, "chunked", arguments), reference(call, arguments), 1e-5)
    jax.clear_caches()


@pytest.mark.parametrize(
    "call",
    [
        dataclasses.replace(GKA, solver=LinearSolver("nesterov"), by_channel=True, iterations=7),
        pytest.param(
            dataclasses.replace(GKA, solver=LinearSolver("gradient_descent"), bare=True, iterations=7),
            marks=pytest.mark.slow,
        ),
        dataclasses.replace(GKA, solver=LinearSolver("conjugate_gradient", "unrolled"), iterations=4),
        dataclasses.replace(GKA, shape=(1, 1, 1, 3), adaptive=False, iterations=7),
    ],
    ids=["nesterov", "bare", "unrolled", "one token"],
)
def test_float64_chunks_are_exact(x64, call):
    """Far from convergence too: an implementation is held to the method's own iterates and derivatives."""
    arguments = call.arguments(jnp.float64)
    assert_close(run(call, "chunked", arguments, chunk_size=16), run(call, "scan", arguments), 1e-11)


def test_bfloat16():
    """Inputs and solutions are bfloat16, the iteration is float32: the error is that of rounding the results."""
    arguments = GKA.arguments(jnp.bfloat16)
    actual = run(GKA, "chunked", arguments)
    assert actual["x"].dtype == jnp.bfloat16 and actual["gram"].dtype == np.float32
    assert_close(actual, reference(GKA, arguments), 1e-2)


@pytest.mark.parametrize("implementation", ["scan", "chunked", "triton"])
@pytest.mark.parametrize("solver", ["chebyshev", "conjugate_gradient"])
def test_solutions_scale_with_their_queries(implementation, solver):
    """Cotangents that decayed over many tokens are tiny: their squares must not vanish."""
    call = Call(shape=(1, 40, 1, 16), adaptive=False)
    arguments = call.arguments(jnp.float32)
    given = {name: arguments[name] for name in ("k", "ridge", "log_decay")}

    @jax.jit
    def solve(q):
        return ops.ridge_solve(q, **given, adaptive=False, implementation=implementation, solver=solver)[0]

    expected = np.asarray(solve(arguments["q"]))
    for size in (1e-17, 1e17):
        assert relative_error(np.asarray(solve(size * arguments["q"])) / size, expected) < 1e-5


def dense(arguments, adaptive):
    """`H_t` and `(H_t + lambda_t)^-1 q_t` by loops over batch, heads and tokens, in float64."""
    a = {name: np.asarray(x, np.float64) for name, x in arguments.items()}
    batch, length, heads, size = a["k"].shape
    x, grams = np.zeros(a["k"].shape), np.zeros((*a["k"].shape, size))
    ridge = a["ridge"].reshape(heads, -1)
    for b in range(batch):
        for h in range(heads):
            gram = a["initial_gram"][b, h]
            for t in range(length):
                if t > 0 and a["segment_ids"][b, t] != a["segment_ids"][b, t - 1]:
                    gram = np.zeros_like(gram)
                gram = np.exp(a["log_decay"][b, t, h]) * gram + np.outer(a["k"][b, t, h], a["k"][b, t, h])
                strength = ridge[h] * (np.linalg.norm(gram) if adaptive else 1)
                x[b, t, h] = np.linalg.solve(gram + strength * np.eye(size), a["q"][b, t, h])
                grams[b, t, h] = gram
    return x, grams


@pytest.mark.parametrize(
    ("method", "iterations", "implementation"),
    [
        ("exact", 1, "scan"),
        ("chebyshev", 80, "chunked"),
        ("conjugate_gradient", 12, "chunked"),
        ("nesterov", 120, "chunked"),
        ("gradient_descent", 350, "chunked"),
    ],
)
def test_all_methods_solve_the_dense_equations(x64, method, iterations, implementation):
    arguments = GKA.arguments(jnp.float64)
    expected, grams = dense(arguments, adaptive=True)
    options = {"solver": method, "iterations": iterations, "implementation": implementation}
    x, final = jax.jit(functools.partial(ops.ridge_solve, **options))(**arguments)
    assert x.dtype == final.dtype == jnp.float64
    assert relative_error(x, expected) < 1e-9
    assert relative_error(final, grams[:, -1]) < 1e-12


@pytest.mark.parametrize("values", ["zero keys", "all zero", "extreme"])
@pytest.mark.parametrize("adaptive", [True, False])
def test_nothing_to_solve_with_is_finite(values, adaptive):
    """Zero keys, a document's first token and hard resets: finite solutions and gradients in float32."""
    call = dataclasses.replace(GKA, adaptive=adaptive)
    arguments = call.arguments(jnp.float32, values="zero keys" if values == "all zero" else values, segments="one")
    if values == "all zero":
        arguments["k"] = jnp.zeros_like(arguments["k"])
    actual = run(call, "chunked", arguments)
    assert all(np.isfinite(x).all() for x in actual.values())
    if values == "all zero":
        expected = 0 if adaptive else np.asarray(arguments["q"] / arguments["ridge"][:, None])
        np.testing.assert_allclose(actual["x"], np.broadcast_to(expected, call.shape), rtol=1e-6)


def test_a_single_chunk_that_starts_at_zero():
    """A state that the compiler knows to be zero is one that it miscompiles, see `rnnlib.ops.chunk.zero_state`."""
    call = dataclasses.replace(GKA, shape=(1, 64, 2, 64), bare=True, iterations=3)
    arguments = call.arguments(jnp.float32)
    actual = run(call, "chunked", arguments)
    expected = run(call, "chunked", arguments | {"initial_gram": jnp.zeros((1, 2, 64, 64))})
    expected.pop("d_initial_gram")
    assert_close(actual, expected, 1e-6)
    x, _ = jax.jit(functools.partial(ops.ridge_solve, iterations=3, implementation="chunked"))(**arguments)
    np.testing.assert_allclose(x, expected["x"], atol=1e-5)


def test_defaults_take_the_scan_for_one_token_and_for_exact():
    arguments = dataclasses.replace(GKA, shape=(2, 1, 2, 8)).arguments(jnp.float32)
    many = GKA.arguments(jnp.float32)
    for given_arguments, solver in ((arguments, "chebyshev"), (many, "exact")):
        x, _ = ops.ridge_solve(**given_arguments, solver=solver)
        expected, _ = ops.ridge_solve(**given_arguments, solver=solver, implementation="scan")
        np.testing.assert_array_equal(x, expected)


@pytest.mark.parametrize("implementation", ["scan", "chunked"])
def test_segments_are_separate_documents_and_the_gram_carries_over_a_cut(implementation):
    arguments = MESA.arguments(jnp.float32)
    names, shared = ("q", "k", "log_decay"), {"ridge": arguments["ridge"]}
    tokens = {name: arguments[name] for name in names}
    solve = jax.jit(functools.partial(ops.ridge_solve, adaptive=False, iterations=20, implementation=implementation))

    ids = jnp.asarray(np.repeat([3, 1, 3], 50), jnp.int32)[None]
    packed, packed_gram = solve(**tokens, **shared, segment_ids=ids)
    whole, final = solve(**tokens, **shared, initial_gram=arguments["initial_gram"])
    gram = arguments["initial_gram"]
    for start in (0, 50, 100):
        part = {name: x[:, start : start + 50] for name, x in tokens.items()}
        alone, alone_gram = solve(**part, **shared, initial_gram=jnp.zeros_like(gram))
        np.testing.assert_allclose(packed[:, start : start + 50], alone, atol=2e-5)
        piece, gram = solve(**part, **shared, initial_gram=gram)
        np.testing.assert_allclose(whole[:, start : start + 50], piece, atol=2e-5)
    np.testing.assert_allclose(packed_gram, alone_gram, atol=1e-5)
    np.testing.assert_allclose(final, gram, atol=1e-5)


@pytest.mark.parametrize("solver", [LinearSolver(), LinearSolver("chebyshev", "reversed")])
def test_chunks_form_no_gram_matrix_but_at_their_boundaries(solver):
    """Forward and backward; beside its arguments the backward keeps the last iterates, and no state at all."""
    call = dataclasses.replace(GKA, shape=(1, 256, 1, 128), solver=solver, bare=True)
    arguments = call.arguments(jnp.float32)

    def solve(arguments):
        return ops.ridge_solve(**arguments, solver=solver, implementation="chunked")

    largest = 4 * 128 * 128  # four chunks, a Gram matrix each; a matrix for each token would be 64 times that
    x, pullback = jax.vjp(solve, arguments)
    kept = sorted(leaf.shape for leaf in jax.tree.leaves(pullback) if hasattr(leaf, "shape") and leaf.size >= 256)
    # Keys and solutions; to run backwards, also queries and the iterate before.
    token_wise = 2 if solver.differentiation == "implicit" else 4
    assert kept.count((4, 1, 1, 64, 128)) == token_wise and max(map(np.prod, kept)) == 256 * 128, kept
    gradient = jax.make_jaxpr(lambda a: jax.vjp(solve, a)[1](x))(arguments)
    arrays = [variable.aval for equation in equations(gradient.jaxpr) for variable in equation.outvars]
    assert max(int(np.prod(array.shape)) for array in arrays) <= largest


def test_rounded_products():
    """A solver told to multiply in bfloat16 errs by about bfloat16's precision times the condition number."""
    arguments = GKA.arguments(jnp.float32)
    solve = jax.jit(ops.ridge_solve, static_argnames=("solver", "implementation"))
    exact = solve(**arguments)[0]
    for implementation in ("scan", "chunked"):
        rounded = solve(**arguments, solver=LinearSolver(product_dtype=jnp.bfloat16), implementation=implementation)[0]
        assert 1e-4 < relative_error(rounded, exact) < 5e-2


def test_transformations():
    """jit, vmap, grad and checkpoint compose with the chunked form."""
    arguments = GKA.arguments(jnp.float32)
    ids = arguments.pop("segment_ids")
    two = jax.tree.map(lambda x: jnp.stack([x, x * 0.5]), arguments)

    def loss(arguments):
        return jnp.sum(jnp.sin(ops.ridge_solve(**arguments, segment_ids=ids, implementation="chunked")[0]))

    mapped = jax.jit(jax.vmap(jax.grad(jax.checkpoint(loss))))(two)
    gradient = jax.jit(jax.grad(loss))
    for i in range(2):
        alone = gradient(jax.tree.map(lambda x: x[i], two))
        assert max(relative_error(mapped[name][i], alone[name]) for name in alone) < 1e-5


def test_shard_map_over_batch_and_heads():
    """Each shard computes its own batch entries and heads, forward and backward."""
    mesh = jax.make_mesh((1, 1), ("batch", "heads"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    partition = jax.sharding.PartitionSpec
    token, state = partition("batch", None, "heads"), partition("batch", "heads")
    arguments = GKA.arguments(jnp.float32)
    arguments = {name: arguments[name] for name in ("q", "k", "log_decay", "ridge", "initial_gram")}
    specs = {"q": token, "k": token, "log_decay": token, "ridge": partition("heads"), "initial_gram": state}

    def solve(arguments):
        return ops.ridge_solve(**arguments, implementation="chunked")

    sharded = jax.shard_map(solve, mesh=mesh, in_specs=(specs,), out_specs=(token, state))
    gradient = jax.jit(jax.grad(lambda a: jnp.sum(jnp.sin(sharded(a)[0]))))(arguments)
    alone = jax.jit(jax.grad(lambda a: jnp.sum(jnp.sin(solve(a)[0]))))(arguments)
    assert max(relative_error(gradient[name], alone[name]) for name in alone) < 1e-6


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"k": jnp.ones((2, 37, 2, 9))}, ValueError, r"k has shape \(2, 37, 2, 9\), expected the shape of q"),
        ({"q": jnp.ones((2, 37, 8))}, ValueError, r"q has shape \(2, 37, 8\), expected \[B, T, H, K\]"),
        ({"q": jnp.ones((2, 37, 2, 8), int)}, TypeError, "q has dtype int32, expected a floating dtype"),
        ({"ridge": jnp.ones((3,))}, ValueError, r"ridge has shape \(3,\), expected a number, \[H\] or \[H, K\]"),
        ({"ridge": 0.0}, ValueError, r"ridge is 0.0, expected a positive number"),
        ({"ridge": None}, TypeError, r"ridge is None, expected a number or an array"),
        ({"ridge": np.float32(-0.5)}, ValueError, r"ridge is -0.5, expected a positive number"),
        ({"adaptive": "no"}, ValueError, "adaptive is 'no', expected a boolean"),
        ({"log_decay": jnp.ones((2, 37, 2, 8))}, ValueError, r"log_decay has shape .* expected \[B, T, H\]"),
        ({"initial_gram": jnp.ones((2, 2, 8))}, ValueError, r"initial_gram has shape .* = \(2, 2, 8, 8\)"),
        ({"segment_ids": jnp.zeros((2, 37))}, TypeError, "segment_ids has dtype float32, expected an integer"),
        ({"ridge": [0.1, 0.1]}, TypeError, r"ridge is \[0.1, 0.1\], expected a number or an array"),
        ({"iterations": 0}, ValueError, "iterations is 0, expected an integer of at least 1"),
        ({"iterations": 3.0}, ValueError, "iterations is 3.0, expected an integer of at least 1"),
        ({"solver": None}, TypeError, "solver is None, expected one of"),
        ({"chunk_size": 60}, ValueError, "chunk_size is 60, expected 16"),
        ({"solver": "jacobi"}, ValueError, "solver is 'jacobi', expected one of .* or a LinearSolver"),
        ({"implementation": "triton", "chunk_size": 32}, NotImplementedError, ".* does not support chunk_size 32"),
        (
            {"implementation": "triton", "solver": LinearSolver(differentiation="unrolled")},
            NotImplementedError,
            ".* does not support differentiation 'unrolled'",
        ),
        ({"solver": "exact", "implementation": "chunked"}, NotImplementedError, ".* exact solver, which factorises"),
        (
            {"solver": LinearSolver("chebyshev", "reversed"), "implementation": "scan"},
            NotImplementedError,
            ".* running backwards through the iterations",
        ),
    ],
)
def test_bad_arguments_are_named(change, error, message, unchecked_shapes):
    with pytest.raises(error, match=f"^ridge_solve: {message}"):
        ops.ridge_solve(**(GKA.arguments(jnp.float32) | change))


def test_a_ridge_that_jit_makes_an_argument_does_not_widen_the_rest(x64):
    x = jax.ShapeDtypeStruct((1, 3, 1, 4), jnp.float32)
    solution, gram = jax.eval_shape(jax.jit(lambda x, ridge: ops.ridge_solve(x, x, ridge=ridge)), x, 0.02)
    assert solution.dtype == gram.dtype == jnp.float32


def test_bad_solvers_are_named(unchecked_shapes):
    with pytest.raises(ValueError, match="differentiation is 'forward', expected one of"):
        LinearSolver(differentiation="forward")
    with pytest.raises(ValueError, match="only 'chebyshev' runs reversed, method is 'nesterov'"):
        LinearSolver("nesterov", "reversed")
    with pytest.raises(ValueError, match="epsilon is 1e-05, expected 0, or above it for 'conjugate_gradient'"):
        LinearSolver(epsilon=1e-5)
