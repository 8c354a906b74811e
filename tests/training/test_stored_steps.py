"""A compiled step that a folder keeps is found by a later run that computes the same, and by no other."""

import dataclasses
import errno
import os
import subprocess
import sys
import time
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


@pytest.mark.parametrize("num_programs", [1, 2])
def test_a_later_run_takes_the_step_and_computes_the_same(num_programs, tmp_path, tiny_config, traced, monkeypatch):
    monkeypatch.setattr(CompiledSteps, "_has_small_update", lambda _: num_programs == 2)
    config, programs = dataclasses.replace(tiny_config, steps=3), tmp_path / "programs"
    first, loss = trained(config, tmp_path / "one", programs)
    (kept,) = stored(programs)
    assert traced == [None], "compiled"
    second, again = trained(config, tmp_path / "two", programs)
    assert traced[1] is not None and stored(programs) == [kept], "read"
    assert loss == again and jax.tree.all(jax.tree.map(np.array_equal, first, second))
    assert list(programs.iterdir()) == [kept], "no mark is left"
    whole = kept.read_bytes()
    kept.write_bytes(whole[:100])
    third, _ = trained(config, tmp_path / "three", programs)
    assert len(traced) == 4 and traced[-1] is None, "what cannot be read is compiled"
    assert jax.tree.all(jax.tree.map(np.array_equal, first, third))
    assert not stored(programs), "JAX's cache had it"
    kept.write_bytes(whole)
    programs.chmod(0o777)  # anyone could have written it
    steps = Trainer(config, programs=programs)._steps
    steps.finish_compiling()
    assert not steps.reads_stored_step and stored(programs) == [kept]


# Of a process that reads a stored step as all do.
TRIAL = """
import os, pathlib, sys
from rnnlib.training.stored_steps import StoredStep
step = object.__new__(StoredStep)
step.path, step._mark = pathlib.Path(sys.argv[1]), None
step.begin_trial()
print("begun", flush=True)
if sys.stdin.readline() == "crash\\n":
    os.abort()
step.end_trial()
"""


def test_a_step_that_has_ended_a_process_is_not_read_again(tmp_path, tiny_config):
    programs = tmp_path / "programs"
    programs.mkdir(mode=0o700)
    step = CompiledSteps(tiny_config, BYTES, None, programs)._stored
    assert step is not None
    step.path.write_text("no program")
    command = [sys.executable, "-c", TRIAL, str(step.path)]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL)
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdout.readline() == "begun\n"
    assert not step._has_failed(), "they are at work"
    processes[0].communicate("end\n")
    assert processes[0].returncode == 0 and not step._has_failed()
    processes[1].communicate("crash\n")
    assert processes[1].returncode != 0 and step._has_failed()
    assert step.load(jax.devices()) is None and not list(programs.iterdir())


def test_a_step_that_raises_is_not_read_again(tmp_path, tiny_config):
    steps = CompiledSteps(tiny_config, BYTES, None, tmp_path)
    step = steps._stored
    assert step is not None

    def fails(*_):
        raise jax.errors.JaxRuntimeError("INTERNAL: no such kernel")

    with pytest.raises(jax.errors.JaxRuntimeError):
        steps._first_call(fails, steps.template, None)
    assert not step._has_failed(), "this process lives"
    step._mark[1].close()  # as at its end
    assert step._has_failed()


@pytest.mark.parametrize("fault", ["full", "a file", "read-only"])
def test_a_folder_that_cannot_be_written_stops_nothing(fault, tmp_path, tiny_config, monkeypatch):
    programs = tmp_path / "programs"
    config = dataclasses.replace(tiny_config, steps=1)
    reason = {"full": errno.ENOSPC, "a file": errno.ENOTDIR, "read-only": errno.EROFS}[fault]

    def refuse(*_, **__):
        raise OSError(reason, os.strerror(reason))

    if fault == "a file":
        programs.write_text("")
    elif fault == "full":
        monkeypatch.setattr(stored_steps, "write_atomically", refuse)
    else:
        programs.mkdir(mode=0o700)
        steps = CompiledSteps(config, BYTES, None, programs)
        steps._stored.path.write_text("{}")
        monkeypatch.setattr(stored_steps.pathlib.Path, "touch", refuse)
    trained(config, tmp_path / "run", programs)
    assert fault == "read-only" or not stored(programs)


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
    for variable in ("XLA_PYTHON_CLIENT_MEM_FRACTION", "LD_LIBRARY_PATH"):
        monkeypatch.setenv(variable, "0.5")
        names.add(name())
    driver = tmp_path / "version"
    driver.write_text("NVRM version: 570.86.15")
    monkeypatch.setattr(stored_steps, "_DRIVER", driver)
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
    assert len(names) == 12


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
    cut_off, at_work = tmp_path / ".4.step-abc", tmp_path / ".5.step-abc"  # as `write_atomically` calls them
    for path, age in ((cut_off, 4000), (at_work, 0)):
        path.write_bytes(b"x")
        os.utime(path, (time.time() - age,) * 2)
    stored_steps._keep_small(tmp_path)
    assert not cut_off.exists() and at_work.exists()
