import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from rnnlib.layers import Experts, with_router_losses
from rnnlib.models import DecoderLM, ModelConfig
from rnnlib.training import (
    OptimizerConfig,
    evaluate,
    head_loss_sums,
    init_train_state,
    learning_rate_schedule,
    loss_sums,
    make_optimizer,
    make_train_step,
    put_batch,
)
from tests.selection import mostly_slow
from tests.training.stand_in import VOCABULARY, TinyModel, random_batch

TOKEN_BYTES = np.arange(VOCABULARY, dtype=np.int32)
CONFIG = OptimizerConfig(learning_rate=1e-2, warmup_steps=2, clip_norm=0.05)
STEPS = 20


@pytest.fixture(scope="module")
def train_step():
    optimizer = make_optimizer(CONFIG, STEPS)
    graphdef, _ = init_train_state(TinyModel(rngs=nnx.Rngs(0)), optimizer)
    return make_train_step(graphdef, optimizer, learning_rate_schedule(CONFIG, STEPS), TOKEN_BYTES)


def new_state():
    return init_train_state(TinyModel(rngs=nnx.Rngs(0)), make_optimizer(CONFIG, STEPS))[1]


def assert_trees_equal(got, expected, **tolerance):
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected)):
        a, b = (jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in (a, b))
        np.testing.assert_allclose(a, b, err_msg=jax.tree_util.keystr(path), **tolerance)


def test_a_batch_that_does_not_fit_is_named():
    batch = random_batch(np.random.default_rng(0))
    rows = len(batch["inputs"])
    with pytest.raises(ValueError, match=f"batch_size={rows} does not split evenly into accumulation_steps={rows + 1}"):
        put_batch(batch, None, rows + 1)
    del batch["positions"]
    with pytest.raises(ValueError, match="batch has no positions, expected all of inputs, targets"):
        put_batch(batch, None)


def test_loss_ignores_what_is_masked():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2, 3, VOCABULARY)).astype(np.float32)
    targets = np.array([[1, 2, 3], [4, 5, 6]], np.int32)
    weights = np.array([[1, 0, 2], [0, 1, 0]], np.float32)
    log_probabilities = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = -sum(weights[b, t] * log_probabilities[b, t, targets[b, t]] for b in range(2) for t in range(3))
    hidden = weights == 0
    logits[hidden], targets[hidden] = np.nan, 10**6

    def nats(logits):
        return loss_sums(logits, jnp.asarray(targets), jnp.asarray(weights), jnp.asarray(TOKEN_BYTES)).nats

    got, gradient = jax.value_and_grad(nats)(jnp.asarray(logits))
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    assert np.isfinite(gradient).all() and not np.any(np.asarray(gradient)[hidden])
    sums = loss_sums(jnp.asarray(logits), jnp.asarray(targets), jnp.asarray(weights), jnp.asarray(TOKEN_BYTES))
    assert (float(sums.tokens), float(sums.bytes)) == (4.0, 1 + 2 * 3 + 5)


@pytest.mark.parametrize("target", [-100, -1, VOCABULARY])
def test_a_target_outside_of_the_vocabulary_is_not_a_loss(target):
    """Its logit would count as 0: a plausible number, and nothing is learned from it."""
    hidden, head = jnp.ones((1, 2, 4)), jnp.ones((VOCABULARY, 4))
    targets, weights, counts = jnp.asarray([[0, target]]), jnp.ones((1, 2)), jnp.asarray(TOKEN_BYTES)
    assert np.isnan(loss_sums(hidden @ head.T, targets, weights, counts).nats)
    assert np.isnan(head_loss_sums(hidden, head, targets, weights, counts).nats)


@pytest.mark.parametrize("block_tokens", [3, 100])
def test_the_head_s_loss_is_the_loss_of_its_logits(block_tokens):
    keys = jax.random.split(jax.random.key(0), 4)
    hidden, head = jax.random.normal(keys[0], (2, 5, 8)), jax.random.normal(keys[1], (VOCABULARY, 8))
    targets = jax.random.randint(keys[2], (2, 5), 0, VOCABULARY)
    weights = jax.random.uniform(keys[3], (2, 5)).at[1, 2].set(0.0)
    counts = jnp.asarray(TOKEN_BYTES)

    def plain(hidden, head, weights):
        return loss_sums(hidden @ head.T, targets, weights, counts)

    def blocked(hidden, head, weights):
        return head_loss_sums(hidden, head, targets, weights, counts, block_logits=block_tokens * VOCABULARY)

    def gradients(function):
        return jax.jit(jax.grad(lambda *x: 3 * function(*x).nats, argnums=(0, 1)))(hidden, head, weights)

    assert_trees_equal(blocked(hidden, head, weights), plain(hidden, head, weights), rtol=1e-5)
    assert_trees_equal(gradients(blocked), gradients(plain), rtol=1e-5, atol=1e-6)
    # What a token's loss weighs changes nothing but its own share.
    nats = jax.grad(lambda weights: blocked(hidden, head, weights).nats)(weights)
    np.testing.assert_allclose(jnp.sum(nats * weights), blocked(hidden, head, weights).nats, rtol=1e-5)
    # A row of weight 0 has no influence, not even through the head's gradient.
    poisoned = hidden.at[1, 2].set(jnp.nan)
    unchanged = jax.grad(lambda head: blocked(poisoned, head, weights).nats)(head)
    np.testing.assert_allclose(unchanged, gradients(blocked)[1] / 3, rtol=1e-5, atol=1e-6)


