"""A training step of two programs takes the steps that one program takes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rnnlib.cli.train import TrainArguments, parse_settings
from rnnlib.training import Trainer, compiled_steps, step
from rnnlib.training.compiled_steps import CompiledSteps
from rnnlib.training.flops import PEAK, step_flops
from rnnlib.training.packed import packed
from rnnlib.training.separate_step import SeparateStep, before_conversion

WIDE = jnp.arange(6.0).reshape(2, 3)


def rounded(x):
    return (x.astype(jnp.bfloat16) ** 2).astype(jnp.float32)


@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        (rounded, jnp.bfloat16),
        (jax.jit(rounded), jnp.bfloat16),
        (jax.checkpoint(rounded), jnp.bfloat16),
        (
            jax.grad(lambda x: (x.astype(jnp.bfloat16) @ jnp.ones((3, 1), jnp.bfloat16)).sum().astype(float)),
            jnp.bfloat16,
        ),
        (lambda x: rounded(x) + x, jnp.float32),
        (lambda x: x, jnp.float32),
        (lambda x: (x > 2).astype(jnp.float32), jnp.float32),
        (lambda x: x.astype(jnp.bfloat16), jnp.bfloat16),
        (lambda x: jax.lax.scan(lambda carry, _: (rounded(carry), None), x, length=1)[0], jnp.float32),
        (lambda x: jnp.zeros_like(x), jnp.float32),
    ],
)
def test_a_result_keeps_the_dtype_before_its_conversion(function, dtype):
    found, expected = jax.jit(before_conversion(lambda x: {"a": function(x)}))(WIDE)["a"], function(WIDE)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found.astype(expected.dtype), expected)


@pytest.mark.parametrize("changes", [{}, {"accumulation_steps": 2}, {"dtype": "bfloat16"}, {"freeze": ("blocks.0",)}])
def test_two_programs_train_as_one(changes, tmp_path, tiny_config, monkeypatch):
    config = dataclasses.replace(tiny_config, steps=3)
    if "dtype" in changes:
        config = dataclasses.replace(config, model=config.model.replace(**changes))
    else:
        config = dataclasses.replace(config, **changes)
    # A program for GPUs has options, which JAX refuses where it is traced inside another.
    monkeypatch.setattr(step, "_compiler_options", lambda *_: {"xla_cpu_enable_fast_math": False})
    ends = []
    for is_separate in (False, True):
        monkeypatch.setattr(CompiledSteps, "_has_small_update", lambda _, small=is_separate: small)
        trainer = Trainer(config)
        trainer.open(tmp_path / str(is_separate))
        assert isinstance(trainer._steps.train_step, SeparateStep) == is_separate
        result = trainer.run()
        ends.append((jax.tree.map(np.asarray, trainer._state), result.evaluation.loss))
    (one, loss), (two, loss_of_two) = ends
    assert loss_of_two == pytest.approx(loss, rel=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), one, two)


def test_gradients_are_written_in_place(tiny_config, monkeypatch):
    monkeypatch.setattr(CompiledSteps, "_has_small_update", lambda _: True)
    steps = CompiledSteps(tiny_config, np.ones(256, np.int32), None)
    steps.begin_compiling()
    steps.finish_compiling()
    state, batch = (
        packed(steps.first_state()),
        {k: jnp.zeros(x.shape, x.dtype) for k, x in steps._abstract_batch().items()},
    )
    places = []
    for _ in range(3):
        state, _ = steps.train_step(state, batch)
        (last,) = steps.train_step.last
        places.append([x.unsafe_buffer_pointer() for x in jax.tree.leaves(last)])
    assert len(places[0]) == len(jax.tree.leaves(steps.template.parameters))
    assert places[0] == places[1] == places[2]


def test_a_step_of_much_work_has_two_programs(tiny_config, monkeypatch):
    steps = CompiledSteps(tiny_config, np.ones(256, np.int32), None)
    assert not isinstance(steps.train_step, SeparateStep), "XLA takes a CPU's cores"
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(steps.template.parameters))
    work = tiny_config.data.batch_size * tiny_config.data.sequence_length * steps._token_flops
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for memory, peak, expected in (
        (32 * size, work / 0.00191, True),
        (32 * size - 1, work / 0.00191, False),
        (32 * size, work / 0.00189, False),
        (32 * size, float("nan"), False),
    ):
        monkeypatch.setattr(compiled_steps, "bytes_of_each_device", lambda memory=memory: memory)
        steps._peak_flops = peak
        assert steps._has_small_update() == expected


def test_the_smallest_step_that_was_timed_has_two_programs():
    config = parse_settings(TrainArguments, ["--preset", "340m"], command="train").train
    tokens = config.data.batch_size * config.data.sequence_length
    seconds = step_flops(config.model, config.data.sequence_length).total * tokens / PEAK["NVIDIA H200"]
    assert compiled_steps._SECONDS_OF_STEP <= seconds < 1.1 * compiled_steps._SECONDS_OF_STEP
