"""Parts of one's own: what they keep, how they are named, saved and looked into."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rnnlib import layers
from rnnlib.analysis import iterate_layers, write_eigenvalues
from rnnlib.layers import Gain, GainConfig, Gates, OutputProjection, OutputProjectionConfig, SolveConfig, mixer_preset
from rnnlib.models import DecoderLM, ModelConfig
from rnnlib.models.weights import load_weights, save_weights

SMALL = ModelConfig(vocabulary_size=29, width=32, num_layers=2, num_heads=2, head_dim=16)
TOKENS = jax.random.randint(jax.random.key(7), (2, 24), 0, 29)


class CountedGate(Gain):
    """Half of the gates dropped out, and a running mean of the rest."""

    def __init__(self, shape, *, rngs):
        self.shape = shape
        self.projection = shape.project(shape.value_heads, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.mean = nnx.BatchStat(jnp.zeros(()))
        self.bias = np.linspace(-1.0, 1.0, shape.value_heads)  # a constant: no variable

    def __call__(self, inputs, decay):
        gate = jax.nn.sigmoid(self.projection(inputs.x).astype(self.shape.gate_dtype) + self.bias)
        if not self.dropout.deterministic:
            self.mean[...] = 0.5 * self.mean[...] + 0.5 * gate.mean()
        return Gates(beta=self.dropout(gate))


@dataclasses.dataclass(frozen=True)
class CountedGain(GainConfig):
    def build(self, shape, *, rngs):
        return CountedGate(shape, rngs=rngs)

    def describe(self):
        return "counted"


def model_of(options, mixer="deltanet", **fields):
    config = SMALL.replace(mixers=(mixer,), mixer_overrides={mixer: options}, **fields)
    return DecoderLM(config, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("how", ["plain", "scan_layers", "remat"])
def test_random_streams_and_statistics_of_parts_advance(how):
    options = {} if how == "plain" else {how: True}
    model = model_of({"gain": CountedGain()}, **options)
    graphdef, parameters, other = nnx.split(model, nnx.Param, ...)

    @jax.jit
    def run(other):
        def loss(parameters):
            model = nnx.merge(graphdef, parameters, other, copy=True)
            return model(TOKENS).mean(), nnx.state(model, nnx.Not(nnx.Param))

        return jax.value_and_grad(loss, has_aux=True)(parameters)[0]

    first, once = run(other)
    second, twice = run(once)
    again, _ = run(once)
    assert second != first and again == second, "another mask at every step, the same one for the same state"
    for state, count in ((other, 0), (once, 1), (twice, 2)):
        for layer in range(SMALL.num_layers):
            gain = state["blocks"][layer]["mixer"]["gain"]
            assert gain["dropout"]["rngs"]["count"].get_value() == count
            assert (gain["mean"].get_value() > 0) == (count > 0)
    assert not jnp.array_equal(
        once["blocks"][0]["mixer"]["gain"]["mean"].get_value(), once["blocks"][1]["mixer"]["gain"]["mean"].get_value()
    )
    model(TOKENS)  # and without jit
    assert model.blocks[1].mixer.gain.dropout.rngs.count[...] == 1
    model.eval()
    closed = jax.jit(lambda tokens: model(tokens))(TOKENS)  # where nothing changes, a model may be closed over
    np.testing.assert_allclose(closed, model(TOKENS), atol=1e-5)
    assert model.blocks[1].mixer.gain.dropout.rngs.count[...] == 1


def test_weights_are_saved_with_statistics_and_without_streams_and_constants(tmp_path):
    model = model_of({"gain": CountedGain()})
    model(TOKENS)
    save_weights(model, tmp_path / "model.safetensors")
    assert b"mean" in (tmp_path / "model.safetensors").read_bytes()
    loaded = load_weights(tmp_path / "model.safetensors")
    assert loaded.blocks[1].mixer.gain.mean[...] == model.blocks[1].mixer.gain.mean[...] > 0
    model.eval(), loaded.eval()
    np.testing.assert_array_equal(loaded(TOKENS), model(TOKENS))
    loaded.train()
    assert np.isfinite(loaded(TOKENS)).all(), "streams of its own"


def test_an_output_projection_of_one_s_own_is_built():
    class Halved(OutputProjection):
        def __call__(self, inputs, out, value):
            return 0.5 * super().__call__(inputs, out, value)

    @dataclasses.dataclass(frozen=True)
    class HalvedOutput(OutputProjectionConfig):
        def build(self, shape, *, rngs):
            return Halved(self, shape, rngs=rngs)

    x = jax.random.normal(jax.random.key(0), (1, 8, 32))
    whole, half = (
        mixer_preset("deltanet", output_projection=config).build(32, 2, rngs=nnx.Rngs(0))
        for config in (OutputProjectionConfig(gate="none"), HalvedOutput(gate="none"))
    )
    np.testing.assert_allclose(half(x)[0], 0.5 * whole(x)[0], rtol=1e-6)


def define(module, name, power):
    """A gain as a script or a notebook's cell in `module` defines it."""

    def fill(namespace):
        namespace |= {"__module__": module, "describe": lambda self: name, "power": power}
        namespace |= {"formula": lambda self, key, gate: gate**power, "__annotations__": {"power": float}}

    return dataclasses.dataclass(frozen=True)(types.new_class(name, (layers.KeyEnergyGain,), {}, fill))