def test_the_head_s_loss_in_bfloat16_never_holds_all_logits():
    tokens, width = 512, 16
    hidden = jnp.ones((1, tokens, width), jnp.bfloat16)
    head, targets = jnp.ones((VOCABULARY, width)), jnp.zeros((1, tokens), jnp.int32)

    def nats(hidden, head):
        weights, counts = jnp.ones((1, tokens)), jnp.asarray(TOKEN_BYTES)
        return head_loss_sums(hidden, head, targets, weights, counts, block_logits=64 * VOCABULARY).nats

    text = str(jax.make_jaxpr(jax.value_and_grad(nats, argnums=(0, 1)))(hidden, head))
    assert f"bf16[64,{VOCABULARY}]" in text and f"[{tokens},{VOCABULARY}]" not in text
    d_hidden, d_head = jax.grad(nats, argnums=(0, 1))(hidden, head)
    assert (d_hidden.dtype, d_head.dtype) == (jnp.bfloat16, jnp.float32)


def test_step_equals_optax_on_the_mean_loss(train_step):
    batch = random_batch(np.random.default_rng(1))
    model = TinyModel(rngs=nnx.Rngs(0))
    graphdef, parameters, other = nnx.split(model, nnx.Param, ...)

    def mean_loss(parameters):
        logits = nnx.merge(graphdef, parameters, other)(batch["inputs"], positions=batch["positions"])
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return jnp.sum(nats * batch["loss_weights"]) / jnp.sum(batch["loss_weights"])

    loss, gradients = jax.value_and_grad(mean_loss)(parameters)
    norm = optax.tree.norm(gradients)
    assert norm > CONFIG.clip_norm  # so that clipping is seen
    gradients = jax.tree.map(lambda g: g * CONFIG.clip_norm / norm, gradients)
    # AdamW's first step: the moments' bias corrections leave g / (|g| + epsilon).
    rate = CONFIG.learning_rate / 2
    decayed = {"hidden/kernel"}

    def update(path, p, g):
        name = jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")
        return p - rate * (g / (jnp.abs(g) + CONFIG.epsilon) + CONFIG.weight_decay * (name in decayed) * p)

    expected = jax.tree_util.tree_map_with_path(update, parameters, gradients)
    state, metrics = train_step(new_state(), put_batch(batch, None))
    assert_trees_equal(state.parameters, expected, atol=2e-6)
    np.testing.assert_allclose(metrics.nats / metrics.tokens, loss, rtol=1e-6)
    np.testing.assert_allclose(metrics.gradient_norm, norm, rtol=1e-5)
    np.testing.assert_allclose(metrics.learning_rate, rate, rtol=1e-6)
    assert int(state.updates) == 1 and int(state.skipped) == 0 and bool(metrics.finite)


@pytest.mark.parametrize("parts", [2, 4])
def test_accumulation_equals_the_large_batch(train_step, parts):
    # Parts of very different weight: a mean of the parts' means would differ.
    rng = np.random.default_rng(2)
    whole, split = new_state(), new_state()
    for _ in range(3):
        batch = random_batch(rng)
        batch["loss_weights"][1:] *= 0.01
        whole, whole_metrics = train_step(whole, put_batch(batch, None))
        split, split_metrics = train_step(split, put_batch(batch, None, parts))
        np.testing.assert_allclose(split_metrics.nats, whole_metrics.nats, rtol=1e-6)
        np.testing.assert_allclose(split_metrics.gradient_norm, whole_metrics.gradient_norm, rtol=1e-5)
    assert_trees_equal(split.parameters, whole.parameters, atol=1e-5)


def test_a_step_that_is_not_finite_changes_nothing(train_step):
    rng = np.random.default_rng(3)
    good, bad = random_batch(rng), random_batch(rng, poison=True)
    state, _ = train_step(new_state(), put_batch(good, None))
    before = jax.tree.map(jnp.copy, (state.parameters, state.optimizer, state.updates))
    state, metrics = train_step(state, put_batch(bad, None))
    assert not bool(metrics.finite) and int(metrics.skipped) == 1 and int(state.skipped) == 1
    assert_trees_equal((state.parameters, state.optimizer, state.updates), before, rtol=0)
    # The step after it goes on as if it had not been.
    expected, _ = train_step(new_state(), put_batch(good, None))
    expected, _ = train_step(expected, put_batch(good, None))
    state, metrics = train_step(state, put_batch(good, None))
    assert bool(metrics.finite)
    assert_trees_equal(state.parameters, expected.parameters, rtol=0)


