"""What holds for mixers beyond their equations: ties between them, heads, eigenvalues, dtypes, gradients, errors."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rnnlib import ops
from rnnlib.layers import (
    ApplyToKey,
    ChannelGain,
    CombaGain,
    Decay,
    DeltaRule,
    FixedDecay,
    Gates,
    Initializer,
    KaczmarzGain,
    LinearAttention,
    MixerShape,
    NLMSGain,
    OutputProjectionConfig,
    PlainKeys,
    RecurrentMixerConfig,
    RidgeRegression,
    RotatedKeys,
    SigmoidGain,
    SoftplusDecay,
    StepGain,
    Trapezoidal,
    TrapezoidalGain,
    UnitGain,
    mixer_names,
    mixer_preset,
)
from rnnlib.models.variables import assign_by_column, values_by_column
from tests.selection import mostly_slow

from .reference import sigmoid, softplus
from .tiny import HEADS, WIDTH, Alone, compiled, inputs, parameters, randomize, relative_error, tiny

SIZE = WIDTH // HEADS
# Where the equation itself is not in question, the quickest form to compile.
SCAN = {"implementation": "scan"}


def copy_into(target, source):
    """Gives `target` those of `source`'s parameters that have the same path and shape."""
    given, wanted = (values_by_column(mixer, nnx.Param) for mixer in (source, target))
    same = {path: v for path, v in given.items() if path in wanted and wanted[path].shape == v.shape}
    assign_by_column(target, nnx.Param, same)


def column(module, name):
    """The kernel of a column of the input projection."""
    return values_by_column(module, nnx.Param)[f"input_projection.{name}.kernel"]


def set_column(module, name, kernel):
    assign_by_column(module, nnx.Param, {f"input_projection.{name}.kernel": kernel})


def build(**options):
    config = RecurrentMixerConfig(
        implementation="scan", output_projection=OutputProjectionConfig(gate="none"), **options
    )
    return randomize(config.build(WIDTH, HEADS, rngs=nnx.Rngs(0)))


def trapezoidal_gain(solve):
    return build(decay=SoftplusDecay(), gain=TrapezoidalGain(), solve=solve)


def per_channel(kernel, channels):
    """A kernel of one column a head, repeated over the head's channels."""
    return jnp.repeat(kernel, channels, axis=1)


def test_tied_gates_reduce_gated_deltanet2_to_kda_to_gated_deltanet_to_deltanet():
    channelwise = SoftplusDecay(channelwise=True)
    gdn2 = build(decay=channelwise, gain=ChannelGain())
    kda = build(decay=channelwise, gain=SigmoidGain())
    gdn = build(decay=SoftplusDecay(), gain=SigmoidGain())
    deltanet = build(gain=SigmoidGain())
    x = inputs(1, 19)

    # Both channel gates tied to the scalar one.
    copy_into(gdn2, kda)
    for name in ("erase_gate", "write_gate"):
        set_column(gdn2, name, per_channel(column(kda, "write_gate"), SIZE))
    y, _ = compiled(kda)(x)
    assert relative_error(compiled(gdn2)(x)[0], y) < 1e-6

    # The decay tied over the channels of a head.
    copy_into(kda, gdn)
    set_column(kda, "decay", per_channel(column(gdn, "decay"), SIZE))
    kda.decay.dt_bias[...] = jnp.repeat(gdn.decay.dt_bias[...], SIZE)
    y, _ = compiled(gdn)(x)
    assert relative_error(compiled(kda)(x)[0], y) < 1e-6

    # No decay.
    copy_into(deltanet, gdn)
    gdn.decay.A_log[...] = jnp.full((HEADS,), -jnp.inf)
    y, _ = compiled(deltanet)(x)
    assert relative_error(compiled(gdn)(x)[0], y) < 1e-6


