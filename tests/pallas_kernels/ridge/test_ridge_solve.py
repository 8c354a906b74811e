"""The ridge solve's kernels, interpreted on a CPU, against the scan in float64: solutions, Gram matrices, gradients."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import example, settings

from pallas_kernels import operators
from pallas_kernels.common.config import KernelConfig
from pallas_kernels.ridge.api import ridge_solve
from pallas_kernels.ridge.config import RidgeConfig
from rnnlib import ops
from rnnlib.models import DecoderLM, ModelConfig
from rnnlib.ops.ridge_solve import LinearSolver
from tests.ops.ridge import Call, assert_close, given_cases, reference, relative_error, run
from tests.pallas_kernels.cases import assert_transformations_agree
from tests.pallas_kernels.test_lowering import H200, count_kernels
from tests.selection import mostly_slow

# Three chunks, the last incomplete, and channels padded.
GKA = Call(shape=(1, 150, 2, 12))
MESA = Call(shape=(1, 70, 1, 16), solver=LinearSolver("conjugate_gradient"), adaptive=False, by_channel=True)


def arguments_of(call, dtype, **options):
    """Tokens in `dtype`, and what is float32 whatever it is, not rounded to `dtype` before."""
    exact = call.arguments(jnp.float32, **options)
    return {**call.arguments(dtype, **options), **{n: exact[n] for n in ("ridge", "log_decay", "initial_gram")}}


@settings(max_examples=10)
@given_cases(GKA, MESA)
@example(call=GKA, values="random", segments="one", seed=0)
@example(call=GKA, values="extreme", segments="random", seed=0)
@example(call=GKA, values="zero keys", segments="every", seed=0)
@example(call=GKA, values="repeated keys", segments="one", seed=0)
@example(call=MESA, values="extreme", segments="random", seed=0)
def test_kernels_are_the_scan(call, values, segments, seed):
    arguments = call.arguments(jnp.float32, seed=seed, values=values, segments=segments)
    # A constant ridge under 70 equal keys has a condition number of 1400, which multiplies rounding errors.
    tolerance = 1e-4 if call == MESA and values == "repeated keys" else 1e-5
    assert_close(run(call, "triton", arguments), reference(call, arguments), tolerance)


@pytest.mark.parametrize(
    "call",
    [
        Call(shape=(1, 80, 1, 16), solver=LinearSolver("nesterov"), by_channel=True, iterations=7),
        pytest.param(
            Call(shape=(1, 64, 2, 16), solver=LinearSolver("gradient_descent"), bare=True, iterations=7),
            marks=pytest.mark.slow,
        ),
        Call(shape=(2, 1, 1, 16), adaptive=False, iterations=7),
    ],
    ids=["nesterov", "bare", "one token"],
)
def test_other_methods_and_arguments(call):
    """Far from convergence too: the kernels make the method's own iterates."""
    arguments = call.arguments(jnp.float32)
    assert_close(run(call, "triton", arguments), reference(call, arguments), 1e-5)


def test_bfloat16_stays_within_rounding():
    call = dataclasses.replace(GKA, shape=(1, 100, 1, 32))
    arguments = call.arguments(jnp.bfloat16)
    actual = run(call, "triton", arguments)
    assert actual["x"].dtype == jnp.bfloat16 and actual["gram"].dtype == np.float32
    assert_close(actual, reference(call, arguments), 1e-2)


def test_precision_of_products():
    """Two parts of bfloat16 keep 16 bits, one keeps 8; a condition number of 11 multiplies what is lost."""
    arguments = GKA.arguments(jnp.float32, segments="one")
    tokens = {name: arguments[name] for name in ("q", "k", "log_decay")}
    ridge = jnp.full((2, 1), 0.1)
    exact = ridge_solve(**tokens, ridge=ridge)[0]
    errors = [
        relative_error(ridge_solve(**tokens, ridge=ridge, precision=precision)[0], exact)
        for precision in ("split", "bfloat16")
    ]
    assert errors[0] < 5e-5 and 5e-4 < errors[1] < 2e-2, errors