def test_a_batch_without_weights_leaves_the_gradient_zero(train_step):
    batch = random_batch(np.random.default_rng(4))
    batch["loss_weights"][:] = 0
    _state, metrics = train_step(new_state(), put_batch(batch, None))
    assert bool(metrics.finite) and float(metrics.gradient_norm) == 0.0


def test_the_state_is_donated(train_step):
    state = new_state()
    train_step(state, put_batch(random_batch(np.random.default_rng(5)), None))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.parameters))


def test_evaluation_is_the_mean_over_all_tokens_without_dropout():
    rng = np.random.default_rng(6)
    batches = [random_batch(rng) for _ in range(3)]
    model = TinyModel(rngs=nnx.Rngs(0), dropout=0.5)
    result = evaluate(model, batches, token_bytes=TOKEN_BYTES)
    plain = TinyModel(rngs=nnx.Rngs(0))
    nats = tokens = num_bytes = 0.0
    for batch in batches:
        logits = plain(batch["inputs"], positions=batch["positions"])
        part = loss_sums(
            logits, jnp.asarray(batch["targets"]), jnp.asarray(batch["loss_weights"]), jnp.asarray(TOKEN_BYTES)
        )
        nats, tokens, num_bytes = nats + part.nats, tokens + part.tokens, num_bytes + part.bytes
    np.testing.assert_allclose(result.loss, nats / tokens, rtol=1e-5)
    np.testing.assert_allclose(result.bits_per_byte, nats / np.log(2) / num_bytes, rtol=1e-5)
    np.testing.assert_allclose(result.perplexity, np.exp(nats / tokens), rtol=1e-5)


def test_evaluation_of_nothing_is_refused():
    with pytest.raises(ValueError, match="no token"):
        evaluate(TinyModel(rngs=nnx.Rngs(0)), [], token_bytes=TOKEN_BYTES)


@pytest.mark.parametrize("parts", mostly_slow([1, 2], [2]))
def test_training_adds_what_routers_of_experts_ask_for(parts):
    """To the gradient, as often as there are tokens; the loss that is reported is the language model's alone."""
    experts = Experts(4, 2, 8, load_balancing=0.4, z_loss=0.2)
    config = ModelConfig(VOCABULARY, 16, 2, 2, mlp_width=16, feed_forwards=("dense", experts))
    settings = OptimizerConfig(learning_rate=1e-3, warmup_steps=0, clip_norm=None)
    optimizer, schedule = make_optimizer(settings, 5), learning_rate_schedule(settings, 5)
    batch = random_batch(np.random.default_rng(0))
    graph, state = init_train_state(DecoderLM(config, rngs=nnx.Rngs(0)), optimizer)
    step = make_train_step(graph, optimizer, schedule, TOKEN_BYTES)
    state, metrics = step(state, put_batch(batch, None, parts))
    assert not jax.tree.leaves(state.other)
    found, nats = optax.tree.get(state.optimizer, "mu"), float(metrics.nats)

    def objective(parameters, rows, with_losses):
        model = nnx.merge(graph, parameters, {}, copy=True)
        part = {name: jnp.asarray(batch[name])[rows] for name in batch}
        options = {"segment_ids": part["segment_ids"], "positions": part["positions"]}
        logits, router_loss = with_router_losses(lambda m: m(part["inputs"], **options), model)
        sums = loss_sums(logits, part["targets"], part["loss_weights"], jnp.asarray(TOKEN_BYTES))
        return sums.nats + (router_loss * sums.tokens if with_losses else 0)

    parameters = init_train_state(DecoderLM(config, rngs=nnx.Rngs(0)), optimizer)[1].parameters
    tokens, rows = np.sum(batch["loss_weights"]), len(batch["inputs"])
    slices = [slice(i * rows // parts, (i + 1) * rows // parts) for i in range(parts)]
    with_losses, without = (
        jax.jit(jax.grad(lambda p, on=on: sum(objective(p, s, on) for s in slices) / tokens))(parameters)
        for on in (True, False)
    )
    scaled = jax.tree.map(lambda m: m / (1 - settings.beta1), found)
    assert_trees_equal(scaled, with_losses, rtol=1e-3, atol=1e-7)
    assert abs(nats - jax.jit(lambda p: objective(p, slice(None), False))(parameters)) < 1e-3
    difference = jax.tree.map(lambda x, y: np.abs(x - y).max(), with_losses, without)
    assert max(jax.tree.leaves(difference)) > 1e-3
