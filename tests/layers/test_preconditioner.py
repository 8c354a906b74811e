"""Preconditioners as an axis: limits, ties, eigenvalues, state, errors. (The layers themselves: test_presets.py.)"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rnnlib import ops
from rnnlib.layers import (
    ApplyToKey,
    ApplyToKeyUnstable,
    ApplyToQuery,
    ChannelGain,
    FixedPreconditioner,
    GramConfig,
    ImplicitWriteGain,
    LonghornGain,
    OutputProjectionConfig,
    PreconditionedGain,
    RecurrentMixerConfig,
    SigmoidGain,
    SoftplusDecay,
    UnitGain,
    mixer_preset,
)

from .tiny import HEADS, WIDTH, compiled, inputs, randomize, tiny

SIZE = WIDTH // HEADS
SCAN = {"implementation": "scan"}


def build(**options):
    config = RecurrentMixerConfig(
        implementation="scan", output_projection=OutputProjectionConfig(gate="none"), **options
    )
    return randomize(config.build(WIDTH, HEADS, rngs=nnx.Rngs(0)))


@nnx.jit
def recurrence_inputs_of(module, x):
    return module.recurrence_inputs(x)[0]


def transitions(recurrence_inputs):
    """Diag(alpha) and (I - k~ e^T), multiplied, for every token and head: `[T, H, K, K]`."""
    keys, gates = recurrence_inputs.keys, recurrence_inputs.gates
    erase = (gates.erase if gates.beta is None else gates.beta)[0]
    erase = np.asarray(erase if erase.ndim == 3 else erase[..., None], np.float64) * np.asarray(keys.key[0], np.float64)
    write_key = np.asarray(keys.key[0] if keys.write_key is None else keys.write_key[0], np.float64)
    matrices = np.eye(SIZE) - write_key[..., :, None] * erase[..., None, :]
    if recurrence_inputs.decay.log_decay is None:
        return matrices
    log_decay = np.asarray(recurrence_inputs.decay.log_decay[0], np.float64)
    return matrices * np.exp(log_decay if log_decay.ndim == 3 else log_decay[..., None])[..., None, :]


@pytest.mark.parametrize(
    ("name", "bound"),
    [("pdn", 1.5), ("pgdn", 2.0), ("pkda", 1.5), ("pgdn2", 1.5), ("pkla", 1.5), ("pkla", 2.0), ("pgdn_atq", 1.5)],
)
def test_negative_eigenvalues_stay_in_the_unit_disk(name, bound):
    """A gain of up to 2 / x with a preconditioner of up to x: lemma E.2, and beyond it with channel-wise gates."""
    keys = "keys.key.bound" if name == "pgdn_atq" else "keys.bound"
    module = tiny(name, negative_eigenvalues=True, **{keys: bound, "gain.bound": bound}, **SCAN)
    # Large inputs saturate the gates; a large center (log A) takes the preconditioner to x.
    key_map = module.keys.key_map if name == "pgdn_atq" else module.keys
    key_map.center[...] = jnp.full((HEADS,), 30.0)
    eigenvalues = np.linalg.eigvals(transitions(recurrence_inputs_of(module, 20 * inputs(1, 60))))
    assert np.abs(eigenvalues).max() <= 1 + 1e-5
    assert eigenvalues.real.min() < -0.6, "negative eigenvalues are not reached: the test is blind"


def test_the_doubled_gain_of_other_mixers_would_leave_the_unit_disk():
    """Appendix E.4: why `PreconditionedGain` is not `SigmoidGain(negative_eigenvalues=True)`."""
    module = build(gain=SigmoidGain(negative_eigenvalues=True), keys=ApplyToKey())
    module.keys.center[...] = jnp.full((HEADS,), 30.0)
    eigenvalues = np.linalg.eigvals(transitions(recurrence_inputs_of(module, 20 * inputs(1, 60))))
    assert np.abs(eigenvalues).max() > 1.5


def test_gain_without_negative_eigenvalues_is_the_gain_inside():
    x = inputs(1, 9)
    plain, wrapped = build(gain=ChannelGain()), build(gain=PreconditionedGain(gain=ChannelGain()))
    np.testing.assert_array_equal(
        recurrence_inputs_of(wrapped, x).gates.erase, recurrence_inputs_of(plain, x).gates.erase
    )
    negative = build(gain=PreconditionedGain(gain=ChannelGain(), negative_eigenvalues=True, bound=1.6))
    np.testing.assert_allclose(
        recurrence_inputs_of(negative, x).gates.erase, 2 / 1.6 * recurrence_inputs_of(plain, x).gates.erase, rtol=1e-6
    )
    np.testing.assert_array_equal(
        recurrence_inputs_of(negative, x).gates.write, recurrence_inputs_of(plain, x).gates.write
    )


def test_bound_of_one_is_the_rule_without_preconditioning():
    module = tiny("pgdn", **{"keys.bound": 1.0}, **SCAN)
    recurrence_inputs = recurrence_inputs_of(module, inputs(2, 12))
    np.testing.assert_array_equal(recurrence_inputs.keys.write_key, recurrence_inputs.keys.key)


def test_fixed_preconditioner_is_one_factor_a_channel_within_its_bound():
    module = tiny("pgdn", keys=FixedPreconditioner(bound=1.8), **SCAN)
    module.keys.strength[...] = 10.0 * jnp.arange(HEADS * SIZE) - 5.0 * HEADS * SIZE
    recurrence_inputs = recurrence_inputs_of(module, inputs(2, 12))
    factors = np.asarray(recurrence_inputs.keys.write_key / recurrence_inputs.keys.key, np.float64)
    np.testing.assert_allclose(factors, np.broadcast_to(factors[0, 0], factors.shape), rtol=1e-5)
    np.testing.assert_allclose([factors.min(), factors.max()], [1 / 1.8, 1.8], rtol=1e-5)
    with pytest.raises(ValueError, match="bound is 3"):
        FixedPreconditioner(bound=3.0)


@pytest.mark.parametrize("channelwise", [False, True])
def test_tied_gates_are_the_main_recurrences(channelwise):
    gain = ChannelGain() if channelwise else SigmoidGain()
    module = build(
        decay=SoftplusDecay(channelwise=channelwise), gain=gain, keys=ApplyToKey(gram=GramConfig(gates="tied"))
    )
    recurrence_inputs = recurrence_inputs_of(module, inputs(2, 12))
    preconditioner, _ = ops.diagonal_preconditioner(
        recurrence_inputs.keys.key,
        log_decay=recurrence_inputs.decay.log_decay,
        gain=recurrence_inputs.gates.erase if channelwise else recurrence_inputs.gates.beta,
        center=module.keys.centers(),
    )
    np.testing.assert_allclose(recurrence_inputs.keys.write_key, preconditioner * recurrence_inputs.keys.key, rtol=1e-5)
    assert [path for path, _ in nnx.to_flat_state(nnx.state(module.keys, nnx.Param))] == [("center",)]


def test_gates_of_one_are_equation_7():
    module = build(gain=UnitGain(), keys=ApplyToQuery(gram=GramConfig(gates="none")))
    recurrence_inputs = recurrence_inputs_of(module, inputs(1, 12))
    query, _ = module.query(module.input_projection(inputs(1, 12)))
    gram = np.cumsum(np.square(np.asarray(recurrence_inputs.keys.key, np.float64)), axis=1)
    ridge = np.asarray(module.keys.ridge())
    np.testing.assert_allclose(recurrence_inputs.keys.query, query / (gram + ridge[:, None]), rtol=1e-5, atol=1e-6)


def test_unstable_form_and_normalizations_are_the_operators():
    x = inputs(1, 12)
    module = build(decay=SoftplusDecay(), keys=ApplyToKeyUnstable(gram=GramConfig(gates="tied")))
    recurrence_inputs = recurrence_inputs_of(module, x)
    gates = {"log_decay": recurrence_inputs.decay.log_decay, "gain": recurrence_inputs.gates.beta}
    expected, _ = ops.sherman_morrison_key(recurrence_inputs.keys.key, **gates, ridge=module.keys.ridge())
    np.testing.assert_allclose(recurrence_inputs.keys.write_key, expected, rtol=1e-5, atol=1e-7)

    plain = build(decay=SoftplusDecay(), keys=ApplyToKey())
    write_key = recurrence_inputs_of(plain, x).keys.write_key
    for kind in ("projection", "implicit", "decayed_implicit"):
        normalized = build(decay=SoftplusDecay(), keys=ApplyToKey(normalization=kind))
        recurrence_inputs = recurrence_inputs_of(normalized, x)
        options = {"gain": recurrence_inputs.gates.beta, "log_decay": recurrence_inputs.decay.log_decay}
        factor = ops.write_key_normalization(recurrence_inputs.keys.key, write_key, kind, **options)
        np.testing.assert_allclose(
            recurrence_inputs.keys.write_key, factor[..., None] * write_key, rtol=1e-4, atol=1e-6
        )


def test_interval_and_squash_reach_the_operator():
    x, plain = inputs(1, 12), build(keys=ApplyToKey())
    changed = build(keys=ApplyToKey(interval="amplify", squash="tanh", bound=2.0, eps=1e-3))
    recurrence_inputs = recurrence_inputs_of(changed, x)
    key, write_key = np.abs(recurrence_inputs.keys.key), np.abs(recurrence_inputs.keys.write_key)
    # Small keys are what the convolution's sum leaves, whose rounding is XLA's to choose.
    assert (write_key >= key - 1e-6).all() and (write_key <= 2 * key + 1e-6).all()
    assert np.abs(recurrence_inputs_of(plain, x).keys.write_key - recurrence_inputs.keys.write_key).max() > 0.1


def test_initial_values():
    module = mixer_preset("pgdn_atq").build(WIDTH, HEADS, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(module.keys.key_map.centers(), -0.2)
    np.testing.assert_allclose(module.keys.query_map.ridge(), 1.0, rtol=1e-6)
    positive = mixer_preset("pgdn", **{"keys.positive_center": True}).build(WIDTH, HEADS, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(positive.keys.centers(), np.exp(-0.2), rtol=1e-6)


def test_half_precision_keeps_the_gram_wide():
    module = mixer_preset("pgdn_atq", **SCAN).build(
        WIDTH, HEADS, rngs=nnx.Rngs(0), dtype=jnp.bfloat16, param_dtype=jnp.bfloat16
    )
    wide = {"A_log", "dt_bias", "center", "ridge"}
    for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        assert variable.dtype == (jnp.float32 if path[-1] in wide else jnp.bfloat16), path
    cache = module.init_cache(1, 8, jnp.bfloat16)
    x = inputs(1, 5).astype(jnp.bfloat16)
    recurrence_inputs = recurrence_inputs_of(module, x)
    assert recurrence_inputs.keys.write_key.dtype == jnp.float32  # for its gradient
    assert recurrence_inputs.keys.written.dtype == recurrence_inputs.keys.query.dtype == jnp.bfloat16
    _, after = compiled(module)(x, cache=cache)
    assert jax.tree.map(lambda a: (a.dtype, a.shape), after) == jax.tree.map(lambda a: (a.dtype, a.shape), cache)
    assert all(gram.dtype == jnp.float32 and gram.shape == (1, HEADS, SIZE) for gram in after.keys)


def test_gradients_reach_every_parameter_and_are_finite():
    x = inputs(2, 6)

    @nnx.jit
    def gradients(module):
        return nnx.grad(lambda module: jnp.sum(jnp.square(module(x)[0])))(module)

    for path, gradient in nnx.to_flat_state(gradients(tiny("pgdn_atq", **SCAN))):
        assert np.all(np.isfinite(gradient[...])), path
        assert np.any(gradient[...] != 0), path


def test_value_heads_of_a_group_share_the_preconditioner():
    module = tiny("pgdn", value_heads=2 * HEADS, **SCAN)
    x = inputs(1, 12)
    recurrence_inputs = recurrence_inputs_of(module, x)
    assert recurrence_inputs.keys.write_key.shape == (1, 12, HEADS, SIZE)
    assert module.init_cache(1, 4).keys.shape == (1, HEADS, SIZE)
    assert compiled(module)(x)[0].shape == x.shape


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: GramConfig(gates="shared"), "GramConfig: gates is 'shared', expected 'own', 'tied' or 'none'"),
        (lambda: ApplyToKey(bound=2.5), "ApplyToKey: bound is 2.5, expected a number from 1 to 2$"),
        (lambda: ApplyToKey(normalization="unit"), "ApplyToKey: normalization is 'unit', expected 'projection'"),
        (lambda: ApplyToQuery(initial_ridge=0.0), "initial_ridge is 0.0, expected a number above 0"),
        (lambda: FixedPreconditioner(bound=2.5), "FixedPreconditioner: bound is 2.5, expected a number from 1 to 2$"),
        (lambda: PreconditionedGain(bound=0.5), "PreconditionedGain: bound is 0.5, expected a number from 1 to 2$"),
        (lambda: PreconditionedGain(gain=UnitGain()), "expected one with a field 'negative_eigenvalues'"),
        (
            lambda: tiny("pmamba2", value_heads=2 * HEADS),
            "gates are tied, expected as many value heads as the 2 key heads",
        ),
        (
            lambda: build(gain=ChannelGain(), keys=ApplyToKey(normalization="decayed_implicit")).recurrence_inputs(
                inputs(1, 3)
            ),
            "normalization is 'decayed_implicit', expected a gain that gives beta",
        ),
        (
            lambda: build(value_heads=2 * HEADS, keys=ApplyToKey(normalization="decayed_implicit")).recurrence_inputs(
                inputs(1, 3)
            ),
            "expected as many value heads as the 2 key heads, not 4",
        ),
    ],
)
def test_bad_values_are_named(unchecked_shapes, make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_config_is_hashable_and_replaceable():
    config = mixer_preset("pgdn_atq")
    assert hash(config) == hash(mixer_preset("pgdn_atq"))
    assert dataclasses.replace(config, keys=ApplyToKey()) == mixer_preset("pgdn")


def test_an_implicit_step_without_a_preconditioner_is_longhorns():
    x = jax.random.normal(jax.random.key(0), (2, 5, WIDTH))
    plain, implicit = (
        mixer_preset("longhorn", gain=gain, **SCAN).build(WIDTH, HEADS, rngs=nnx.Rngs(0))
        for gain in (LonghornGain(), ImplicitWriteGain())
    )
    np.testing.assert_allclose(implicit(x)[0], plain(x)[0], rtol=1e-5, atol=1e-7)
