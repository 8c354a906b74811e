"""Packed states are the states in another form, and a step of them the same step."""

import cProfile
import re

import jax
import numpy as np
from flax import nnx

from rnnlib.training.compiled_steps import CompiledSteps
from rnnlib.training.packed import Packed, packed, unpacked
from rnnlib.training.step import abstract_state


def test_a_packed_tree_has_its_arrays_and_gives_the_tree_again():
    tree = {"a": np.ones(2), "b": (nnx.Param(np.zeros(3)), None)}
    one, two = Packed(tree), Packed(jax.tree.map(lambda x: x + 1, tree))
    assert jax.tree.structure(one.tree) == jax.tree.structure(tree)
    assert one.tree["b"][0].get_raw_value() is tree["b"][0].get_raw_value()
    assert jax.tree.structure(one) == jax.tree.structure(two) != jax.tree.structure(Packed({"a": np.ones(2)}))
    total = jax.jit(lambda x, y: jax.tree.map(lambda a, b: a + b, x, y))(one, two)
    np.testing.assert_array_equal(total.tree["b"][0][...], np.ones(3))


def test_a_step_of_a_packed_state_is_the_same_program(tiny_config):
    steps = CompiledSteps(tiny_config, np.ones(256, np.int32), None)
    plain, batch = abstract_state(steps.template, None), steps._abstract_batch()
    texts = [
        re.sub(r"jax.result_info = \"[^\"]*\"", "", steps.train_step.lower(state, batch).as_text())
        for state in (plain, packed(plain))
    ]
    assert texts[0] == texts[1]
    assert jax.tree.structure(unpacked(packed(plain))) == jax.tree.structure(plain)
    state = packed(steps.first_state())
    assert all(isinstance(x, Packed) for x in (state.parameters, state.other, state.optimizer))
    compiled = steps.train_step.lower(state, batch).compile()
    values = {name: np.zeros(x.shape, x.dtype) for name, x in batch.items()}
    state, _ = compiled(state, values)
    profile = cProfile.Profile()
    profile.runcall(compiled, state, values)
    files = {getattr(entry.code, "co_filename", "") for entry in profile.getstats()}
    assert not [path for path in files if "flax" in path], "variables are made in each call"
