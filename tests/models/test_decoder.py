import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

from rnnlib.layers import mixer_names
from rnnlib.models import DecoderLM, ModelConfig
from tests.jaxprs import equations
from tests.selection import mostly_slow

# Compilation takes nearly all of these tests' time, and half of it is optimisation.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
SMALL = ModelConfig(vocabulary_size=29, width=32, num_layers=2, num_heads=2, head_dim=16)
TOKENS = jax.random.randint(jax.random.key(7), (2, 24), 0, 29)


@functools.cache
def small_model() -> DecoderLM:
    return DecoderLM(SMALL, rngs=nnx.Rngs(0))


@functools.cache
def compiled():
    graphdef, state = nnx.split(small_model())
    run = quick_jit(lambda state, tokens, segment_ids: nnx.merge(graphdef, state)(tokens, segment_ids=segment_ids))
    return functools.partial(run, state)


def small_logits(tokens, segment_ids):
    return compiled()(tokens, segment_ids)


def loss_and_gradients(config, tokens=TOKENS):
    model = DecoderLM(config, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(model)

    @quick_jit
    def run(state):
        def loss(state):
            logits = nnx.merge(graphdef, state)(tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        return jax.value_and_grad(loss)(state)

    return run(state)


def test_no_logit_depends_on_a_later_token():
    segments = jnp.ones_like(TOKENS)
    changed = TOKENS.at[:, 12].set((TOKENS[:, 12] + 1) % 29)
    before, after = small_logits(TOKENS, segments), small_logits(changed, segments)
    np.testing.assert_array_equal(before[:, :12], after[:, :12])
    assert not np.allclose(before[:, 12], after[:, 12])


def test_packed_documents_do_not_see_each_other():
    segments = jnp.broadcast_to(jnp.where(jnp.arange(24) < 9, 3, 5), (2, 24))
    packed = small_logits(TOKENS, segments)
    # The second document alone: with another first document before it.
    other = TOKENS.at[:, :9].set((TOKENS[:, :9] + 5) % 29)
    np.testing.assert_allclose(small_logits(other, segments)[:, 9:], packed[:, 9:], atol=1e-6)
    alone = small_logits(jnp.roll(TOKENS, -9, axis=1), jnp.ones_like(TOKENS))
    np.testing.assert_allclose(alone[:, :15], packed[:, 9:], atol=1e-5)
    assert not np.allclose(small_logits(TOKENS, jnp.ones_like(TOKENS))[:, 9:], packed[:, 9:], atol=1e-3)


def test_hybrid_packs_documents_too():
    mixers = ("deltanet", "sliding_window_attention", "attention")
    # Mixers that matter: a leak between documents would be far above the tolerance.
    strong = {name: {"initializer.scale": 0.3} for name in ("*", *mixers[1:])}
    config = SMALL.replace(num_layers=3, mixers=mixers, window=6, mixer_overrides=strong)
    model = DecoderLM(config, rngs=nnx.Rngs(1))
    segments = jnp.broadcast_to(jnp.where(jnp.arange(24) < 9, 3, 5), (2, 24))
    run = quick_jit(lambda tokens, segments: model(tokens, segment_ids=segments))
    alone = run(jnp.roll(TOKENS, -9, axis=1), jnp.ones_like(TOKENS))
    np.testing.assert_allclose(alone[:, :15], run(TOKENS, segments)[:, 9:], atol=1e-5)
    leaking = run(TOKENS, jnp.ones_like(TOKENS))[:, 9:]
    assert float(jnp.abs(leaking - alone[:, :15]).max()) > 0.05


def test_remat_and_scanned_layers_change_nothing():
    # Five layers of two mixers leave one layer outside of the scan.
    config = SMALL.replace(mixers=("linear_attention", "attention"), num_layers=5)
    loss, gradients = loss_and_gradients(config)
    other = config.replace(remat=True, remat_keeps="products", scan_layers=True)
    other_loss, other_gradients = loss_and_gradients(other)
    np.testing.assert_allclose(loss, other_loss, rtol=1e-6)
    for one, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(other_gradients), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6, rtol=1e-4)


def test_remat_stores_less_for_the_backward_pass():
    def stored(config):
        model = DecoderLM(config, rngs=nnx.Rngs(0))
        graphdef, state = nnx.split(model)
        _, pullback = jax.eval_shape(lambda s: jax.vjp(lambda s: nnx.merge(graphdef, s)(TOKENS), s), state)
        return sum(leaf.size for leaf in jax.tree.leaves(pullback))

    config = SMALL.replace(num_layers=4)
    inputs = stored(config.replace(remat=True))
    products = stored(config.replace(remat=True, remat_keeps="products"))
    assert inputs < 0.7 * products and products < 0.8 * stored(config)


def test_bfloat16_computes_low_and_keeps_parameters_logits_and_decay_high():
    config = SMALL.replace(dtype="bfloat16")
    model = DecoderLM(config, rngs=nnx.Rngs(0))
    run = quick_jit(lambda model: (model(TOKENS), model.hidden(TOKENS)))
    logits, hidden = run(model)
    assert logits.dtype == jnp.float32
    assert hidden.dtype == jnp.bfloat16
    reference = small_logits(TOKENS, jnp.ones_like(TOKENS))
    assert jnp.linalg.norm(logits - reference) / jnp.linalg.norm(reference) < 0.03
    assert {leaf.dtype.name for leaf in jax.tree.leaves(nnx.state(model))} == {"float32"}
    low = DecoderLM(config.replace(param_dtype="bfloat16"), rngs=nnx.Rngs(0))
    dtypes = {".".join(map(str, k)): v[...].dtype.name for k, v in nnx.to_flat_state(nnx.state(low, nnx.Param))}
    assert dtypes["embedding"] == "bfloat16"
    decay = {name: dtype for name, dtype in dtypes.items() if "A_log" in name or "dt_bias" in name}
    assert decay and set(decay.values()) == {"float32"}


def test_initial_weights_are_normal_with_the_configured_deviation():
    model = DecoderLM(SMALL.replace(vocabulary_size=2000, width=64), rngs=nnx.Rngs(3))
    block = model.blocks[0]
    for weights in (model.embedding, model.head, block.feed_forward.gate.kernel, block.feed_forward.down.kernel):
        assert float(weights[...].std()) == pytest.approx(0.02, rel=0.05)
        assert abs(float(weights[...].mean())) < 1e-3


def test_tied_head_reads_the_embedding():
    tied = DecoderLM(SMALL.replace(tie_embeddings=True), rngs=nnx.Rngs(0))
    hidden = tied.hidden(TOKENS)
    np.testing.assert_allclose(tied.logits(hidden), hidden @ tied.embedding[...].T, atol=1e-5)


def test_a_model_without_feed_forward_is_mixers_alone():
    model = DecoderLM(SMALL.replace(mlp_ratio=0), rngs=nnx.Rngs(0))
    assert all(block.feed_forward is None for block in model.blocks)
    assert model(TOKENS).shape == (2, 24, 29)


def test_a_token_outside_the_vocabulary_gives_nan_and_not_a_neighbour():
    for outside in (29, -1):
        logits = small_logits(TOKENS.at[0, 3].set(outside), jnp.ones_like(TOKENS))
        assert jnp.isnan(logits[0, 3:]).all()
        assert jnp.isfinite(logits[1]).all()


def test_bad_shapes_are_named(unchecked_shapes):
    with pytest.raises(ValueError, match=r"DecoderLM: tokens has shape \(2,\), expected \[B, T\]"):
        small_model()(TOKENS[:, 0])
    with pytest.raises(TypeError, match=r"tokens is \[\[1, 2\]\], expected an array"):
        small_model()([[1, 2]])
    with pytest.raises(TypeError, match="tokens has dtype float32, expected an integer"):
        small_model()(TOKENS.astype(jnp.float32))
    with pytest.raises(ValueError, match=r"DecoderLM: segment_ids has shape \(1, 24\), expected \[B, T\] = \(2, 24\)"):
        small_model().extend(TOKENS, small_model().init_cache(2, 24), segment_ids=jnp.ones((1, 24), jnp.int32))
    with pytest.raises(ValueError, match=r"positions has shape \(24,\), expected \[B, T\] = \(2, 24\)"):
        small_model()(TOKENS, positions=jnp.arange(24))
    with pytest.raises(ValueError, match="cache has 1 entries, expected 2, one a layer, as init_cache gives"):
        small_model().extend(TOKENS, small_model().init_cache(2, 30)[:1])
    with pytest.raises(ValueError, match="DecoderLM: cache is None, expected 2, one a layer, as init_cache gives"):
        small_model().extend(TOKENS, None)
    other = DecoderLM(SMALL.replace(num_heads=1), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"cache.* has shape \(2, .*\), expected \(2, .*\) as init_cache gives"):
        small_model().extend(TOKENS, other.init_cache(2, 30))
    for wrong, value in ((0, "0"), (None, "None"), (4.5, "4.5")):
        with pytest.raises(ValueError, match=f"init_cache: max_length is {value}, expected an integer of at least 1"):
            small_model().init_cache(2, wrong)
    with pytest.raises(ValueError, match=r"DecoderLM\.init_cache: batch_size is 0, expected an integer of at least 1"):
        small_model().init_cache(0, 30)


def test_float64_is_not_quietly_float32():
    for field in ("dtype", "param_dtype"):
        with pytest.raises(ValueError, match=f"{field}='float64': expected jax_enable_x64"):
            DecoderLM(SMALL.replace(**{field: "float64"}), rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    "mixer", mostly_slow(mixer_names(), ["kda", "gated_kalmanet", "attention", "latent_attention"])
)
def test_a_float64_model_computes_in_float64(mixer, x64):
    """The whole pass, its gradient, and calls of one and of several tokens."""
    config = SMALL.replace(num_layers=1, mixers=(mixer,), dtype="float64", param_dtype="float64")
    graph, state = nnx.split(DecoderLM(config, rngs=nnx.Rngs(0)))
    tokens, cache = jnp.zeros((2, 40), int), nnx.merge(graph, state).init_cache(2, 50)

    def everything(state, cache):
        total = jax.grad(lambda state: nnx.merge(graph, state)(tokens, segment_ids=tokens).sum())(state)
        return total, [nnx.merge(graph, state).extend(tokens[:, :length], cache) for length in (1, 9)]

    found = equations(jax.make_jaxpr(everything)(state, cache).jaxpr)
    innermost = [equation for equation in found if not list(jaxprs_in_params(equation.params))]
    assert len(innermost) > 100
    narrow = {e.primitive.name for e in innermost for x in e.outvars if x.aval.dtype in (jnp.float32, jnp.bfloat16)}
    # Some parameters are stored in float32 always: they are widened, and their gradients rounded.
    assert narrow <= {"convert_element_type"}


def test_a_few_steps_learn_a_repeating_sequence():
    tokens = jnp.tile(jnp.arange(8), 4)[None]
    optimizer = optax.adamw(1e-2)
    graphdef, parameters = nnx.split(DecoderLM(SMALL, rngs=nnx.Rngs(0)))

    @quick_jit
    def step(parameters, moments):
        def loss(parameters):
            logits = nnx.merge(graphdef, parameters)(tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        value, gradients = jax.value_and_grad(loss)(parameters)
        updates, moments = optimizer.update(gradients, moments, parameters)
        return value, optax.apply_updates(parameters, updates), moments

    moments = optimizer.init(parameters)
    losses = []
    for _ in range(40):
        value, parameters, moments = step(parameters, moments)
        losses.append(float(value))
    assert losses[0] == pytest.approx(np.log(29), rel=0.1)
    assert losses[-1] < 0.3


ONE_MIXER_TWICE = SMALL.replace(
    num_layers=4,
    mixers=("attention/local", "attention/global"),
    mixer_overrides={
        "attention": {"qk_norm": True},
        "attention/local": {"window": 4, "num_heads": 4, "head_dim": 8},
        "attention/global": {"rope_base": None, "output_gate": True},
    },
    norm_positions=("input", "output"),
    zero_centred_norms=True,
    mlp_width=24,
)


def test_variants_of_a_mixer_have_their_own_settings_on_top_of_its():
    local, everywhere = (block.mixer.config for block in DecoderLM(ONE_MIXER_TWICE, rngs=nnx.Rngs(0)).blocks[:2])
    assert (local.qk_norm, local.window, local.num_heads, local.rope_base) == (True, 4, 4, 10000.0)
    assert (everywhere.qk_norm, everywhere.window, everywhere.head_dim) == (True, None, 16)
    assert everywhere.rope_base is None and everywhere.output_gate
    assert ModelConfig.from_dict(ONE_MIXER_TWICE.to_dict()) == ONE_MIXER_TWICE
    for wrong in ("attention/", "/local", "nothing/local"):
        with pytest.raises(ValueError, match=f"mixers: '{wrong}' is no mixer"):
            SMALL.replace(mixers=(wrong,))


def test_norms_stand_where_the_configuration_says():
    """Both kinds of block against their formulas; norms multiply by 1 + scale."""
    model = DecoderLM(ONE_MIXER_TWICE, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (2, 6, 32))
    for block, before in zip(model.blocks, (True, False)):
        scales = [0.1 * jax.random.normal(jax.random.key(i), (32,)) for i in (2, 3)]
        assert not np.any(block.mixer_norm.scale[...])
        block.mixer_norm.scale[...], block.feed_forward_norm.scale[...] = scales

        def norm(y, scale):
            return y / jnp.sqrt(jnp.mean(y**2, axis=-1, keepdims=True) + 1e-6) * (1 + scale)

        if before:
            y = x + block.mixer(norm(x, scales[0]))[0]
            y = y + block.feed_forward(norm(y, scales[1]))
        else:
            y = x + norm(block.mixer(x)[0], scales[0])
            y = y + norm(block.feed_forward(y), scales[1])
        np.testing.assert_allclose(block(x)[0], y, rtol=1e-5, atol=1e-5)


def test_variants_and_norm_positions_under_scan_remat_and_a_cache():
    expected = loss_and_gradients(ONE_MIXER_TWICE)
    found = loss_and_gradients(ONE_MIXER_TWICE.replace(scan_layers=True, remat=True))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(expected))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), found, expected)
    with pytest.raises(ValueError, match=r"norm_positions=.* with scan_layers expected one entry, or one for each"):
        ONE_MIXER_TWICE.replace(scan_layers=True, norm_positions=("input", "output", "input", "input"))
    model = DecoderLM(ONE_MIXER_TWICE, rngs=nnx.Rngs(0))
    cache, pieces = model.init_cache(2, 12), []
    for start, end in ((0, 7), (7, 8), (8, 12)):
        logits, cache = model.extend(TOKENS[:, start:end], cache)
        pieces.append(logits)
    np.testing.assert_allclose(np.concatenate(pieces, axis=1), model(TOKENS[:, :12]), rtol=1e-4, atol=1e-5)
