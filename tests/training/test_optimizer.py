import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from rnnlib.training import OptimizerConfig, decay_mask, learning_rate_schedule, make_optimizer
from rnnlib.training.optimizer import gradient_norm, muon_mask


def rates(config, steps):
    return np.asarray(learning_rate_schedule(config, steps)(jnp.arange(steps)))


def test_cosine_warms_up_linearly_and_ends_at_a_tenth():
    config = OptimizerConfig(learning_rate=2.0, warmup_steps=10, schedule="cosine", final_fraction=0.1)
    got = rates(config, 100)
    np.testing.assert_allclose(got[:10], 2.0 * np.arange(1, 11) / 10, rtol=1e-6)
    np.testing.assert_allclose(got[-1], 0.2, rtol=1e-5)
    # Halfway through the decay: the mean of peak and end.
    np.testing.assert_allclose(got[10 + 45 - 1], 0.5 * (2.0 + 0.2), rtol=1e-5)
    assert np.all(np.diff(got[10:]) < 0)


def test_wsd_is_stable_then_falls_linearly():
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=5, schedule="wsd", decay_fraction=0.2, final_fraction=0.0)
    got = rates(config, 50)
    np.testing.assert_allclose(got[4:40], 1.0)
    np.testing.assert_allclose(got[40:], 1 - np.arange(1, 11) / 10, atol=1e-6)


def test_constant_and_default_warmup():
    got = rates(OptimizerConfig(learning_rate=3.0, schedule="constant"), 100)
    np.testing.assert_allclose(got[:5], 3.0 * np.arange(1, 6) / 5, rtol=1e-6)
    np.testing.assert_allclose(got[5:], 3.0)


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_one_step_without_warmup(schedule):
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=0, schedule=schedule, decay_fraction=1.0)
    assert np.isfinite(rates(config, 1)).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"learning_rate": -1.0}, "learning_rate"),
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"schedule": "linear"}, "cosine"),
        ({"beta2": 1.0}, "beta2"),
        ({"clip_norm": 0.0}, "clip_norm"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"final_fraction": 1.5}, "final_fraction"),
    ],
)
def test_bad_settings_are_named(unchecked_shapes, change, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**change)


def test_warmup_longer_than_the_run_is_refused():
    with pytest.raises(ValueError, match="warmup_steps is 20, more than all 10 steps of the schedule"):
        learning_rate_schedule(OptimizerConfig(warmup_steps=20), 10)
    with pytest.raises(ValueError, match="decay_fraction"):
        learning_rate_schedule(OptimizerConfig(warmup_steps=9, schedule="wsd"), 10)


class Mixer(nnx.Module):
    """One parameter of each kind, named as in the library."""

    def __init__(self):
        self.A_log = nnx.Param(jnp.ones([4]))
        self.dt_bias = nnx.Param(jnp.ones([4, 16]))
        self.query = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        self.norm = nnx.RMSNorm(4, rngs=nnx.Rngs(0))
        self.kernel = nnx.Param(jnp.ones([4, 8]))


class Model(nnx.Module):
    def __init__(self):
        self.embedding = nnx.Param(jnp.ones([8, 4]))
        self.blocks = nnx.List([Mixer()])
        self.head = nnx.Param(jnp.ones([8, 4]))


def test_weight_decay_spares_norms_biases_decays_and_embeddings():
    parameters = nnx.state(Model(), nnx.Param)
    mask = jax.tree_util.tree_leaves_with_path(decay_mask(parameters))
    decayed = {jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value") for path, on in mask if on}
    assert decayed == {"blocks/0/query/kernel", "blocks/0/kernel", "head"}


def test_weight_decay_alone_moves_only_decayed_parameters():
    parameters = nnx.state(Model(), nnx.Param)
    config = OptimizerConfig(learning_rate=0.1, weight_decay=0.5, warmup_steps=0, schedule="constant")
    optimizer = make_optimizer(config, 10)
    zeros = jax.tree.map(jnp.zeros_like, parameters)
    changes, _ = optimizer.update(zeros, optimizer.init(parameters), parameters)
    np.testing.assert_allclose(changes["head"][...], -0.05 * np.ones([8, 4]), rtol=1e-6)
    assert not np.any(changes["embedding"][...]) and not np.any(changes["blocks"][0]["dt_bias"][...])


def gradients_of(layers, widths, dtype, seed=0):
    """Layers of two arrays each, one of which has another shape in every layer, beside an array outside of them."""
    rng = np.random.default_rng(seed)

    def array(*shape):
        return jnp.asarray(rng.standard_normal(shape) * 10 ** rng.uniform(-3, 3), dtype)

    blocks = [{"kernel": array(5, 3), "own": array(width)} for width in widths[:layers]]
    return {"blocks": blocks, "head": array(4, 2), "scale": array()}


@given(
    st.integers(0, 5),
    st.lists(st.integers(0, 4), min_size=5, max_size=5),
    st.sampled_from([jnp.float32, jnp.bfloat16]),
    st.integers(0, 99),
)
def test_the_gradients_norm_is_that_of_all_numbers(layers, widths, dtype, seed):
    gradients = gradients_of(layers, widths, dtype, seed)
    numbers = np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in jax.tree.leaves(gradients)])
    norm = gradient_norm(gradients)
    assert norm.dtype == jnp.float32 and norm.shape == ()
    np.testing.assert_allclose(norm, np.linalg.norm(numbers), rtol=1e-6)


def test_the_gradients_norm_has_one_sum_for_each_name():
    def sums(layers):
        gradients = gradients_of(layers, [2] * layers, jnp.float32)
        return jax.jit(gradient_norm).lower(gradients).as_text().count("stablehlo.reduce(")

    assert sums(2) == sums(9) == 4