def test_kaczmarz_with_unit_keys_is_gated_deltanet():
    kla = build(decay=SoftplusDecay(), gain=KaczmarzGain(eps=1e-12))
    gdn = build(decay=SoftplusDecay(), gain=SigmoidGain())
    copy_into(kla, gdn)
    x = 4 * inputs(1, 19)  # of short keys the norm's epsilon would leave less than unit length
    assert relative_error(compiled(kla)(x)[0], compiled(gdn)(x)[0]) < 1e-5


@pytest.mark.parametrize(
    "name",
    mostly_slow(
        ["gated_deltanet2", "kla", "nlms", "mamba2", "mamba3_mimo", "comba"], ["gated_deltanet2", "mamba3_mimo"]
    ),
)
def test_grouped_value_heads_share_their_key_head(name):
    """A mixer of 2 key and 4 value heads is the mixer of 4 and 4 whose key heads are repeated."""
    value_heads, key_heads = 4, 1 if name.startswith("mamba") else 2
    sizes = {"head_dim": 4, "key_head_dim": 4} | SCAN
    grouped = randomize(
        mixer_preset(name, value_heads=value_heads, key_heads=key_heads, **sizes).build(WIDTH, 2, rngs=nnx.Rngs(0))
    )
    full = mixer_preset(name, value_heads=4, key_heads=4, **sizes).build(WIDTH, 2, rngs=nnx.Rngs(0))
    repeats = value_heads // key_heads

    def repeat_heads(array, shape):
        """Repeats the key-head axis within the one axis where the shapes differ."""
        (axis,) = [i for i in range(array.ndim) if array.shape[i] != shape[i]]
        assert shape[axis] == repeats * array.shape[axis]
        split = array.reshape(*array.shape[:axis], key_heads, -1, *array.shape[axis + 1 :])
        return jnp.repeat(split, repeats, axis=axis).reshape(shape)

    given, repeated = dict(values_by_column(grouped, nnx.Param)), set()
    for path, like in values_by_column(full, nnx.Param).shapes().items():
        if given[path].shape != like.shape:
            repeated.add(path.removeprefix("input_projection.").split(".")[0])
            given[path] = repeat_heads(given[path], like.shape)
    assign_by_column(full, nnx.Param, given)
    assert {"query", "key"} <= repeated <= {"query", "key", "decay", "erase_gate", "keys"}
    x = inputs(2, 9)
    assert relative_error(compiled(grouped)(x)[0], compiled(full)(x)[0]) < 1e-5
    assert all(leaf.shape[1] == value_heads for leaf in jax.tree.leaves(grouped.init_cache(3, 9).state))


@pytest.mark.parametrize(
    ("gain", "lowest"),
    [
        (SigmoidGain(), 0.0),
        (SigmoidGain(negative_eigenvalues=True), -1.0),
        (ChannelGain(), 0.0),
        (ChannelGain(negative_eigenvalues=True), -1.0),
        (KaczmarzGain(negative_eigenvalues=True), -1.0),
    ],
)
def test_eigenvalues_of_transitions(gain, lowest):
    module = build(gain=gain, key_norm="none" if isinstance(gain, KaczmarzGain) else "l2")
    recurrence_inputs, _ = module.recurrence_inputs(20 * inputs(1, 50))
    gates, k = recurrence_inputs.gates, recurrence_inputs.keys.key[0]
    erase = (gates.erase if gates.beta is None else gates.beta)[0]
    erase = erase if erase.ndim == 3 else erase[..., None]
    # I - k (b k)^T has eigenvalue 1 - b k.k once, and 1 elsewhere.
    eigenvalue = 1 - np.sum(erase * k * k, axis=-1)
    assert eigenvalue.min() >= lowest - 1e-5
    assert eigenvalue.max() <= 1
    assert eigenvalue.min() < lowest + 0.3, "the range is not reached: the test is blind"
    if isinstance(gain, ChannelGain):
        assert gates.write.max() <= 1