@pytest.mark.parametrize(("product_dtype", "low", "high"), [(jnp.bfloat16, 2e-2, np.inf), (None, 0.0, 1e-2)])
def test_condition_beyond_that_of_bfloat16_needs_precise_products(product_dtype, low, high):
    """An eigenvalue of 150 beside a ridge of 0.05: rounding the state to 8 bits turns it by more than the ridge.

    A constant ridge bounds no condition number, so that precise products are its default.
    """
    solver = LinearSolver("conjugate_gradient", product_dtype=product_dtype)
    call = dataclasses.replace(MESA, shape=(1, 20, 1, 64), solver=solver)
    arguments = arguments_of(call, jnp.bfloat16, segments="one")
    arguments["initial_gram"] = arguments["initial_gram"] * 150 / np.linalg.norm(arguments["initial_gram"], 2, (-2, -1))
    expected = reference(dataclasses.replace(call, solver=LinearSolver("conjugate_gradient")), arguments)
    assert low < relative_error(run(call, "triton", arguments)["x"], expected["x"]) < high


@pytest.mark.parametrize("shape", [(1, 100, 2, 32), pytest.param((2, 300, 2, 32), marks=pytest.mark.gpu)], ids=str)
def test_mixed_precision_is_as_exact_as_two_parts(shape):
    """Well-conditioned chunks in float16, those of a head with an eigenvalue of 3000 ridges in two parts."""
    call = Call(shape, LinearSolver("conjugate_gradient"), adaptive=False, by_channel=True)
    arguments = arguments_of(call, jnp.bfloat16, segments="one")
    arguments["initial_gram"] = arguments["initial_gram"].at[:, 1].multiply(10.0)
    expected, actual = reference(call, arguments), run(call, "triton", arguments)
    tokens = {name: arguments[name] for name in ("q", "k", "log_decay", "initial_gram", "ridge")}
    solve = functools.partial(ridge_solve, **tokens, solver="conjugate_gradient", adaptive=False)
    mixed, split = (solve(precision=precision)[0] for precision in ("mixed", "split"))
    assert np.array_equal(mixed[0, :64, 1], split[0, :64, 1]) and not np.array_equal(mixed[..., 0, :], split[..., 0, :])
    for head in range(2):
        errors = [relative_error(x[..., head, :], expected["x"][..., head, :]) for x in (mixed, split)]
        assert errors[0] < 1.05 * errors[1] < 3e-3, errors
    assert_close(actual, expected, 2e-2)


def test_no_solve_hides_what_is_not_finite():
    q = jnp.ones((1, 3, 1, 16), jnp.bfloat16).at[:, 1].set(jnp.nan)
    k = jnp.ones((1, 3, 1, 16), jnp.bfloat16)
    x = ridge_solve(q, k, jnp.ones((1, 1)), adaptive=False, solver="conjugate_gradient")[0]
    assert np.isnan(np.asarray(x, np.float32)[:, 1]).all() and np.isfinite(np.asarray(x, np.float32)[:, [0, 2]]).all()


@pytest.mark.parametrize("adaptive", mostly_slow([True, False], [True]))
def test_no_keys_at_all_is_finite(adaptive):
    call = Call(shape=(1, 70, 1, 16), adaptive=adaptive, bare=True)
    arguments = call.arguments(jnp.float32)
    arguments["k"] = jnp.zeros_like(arguments["k"])
    actual = run(call, "triton", arguments)
    assert all(np.isfinite(x).all() for x in actual.values())
    expected = 0 if adaptive else np.asarray(arguments["q"] / arguments["ridge"][:, None])
    np.testing.assert_allclose(actual["x"], np.broadcast_to(expected, call.shape), rtol=1e-6)


