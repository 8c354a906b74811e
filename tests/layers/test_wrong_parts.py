"""A part of one's own that gives a wrong type, shape or sign is named, before anything is computed with it."""

import dataclasses

import jax.numpy as jnp
import pytest
from flax import nnx

from rnnlib.layers import DecayConfig, DecayGate, GainConfig, KeyEnergyGain, mixer_preset
from rnnlib.layers.decay import Decay

pytestmark = pytest.mark.usefixtures("unchecked_shapes")


class Gives(nnx.Module):
    """A gate that gives the same whatever it is asked."""

    def __init__(self, value):
        self.value = lambda: value

    def __call__(self, *arguments, **options):
        return self.value()


class GivesDecay(Gives, DecayGate):
    pass


@dataclasses.dataclass(frozen=True)
class Growth(DecayConfig):
    def build(self, shape, *, rngs):
        return GivesDecay(Decay(jnp.full((2, 8, shape.value_heads), 0.25)))

    def describe(self):
        return "grows"


@dataclasses.dataclass(frozen=True)
class NoDecayAtAll(DecayConfig):
    def build(self, shape, *, rngs):
        return GivesDecay(jnp.zeros((2, 8, shape.value_heads)))

    def describe(self):
        return "an array"


@dataclasses.dataclass(frozen=True)
class PerValueChannel(DecayConfig):
    def build(self, shape, *, rngs):
        return GivesDecay(Decay(jnp.zeros((2, 8, shape.value_heads, 3))))

    def describe(self):
        return "three channels"


@dataclasses.dataclass(frozen=True)
class ArrayGain(GainConfig):
    def build(self, shape, *, rngs):
        return Gives(jnp.ones((1, 5, shape.value_heads)))

    def describe(self):
        return "an array"


@dataclasses.dataclass(frozen=True)
class KeepsChannels(KeyEnergyGain):
    def formula(self, key, gate):
        return gate[..., None] * key

    def describe(self):
        return "b k"


@dataclasses.dataclass(frozen=True)
class Word(KeyEnergyGain):
    def formula(self, key, gate):
        return "gate"

    def describe(self):
        return "a word"


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"decay": Growth()}, r"decay \(Growth\): log_decay is 0.25 at some tokens, expected at most 0"),
        ({"decay": NoDecayAtAll()}, r"decay \(NoDecayAtAll\) gave an array, expected Decay"),
        ({"decay": PerValueChannel()}, r"decay \(PerValueChannel\): log_decay has shape \(2, 8, 2, 3\), expected \[B"),
        ({"gain": ArrayGain()}, r"gain \(ArrayGain\) gave an array, expected Gates"),
        ({"gain": KeepsChannels()}, r"KeepsChannels.formula gave shape \(1, 5, 2, 8\), expected \[B, T, H\]"),
        ({"gain": Word()}, r"Word.formula gave a str, expected an array \[B, T, H\]"),
    ],
    ids=lambda value: "" if isinstance(value, str) else type(next(iter(value.values()))).__name__,
)
def test_a_wrong_part_is_named(part, message):
    with pytest.raises((TypeError, ValueError), match=message):
        mixer_preset("gated_deltanet", **part).build(width=16, num_heads=2, rngs=nnx.Rngs(0))(jnp.ones((1, 5, 16)))


def test_a_growing_state_is_refused_while_a_model_is_traced_too():
    config = mixer_preset("kda", decay=Growth())
    with pytest.raises(ValueError, match="expected at most 0"):
        nnx.eval_shape(lambda: config.build(width=16, num_heads=2, rngs=nnx.Rngs(0)))


def test_sizes_that_do_not_divide_name_the_flags():
    with pytest.raises(ValueError, match=r"130 does not divide into 4 heads.*--model.width, --model.num-heads"):
        mixer_preset("kda").build(width=130, num_heads=4, rngs=nnx.Rngs(0))