def test_comba_erases_the_state_before_its_decay_even_at_a_reset():
    shape = MixerShape(WIDTH, HEADS, HEADS, SIZE, SIZE)
    comba = CombaGain().build(shape, rngs=nnx.Rngs(0))
    comba, x = Alone(comba, shape), jnp.asarray(inputs(1, 3))
    log_decay = jnp.asarray([[[-0.5, 0.0], [-1000.0, -20.0], [-jnp.inf, -70.0]]])

    def erased(log_decay):
        gates = comba(x, Decay(log_decay=log_decay))
        return gates.erase * jnp.exp(log_decay) / gates.write, gates

    share, gates = erased(log_decay)
    assert np.all(np.isfinite(gates.erase))
    expected = np.where(log_decay >= -60, sigmoid(1.0), 0.0)
    np.testing.assert_allclose(share, expected, atol=1e-4)
    gradient = jax.grad(lambda d: jnp.sum(comba(x, Decay(log_decay=d)).erase * jnp.exp(d)))(log_decay)
    assert np.all(np.isfinite(gradient))


@pytest.mark.parametrize("name", mostly_slow(["gated_deltanet2", "mamba2"], ["mamba2"]))
def test_half_precision_keeps_states_gates_and_decay_parameters_wide(name):
    options = {"head_dim": 8} | SCAN
    module = mixer_preset(name, **options).build(
        WIDTH, HEADS, rngs=nnx.Rngs(0), dtype=jnp.bfloat16, param_dtype=jnp.bfloat16
    )
    kept = {"A_log", "dt_bias"}
    for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        assert variable.dtype == (jnp.float32 if path[-1] in kept else jnp.bfloat16), path
    x = inputs(1, 5).astype(jnp.bfloat16)
    cache = module.init_cache(1, 8)
    recurrence_inputs, _ = module.recurrence_inputs(x)
    assert recurrence_inputs.decay.log_decay.dtype == jnp.float32
    assert all(gate.dtype == jnp.float32 for gate in recurrence_inputs.gates if gate is not None)
    assert recurrence_inputs.keys.key.dtype == recurrence_inputs.value.dtype == jnp.bfloat16
    y, after = module(x, cache=cache)
    assert y.dtype == jnp.bfloat16
    assert after.state.dtype == jnp.float32
    assert jax.tree.map(lambda a: a.dtype, after) == jax.tree.map(lambda a: a.dtype, cache)


