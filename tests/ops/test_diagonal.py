"""Linear attention with a weight of its own on what a token reads of its own write."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rnnlib import ops

from .rules import relative_error, weighted_loss


def _arguments(size: int = 1, channels: int | None = None, length: int = 76) -> tuple[dict[str, jax.Array], jax.Array]:
    random = np.random.default_rng(0)
    per_head = (2, length, 2)
    arrays = {
        "q": random.standard_normal((2, length, 1, 8)),
        "k": random.standard_normal((2, length, 1, 8)),
        "v": random.standard_normal((*per_head, 12)),
        "write": np.where(random.random(per_head) < 0.1, 0.0, random.random(per_head)),
        "diagonal": random.random(per_head),
        "log_decay": -random.exponential(0.3, per_head if channels is None else (*per_head, channels)),
        "initial_state": random.standard_normal((2, 2, 8, 12)),
    }
    tokens = np.cumsum(random.random((2, length // size)) < 0.08, axis=1)
    ids = jnp.asarray(np.repeat(tokens, size, axis=1), jnp.int32)
    return {name: jnp.asarray(x, jnp.float32) for name, x in arrays.items()}, ids


@pytest.mark.parametrize(("size", "channels"), [(1, 8), (4, None)])
def test_chunks_are_the_scan(size, channels):
    arrays, ids = _arguments(size, channels)

    def run(arrays, implementation):
        def loss(arrays):
            options = {"segment_ids": ids, "diagonal_size": size, "chunk_size": 16, "implementation": implementation}
            results = ops.linear_attention(**arrays, **options)
            return weighted_loss(*results), results

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(arrays)

    (_, found), gradients = run(arrays, "chunked")
    with jax.enable_x64(True):
        exact = {name: jnp.asarray(np.asarray(x, np.float64)) for name, x in arrays.items()}
        (_, expected), exact_gradients = jax.tree.map(np.asarray, run(exact, "scan"))
    for x, right in zip(found, expected, strict=True):
        assert relative_error(x, right) < 1e-5
    for name, x in gradients.items():
        assert relative_error(x, exact_gradients[name]) < 1e-5, name


def test_a_diagonal_that_is_the_write_gate_changes_nothing():
    arrays, ids = _arguments()
    arrays["diagonal"] = arrays["write"]
    with_it = ops.linear_attention(**arrays, segment_ids=ids, implementation="scan")
    del arrays["diagonal"]
    without = ops.linear_attention(**arrays, segment_ids=ids, implementation="scan")
    for x, y in zip(with_it, without, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_outputs_depend_on_no_write_gate_of_their_own_token_or_later_ones():
    """To the bit: under the trapezoidal rule that gate depends on the next token."""
    arrays, _ = _arguments()
    other = arrays | {"write": arrays["write"].at[:, 40:].set(0.7)}
    run = jax.jit(lambda arrays: ops.linear_attention(**arrays, implementation="chunked", chunk_size=64)[0])
    first, second = run(arrays), run(other)
    np.testing.assert_array_equal(first[:, :41], second[:, :41])
    assert not np.array_equal(first[:, 41], second[:, 41])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"write": jnp.ones((2, 76, 2, 12))}, r"write has shape \(2, 76, 2, 12\), expected \[B, T, HV\] with a diag"),
        ({"diagonal": None, "diagonal_size": 2}, "diagonal_size is 2, expected 1 without a diagonal"),
        ({"diagonal_size": 3}, "diagonal_size is 3, expected a power of two of at most 64"),
        ({"diagonal_size": 8}, "v has 76 rows, expected a multiple of diagonal_size=8"),
    ],
)
def test_bad_input_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        ops.linear_attention(**_arguments()[0] | changes)


def test_kernels_say_what_they_do_not_take():
    arrays, _ = _arguments(channels=8)
    with pytest.raises(NotImplementedError, match="a diagonal beside a decay of one number a channel"):
        ops.linear_attention(**arrays, implementation="triton")
    one = {name: x if name == "initial_state" else x[:, :1] for name, x in _arguments()[0].items()}
    with pytest.raises(NotImplementedError, match="a diagonal for a single row"):
        ops.linear_attention(**one, implementation="triton")