def test_schedules_agree_and_reruns_are_identical():
    arguments = GKA.arguments(jnp.float32)
    arguments["ridge"] = arguments["ridge"][:, None]
    ids = arguments.pop("segment_ids")
    halves, blocks = KernelConfig(num_warps=4, num_stages=1, block=8), KernelConfig(block=16, inner=2)
    other = RidgeConfig(
        scan=blocks,
        reverse_scan=blocks,
        start_gradients=halves,
        boundary_gradients=halves,
        gradients=halves,
        keeps_states=False,
    )

    def run_with(schedule):
        def solve(x):
            return ridge_solve(**x, segment_ids=ids, iterations=5, config=schedule)

        x, pull_back = jax.vjp(solve, arguments)
        return x, pull_back(jax.tree.map(jnp.ones_like, x))[0]

    run_with = jax.jit(run_with, static_argnums=0)
    found, again = run_with(RidgeConfig()), run_with(RidgeConfig())
    jax.tree.map(np.testing.assert_array_equal, found, again)
    for a, b in zip(jax.tree.leaves(run_with(other)), jax.tree.leaves(found), strict=True):
        assert relative_error(a, b) < 1e-5


def test_vmap_remat_and_shard_map():
    arguments = dataclasses.replace(GKA, shape=(2, 40, 1, 16)).arguments(jnp.float32)
    arrays = {name: arguments[name] for name in ("q", "k", "log_decay")}

    def loss(arrays):
        x, gram = jax.checkpoint(lambda a: ops.ridge_solve(**a, iterations=3, implementation="triton"))(arrays)
        return jnp.sum(x**2) + jnp.sum(gram)

    assert_transformations_agree(loss, arrays)


@pytest.mark.parametrize("keeps_states", [True, False])
def test_what_the_backward_keeps(keeps_states):
    """Keys, solutions and norms; if it is to keep them, states with the squares of their rows, and rows of decay."""
    like = jax.ShapeDtypeStruct((1, 1024, 1, 128), jnp.bfloat16)
    decay = jax.ShapeDtypeStruct((1, 1024, 1), jnp.float32)
    schedule = RidgeConfig(keeps_states=keeps_states)

    def kept(q, k, log_decay):
        def solve(q, k, log_decay):
            return ridge_solve(q, k, jnp.ones((1, 1)), log_decay=log_decay, config=schedule)

        return jax.tree.leaves(jax.vjp(solve, q, k, log_decay)[1])

    total = sum(x.size * x.dtype.itemsize for x in jax.eval_shape(kept, like, like, decay))
    states = 16 * (128 * 128 * 2 + 128 * 4) + 1024 * 4 * 4 + 16 * 4
    assert total <= 1024 * (2 * 128 * 2 + 2 * 4) + 64 + states * keeps_states


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"chunk_size": 32}, "chunk_size 32"),
        ({"dtype": jnp.float16}, "float16"),
        ({"size": 256}, "key size 256"),
        ({"solver": "exact"}, "solver 'exact'"),
        ({"precision": "float16"}, "products in 'float16'"),
        ({"precision": "mixed"}, "products in 'mixed' precision but for conjugate gradients"),
    ],
)
def test_unsupported_says_why(change, reason):
    x = jnp.zeros((1, 64, 1, change.pop("size", 16)), change.pop("dtype", jnp.float32))
    assert reason in operators.ridge.unsupported_reason(x, x, **change)
    with pytest.raises(NotImplementedError, match=reason):
        ridge_solve(x, x, jnp.ones((1, 1)), **change)
    assert operators.ridge.unsupported_reason(*(jnp.zeros((1, 64, 1, 16)),) * 2) is None


