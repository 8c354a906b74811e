"""What the studies' commands share: picking mixers, taking turns on a device, comparing runs."""

import math
import os
import sys
import threading
import time

import pytest

from experiments.harness.child import Child, answer, last_line
from experiments.harness.device import Turn, turn
from experiments.harness.study import Mixer, pick
from experiments.kill_check.__main__ import faults, first_difference
from experiments.language_modelling.command import main as language_modelling
from experiments.scale_prediction.__main__ import sent_by_link
from experiments.sweep.command import SweepOptions, load_study
from experiments.sweep.study import Cell, fingerprint
from experiments.throughput.__main__ import main as throughput
from rnnlib.data.tasks import MQAR
from rnnlib.training import Exchange

MIXERS = tuple(Mixer.of(label, "linear_attention") for label in ("KLA", "KLA + ATK", "DeltaNet", "Gated DeltaNet"))


@pytest.mark.parametrize(
    ("parts", "labels"),
    [
        ((), ["KLA", "KLA + ATK", "DeltaNet", "Gated DeltaNet"]),
        (("DeltaNet",), ["DeltaNet"]),
        (("Delta",), ["DeltaNet", "Gated DeltaNet"]),
        (("KLA", "Gated"), ["KLA", "Gated DeltaNet"]),
        (("Gated", "Delta"), ["Gated DeltaNet", "DeltaNet"]),
        (("nothing",), []),
    ],
)
def test_a_whole_label_picks_one_mixer_and_a_part_all_that_contain_it_in_the_order_named(parts, labels):
    assert [mixer.label for mixer in pick(MIXERS, parts)] == labels


def test_mixers_are_left_out_by_name():
    options = SweepOptions(setting="real", skip=("KalmaNet", "attention"))
    labels = [mixer.label for mixer in load_study("mqar", options).mixers]
    assert "DeltaNet" in labels and "attention" not in labels and "Gated KalmaNet" not in labels


def test_turns_on_devices_do_not_overlap(tmp_path):
    locks = [tmp_path / "folder" / name for name in ("one", "two")]
    events: list[str] = []

    def second() -> None:
        with turn(locks[1:]):
            events.append("second")

    with turn(locks):
        waiting = threading.Thread(target=second)
        waiting.start()
        time.sleep(0.1)
        events.append("first")
    waiting.join(10)
    assert events == ["first", "second"]
    with turn(()):
        pass


def test_a_turn_is_kept_until_its_work_is_done(tmp_path):
    locks = [tmp_path / "lock"]
    events: list[str] = []

    def second() -> None:
        with Turn(locks) as own:
            own.take()
            events.append("second")

    with Turn(locks) as own:
        own.take()
        waiting = threading.Thread(target=second)
        waiting.start()
        own.take()
        time.sleep(0.1)
        events.append("first")
    waiting.join(10)
    assert events == ["first", "second"]
    with Turn(locks):
        pass  # never taken


def test_the_dtype_is_part_of_a_run():
    cell = Cell("a", MQAR(sequence_length=16, num_pairs=2, vocabulary_size=32))
    half = Cell("a", MQAR(sequence_length=16, num_pairs=2, vocabulary_size=32), dtype="bfloat16")
    assert fingerprint(MIXERS[0], cell) != fingerprint(MIXERS[0], half)
    assert half.model_config(MIXERS[0]).dtype == "bfloat16" and cell.model_config(MIXERS[0]).dtype == "float32"


def test_first_step_at_which_runs_differ():
    rows = [{"step": float(i), "loss": 1.0 / i} for i in range(1, 5)]
    assert first_difference(rows, [dict(row) for row in rows]) is None
    assert first_difference(rows, rows[:2]) == 3
    other = [dict(row) for row in rows]
    other[2]["loss"] += 1e-7
    assert first_difference(rows, other) == 3


@pytest.mark.parametrize("study", ["language_modelling", "throughput"])
def test_an_interrupt_is_one_line(study, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("experiments.language_modelling.command.load_study", interrupted)
    monkeypatch.setattr("experiments.throughput.__main__.study", interrupted)
    monkeypatch.setattr("experiments.harness.command.os._exit", sys.exit)
    with pytest.raises(SystemExit) as end:
        if study == "throughput":
            throughput([])
        else:
            language_modelling(study, [])
    assert end.value.code == 130
    assert capsys.readouterr().err == "interrupted: what is done is kept, the same command goes on\n"


def test_kill_check_finds_what_a_kill_may_not_cost():
    kill = {"last_whole_checkpoint": 10, "last_whole_checkpoint_before": 10, "steps_lost": 7}
    kill |= {"killed": (1,), "exit_codes": [1, -9]}
    later = kill | {"last_whole_checkpoint": 15}
    assert faults(kill, None, 5) == faults(kill, later, 5) == faults(kill | {"killed": (0, 1)}, kill, 5) == []
    assert faults(later, kill, 5) == ["the next start went back before the last whole checkpoint"]
    assert faults(kill | {"last_whole_checkpoint": 5}, None, 5) == ["a whole checkpoint was lost"]
    assert faults(kill | {"steps_lost": 11}, None, 5) == ["11 steps were lost"]
    assert faults(kill | {"exit_codes": [0, -9]}, None, 5) == ["process 0 ended with code 0"]


def test_predicted_bytes_go_by_the_links_that_a_group_has():
    def sent(over, **mesh):
        devices = math.prod(mesh[axis] for axis in over)
        return sent_by_link(Exchange("all-gather", "x", over, devices, 1, 1024 * devices), mesh)

    assert sent(("fsdp",), data=8, fsdp=8) == (7 * 1024, 0)
    assert sent(("fsdp",), data=1, fsdp=64) == (63 * 1024, 63 * 1024 / 8)
    # The same place in each of eight hosts: one device a host, alone with its adapter. Then two in each.
    assert sent(("data",), data=8, fsdp=8) == (0, 7 * 1024)
    assert sent(("data",), data=16, fsdp=4) == (15 * 1024, 15 * 1024 / 2)
    assert sent(("data",), data=16, fsdp=16) == (0, 15 * 1024)
    # Devices that share layers are neighbours, and the group beside them is of another host.
    assert sent(("tensor",), data=8, fsdp=8, tensor=8) == (7 * 1024, 0)
    assert sent(("fsdp",), data=8, fsdp=8, tensor=8) == (0, 7 * 1024)
    assert sent(("fsdp", "tensor"), data=8, fsdp=8, tensor=8) == (63 * 1024, 63 * 1024 / 8)


def test_a_child_answers_fails_or_is_ended(tmp_path, monkeypatch):
    (tmp_path / "asked.py").write_text(
        "import json, os, sys, time\n"
        "print('a line of its own')\n"
        "given = sys.stdin.read()\n"
        "time.sleep(60 if given == 'sleep' else 0)\n"
        "if not given:\n"
        "    sys.exit('the reason\\nno such thing')\n"
        "print(json.dumps([json.loads(given), sys.argv[1:]]))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    assert answer(Child("asked", 1, "two"), {"x": 3}) == [{"x": 3}, ["1", "two"]]
    lines, failure = Child("asked").finish()
    assert lines == ["a line of its own"] and last_line(failure) == "no such thing"
    with pytest.raises(RuntimeError, match="the reason"):
        answer(Child("asked"))
    assert Child("asked").finish("sleep", 1)[1] == "not done in 1 s"
