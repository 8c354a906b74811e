"""A small Gated KalmaNet hybrid learns, generates, is stored and read again, stacked or not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from rnnlib.inference import generate
from rnnlib.models import DecoderLM, ModelConfig, attention_at
from rnnlib.models.weights import load_weights, save_weights

CONFIG = ModelConfig(
    vocabulary_size=23,
    width=16,
    num_layers=3,
    num_heads=2,
    mixers=attention_at("gated_kalmanet", 3, (2,)),
    mixer_overrides={
        "gated_kalmanet": {"solve.sketch_size": 4, "solve.sketch": "random", "solve.iterations": 12},
        "attention": {"qk_norm": True},
    },
    mlp_width=16,
)
PROMPTS = [[3, 1, 4, 1, 5], [6, 5]]
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def test_training_changes_parameters_and_leaves_the_random_projection():
    model = DecoderLM(CONFIG, rngs=nnx.Rngs(0))
    tokens = jnp.asarray(np.tile(np.arange(12) % 5, (2, 1)), jnp.int32)
    graphdef, parameters, other = nnx.split(model, nnx.Param, ...)
    optimizer = optax.adam(1e-2)

    @quick_jit
    def step(parameters, state):
        def loss(parameters):
            logits = nnx.merge(graphdef, parameters, other)(tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        value, gradients = jax.value_and_grad(loss)(parameters)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(parameters, updates), state, value

    state, losses = optimizer.init(parameters), []
    for _ in range(30):
        parameters, state, value = step(parameters, state)
        losses.append(float(value))
    assert losses[-1] < 0.3 * losses[0]
    assert len(jax.tree.leaves(other)) == 2  # one projection a recurrent layer


def test_stored_weights_generate_the_same_and_stacked_blocks_are_the_same(tmp_path):
    config = CONFIG.replace(initializer_std=0.3, mixers=("gated_kalmanet",))
    model = DecoderLM(config, rngs=nnx.Rngs(1))
    expected = generate(model, PROMPTS, max_new_tokens=6, temperature=0)
    save_weights(model, tmp_path / "weights")
    read = load_weights(tmp_path / "weights")
    np.testing.assert_array_equal(generate(read, PROMPTS, max_new_tokens=6, temperature=0), expected)

    tokens = jnp.asarray([PROMPTS[0]], jnp.int32)
    graphdef, state = nnx.split(model)
    stacked = nnx.split(DecoderLM(config.replace(scan_layers=True, remat=True), rngs=nnx.Rngs(1)))[0]
    logits = quick_jit(lambda state: nnx.merge(graphdef, state)(tokens))(state)
    np.testing.assert_allclose(quick_jit(lambda state: nnx.merge(stacked, state)(tokens))(state), logits, atol=1e-5)
    # Greedy decoding follows the parallel pass.
    assert int(logits[0, -1].argmax()) == int(expected[0, 0])
