"""What the diagonal preconditioner refuses, and its options' types."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rnnlib import ops


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"k": jnp.ones((1, 3, 2))}, ValueError, r"k has shape \(1, 3, 2\), expected \[B, T, H, K\]"),
        ({"k": jnp.ones((1, 3, 2, 4), int)}, TypeError, "k has dtype int32, expected a floating dtype"),
        ({"gain": jnp.ones((1, 3, 4))}, ValueError, r"gain has shape \(1, 3, 4\), expected \[B, T, H\] or"),
        ({"log_decay": jnp.ones((1, 2, 2))}, ValueError, r"log_decay has shape \(1, 2, 2\)"),
        ({"initial_state": jnp.ones((1, 2, 3))}, ValueError, r"initial_state has shape \(1, 2, 3\)"),
        ({"center": jnp.ones((4,))}, ValueError, r"center has shape \(4,\), expected a number or \[H\]"),
        ({"center": None}, TypeError, "center is None, expected a number or an array"),
        ({"segment_ids": jnp.ones((1, 3))}, TypeError, "segment_ids has dtype float32"),
        ({"bound": 2.5}, ValueError, "bound is 2.5, expected 1 <= bound <= 2"),
        ({"eps": 0.0}, ValueError, "eps is 0.0, expected a positive number"),
        ({"eps": 1e-50}, ValueError, "eps is 1e-50, expected a positive number, of at least 1.2e-38"),
        ({"interval": "wide"}, ValueError, "interval is 'wide', expected one of"),
        ({"squash": "erf"}, ValueError, "squash is 'erf', expected one of"),
        ({"implementation": "fast"}, ValueError, "implementation is 'fast'"),
    ],
)
def test_bad_arguments_are_named(unchecked_shapes, changes, error, message):
    with pytest.raises(error, match=message) as info:
        ops.diagonal_preconditioner(**({"k": jnp.ones((1, 3, 2, 4))} | changes))
    assert str(info.value).startswith("diagonal_preconditioner: ")


def test_bad_ridge_is_named(unchecked_shapes):
    k = jnp.ones((1, 3, 2, 4))
    with pytest.raises(ValueError, match="precondition_query: ridge is 0, expected a positive number"):
        ops.precondition_query(k, k, ridge=0)
    with pytest.raises(ValueError, match=r"precondition_query: ridge has shape \(3,\), expected a number or \[H\]"):
        ops.precondition_query(k, k, ridge=np.ones(3, np.float32))
    with pytest.raises(ValueError, match=r"sherman_morrison_key: ridge has shape \(3,\)"):
        ops.sherman_morrison_key(k, ridge=jnp.ones(3))
    with pytest.raises(ValueError, match="write_key_normalization: kind is 'unit'"):
        ops.write_key_normalization(k, k, "unit")


def test_write_key_dtype_is_checked():
    with pytest.raises(TypeError, match=r"write_key_dtype is .*int32.*, expected a floating dtype"):
        ops.precondition_key(jnp.ones((1, 3, 1, 4)), write_key_dtype=jnp.int32)
    with pytest.raises(TypeError, match="precondition_key: write_key_dtype is 'halves', expected a floating dtype"):
        ops.precondition_key(jnp.ones((1, 3, 1, 4)), write_key_dtype="halves")


def test_squash_of_a_float16_gram_is_that_in_float32_rounded():
    gram = jnp.asarray([[0.0, 1e-3, 2.0]])
    wide = ops.squash_to_interval(gram, eps=2e-8, center=-1.0)
    narrow = ops.squash_to_interval(gram.astype(jnp.float16), eps=2e-8, center=-1.0)
    assert narrow.dtype == jnp.float16
    np.testing.assert_allclose(narrow, wide, rtol=1e-3)


def test_options_may_be_arrays_of_one_number_and_are_finite(unchecked_shapes):
    k = jax.random.normal(jax.random.key(0), (1, 20, 1, 16))
    options = {"bound": jnp.float32(1.25), "eps": np.float32(1e-5)}
    for implementation in ("chunked", "triton"):
        out, _ = ops.diagonal_preconditioner(k, **options, implementation=implementation)
        np.testing.assert_allclose(out, ops.diagonal_preconditioner(k, bound=1.25, eps=1e-5)[0], rtol=1e-5)
    with pytest.raises(TypeError, match=r"bound is .*, expected a number from 1 to 2"):
        jax.jit(lambda bound: ops.diagonal_preconditioner(k, bound=bound))(1.25)
    with pytest.raises(ValueError, match="center is inf, expected a finite number"):
        ops.diagonal_preconditioner(k, center=float("inf"))
    with pytest.raises(ValueError, match=r"ridge is inf, expected a positive number, .* finite"):
        ops.ridge_solve(k, k, ridge=float("inf"))
