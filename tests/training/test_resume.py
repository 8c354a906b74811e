"""Runs that are stopped in every way and continued end as if they had not been."""

import dataclasses
import shutil
import signal
import subprocess
import sys
import time

import pytest

from rnnlib.cli.main import main
from rnnlib.training import (
    CheckpointError,
    Checkpoints,
    ProgressReporter,
    RunError,
    Trainer,
    load_run,
    load_run_config,
    read_csv,
    save_config,
    train,
)
from rnnlib.training.run import check_continues

pytestmark = pytest.mark.usefixtures("compilation_cache")

# Kills its own process right after a checkpoint's writing has begun in the background.
KILLED_WHILE_SAVING = """
import os, signal, sys
from rnnlib.cli.main import main
from rnnlib.training import Checkpoints

save = Checkpoints.save

def save_and_die(self, state, progress, **metrics):
    save(self, state, progress, **metrics)
    if progress.step == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)

Checkpoints.save = save_and_die
main(sys.argv[2:])
"""


def records(folder):
    """What must not depend on interruptions, as written."""
    columns = ("step", "tokens", "loss", "bits_per_byte", "learning_rate", "gradient_norm", "skipped")
    train_rows = [[row[name] for name in columns] for row in read_csv(folder / "metrics.csv")]
    return train_rows, read_csv(folder / "validation.csv")


@pytest.fixture(scope="module")
def run_config(tiny_config):
    """Long enough to be stopped in several places, whatever else the machine does."""
    return dataclasses.replace(tiny_config, steps=240, evaluation=dataclasses.replace(tiny_config.evaluation, every=30))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, run_config):
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    result = train(run_config, folder)
    assert (result.step, result.stopped_by) == (run_config.steps, None)
    return folder