def test_the_norm_of_nothing_is_zero_and_that_of_nan_is_nan():
    assert gradient_norm({}) == 0
    assert jnp.isnan(gradient_norm({"a": jnp.ones(3), "b": jnp.array([1.0, jnp.nan])}))


@pytest.mark.parametrize("largest", [1e-4, 1e9])
def test_clipping_is_optaxs(largest):
    gradients = gradients_of(3, [1, 2, 2], jnp.float32)
    parameters = jax.tree.map(jnp.zeros_like, gradients)
    config = OptimizerConfig(clip_norm=largest, weight_decay=0.0)
    ours = make_optimizer(config, 10)
    optaxs = optax.chain(
        optax.clip_by_global_norm(largest),
        optax.adamw(
            learning_rate_schedule(config, 10), b1=config.beta1, b2=config.beta2, weight_decay=0.0, mask=decay_mask
        ),
    )
    assert jax.tree.structure(ours.init(parameters)) == jax.tree.structure(optaxs.init(parameters))  # of checkpoints
    got, want = (optimizer.update(gradients, optimizer.init(parameters), parameters) for optimizer in (ours, optaxs))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-12), got, want)


def muon(**changes):
    return make_optimizer(OptimizerConfig(name="muon", clip_norm=None, **changes), 100)


class Fused(nnx.Module):
    """A kernel with named columns, experts' matrices, and one of each parameter that Muon leaves alone."""

    def __init__(self):
        keys = iter(jax.random.split(jax.random.key(0), 9))
        self.fused = nnx.Param(jax.random.normal(next(keys), (8, 12)), columns=(("query", 0, 4), ("value", 4, 6)))
        self.experts = nnx.Param(jax.random.normal(next(keys), (3, 8, 4)))
        self.plain = nnx.Param(jax.random.normal(next(keys), (8, 4)))
        self.convolution = nnx.Dict(kernel=nnx.Param(jnp.ones([4, 8])))
        self.head = nnx.Param(jnp.ones([8, 16]))
        self.embedding = nnx.Param(jnp.ones([16, 8]))
        self.norm = nnx.RMSNorm(8, rngs=nnx.Rngs(0))


def test_muon_is_for_matrices_and_adamw_for_the_rest():
    parameters = nnx.state(Fused(), nnx.Param)
    matrices = nnx.to_pure_dict(muon_mask(parameters))
    assert {name for name, value in matrices.items() if value is True} == {"fused", "experts", "plain"}
    gradients = jax.tree.map(lambda x: jax.random.normal(jax.random.key(1), x.shape), parameters)
    config = OptimizerConfig(clip_norm=None, weight_decay=0.1)
    changes = {}
    for name in ("adamw", "muon"):
        optimizer = make_optimizer(dataclasses.replace(config, name=name), 100)
        changes[name] = nnx.to_pure_dict(optimizer.update(gradients, optimizer.init(parameters), parameters)[0])
    for name in ("head", "embedding", "convolution", "norm"):
        jax.tree.map(np.testing.assert_array_equal, changes["muon"][name], changes["adamw"][name])
    # A matrix's update is orthogonal, near enough (the iteration leaves singular values in [0.7, 1.2]).
    rate = float(learning_rate_schedule(config, 100)(0))
    own = -(changes["muon"]["plain"] / rate) - 0.1 * nnx.to_pure_dict(parameters)["plain"]
    singular = np.linalg.svd(own, compute_uv=False)
    assert singular.max() < 2 * singular.min()
    np.testing.assert_allclose(np.sqrt(np.mean(np.square(own))), 0.2, rtol=0.5)


def test_muon_takes_named_columns_and_experts_for_matrices_of_their_own():
    module = Fused()
    parameters = nnx.state(module, nnx.Param)
    gradients = jax.tree.map(lambda x: jax.random.normal(jax.random.key(2), x.shape), parameters)
    optimizer = muon()
    state, apart = optimizer.init(parameters), None
    kernel, experts = module.fused[...], module.experts[...]
    pieces = {"query": kernel[:, :4], "value": kernel[:, 4:10]} | {f"expert {i}": experts[i] for i in range(3)}
    own = optimizer.init(pieces)
    for _ in range(2):
        changes, state = optimizer.update(gradients, state, parameters)
        whole = nnx.to_pure_dict(gradients)
        cut = {"query": whole["fused"][:, :4], "value": whole["fused"][:, 4:10]}
        cut |= {f"expert {i}": whole["experts"][i] for i in range(3)}
        apart, own = optimizer.update(cut, own, pieces)
    changes = nnx.to_pure_dict(changes)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=5e-9)  # of changes of up to 6e-4
    close(changes["fused"][:, :4], apart["query"])
    close(changes["fused"][:, 4:10], apart["value"])
    assert not np.any(changes["fused"][:, 10:])  # nothing reads these
    for i in range(3):
        close(changes["experts"][i], apart[f"expert {i}"])


def test_the_schedules_length_is_a_setting_of_its_own():
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=10)
    np.testing.assert_array_equal(rates(dataclasses.replace(config, schedule_steps=100), 400)[:100], rates(config, 100))
    for schedule in ("cosine", "wsd"):
        longer = rates(dataclasses.replace(config, schedule=schedule, schedule_steps=100), 400)
        np.testing.assert_allclose(longer[99:], 0.1, rtol=1e-6)
    with pytest.raises(ValueError, match="warmup_steps is 20, more than all 10 steps of the schedule"):
        learning_rate_schedule(OptimizerConfig(warmup_steps=20, schedule_steps=10), 400)
