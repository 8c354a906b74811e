"""The embedding's gradient: by products as by scatter, and of the table's dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rnnlib.models import embedding


@pytest.mark.parametrize("count", [1, 7, 4096, 5000])
def test_sums_by_products_are_sums(count):
    rng = np.random.default_rng(0)
    tokens = rng.integers(-1, 12, size=count)  # -1 and 11 are outside
    rows = rng.standard_normal((count, 3)).astype(np.float32)
    expected = np.zeros((11, 3))
    for token, row in zip(tokens, rows):
        if 0 <= token < 11:
            expected[token] += row
    got = embedding.sum_rows_by_products(jnp.asarray(tokens), jnp.asarray(rows), 11)
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_gradient_is_that_of_indexing(dtype, backend, monkeypatch):
    table = jax.random.normal(jax.random.key(0), (9, 4))
    tokens = jnp.array([[1, 1, 8], [0, 1, 5]])
    weights = jax.random.normal(jax.random.key(1), (2, 3, 4))

    def loss(look_up, table):
        return jnp.sum(weights * look_up(table, tokens, dtype).astype(jnp.float32))

    def indexed(table, tokens, dtype):
        return table[tokens].astype(dtype)

    expected = jax.grad(lambda t: loss(indexed, t))(table)
    monkeypatch.setattr(embedding.jax, "default_backend", lambda: backend)
    got = jax.grad(lambda t: loss(embedding.look_up, t))(table)
    assert got.dtype == table.dtype
    np.testing.assert_allclose(got, expected, rtol=2e-2 if dtype == jnp.bfloat16 else 1e-6, atol=1e-6)


def test_a_token_outside_the_table_is_nan():
    rows = embedding.look_up(jnp.ones((3, 2)), jnp.array([2, 3, -1, -100]), jnp.float32)
    assert np.isnan(rows).all(axis=1).tolist() == [False, True, True, True]


@pytest.mark.parametrize("outer", [jax.jacfwd, jax.jacrev])
def test_gradient_can_be_differentiated_again(outer):
    table = jax.random.normal(jax.random.key(0), (3, 2))
    tokens = jnp.array([[1, 1, 2]])

    def second(look_up):
        return outer(jax.grad(lambda table: jnp.sum(look_up(table, tokens, jnp.float32) ** 3)))(table)

    np.testing.assert_allclose(second(embedding.look_up), second(lambda table, *_: table[tokens]), rtol=1e-6)
