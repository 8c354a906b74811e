"""A compiled step that a folder keeps is found by a later run that computes the same, and by no other."""

import dataclasses
import os
import warnings
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from rnnlib.training import Trainer, compiled_steps, stored_steps
from rnnlib.training.compiled_steps import CompiledSteps


@pytest.fixture(autouse=True)
def jax_cache(tmp_path):
    """JAX's own cache, empty: what is in it is not stored."""
    wanted = {"jax_compilation_cache_dir": str(tmp_path / "jax"), "jax_persistent_cache_min_compile_time_secs": 0.0}
    before = {name: getattr(jax.config, name) for name in wanted}
    reset_cache()
    for name, value in wanted.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    reset_cache()


BYTES = np.ones(256, np.int32)


@pytest.fixture
def traced(monkeypatch):
    """How often a step was traced to be compiled."""
    calls, lower = [], CompiledSteps.begin_compiling
    monkeypatch.setattr(CompiledSteps, "begin_compiling", lambda self: (calls.append(self._compiling), lower(self))[1])
    return calls


def trained(config, folder, programs):
    trainer = Trainer(config, programs=programs)
    trainer.open(folder)
    result = trainer.run()
    return jax.tree.map(np.asarray, trainer._steps.model_parameters(trainer._state)), result.evaluation.loss


def stored(programs):
    return sorted(programs.glob("*.step"))


def test_a_later_run_takes_the_step_and_computes_the_same(tmp_path, tiny_config, traced):
    config, programs = dataclasses.replace(tiny_config, steps=3), tmp_path / "programs"
    first, loss = trained(config, tmp_path / "one", programs)
    (kept,) = stored(programs)
    assert traced == [None], "compiled"
    second, again = trained(config, tmp_path / "two", programs)
    assert traced[1] is not None and stored(programs) == [kept], "read"
    assert loss == again and jax.tree.all(jax.tree.map(np.array_equal, first, second))
    assert not list(programs.glob("*.unproven"))
    whole = kept.read_bytes()
    kept.write_bytes(whole[:100])
    third, _ = trained(config, tmp_path / "three", programs)
    assert len(traced) == 4 and traced[-1] is None, "what cannot be read is compiled"
    assert jax.tree.all(jax.tree.map(np.array_equal, first, third))
    assert not stored(programs), "JAX's cache had it"
    kept.write_bytes(whole)
    for expected in ([kept], []):  # a process that reads it and ends before its first step; the next one
        Trainer(config, programs=programs)._steps.finish_compiling()
        assert stored(programs) == expected


def test_what_the_program_depends_on_is_in_its_name(tmp_path, tiny_config, monkeypatch):
    def name(**changes):
        steps = CompiledSteps(dataclasses.replace(tiny_config, **changes), BYTES, None, tmp_path)
        assert steps._stored is not None
        return steps._stored.path.name

    own = name()
    assert own == name() == name(evaluation=dataclasses.replace(tiny_config.evaluation, every=7))
    optimizer, model, data = tiny_config.optimizer, tiny_config.model, tiny_config.data
    names = {
        own,
        name(optimizer=dataclasses.replace(optimizer, learning_rate=0.5)),
        name(model=dataclasses.replace(model, norm_eps=1e-3)),
        name(data=dataclasses.replace(data, batch_size=2 * data.batch_size)),
        name(steps=tiny_config.steps + 1),
    }
    with jax.default_matmul_precision("highest"):
        names.add(name())
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    names.add(name())
    previous = jax.config.jax_default_prng_impl
    jax.config.update("jax_default_prng_impl", "rbg")
    try:
        names.add(name())
    finally:
        jax.config.update("jax_default_prng_impl", previous)
    # A file of the library, of a package or of the user's own module.
    digest, module = stored_steps._source_digest(), tmp_path / "mine.py"
    module.write_text("FACTOR = 1")
    monkeypatch.syspath_prepend(tmp_path)
    __import__("mine")
    for change in (lambda: None, lambda: module.write_text("FACTOR = 2")):
        change()
        stored_steps._source_digest.cache_clear()
        digest, before = stored_steps._source_digest(), digest
        assert digest != before
        names.add(name())
    stored_steps._source_digest.cache_clear()
    assert len(names) == 10


def test_a_step_that_warns_is_not_kept_nor_one_of_several_tries(tmp_path, tiny_config, monkeypatch):
    steps = CompiledSteps(tiny_config, BYTES, None, tmp_path)
    monkeypatch.setattr(steps, "train_step", lambda *_: warnings.warn("slow", RuntimeWarning, stacklevel=1))
    with pytest.warns(RuntimeWarning, match="slow"):
        steps.check_step()
    assert steps._stored is None
    auto = dataclasses.replace(tiny_config, model=dataclasses.replace(tiny_config.model, remat="auto"))
    assert CompiledSteps(auto, BYTES, None, tmp_path)._stored is None
    own = SimpleNamespace(module="my_mixers")
    monkeypatch.setattr(compiled_steps, "preset_details", lambda name: own)
    assert CompiledSteps(tiny_config, BYTES, None, tmp_path)._stored is None


def test_the_folder_stays_small(tmp_path, monkeypatch):
    monkeypatch.setattr(stored_steps, "_LARGEST", 25)
    for number in range(4):
        path = tmp_path / f"{number}.step"
        path.write_bytes(b"x" * 10)
        os.utime(path, (number, number))
    stored_steps._keep_small(tmp_path)
    assert [path.name for path in stored(tmp_path)] == ["2.step", "3.step"]