def wait_for_rows(folder, process, count):
    deadline = time.monotonic() + 120
    while len(read_csv(folder / "metrics.csv")) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_killed_and_terminated_runs_continue_bit_for_bit(
    uninterrupted, tmp_path, run_config, process_environment, capsys
):
    folder = tmp_path / "run"
    save_config(run_config, tmp_path / "config.yaml")

    def start(*program):
        return subprocess.Popen(
            [sys.executable, *program],
            env=process_environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    command = ["-m", "rnnlib.cli.main", "train", "--run", str(folder), "--resume", "--prompt", ""]
    # kill -9 while a checkpoint is being written ...
    process = start(
        "-c", KILLED_WHILE_SAVING, "60", "train", "--config", str(tmp_path / "config.yaml"), "--run", str(folder)
    )
    output = process.communicate(timeout=300)
    assert process.returncode == -signal.SIGKILL, output
    saved = {path.name for path in (folder / "checkpoints").iterdir()}
    assert "40" in saved and "60" not in saved, "the kill came after the checkpoint was whole"
    # ... kill -9 at any other moment ...
    process = start(*command)
    wait_for_rows(folder, process, 70)
    process.kill()
    process.communicate(timeout=300)
    rows_when_killed = len(read_csv(folder / "metrics.csv"))
    assert rows_when_killed < run_config.steps
    # ... SIGTERM ...
    process = start(*command)
    wait_for_rows(folder, process, rows_when_killed + 20)
    process.terminate()
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert "stopping after this step\n" in errors
    stopped = len(read_csv(folder / "metrics.csv"))
    assert stopped < run_config.steps and f"SIGTERM: saved at step {stopped}" in output
    assert (folder / "checkpoints" / str(stopped)).is_dir()
    # ... and to the end.
    assert main(command[2:]) == 0
    assert f"continuing after step {stopped}" in capsys.readouterr().out
    train_rows, validation_rows = records(folder)
    assert [row[0] for row in train_rows] == list(range(1, run_config.steps + 1))
    assert (train_rows, validation_rows) == records(uninterrupted)
    assert len(validation_rows) == 8 and (folder / "loss.png").is_file()


class SignalAt(ProgressReporter):
    """Sends this process a signal at a step, or in the evaluation after it."""

    def __init__(self, steps, step, number, *, evaluating=False):
        super().__init__(steps, plain_seconds=3600)
        self._at, self._number, self._evaluating, self._now = step, number, evaluating, 0

    def step(self, report):
        self._now = report.step
        if self._now == self._at and not self._evaluating:
            signal.raise_signal(self._number)

    def phase(self, name):
        if self._evaluating and self._now == self._at:
            signal.raise_signal(self._number)


@pytest.mark.parametrize(
    ("number", "step", "evaluating"),
    [
        pytest.param(signal.SIGINT, 33, False, id="ctrl-c", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 90, True, id="eval"),
    ],
)
def test_a_signal_saves_and_stops(uninterrupted, tmp_path, run_config, number, step, evaluating):
    folder = tmp_path / "run"
    before = signal.getsignal(number)
    result = train(run_config, folder, reporter=SignalAt(run_config.steps, step, number, evaluating=evaluating))
    assert signal.getsignal(number) is before
    assert result.stopped_by == number and step <= result.step <= step + 1
    assert load_run(folder).step == result.step
    # What an interrupted evaluation has not recorded, the next one makes up for.
    assert train(run_config, folder, resume=True).step == run_config.steps
    assert records(folder) == records(uninterrupted)


@pytest.fixture
def heeded_hangups():
    """SIGHUP as in a terminal: under nohup it is ignored, by these tests' process too."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("heeded_hangups")
def test_a_finished_run_can_be_extended(uninterrupted, run_config, tmp_path):
    folder = tmp_path / "run"
    # A schedule without an end in the program: runs of all lengths share what is compiled.
    short = dataclasses.replace(run_config, steps=30, optimizer=constant(run_config))
    # Stopped in the last evaluation a run is not finished, though all its steps are done.
    result = train(short, folder, reporter=SignalAt(30, 30, signal.SIGHUP, evaluating=True))
    assert (result.step, result.stopped_by, result.evaluation) == (30, signal.SIGHUP, None)
    result = train(short, folder, resume=True)
    assert (result.step, result.stopped_by) == (30, None) and result.evaluation is not None
    assert train(short, folder, resume=True).step == 30  # nothing to do
    assert len(read_csv(folder / "metrics.csv")) == 30
    assert train(dataclasses.replace(short, steps=40), folder, resume=True).step == 40
    assert load_run_config(folder).steps == 40
    assert [row["step"] for row in read_csv(folder / "metrics.csv")] == list(range(1, 41))
    with pytest.raises(RunError, match="is at step 40, beyond the 30"):
        train(short, folder, resume=True)


def test_folders_that_do_not_fit_are_refused_and_left_alone(uninterrupted, tmp_path, run_config):
    def content():
        return {path: path.stat().st_mtime_ns for path in uninterrupted.rglob("*") if path.name != ".lock"}

    before = content()
    with pytest.raises(RunError, match="exists: choose another, or continue it with --resume"):
        train(run_config, uninterrupted)
    with pytest.raises(RunError, match="does not exist"):
        train(run_config, tmp_path / "absent", resume=True)
    (tmp_path / "other").mkdir()
    with pytest.raises(RunError, match=r"not a run folder: it has no config.yaml"):
        train(run_config, tmp_path / "other", resume=True)
    wider = dataclasses.replace(run_config, model=dataclasses.replace(run_config.model, width=32))
    with pytest.raises(RunError, match=r"model.width is 32 but 16 in the run"):
        train(wider, uninterrupted, resume=True)
    reseeded = dataclasses.replace(run_config, seed=1)
    with pytest.raises(RunError, match=r"seed is 1 but 0 in the run"):
        train(reseeded, uninterrupted, resume=True)
    trainer = Trainer(run_config)
    trainer.read_data()[1].fingerprint = "of other files"
    with pytest.raises(RunError, match=r"validation data is not that of run .* of other files, saved"):
        trainer.open(uninterrupted, resume=True)
    assert content() == before
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="is not a folder"):
        train(run_config, tmp_path / "file" / "run")
    bad = dataclasses.replace(run_config, data=dataclasses.replace(run_config.data, paths=("/nonexistent/*.txt",)))
    with pytest.raises(ValueError, match=r"no file matches '/nonexistent/\*.txt'"):
        train(bad, tmp_path / "new")
    bad = dataclasses.replace(run_config, model=dataclasses.replace(run_config.model, num_heads=3))
    with pytest.raises(ValueError, match="3 heads"):
        train(bad, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_what_saves_memory_may_change_in_a_run(run_config):
    model = dataclasses.replace(run_config.model, remat=True, scan_layers=True)
    check_continues(dataclasses.replace(run_config, model=model, accumulation_steps=2), run_config)


def constant(config):
    return dataclasses.replace(config.optimizer, schedule="constant", warmup_steps=0)


def test_two_processes_cannot_train_in_one_run(tmp_path, run_config):
    config = dataclasses.replace(run_config, steps=3, optimizer=constant(run_config))
    first, second = Trainer(config), Trainer(config)
    first.open(tmp_path / "run")
    with pytest.raises(RunError, match="is being trained by another process"):
        second.open(tmp_path / "run", resume=True)
    assert first.run().step == 3


def test_a_run_without_a_checkpoint_cannot_be_loaded_but_resumed(tmp_path, run_config):
    config = dataclasses.replace(run_config, steps=3, optimizer=constant(run_config))
    trainer = Trainer(config)
    trainer.open(tmp_path / "run")
    trainer.close()
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        load_run(tmp_path / "run")
    assert train(config, tmp_path / "run", resume=True).step == 3


def test_a_run_that_has_lost_its_checkpoints_is_refused_and_left_alone(uninterrupted, tmp_path, run_config):
    folder = tmp_path / "run"
    shutil.copytree(uninterrupted, folder)
    shutil.rmtree(folder / "checkpoints")

    def content():
        return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != ".lock"}

    before = content()
    expected = r"run .*/run has 240 rows in metrics.csv and no whole checkpoint, expected one in .*/run/checkpoints to "
    with pytest.raises(RunError, match=expected):
        train(run_config, folder, resume=True)
    assert content() == before
    # A run whose only checkpoint was that of its last step.
    config = dataclasses.replace(run_config, steps=3, optimizer=constant(run_config))
    train(config, tmp_path / "short")
    shutil.rmtree(tmp_path / "short" / "checkpoints" / "3")
    with pytest.raises(RunError, match=r"has 3 rows in metrics.csv and no whole checkpoint"):
        train(dataclasses.replace(config, steps=5), tmp_path / "short", resume=True)
    # Not drawn, the same run may have been killed while its first checkpoint was written.
    (tmp_path / "short" / "loss.png").unlink()
    assert train(config, tmp_path / "short", resume=True).step == 3
    assert [row["step"] for row in read_csv(tmp_path / "short" / "metrics.csv")] == [1, 2, 3]


class NeverWhole(Checkpoints):
    """On a full disk: that the first checkpoint could not be written shows when the second is to be."""

    def save(self, state, progress, **metrics):
        if progress.step >= 40:
            raise CheckpointError("no space left")


def test_a_run_that_fails_before_its_first_checkpoint_is_whole_can_be_resumed(
    uninterrupted, tmp_path, run_config, monkeypatch
):
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr("rnnlib.training.trainer.Checkpoints", NeverWhole)
        with pytest.raises(CheckpointError, match="no space left"):
            train(run_config, folder)
    assert len(read_csv(folder / "metrics.csv")) == 40
    assert train(run_config, folder, resume=True).step == run_config.steps
    assert records(folder) == records(uninterrupted)
