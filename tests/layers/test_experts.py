"""Experts: every choice against a loop over tokens and experts in float64, and what routers add to the loss."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rnnlib import ops
from rnnlib.layers import Experts, RouterConfig, with_router_losses
from rnnlib.models import DecoderLM, ModelConfig, count_parameters
from rnnlib.training.memory import least_parameters
from tests.selection import mostly_slow

from .tiny import inputs, parameters, relative_error

WIDTH = 16


def build(config, seed=0, **options):
    options = {"initializer_std": 0.5, "dtype": jnp.float32, "param_dtype": jnp.float32} | options
    module = config.build(WIDTH, 12, rngs=nnx.Rngs(seed), **options)
    if module.router.correction_bias is not None:
        bias = np.random.default_rng(seed).uniform(-0.4, 0.4, config.num_experts)
        module.router.correction_bias[...] = jnp.asarray(bias, jnp.float32)
    return module


def swiglu(x, gate, up, down):
    h = x @ gate
    return (h / (1 + np.exp(-h)) * (x @ up)) @ down


def expert(config, row, matrices):
    """An expert of either kind; `matrices` are its maps by name."""
    if config.gated:
        return swiglu(row, *(matrices[name] for name in ("gate", "up", "down")))
    return np.maximum(row @ matrices["up"], 0) ** 2 @ matrices["down"]


def loop(config, p, x):
    """The definition, token by token, in float64; also each token's chosen experts."""
    router, chosen = config.router, []
    out = np.zeros_like(x)
    for t, row in enumerate(x):
        logits = row @ p["router"]["projection"]["kernel"]
        e = np.exp(logits - logits.max())
        scores = e / e.sum() if router.scores == "softmax" else 1 / (1 + np.exp(-logits))
        ranked = scores + p["router"].get("correction_bias", 0.0)
        groups = ranked.reshape(router.groups, -1)
        worth = [np.sort(g)[-2:].sum() for g in groups]
        kept = sorted(range(router.groups), key=lambda g: -worth[g])[: router.groups_kept]
        size = groups.shape[1]
        candidates = [e for e in range(config.num_experts) if e // size in kept]
        best = sorted(candidates, key=lambda e: -ranked[e])[: config.experts_per_token]
        total = sum(scores[e] for e in best) if router.renormalize else 1.0
        for e in best:
            weight = router.scale * scores[e] / total
            seen = row @ p["latent_in"]["kernel"] + p["latent_in"]["bias"] if config.latent_size else row
            y = weight * expert(config, seen, {name: p[name][e] for name in ("gate", "up", "down") if name in p})
            out[t] += y @ p["latent_out"]["kernel"] if config.latent_size else y
        if config.latent_size:
            out[t] += p["latent_out"]["bias"]
        if config.shared_width:
            y = expert(config, row, {name: linear["kernel"] for name, linear in p["shared"].items()})
            if config.shared_gate:
                y = y / (1 + np.exp(-(row @ p["shared_gate"]["kernel"])))
            out[t] += y
        chosen.append(best)
    return out, chosen


CONFIGS = {
    "qwen": Experts(6, 2, 10, shared_width=5, shared_gate=True),
    "not renormalised": Experts(5, 3, router=RouterConfig(renormalize=False)),
    "kimi": Experts(
        8, 3, 9, RouterConfig("sigmoid", correction_bias=True, groups=4, groups_kept=2, scale=2.446), shared_width=7
    ),
    "sigmoid, not renormalised": Experts(4, 2, router=RouterConfig("sigmoid", False, correction_bias=True)),
    "all": Experts(3, 3, 4),
    "one": Experts(4, 1, 6, RouterConfig("softmax", renormalize=False, groups=2), shared_width=3),
    "no gates": Experts(4, 2, 6, gated=False, activation="squared_relu", shared_width=5),
    "latent": Experts(4, 2, 6, gated=False, activation="squared_relu", latent_size=10, use_bias=True),
    "groups of one": Experts(4, 2, 6, RouterConfig("sigmoid", groups=4, groups_kept=3)),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_experts_are_the_loop_over_tokens(name):
    config = CONFIGS[name]
    module, x = build(config), inputs(3, 7)
    expected, _ = loop(config, parameters(module), np.asarray(x, np.float64).reshape(-1, WIDTH))
    assert relative_error(jax.jit(module)(x).reshape(-1, WIDTH), expected) < 1e-5


@pytest.mark.parametrize("name", ["qwen", "kimi", "all"])
def test_gradients_are_those_of_a_dense_sum_over_all_experts(name):
    """The same choices, but every expert on every token and a weight of 0 where it was not chosen."""
    config = CONFIGS[name]
    module, x = build(config), inputs(2, 9)
    graph, state = nnx.split(module)

    def sparse(state, x):
        return jnp.sum(jnp.sin(3 * nnx.merge(graph, state)(x)))

    def dense(state, x):
        module = nnx.merge(graph, state)
        choices, weights, _ = module.router(x)
        one_hot = jax.nn.one_hot(choices, config.num_experts)
        by_expert = jnp.einsum("bts,btse->bte", weights, one_hot)
        hidden = jax.nn.silu(jnp.einsum("btd,edf->btef", x, module.gate[...]))
        hidden = hidden * jnp.einsum("btd,edf->btef", x, module.up[...])
        y = jnp.einsum("btef,efd,bte->btd", hidden, module.down[...], by_expert)
        if module.shared is not None:
            shared = module.shared(x)
            y = y + (shared if module.shared_gate is None else shared * jax.nn.sigmoid(module.shared_gate(x)))
        return jnp.sum(jnp.sin(3 * y))

    (value, found), (expected_value, expected) = (
        jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(state, x) for f in (sparse, dense)
    )
    assert abs(value - expected_value) < 1e-4
    leaves = list(zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected)))
    assert len(leaves) > 4
    for (path, a), b in leaves:
        if "correction_bias" in jax.tree_util.keystr(path):
            assert not np.any(a), "no loss trains the bias"
        else:
            assert np.any(b) and relative_error(a, b) < 1e-5, jax.tree_util.keystr(path)