def test_half_precision_is_close_to_single():
    wide = tiny("gated_deltanet", **SCAN)
    half = mixer_preset("gated_deltanet", **SCAN).build(WIDTH, HEADS, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    copy_into(half, wide)
    x = inputs(1, 30)
    error = relative_error(np.asarray(compiled(half)(x.astype(jnp.bfloat16))[0], np.float32), compiled(wide)(x)[0])
    assert 1e-5 < error < 3e-2


def test_gradients_reach_every_parameter_and_are_finite():
    x = inputs(2, 6)

    @nnx.jit
    def gradients(module):
        return nnx.grad(lambda module: jnp.sum(jnp.square(module(x)[0])))(module)

    for name in ("comba", "gated_deltanet2", "mamba3_mimo"):
        for path, gradient in nnx.to_flat_state(gradients(tiny(name, **SCAN))):
            assert np.all(np.isfinite(gradient[...])), (name, path)
            assert np.any(gradient[...] != 0), (name, path)


def test_modules_of_one_configuration_share_a_graph():
    """Layers can be stacked and scanned: nothing that differs between two of them hides outside their arrays."""
    for name in mixer_names():
        config = mixer_preset(name)
        first, second = (nnx.eval_shape(lambda: config.build(64, 2, rngs=nnx.Rngs(0))) for _ in range(2))
        assert nnx.graphdef(first) == nnx.graphdef(second), name
        assert hash(config) == hash(mixer_preset(name))
        assert dataclasses.replace(config) == config


@pytest.mark.parametrize(
    "gain", mostly_slow([SigmoidGain(), KaczmarzGain(), NLMSGain(), CombaGain()], [SigmoidGain(), CombaGain()])
)
def test_keys_that_do_not_turn_are_plain_under_any_gain(gain):
    """Turned keys belong to value heads, four here, and plain ones to key heads."""
    heads = {"value_heads": 2 * HEADS, "head_dim": 4, "decay": SoftplusDecay(), "gain": gain}
    plain, turned = build(**heads), build(keys=RotatedKeys(), **heads)
    copy_into(turned, plain)
    for parameter in (turned.keys.query_bias, turned.keys.key_bias):
        parameter[...] = jnp.zeros_like(parameter[...])
    x = inputs(1, 9)
    expected = compiled(plain)(x)[0]
    assert relative_error(compiled(turned)(x)[0], expected) > 1e-3
    set_column(turned, "angle", jnp.zeros_like(column(turned, "angle")))
    assert relative_error(compiled(turned)(x)[0], expected) < 1e-6


def test_angles_of_long_documents_stay_precise():
    module = tiny("mamba3")

    @jax.jit
    def revolutions(x):
        _, carried = module.recurrence_inputs(x)
        columns = module.input_projection(x)
        return jnp.tanh(columns["angle"])[:, :, None] / 2 * module.decay(columns).step[..., None], carried.keys

    turns, angle = (np.asarray(y, np.float64) for y in revolutions(3.0 * inputs(1, 4000)))
    total = turns.sum(axis=1)
    assert np.abs(total).max() > 300, "the document is too short to tell"
    difference = angle - total
    # Each turn is rounded to 1e-8; a plain running sum, near 1000 revolutions, would be rounded to 3e-5 at each token.
    assert np.abs(difference - np.round(difference)).max() < 1e-5
    assert np.abs(angle).max() <= 0.5


def test_implementation_chunk_size_and_scale_are_forwarded(monkeypatch):
    seen = {}

    def record(q, k, v, **options):
        seen.update(options)
        return v, jnp.zeros((1, HEADS, SIZE, SIZE))

    for operator, name in (("gated_delta_rule", "deltanet"), ("linear_attention", "linear_attention")):
        seen.clear()
        monkeypatch.setattr(ops, operator, record)
        tiny(name, implementation="scan", chunk_size=32, scale=0.25)(inputs(1, 3))
        assert (seen["implementation"], seen["chunk_size"], seen["scale"]) == ("scan", 32, 0.25)


@pytest.mark.parametrize("decay", [SoftplusDecay(), SoftplusDecay(channelwise=True, rate=(1.0, 16.0))])
def test_state_space_decay_starts_in_its_ranges(decay):
    shape = MixerShape(16, 256, 256, 2, 2)
    module = decay.build(shape, rngs=nnx.Rngs(3))
    rate, step = np.exp(module.A_log[...]), softplus(np.asarray(module.dt_bias[...], np.float64))
    assert decay.rate[0] < rate.min() < decay.rate[0] + 1
    assert 15 < rate.max() <= 16
    assert 1e-3 * 0.999 <= step.min() < 2e-3
    assert 0.05 < step.max() <= 0.1 * 1.001
    # Log-uniform: half of them lie below the geometric mean.
    assert abs(np.mean(step < 1e-2) - 0.5) < 0.15


def test_initializers_have_the_stated_spread():
    for initializer, deviation, bound in (
        (Initializer(), 0.02, None),
        (Initializer("xavier_uniform", 2.0**-2.5), 2.0**-2.5 * np.sqrt(2 / 400), 2.0**-2.5 * np.sqrt(6 / 400)),
        (Initializer("fan_in_uniform", 1.0), 0.1 / np.sqrt(3), 0.1),
    ):
        kernel = np.asarray(initializer.build()(jax.random.key(0), (100, 300), jnp.float32))
        assert abs(kernel.std() / deviation - 1) < 0.03
        assert bound is None or 0.98 * bound < np.abs(kernel).max() <= bound


def test_value_stream_without_convolution_and_head_sizes():
    config = mixer_preset("deltanet", head_dim=6, value_expansion=2.0, **{"convolution.value": False})
    module = config.build(WIDTH, HEADS, rngs=nnx.Rngs(0))
    assert module.value.convolution is None
    assert module.query.convolution is not None
    assert column(module, "key").shape == (WIDTH, 12)
    assert column(module, "value").shape == (WIDTH, 24)
    assert module.init_cache(1, 1).value_tail is None
    assert parameters(module)["key"]["convolution"]["kernel"].shape == (4, 12)


@pytest.mark.parametrize(
    ("options", "width", "heads", "message"),
    [
        ({}, 16, 0, "num_heads is 0, expected at least 1"),
        ({}, 16, 3, "key channels: 16 does not divide into 3 heads of a whole size"),
        ({"value_expansion": 0.3}, 20, 4, "value channels: 6 does not divide into 4 heads"),
        ({"key_heads": 2, "value_heads": 3}, 16, 2, "value_heads is 3, expected a multiple of key_heads = 2"),
    ],
)
def test_sizes_that_do_not_come_out_are_named(options, width, heads, message):
    with pytest.raises(ValueError, match=message):
        mixer_preset("deltanet", **options).build(width, heads, rngs=nnx.Rngs(0))


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RecurrentMixerConfig(feature_map="tanh"), "feature_map is 'tanh', expected 'identity', 'silu'"),
        (lambda: RecurrentMixerConfig(key_norm="l3"), "key_norm is 'l3', expected 'none', 'l2', 'rms', 'l1' or 'sum'"),
        (lambda: RecurrentMixerConfig(key_expansion=0.0), "key_expansion is 0.0, expected a number above 0"),
        (lambda: RecurrentMixerConfig(head_dim=0), "head_dim is 0, expected an integer of at least 1 or None"),
        (lambda: build(initializer=Initializer("ones")), "kind is 'ones', expected 'normal'"),
        (lambda: OutputProjectionConfig(gate="tanh"), "gate is 'tanh', expected 'none', 'silu' or 'sigmoid'"),
        (lambda: OutputProjectionConfig(norm="batch"), "norm is 'batch', expected 'head', 'all', 'group' or 'none'"),
        (lambda: mixer_preset("deltanet", **{"convolution.size": 0}), "size is 0, expected an integer of at least 1"),
        (lambda: build(decay=SoftplusDecay(rate=(2.0, 1.0))), r"rate is \(2.0, 1.0\), expected 0 <= low <= high"),
        (lambda: build(decay=SoftplusDecay(step=(0.0, 1.0))), r"step is \(0.0, 1.0\), expected 0 < low <= high"),
        (lambda: SoftplusDecay(rank=0), "rank is 0, expected an integer of at least 1, 'value_size' or None"),
        (lambda: FixedDecay(0.0), "first_exponent is 0.0, expected a number above 0"),
        (lambda: KaczmarzGain(eps=0.0), "KaczmarzGain: eps is 0.0, expected a number above 0"),
        (lambda: NLMSGain(eps=-1.0), "NLMSGain: eps is -1.0, expected a number above 0"),
        (lambda: CombaGain(largest_log=100.0), "largest_log is 100.0, expected a number from 0 to 80"),
        (lambda: build(gain=StepGain())(inputs(1, 2)), "the decay gives no step per head"),
        (lambda: build(keys=RotatedKeys(1.5)), "fraction is 1.5, expected at most 1 and at least a pair of 8 channels"),
        (lambda: build(keys=RotatedKeys(0.1)), "fraction is 0.1, expected at most 1 and at least a pair of 8 channels"),
        (lambda: build(keys=RotatedKeys(), key_head_dim=5), "keys have 5 channels, expected an even number"),
        (lambda: build(keys=RotatedKeys())(inputs(1, 2)), "RotatedKeys: the decay gives no step per head"),
        (lambda: build(gain=TrapezoidalGain())(inputs(1, 2)), "TrapezoidalGain: the decay gives no step per head"),
        (lambda: Trapezoidal(rank=0), "rank is 0, expected an integer of at least 1"),
        (lambda: build(solve=Trapezoidal())(inputs(1, 2)), "the gain gives no gate on the previous token"),
        (lambda: build(solve=Trapezoidal(2), gain=KaczmarzGain()), "KaczmarzGain: the solve axis takes 2 keys a token"),
        (lambda: build(solve=Trapezoidal(2), keys=ApplyToKey()), "GramConfig: the solve axis takes 2 keys a token"),
        (lambda: trapezoidal_gain(DeltaRule())(inputs(1, 2)), "DeltaRule: the gain gives a gate on the previous token"),
        (
            lambda: trapezoidal_gain(LinearAttention())(inputs(1, 2)),
            "LinearAttention: the gain gives a gate on the previous token",
        ),
        (
            lambda: trapezoidal_gain(RidgeRegression())(inputs(1, 2)),
            "RidgeRegression: the gain gives a gate on the prev",
        ),
        (lambda: build(gain=ChannelGain(), solve=LinearAttention())(inputs(1, 2)), "the gain gives an erase gate"),
        (lambda: build()(jnp.zeros((1, 2, 5))), r"x has shape \(1, 2, 5\), expected \[B, T, D\] with D = 16"),
        (lambda: build()(inputs(1, 2), segment_ids=jnp.zeros((1, 3), int)), "segment_ids has shape"),
        (lambda: build(chunk_size=48)(inputs(1, 2)), "chunk_size is 48"),
        (lambda: build()(inputs(2, 2), cache=build().init_cache(1, 2)), "cache is of a batch of 1, expected 2 as in x"),
        (
            lambda: build()(inputs(1, 2), cache=tiny("attention").init_cache(1, 2)),
            r"cache is AttentionCache\(.key, .*\), expected what init_cache gives, MixerCache\(.query_tail, ",
        ),
        (
            lambda: build()(inputs(1, 2), cache=build(keys=ApplyToKey()).init_cache(1, 2)),
            r"tail, .keys, .state\), expected what init_cache gives, MixerCache\(.*tail, .state\)",
        ),
        (
            lambda: build()(inputs(1, 2), cache=build(value_expansion=2.0).init_cache(1, 2)),
            r"cache.value_tail has shape \(1, 3, 32\), expected \(1, 3, 16\) as init_cache gives",
        ),
        (
            lambda: build().init_cache(1, None),
            "RecurrentMixer.init_cache: max_length is None, expected an integer",
        ),
        (lambda: build().init_cache(0, 4), "batch_size is 0, expected an integer of at least 1"),
    ],
)
def test_bad_values_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_recurrence_inputs_are_what_the_operator_gets():
    """The axes can be looked into: running the operator on the recurrence_inputs and reading out is the call."""
    module = tiny("comba", **SCAN)
    x = jnp.asarray(inputs(1, 6))
    recurrence_inputs, carried = module.recurrence_inputs(x)
    assert carried.state is None
    gates = recurrence_inputs.gates
    out, _ = ops.gated_delta_rule(
        recurrence_inputs.keys.query,
        recurrence_inputs.keys.key,
        recurrence_inputs.value,
        erase=gates.erase,
        write=gates.write,
        log_decay=recurrence_inputs.decay.log_decay,
        implementation="scan",
    )
    np.testing.assert_allclose(
        module.output_projection(module.input_projection(x), out, recurrence_inputs.value),
        module(x)[0],
        rtol=1e-5,
        atol=1e-6,
    )
    assert isinstance(gates, Gates)


def test_unit_gain_online_overwrites_a_repeated_key():
    """The delta rule with gain 1 and unit keys: reading with the key just written gives its value."""
    module = build(gain=UnitGain(), keys=PlainKeys())
    recurrence_inputs, _ = module.recurrence_inputs(jnp.asarray(inputs(1, 12)))
    columns = module.input_projection(inputs(1, 12))
    out, _ = module.solve(
        columns, recurrence_inputs._replace(keys=recurrence_inputs.keys._replace(query=recurrence_inputs.keys.key))
    )
    np.testing.assert_allclose(out * SIZE**0.5, recurrence_inputs.value, rtol=1e-4, atol=1e-4)