def test_a_part_with_the_name_of_another_module_s_is_refused():
    config = SMALL.replace(
        mixers=("deltanet",), mixer_overrides={"deltanet": {"gain": define("one", "SameName", 1.0)()}}
    )
    assert ModelConfig.from_dict(config.to_dict()) == config
    again = define("one", "SameName", 2.0)  # the cell is run once more: it takes its own place
    plain = {"deltanet": {"gain": {"SameName": {}}}}
    assert SMALL.replace(mixers=("deltanet",), mixer_overrides=plain).mixer_overrides[0][1][0][1] == again()
    define("two", "SameName", 3.0)
    message = "SameName: there are parts of this name in one and two, expected one: rename"
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict(config.to_dict())
    with pytest.raises(ValueError, match=message):
        SMALL.replace(mixers=("deltanet",), mixer_overrides=plain)


def test_a_part_that_is_not_imported_is_said_to_be():
    with pytest.raises(ValueError, match="or of a module that defines it and is imported before"):
        SMALL.replace(mixers=("deltanet",), mixer_overrides={"deltanet": {"gain": {"NowhereGain": {}}}})


@dataclasses.dataclass(frozen=True)
class OwnSolve(SolveConfig):
    said: bool | None = None

    def build(self, shape, options, *, rngs):
        return layers.DeltaRule().build(shape, options, rngs=rngs)

    def describe(self):
        return "own"

    def erases(self):
        return self.said


def test_analysis_takes_a_transition_only_as_the_solve_axis_says():
    (expected, _), (found, _) = (
        [
            write_eigenvalues(recurrence_inputs)
            for recurrence_inputs in iterate_layers(model_of({"solve": solve}), TOKENS)
        ]
        for solve in (layers.DeltaRule(), OwnSolve(True))
    )
    np.testing.assert_array_equal(found, expected)
    with pytest.raises(ValueError, match=r"layer 0: OwnSolve.erases gives None, expected True for the delta rule"):
        next(iterate_layers(model_of({"solve": OwnSolve()}), TOKENS))
    for name in set(layers.mixer_names()) - {"gsa"}:  # whose slots are no matrix that a key reads
        solve = getattr(mixer_preset(name), "solve", None)
        assert solve is None or isinstance(solve.erases(), bool), name


def test_eigenvalues_of_write_keys_with_other_signs_are_not_taken_for_real():
    (recurrence_inputs, *_) = iterate_layers(model_of({}, mixer="kda"), TOKENS)
    turned = dataclasses.replace(
        recurrence_inputs,
        write_key=recurrence_inputs.key * jnp.where(jnp.arange(recurrence_inputs.key.shape[-1]) % 2, 1, -1),
    )
    with pytest.raises(ValueError, match=r"erase [*] key [*] write_key is negative in 50% of the channels"):
        write_eigenvalues(turned)
    assert np.all(write_eigenvalues(recurrence_inputs) <= 1)


@pytest.mark.parametrize("mixer", ["mamba3", "retnet", "deltanet", "attention"])
@pytest.mark.parametrize("shape", [(1, 0, 32), (0, 3, 32), (3, 32), (1, 3, 31)])
def test_an_input_of_another_shape_is_named(unchecked_shapes, mixer, shape):
    module = mixer_preset(mixer).build(32, 2, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"x has shape .*expected \[B, T, D\] with D = 32 and no empty axis"):
        module(jnp.zeros(shape))


class Noisy(nnx.Module):
    """A feed-forward with a part of one's own around it."""

    def __init__(self, inner, rate, rngs):
        self.inner = inner
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.inner(x))


@pytest.mark.parametrize("how", ["rate", "structure", "shared stream"])
def test_scanned_layers_that_were_made_to_differ_are_refused(how):
    for scan_layers in (False, True):
        model = model_of({}, num_layers=3, scan_layers=scan_layers)
        shared = nnx.Rngs(1)
        for block, rate in zip(model.blocks, (0.1, 0.1, 0.9)):
            if how == "shared stream":
                block.feed_forward.noise = shared
            else:
                block.feed_forward = Noisy(block.feed_forward, 0.1 if how == "structure" else rate, nnx.Rngs(1))
        if how == "structure":
            model.blocks[1].feed_forward = model.blocks[1].feed_forward_norm = None
        if not scan_layers:
            assert jnp.isfinite(model(TOKENS)).all()
            continue
        message = {
            "rate": "scan_layers: blocks 0 and 2 differ in more than their arrays' values",
            "structure": "scan_layers: blocks 0 and 1 differ in more than their arrays' values",
            "shared stream": r"scan_layers: blocks 0 and 1 share feed_forward.noise.\w+.\w+, expected",
        }[how]
        with pytest.raises(ValueError, match=message):
            model(TOKENS)


def test_bfloat16_attention_layers_are_alike_where_they_are_scanned():
    config = SMALL.replace(num_layers=5, mixers=("attention", "deltanet"), dtype="bfloat16")
    for scan_layers, numbers in ((False, [0, 1, 2]), (True, [0, 0, 1])):
        model = DecoderLM(config.replace(scan_layers=scan_layers), rngs=nnx.Rngs(0))
        assert [block.mixer.number for block in model.blocks[::2]] == numbers
        assert jnp.isfinite(model(TOKENS)).all()


class Sown(nnx.Module):
    def __init__(self, inner):
        self.inner = inner

    def __call__(self, x):
        y = self.inner(x)
        self.sow(nnx.Intermediate, "mean", y.mean())
        return y


def test_what_parts_sow_is_captured_of_scanned_layers_too():
    captured = []
    for scan_layers in (False, True):
        model = model_of({}, num_layers=3, scan_layers=scan_layers)
        for block in model.blocks:
            block.feed_forward = Sown(block.feed_forward)
        logits, intermediates = nnx.capture(lambda model: model(TOKENS), nnx.Intermediate)(model)
        captured.append(jax.tree.leaves(nnx.to_pure_dict(intermediates)))
        assert len(set(map(float, captured[-1]))) == 3
        np.testing.assert_allclose(logits, model(TOKENS), atol=1e-6)
    np.testing.assert_allclose(*captured, atol=1e-7)