@pytest.mark.parametrize("favourite", [0, 3, 5])
def test_one_expert_may_get_every_token_and_others_none(favourite):
    config = Experts(6, 1, 10, RouterConfig("sigmoid", correction_bias=True))
    module = build(config)
    module.router.correction_bias[...] = 9.0 * jnp.eye(6)[favourite]
    x = inputs(4, 33)
    expected, chosen = loop(config, parameters(module), np.asarray(x, np.float64).reshape(-1, WIDTH))
    assert {e for best in chosen for e in best} == {favourite}
    graph, state = nnx.split(module)
    value, gradient = jax.jit(jax.value_and_grad(lambda s: jnp.sum(nnx.merge(graph, s)(x) ** 2)))(state)
    assert relative_error(module(x).reshape(-1, WIDTH), expected) < 1e-5
    assert abs(value - np.sum(expected**2)) < 1e-3 * value
    sizes = [float(jnp.abs(gradient.gate[...][e]).sum()) for e in range(6)]
    assert [size > 0 for size in sizes] == [e == favourite for e in range(6)]
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(gradient))


def test_choices_that_all_underflow_give_finite_weights():
    module = build(Experts(4, 2, 6, RouterConfig("sigmoid")))
    module.router.projection.kernel[...] = jnp.full((WIDTH, 4), -1e4)
    y = module(jnp.ones((1, 2, WIDTH)))
    np.testing.assert_array_equal(y, 0)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_lower_precision_is_close_and_routes_in_float32(dtype):
    config = CONFIGS["qwen"]
    wide = build(config)
    narrow = build(config, dtype=dtype)
    nnx.update(narrow, nnx.state(wide))
    x = inputs(2, 20).astype(dtype)
    expected, _ = loop(config, parameters(wide), np.asarray(x, np.float64).reshape(-1, WIDTH))
    y = jax.jit(narrow)(x)
    assert y.dtype == dtype and narrow.router(x)[1].dtype == jnp.float32
    assert relative_error(y.reshape(-1, WIDTH), expected) < (1e-5 if dtype == jnp.float32 else 2e-2)