@pytest.mark.parametrize("dtype", mostly_slow([jnp.bfloat16, jnp.float32], [jnp.bfloat16]), ids=["bfloat16", "float32"])
@pytest.mark.parametrize("solver", ["chebyshev", "conjugate_gradient"])
def test_forward_and_backward_lower_for_an_h200(solver, dtype):
    """Decay, increments, scan and solve; backward a solve, the states' gradients (two) and the arguments' (two)."""
    x = jax.ShapeDtypeStruct((1, 1000, 2, 128), dtype)
    shapes = {"log_decay": (1, 1000, 2), "initial_gram": (1, 2, 128, 128), "ridge": (2, 1 if "che" in solver else 128)}
    arrays = {"q": x, "k": x, **{name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}}
    ids = jax.ShapeDtypeStruct((1, 1000), jnp.int32)

    def loss(arrays, ids):
        x, gram = ridge_solve(**arrays, segment_ids=ids, solver=solver, adaptive=solver == "chebyshev")
        return jnp.sum(x.astype(jnp.float32)) + jnp.sum(gram)

    in_float16 = 2 if solver == "conjugate_gradient" and dtype == jnp.bfloat16 else 0  # its solves are two kernels
    assert count_kernels(jax.grad(loss), arrays, ids) == 4 + 1 + 2 + 2 + in_float16


@pytest.mark.parametrize("keeps", ["input", "products"])
def test_blocks_that_are_recomputed_keep_solutions(keeps):
    """Solutions and norms, of each layer: with both, the solve's kernel is for nothing, and XLA leaves it out."""
    config = ModelConfig(16, 32, 2, 1, mixers=("gated_kalmanet",), dtype="bfloat16", remat=True, scan_layers=True)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: DecoderLM(config.replace(remat_keeps=keeps), rngs=nnx.Rngs(0))))

    def pull_back(state, tokens):
        return jax.vjp(lambda state: nnx.merge(graphdef, state)(tokens), state)[1]

    with jax.sharding.use_abstract_mesh(H200):
        kept = jax.eval_shape(pull_back, state, jax.ShapeDtypeStruct((1, 128), jnp.int32))
    shapes = [(x.shape, x.dtype.name) for x in jax.tree.leaves(kept)]
    assert ((2, 1, 128, 1, 32), "bfloat16") in shapes and ((2, 1, 1, 128), "float32") in shapes, shapes


def test_none_takes_the_kernels_on_a_gpu():
    x = jax.ShapeDtypeStruct((1, 256, 2, 128), jnp.bfloat16)
    with jax.sharding.use_abstract_mesh(H200):
        lowered = jax.jit(ops.ridge_solve).trace(x, x).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("xla.gpu.triton") == 3


def test_scan_of_many_chunks_loads_ahead():
    """More chunks than are loaded together, and a rest of fewer."""
    call = Call(shape=(1, 64 * 10 + 5, 1, 16), iterations=2)
    arguments = call.arguments(jnp.float32)
    assert_close(run(call, "triton", arguments), reference(call, arguments), 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("size", [16, 32, 64, 128])
@pytest.mark.parametrize("values", ["random", "extreme", "zero keys"])
@pytest.mark.parametrize("solver", ["chebyshev", "conjugate_gradient"])
def test_on_a_gpu(solver, values, size, dtype):
    """The same cases at sizes that models have."""
    adaptive = solver == "chebyshev"
    call = Call(shape=(2, 700, 2, size), solver=LinearSolver(solver), adaptive=adaptive, by_channel=not adaptive)
    arguments = arguments_of(call, dtype, values=values)
    if dtype == jnp.bfloat16:  # as large as three unit keys make it: see what condition bfloat16 allows, above
        arguments["initial_gram"] = arguments["initial_gram"] / size
    actual, expected = run(call, "triton", arguments), reference(call, arguments)
    # The backward starts from solutions rounded to the inputs' dtype; the keys' gradient is a difference of two sums.
    limit = 3e-2 if dtype == jnp.bfloat16 else 1e-3
    assert_close(actual, expected, limit)
    assert relative_error(actual["x"], expected["x"]) < limit / 3
    assert relative_error(actual["d_q"], expected["d_q"]) < limit / 3
