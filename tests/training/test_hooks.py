"""Hooks and loggers of a run, the checkpoints that it keeps, and the one that a folder's name asks for."""

import dataclasses
import json
import math

import jax
import numpy as np
import pytest
from flax import nnx

from rnnlib.training import CheckpointError, Hook, Logger, RunError, Trainer, is_run, load_run, read_csv, split_step

pytestmark = pytest.mark.usefixtures("compilation_cache")

STEPS = 9


class Recorder(Hook):
    """Notes all calls."""

    def __init__(self):
        self.calls = []

    def on_start(self, trainer):
        self.calls.append(("start", trainer.step))

    def on_report(self, trainer, report):
        self.calls.append(("report", report.step))

    def on_step(self, trainer):
        self.calls.append(("step", trainer.step))

    def on_evaluation(self, trainer, report):
        self.calls.append(("evaluation", report.step))

    def on_save(self, trainer):
        self.calls.append(("save", trainer.step))

    def on_end(self, trainer):
        self.calls.append(("end", trainer.step))

    def close(self):
        self.calls.append(("close",))


class Numbers(Logger):
    """Keeps the numbers that it gets."""

    def __init__(self):
        self.rows = {"train": [], "validation": []}

    def log(self, split, values):
        self.rows[split].append(dict(values))


def offline_records(path):
    """The records of a file of Weights & Biases: LevelDB's log format, messages of their protocol."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, position, whole = path.read_bytes(), 7, b""
    while position + 7 <= len(content):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        length, kind = int.from_bytes(content[position + 4 : position + 6], "little"), content[position + 6]
        whole += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or its last part
            yield Record.FromString(whole)
            whole = b""


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_config, compilation_cache):
    """A run of nine steps with every logger, its hooks, and the state after step 6."""
    pytest.importorskip("wandb")
    folder = tmp_path_factory.mktemp("hooks") / "run"
    config = dataclasses.replace(
        tiny_config,
        steps=STEPS,
        evaluation=dataclasses.replace(tiny_config.evaluation, every=2, batches=2),
        checkpoint=dataclasses.replace(tiny_config.checkpoint, every=4, keep=1, keep_every=3, keep_best=1),
        logging=dataclasses.replace(tiny_config.logging, wandb="delta", picture=False),
        # The rate is so high at the end that the model is worse there.
        optimizer=dataclasses.replace(
            tiny_config.optimizer, schedule="constant", learning_rate=0.02, warmup_steps=0, clip_norm=None
        ),
    )
    recorder, numbers, weights = Recorder(), Numbers(), {}
    trainer = Trainer(config)

    def keep(trainer):
        weights[trainer.step] = jax.device_get(nnx.to_pure_dict(nnx.state(trainer.trained_model(), nnx.Param)))

    trainer.add_hook(recorder, every=4)
    trainer.add_hook(numbers)
    trainer.add_hook(keep, every=3)
    with pytest.raises(ValueError, match=r"Trainer.add_hook: every is 0, expected at least 1"):
        trainer.add_hook(keep, every=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        trainer.open(folder)
        trainer.run()
    return folder, recorder.calls, numbers.rows, weights


def test_hooks_are_called_in_order(run):
    _, calls, _, weights = run
    assert calls[0] == ("start", 0) and calls[-2:] == [("end", STEPS), ("close",)]
    assert [step for name, step in calls[:-1] if name == "report"] == list(range(1, STEPS + 1))
    assert [step for name, step in calls[:-1] if name == "step"] == [4, 8, 9]
    assert [step for name, step in calls[:-1] if name == "evaluation"] == [2, 4, 6, 8, 9]
    assert calls.index(("report", 4)) < calls.index(("evaluation", 4)) < calls.index(("save", 4))
    assert set(weights) == {3, 6, 9}


def test_every_logger_has_every_number(run):
    folder, _, rows, _ = run
    train, validation = read_csv(folder / "metrics.csv"), read_csv(folder / "validation.csv")
    assert [row["step"] for row in rows["train"]] == list(range(1, STEPS + 1))
    names = "step tokens loss bits_per_byte learning_rate gradient_norm skipped tokens_per_second utilization"
    assert list(rows["train"][0]) == names.split()
    for recorded, found in ((train, rows["train"]), (validation, rows["validation"])):
        assert len(recorded) == len(found)
        for one, other in zip(recorded, found, strict=True):
            np.testing.assert_equal(one, {name: float(value) for name, value in other.items()})
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    sent = [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in offline_records(file)
        if record.WhichOneof("record_type") == "history"
    ]
    for split, recorded in (("train", train), ("validation", validation)):
        found = [row for row in sent if f"{split}/loss" in row]
        assert [row["step"] for row in found] == [row["step"] for row in recorded]
        for name in recorded[0].keys() - {"step"}:
            values = [float(row[f"{split}/{name}"]) for row in found]
            np.testing.assert_allclose(values, [row[name] for row in recorded])


def test_checkpoints_that_are_kept_and_named(run):
    folder, _, rows, weights = run
    losses = {row["step"]: row["loss"] for row in rows["validation"]}
    best = min(losses, key=losses.get)
    there = {int(path.name) for path in (folder / "checkpoints").iterdir() if path.name.isdecimal()}
    assert there == {3, 6, 9, best}  # every third, the best, and the latest
    for name, step in (("run@6", 6), ("run@9", 9), ("run", 9), ("run@best", best)):
        loaded = load_run(folder.with_name(name))
        assert is_run(folder.with_name(name))
        assert (loaded.step, loaded.folder) == (step, folder)
        if step in weights:
            found = jax.device_get(nnx.to_pure_dict(nnx.state(loaded.model, nnx.Param)))
            jax.tree.map(np.testing.assert_array_equal, found, weights[step])
    with pytest.raises(CheckpointError, match=r"holds no checkpoint of step 5, expected one of: 3, "):
        load_run(folder.with_name("run@5"))
    with pytest.raises(RunError, match=r"run .*run@newest does not exist"):
        load_run(folder.with_name("run@newest"))


def test_a_folder_may_have_such_a_name_itself(tmp_path):
    assert split_step(tmp_path / "run@7") == (tmp_path / "run", 7)
    (tmp_path / "run@7").mkdir()
    assert split_step(tmp_path / "run@7") == (tmp_path / "run@7", None)
    assert split_step("@7")[1] is None and split_step("run@")[1] is None


def test_utilization_is_of_the_cards_peak(tiny_config, monkeypatch):
    from rnnlib.training import step_flops

    trainer = Trainer(dataclasses.replace(tiny_config, devices=1), read_data=False)
    assert math.isnan(trainer._steps.utilization(1e6))
    model = dataclasses.replace(trainer.config.model, dtype="bfloat16")
    trainer = Trainer(dataclasses.replace(tiny_config, devices=1, model=model), read_data=False)
    monkeypatch.setattr(type(trainer._steps), "_peak_flops", 1e12)
    flops = step_flops(trainer.config.model, tiny_config.data.sequence_length).total
    assert trainer._steps.utilization(1e4) == pytest.approx(1e4 * flops / 1e12)
