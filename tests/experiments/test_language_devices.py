"""The language models on several GPUs: which is trained when and where."""

import pathlib
import sys
import time

import pytest
import tyro
from rich.console import Console

from experiments.harness.study import Mixer
from experiments.harness.tables import read_table
from experiments.language_modelling.__main__ import Options, command_of
from experiments.language_modelling.devices import TESTING, Job, Timetable, expected_seconds, train_on_devices
from experiments.language_modelling.study import study

RESULTS = pathlib.Path(__file__).parents[2] / "experiments" / "language_modelling" / "results"


def jobs_of(**seconds: float) -> list[Job]:
    return [Job(Mixer.of(name, "deltanet"), 1e-3, 0, x) for name, x in seconds.items()]


def test_jobs_go_in_their_order_but_none_that_would_end_too_late():
    short, long, last = jobs = jobs_of(short=100.0, long=500.0, last=150.0)
    table = Timetable(jobs, until=1000.0)
    assert table.take(0, now=700.0) is short  # compiled at 775, done at 875
    assert table.take(0, now=700.0) is None
    assert table.take(1, now=700.0) is last  # the long one has no time anywhere
    table.end(0, short, now=740.0)
    assert table.take(0, now=740.0) is None
    assert Timetable(jobs, until=None).take(0, now=700.0) is short
    again = Timetable([long, last], until=1500.0)
    assert again.take(0, now=700.0) is long  # done at 1275
    assert again.take(0, now=700.0) is last
    again.end(0, long, now=900.0)
    assert again.take(0, now=900.0) is None
    again = Timetable(jobs, until=None)
    again.close()
    assert again.take(0, now=0.0) is None


def test_what_a_run_takes_is_known_from_its_other_rates():
    plan = study("large")
    kda = next(mixer for mixer in plan.mixers if mixer.label == "KDA")
    found = [row["seconds"] for row in read_table(RESULTS / "large.jsonl") if row["mixer"]["label"] == "KDA"]
    assert expected_seconds(plan, RESULTS / "large.jsonl", kda) == min(found) + TESTING
    assert expected_seconds(plan, RESULTS / "nothing", kda) == 0.0


@pytest.mark.parametrize("until", [None, 60.0])
def test_two_commands_run_on_each_device(tmp_path, until):
    code = "import os, sys, time; print(os.environ['CUDA_VISIBLE_DEVICES'], time.time()); time.sleep(0.6); sys.exit({})"

    def command(job: Job, device: int) -> list[str]:
        return [sys.executable, "-c", code.format(3 if job.mixer.label == "bad" else 0)]

    jobs = jobs_of(a=1.0, b=1.0, c=1.0, bad=1.0, d=1.0)
    with (tmp_path / "shown").open("w") as shown:
        train_on_devices(
            jobs,
            (0, 3),
            command,
            logs=tmp_path / "logs",
            console=Console(file=shown, width=200),
            until=until and time.time() + until,
        )
    text = (tmp_path / "shown").read_text()
    if until is not None:  # less than it takes to compile
        assert not text and not list((tmp_path / "logs").iterdir())
        return
    assert "bad, learning rate 0.001, seed 0: ended with 3, see" in text and text.count(": done after") == 4
    logs = [path.read_text().split() for path in (tmp_path / "logs").iterdir()]
    starts = sorted(float(begin) for _, begin in logs)
    assert {device for device, _ in logs} == {"0", "3"}
    assert starts[4] - starts[0] > 0.5  # four at a time


def test_a_command_asks_for_its_run(tmp_path):
    options = Options(setting="large", rates=(1e-3, 2e-3), devices=(0, 1), work=tmp_path, until=5e9, steps=7)
    job = Job(Mixer.of("DeltaNet + 2 attention layers", "deltanet"), 2e-3, 1)
    _, module, name, *arguments = command_of(options, job, device=1)
    assert (module, name) == ("-m", "experiments.language_modelling")
    asked = tyro.cli(Options, args=arguments)
    assert asked == Options(
        setting="large",
        mixers=(job.mixer.label,),
        rates=(2e-3,),
        seeds=(1,),
        steps=7,
        train_only=True,
        work=tmp_path,
        until=5e9,
        exclusive=tmp_path / "device1.lock",
    )
