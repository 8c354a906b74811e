"""Several delta steps a token: the layer is its recurrence written out, whole, by documents and token by token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rnnlib.layers import mixer_preset
from rnnlib.layers.delta_product import in_turn
from rnnlib.layers.solve import LinearAttention

WIDTH, HEADS, LENGTH = 16, 2, 11


def layer(steps: int, **options):
    config = mixer_preset("gated_deltaproduct", steps=steps, **options)
    return config.build(WIDTH, HEADS, rngs=nnx.Rngs(0))


def inputs(batch: int = 2):
    return jax.random.normal(jax.random.key(1), (batch, LENGTH, WIDTH))


def test_steps_are_written_one_after_the_other():
    """The operator's result is that of a loop over tokens and their steps, in float64."""
    steps, mixer = 3, layer(3)
    x = inputs()
    recurrence_inputs, _ = mixer.recurrence_inputs(x)
    columns = mixer.input_projection(x)
    out, _ = mixer.solve(columns, recurrence_inputs)
    query, key, value = (
        np.asarray(a, np.float64)
        for a in (recurrence_inputs.keys.query, recurrence_inputs.keys.key, recurrence_inputs.value)
    )
    beta, log_decay = (
        np.asarray(recurrence_inputs.gates.beta, np.float64),
        np.asarray(recurrence_inputs.decay.log_decay, np.float64),
    )
    batch, size = query.shape[0], query.shape[-1]
    own = np.asarray(mixer.decay(columns).log_decay)
    state = np.zeros((batch, HEADS, size, value.shape[-1]))
    for t in range(LENGTH):
        state = state * np.exp(own[:, t])[..., None, None]
        for j in range(steps):
            i = t * steps + j
            np.testing.assert_array_equal(log_decay[:, i], own[:, t] if j == 0 else 0)
            k, v = key[:, i], value[:, i]
            error = v - np.einsum("bhkv,bhk->bhv", state, k)
            state = state + beta[:, i][..., None, None] * k[..., None] * error[..., None, :]
        expected = np.einsum("bhkv,bhk->bhv", state, query[:, t * steps]) * size**-0.5
        np.testing.assert_allclose(out[:, t * steps + steps - 1], expected, atol=2e-6)
    assert 1 < beta.max() <= 2


def test_a_heads_steps_are_next_to_each_other():
    x = jnp.arange(12.0).reshape(1, 2, 6)  # two heads of three steps
    np.testing.assert_array_equal(in_turn(x, 3)[0], [[0, 3], [1, 4], [2, 5], [6, 9], [7, 10], [8, 11]])


@pytest.mark.parametrize("steps", [1, 2])
def test_documents_and_pieces_are_the_whole(steps):
    mixer, x = layer(steps), inputs()
    ids = jnp.asarray([[0] * 5 + [1] * 6, [3] * 2 + [4] * 9])
    packed, _ = mixer(x, segment_ids=ids)
    for row, cut in ((0, 5), (1, 2)):
        for part in (slice(0, cut), slice(cut, LENGTH)):
            alone, _ = mixer(x[row : row + 1, part])
            np.testing.assert_allclose(packed[row : row + 1, part], alone, atol=1e-6)
    whole, _ = mixer(x)
    cache = mixer.init_cache(2, LENGTH)
    pieces = []
    for piece in (x[:, :4], *(x[:, i : i + 1] for i in range(4, LENGTH))):
        y, cache = mixer(piece, cache=cache)
        pieces.append(y)
    np.testing.assert_allclose(jnp.concatenate(pieces, axis=1), whole, atol=1e-6)
    assert mixer.delay_updates(cache) is cache or steps == 1


def test_one_step_is_gated_deltanet():
    single = layer(1)
    other = mixer_preset("gated_deltanet", **{"gain.negative_eigenvalues": True}).build(WIDTH, HEADS, rngs=nnx.Rngs(0))
    x = inputs()
    np.testing.assert_array_equal(single(x)[0], other(x)[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"solve": LinearAttention()}, "solve is LinearAttention, with steps=2 expected DeltaRule"),
        ({"shared_heads": 1}, "shared_heads is 1, with steps=2 expected None"),
    ],
)
def test_parts_that_several_steps_are_not_served_with_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        mixer_preset("deltaproduct", **options)