def test_router_losses_are_their_formulas_and_are_asked_for():
    x = inputs(2, 30)
    for scores in ("softmax", "sigmoid"):
        config = Experts(5, 2, 6, RouterConfig(scores), load_balancing=0.3, z_loss=0.02)
        module = build(config)
        logits = np.asarray(x, np.float64).reshape(-1, WIDTH) @ parameters(module)["router"]["projection"]["kernel"]
        p = np.exp(logits) if scores == "softmax" else 1 / (1 + np.exp(-logits))
        p = p / p.sum(1, keepdims=True)
        share = np.zeros(5)
        for best in loop(config, parameters(module), np.asarray(x, np.float64).reshape(-1, WIDTH))[1]:
            share[best] += 1 / (2 * len(p))
        expected = 0.3 * 5 * share @ p.mean(0) + 0.02 * np.mean(np.log(np.exp(logits).sum(1)) ** 2)
        y, loss = with_router_losses(lambda module: module(x), nnx.clone(module))
        assert abs(loss - expected) < 1e-5 * expected
        np.testing.assert_array_equal(y, module(x))
    uniform = Experts(4, 4, 6, load_balancing=1.0)
    assert abs(with_router_losses(lambda m: m(x), build(uniform))[1] - 1) < 1e-6, "1 where all are chosen alike"
    silent = build(Experts(5, 2, 6))
    assert with_router_losses(lambda m: m(x), silent)[1] == 0 and not hasattr(silent, "__captures__")


SPARSE = ModelConfig(
    vocabulary_size=29,
    width=WIDTH,
    num_layers=4,
    num_heads=2,
    mixers=("gated_deltanet", "attention"),
    mlp_width=24,
    feed_forwards=("dense", Experts(5, 2, 8, shared_width=6, shared_gate=True, load_balancing=0.5, z_loss=0.1)),
    initializer_std=0.3,
)
TOKENS = jax.random.randint(jax.random.key(0), (2, 21), 0, 29)


def loss_and_gradient(config):
    graph, state = nnx.split(DecoderLM(config, rngs=nnx.Rngs(1)))

    def loss(state):
        logits, router_loss = with_router_losses(lambda m: m(TOKENS), nnx.merge(graph, state, copy=True))
        return jnp.sum(jnp.sin(logits)) + router_loss, router_loss

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(state)


BOTH = {"scan_layers": True, "remat": True}


@pytest.mark.parametrize("options", mostly_slow([{"scan_layers": True}, {"remat": True}, BOTH], [BOTH]), ids=str)
def test_scan_and_remat_change_neither_loss_nor_gradient(options):
    (expected_value, router_loss), expected = loss_and_gradient(SPARSE)
    assert router_loss > 2 * 0.5, "of two layers"
    (value, _), found = loss_and_gradient(SPARSE.replace(**options))
    assert abs(value - expected_value) < 1e-3
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        assert relative_error(a, b) < 1e-4


def test_documents_and_pieces_of_a_model_with_experts():
    model = DecoderLM(SPARSE, rngs=nnx.Rngs(1))
    alone = model(TOKENS)
    ids = jnp.asarray([[0] * 8 + [1] * 13] * 2)
    packed = model(TOKENS, segment_ids=ids, positions=jnp.where(ids == 0, jnp.arange(21), jnp.arange(21) - 8))
    assert relative_error(packed[:, 8:], model(TOKENS[:, 8:])) < 1e-5
    cache, pieces = model.init_cache(2, 21), []
    for start, end in ((0, 9), (9, 10), (10, 21)):
        logits, cache = model.extend(TOKENS[:, start:end], cache)
        pieces.append(logits)
    assert relative_error(jnp.concatenate(pieces, axis=1), alone) < 1e-5


