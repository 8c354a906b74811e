"""Recomputation chosen by the memory that there is."""

import dataclasses
import types

import jax
import numpy as np
import pytest
from flax import nnx

from rnnlib.models import DecoderLM, ModelConfig
from rnnlib.training import (
    OptimizerConfig,
    choose_remat,
    init_train_state,
    learning_rate_schedule,
    make_optimizer,
    make_train_step,
    planned_bytes,
    read_csv,
    train,
)
from rnnlib.training.batches import abstract_batch

pytestmark = pytest.mark.usefixtures("compilation_cache")

MODEL = ModelConfig(
    vocabulary_size=17, width=32, num_layers=3, num_heads=2, mixers=("linear_attention",), mlp_width=96, remat="auto"
)


def compile_step(model):
    optimizer, schedule = make_optimizer(OptimizerConfig(), 10), learning_rate_schedule(OptimizerConfig(), 10)
    graph, state = nnx.eval_shape(lambda: init_train_state(DecoderLM(model, rngs=nnx.Rngs(0)), optimizer))
    step = make_train_step(graph, optimizer, schedule, np.ones(17, np.int32))
    return step.lower(state, abstract_batch(4, 128, None)).compile()


@pytest.fixture(scope="module")
def steps():
    ways = ({"remat": False}, {"remat": True, "remat_keeps": "products"}, {"remat": True, "remat_keeps": "input"})
    return {model: compile_step(model) for model in (MODEL.replace(**way) for way in ways)}


def test_the_least_is_recomputed_that_fits(steps):
    sizes = [planned_bytes(step) for step in steps.values()]
    assert sizes[0] > 1.2 * sizes[1] > 1.2 * 1.2 * sizes[2] > 0
    expected = [(sizes[0], 0), (sizes[1], 1), (sizes[2], 2), (sizes[2] / 2, 2)]
    for limit, index in expected:
        compiled = []

        def compile_known(model):
            compiled.append(model)
            return steps[model]

        found = choose_remat(MODEL, compile_known, int(limit / 0.9) + 1)
        models = list(steps)
        assert found.model == models[index] and found.step is steps[models[index]]
        assert compiled == models[: index + 1]  # and nothing that is not asked for
        assert f"the step takes {sizes[index] / 1e6:.1f} MB of {(int(limit / 0.9) + 1) / 1e6:.1f} MB" in found.line


def test_what_cannot_be_compiled_or_has_no_plan_does_not_fit(steps):
    def compile_some(model):
        if not model.remat:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return types.SimpleNamespace(memory_analysis=lambda: None)

    found = choose_remat(MODEL, compile_some, 10**12)
    assert found.model.remat_keeps == "input"
    assert found.line == (
        "recomputed in the backward pass: whole blocks (with nothing: too large, with blocks but for their products "
        "with weights: too large)"
    )

    def broken(model):
        raise jax.errors.JaxRuntimeError("INTERNAL: a fault")

    with pytest.raises(jax.errors.JaxRuntimeError, match="a fault"):
        choose_remat(MODEL, broken, 10**12)


@pytest.mark.parametrize(
    ("device_bytes", "way"), [pytest.param(10**12, "nothing", marks=pytest.mark.slow), (1000, "whole blocks")]
)
def test_training_says_what_it_has_chosen(tmp_path, tiny_config, capsys, monkeypatch, device_bytes, way):
    monkeypatch.setattr("rnnlib.training.compiled_steps.bytes_of_each_device", lambda: device_bytes)
    model = tiny_config.model.replace(remat="auto")
    logging = dataclasses.replace(tiny_config.logging, tensorboard=False, picture=False)
    losses = []
    for config in (tiny_config, dataclasses.replace(tiny_config, model=model)):
        config = dataclasses.replace(config, steps=3, logging=logging)
        folder = tmp_path / str(config.model.remat)
        train(config, folder)
        losses.append([row["loss"] for row in read_csv(folder / "metrics.csv")])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "recomputed" in line]
    assert line.startswith(f"recomputed in the backward pass: {way}; the step takes ")