def test_a_config_with_experts_is_plain_and_counted():
    plain = SPARSE.to_dict()
    assert plain["feed_forwards"][1]["Experts"]["num_experts"] == 5
    assert ModelConfig.from_dict(plain) == SPARSE and hash(ModelConfig.from_dict(plain)) == hash(SPARSE)
    assert ModelConfig().to_dict()["feed_forwards"] == ["dense"]
    dense, experts = 3 * WIDTH * 24, 5 * 3 * WIDTH * 8 + 3 * WIDTH * 6
    count = count_parameters(SPARSE)
    assert count.feed_forward == 2 * (dense + experts + WIDTH * 5 + WIDTH)
    assert 2 * (dense + experts) <= least_parameters(SPARSE) <= count.total
    alone = ModelConfig(mlp_ratio=0, feed_forwards=Experts(width=8))
    assert alone.layer_feed_forwards == (Experts(width=8),) * 4
    assert count_parameters(alone).feed_forward == 4 * (8 * 3 * 256 * 8 + 256 * 8)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Experts(4, 5), "experts_per_token is 5, expected at most the 4 to choose from"),
        (lambda: Experts(8, 3, router=RouterConfig(groups=4)), "experts_per_token is 3, expected at most the 2"),
        (lambda: Experts(6, router=RouterConfig(groups=4)), "num_experts is 6, expected a multiple of router.groups=4"),
        (lambda: RouterConfig(groups_kept=2), "groups_kept is 2, expected at most groups=1"),
        (lambda: Experts(load_balancing=-1.0), "load_balancing is -1.0, expected a number of at least 0"),
        (lambda: Experts(shared_gate=True), "shared_gate is True, expected shared_width above 0"),
        (lambda: ModelConfig(feed_forwards="sparse"), "feed_forwards has 'sparse', expected 'dense', 'none' or a part"),
        (lambda: ModelConfig(feed_forwards=[{"Experts": {"size": 3}}]), "Experts has no field 'size'"),
        (lambda: ModelConfig(feed_forwards=()), r"feed_forwards=\(\) has 0 entries: expected 1 to num_layers=4"),
        (lambda: ModelConfig(feed_forwards=("dense",) * 2, scan_layers=True), "feed_forwards=.* with scan_layers"),
        (
            lambda: DecoderLM(ModelConfig(mlp_ratio=0, feed_forwards=Experts()), rngs=nnx.Rngs(0)),
            "Experts: width is None in a model whose mlp_width is 0",
        ),
    ],
)
def test_wrong_settings_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.usefixtures("unchecked_shapes")
def test_wrong_arrays_are_named():
    x, matrix = jnp.ones((1, 2, 3)), jnp.ones((4, 3, 5))
    good = [x, jnp.zeros((1, 2, 2), int), jnp.ones((1, 2, 2)), matrix, matrix, jnp.ones((4, 5, 3))]
    for place, wrong, message in (
        (1, jnp.zeros((1, 3, 2), int), r"choices has shape \(1, 3, 2\), expected \[B, T, S\]"),
        (2, jnp.ones((1, 2, 3)), r"weights has shape \(1, 2, 3\)"),
        (4, jnp.ones((4, 3, 6)), r"up has shape \(4, 3, 6\)"),
        (5, jnp.ones((4, 3, 5)), r"down has shape \(4, 3, 5\), expected \[E, F, M\]"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.expert_mixture(*good[:place], wrong, *good[place + 1 :])
    with pytest.raises(TypeError, match="choices has dtype float32, expected an integer dtype"):
        ops.expert_mixture(x, jnp.ones((1, 2, 2)), *good[2:])
