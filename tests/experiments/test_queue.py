"""The queue: what is left of the studies, which job runs when and where, what is brought back and folded in."""

import dataclasses
import json
import sys
import time

import pytest

from experiments.harness.jobs import Job
from experiments.harness.tables import EXPERIMENTS, add_rows, read_table, table_path
from experiments.language_modelling.command import TESTING
from experiments.language_modelling.command import jobs as language_jobs
from experiments.queue import bundle
from experiments.queue.__main__ import Options, command_of, entries, left, main
from experiments.queue.left import hours, told
from experiments.queue.order import ORDER
from experiments.queue.scheduler import COMPILING, STOPPING, Timetable, run_jobs
from experiments.sweep.command import jobs as sweep_jobs


def job(name: str, seconds: float, devices: int = 1, alone: bool = True) -> Job:
    return Job("study", "real", name, (), seconds, devices, alone)


def row(study: str, setting: str, name: str, **values):
    return {"study": study, "setting": setting, "id": name, "environment": {}, **values}


def test_jobs_go_in_their_order_but_the_first_that_would_be_done_in_time():
    short, long, last = jobs = [job("short", 100.0), job("long", 500.0), job("last", 150.0)]
    table = Timetable(jobs, (0,), until=1000.0)
    assert table.take(700.0) == (short, (0,))  # compiled at 775, done at 875
    assert table.take(700.0) == (long, (0,)), "none fits, and what it does is saved"
    assert table.take(700.0) is None, "two commands a device"
    assert table.left == [last]
    table = Timetable([long, short, last], (0, 1), until=1000.0)
    assert [table.take(700.0) for _ in range(2)] == [(short, (0,)), (last, (1,))]
    late = Timetable(jobs, (0,), until=700.0 + COMPILING + STOPPING - 1)
    assert late.take(700.0) is None, "no time to begin anything"
    table.end(short, (0,), 740.0)
    assert table.take(740.0) == (long, (0,))


def test_jobs_that_train_beside_others_keep_no_device_waiting():
    beside = [job("x", 400.0, alone=False), job("y", 400.0, alone=False)]
    alone = [job("a", 300.0), job("b", 300.0)]
    table = Timetable([*beside, *alone], (0, 1), until=600.0, commands=3)
    assert [table.take(0.0)[1] for _ in range(4)] == [(0,), (1,), (0,), (1,)]
    first, *rest = [job("a", 300.0), *beside, job("b", 300.0)]
    table = Timetable([first, *rest], (0, 1), until=600.0, commands=2)
    assert [table.take(0.0)[1] for _ in range(4)] == [(0,), (1,), (1,), (0,)], "b goes where there is a place, last"


def test_a_job_of_several_devices_waits_for_them_and_is_not_overtaken():
    large, small = job("large", 100.0, devices=2), job("small", 1.0)
    first = [job("a", 50.0), job("b", 60.0), job("c", 70.0)]
    table = Timetable([*first, large, small], (0, 1), until=None)
    assert [table.take(0.0) for _ in range(3)] == [(first[0], (0,)), (first[1], (1,)), (first[2], (0,))]
    assert table.take(0.0) is None, "one device has a place, the small job waits behind"
    table.end(first[0], (0,), 50.0)
    assert table.take(50.0) == (large, (0, 1))
    table.end(first[1], (1,), 60.0)
    assert table.take(60.0) == (small, (1,))
    assert Timetable([large], (0,), None).left == [large], "more devices than there are"


@pytest.mark.parametrize("minutes", [None, 1.0])
def test_two_commands_run_on_each_device_and_one_that_fails_stops_no_other(tmp_path, monkeypatch, minutes):
    monkeypatch.setattr("experiments.queue.scheduler.POLL", 0.05)
    code = "import os, sys, time; print(os.environ['CUDA_VISIBLE_DEVICES'], time.time()); time.sleep(0.8); sys.exit({})"
    jobs = [job(name, 1.0) for name in ("a", "b", "c", "bad", "d")]
    shown, ended = [], []
    left = run_jobs(
        jobs,
        (0, 3),
        lambda one, _: [sys.executable, "-c", code.format(3 if one.name == "bad" else 0)],
        logs=tmp_path / "logs",
        tell=shown.append,
        ended=ended.append,
        until=minutes and time.time() + 60 * minutes,
    )
    if minutes is not None:  # less than it takes to compile
        assert left == jobs and not shown
        return
    assert {one.job.name: one.code for one in ended} == {"a": 0, "b": 0, "c": 0, "bad": 3, "d": 0} and not left
    assert any("bad: ended with 3, see" in line for line in shown)
    starts = sorted((float(one.log.read_text().split()[1]), one.log.read_text().split()[0]) for one in ended)
    assert {device for _, device in starts} == {"0", "3"}
    assert starts[4][0] - starts[0][0] > 0.5  # four at a time


def test_when_time_is_up_commands_are_told_to_save(tmp_path, monkeypatch):
    monkeypatch.setattr("experiments.queue.scheduler.POLL", 0.05)
    monkeypatch.setattr("experiments.queue.scheduler.COMPILING", 0.0)
    monkeypatch.setattr("experiments.queue.scheduler.STOPPING", 10.0)
    code = "import sys, time\ntry: time.sleep(60)\nexcept KeyboardInterrupt: print('saved'); sys.exit(130)"
    ended = []
    begin = time.monotonic()
    run_jobs(
        [job("long", 60.0)],
        (0,),
        lambda *_: [sys.executable, "-c", code],
        logs=tmp_path,
        tell=lambda _: None,
        ended=ended.append,
        until=time.time() + 13.0,
    )
    assert ended[0].code == 130 and ended[0].log.read_text() == "saved\n" and time.monotonic() - begin < 12


def test_what_is_left_of_a_study_is_what_no_table_has(tmp_path):
    assert not language_jobs("language_modelling", "real", [EXPERIMENTS])
    assert not sweep_jobs("mqar", "real", [EXPERIMENTS])
    everything = sweep_jobs("mqar", "real", [tmp_path])
    rows = read_table(table_path("mqar", "real"))
    first = everything[0]
    own = [r for r in rows if f"{r['cell']['name']}, {r['mixer']['label']}" == first.name]
    add_rows(table_path("mqar", "real", tmp_path), [r for r in own if r["seed"] != 2])
    assert [one.name for one in sweep_jobs("mqar", "real", [tmp_path])] == [one.name for one in everything]
    add_rows(table_path("mqar", "real", tmp_path), own)
    rest = sweep_jobs("mqar", "real", [tmp_path])
    assert [one.name for one in rest] == [one.name for one in everything[1:]]
    mixer = first.name.rpartition(", ")[2]
    assert all((one.seconds > 0) == one.name.endswith(f", {mixer}") for one in rest), "of its mixer's runs, by tokens"


def test_seeds_that_report_are_counted_until_their_rate_is_chosen(tmp_path):
    jobs = language_jobs("axes", "real", [tmp_path])
    assert len(jobs) == 44 and sum(job.later for job in jobs) == 44
    first, later = hours(jobs)
    assert first == pytest.approx(later) and told(first, later) == f"{first:.1f}, then {first:.1f}"
    of_recall = sweep_jobs("recall", "real", [tmp_path])
    assert all((job.runs, job.later) == (40, 10) for job in of_recall)
    assert of_recall[-1].seconds == 2 * of_recall[0].seconds, "rows of twice as many tokens"


def test_what_a_model_takes_is_known_from_its_other_rates(tmp_path):
    rows = [r for r in read_table(table_path("language_modelling", "large")) if r["mixer"]["label"] == "KDA"]
    add_rows(table_path("language_modelling", "large", tmp_path), [r for r in rows if r["learning_rate"] == 1e-3])
    (kda,) = [
        j for j in language_jobs("language_modelling", "large", [tmp_path]) if j.name == "KDA, rate 0.002, seed 0"
    ]
    known = next(r["seconds"] for r in rows if r["learning_rate"] == 1e-3)
    assert kda.seconds == known + TESTING


def test_every_study_of_the_queue_can_say_what_is_left(tmp_path):
    for entry in ORDER:
        jobs = entry.jobs(entry.study, entry.setting, [tmp_path])
        assert jobs and all(job.seconds > 0 and job.study == entry.study for job in jobs)
        assert len({job.name for job in jobs}) == len(jobs)
        assert (EXPERIMENTS / entry.study / "PLAN.md").exists(), "what a run decides is written before it"


def test_a_command_asks_for_its_runs(tmp_path):
    one = Job("mqar", "real", "x", ("--setting", "real", "--seeds", "1"), 1.0, devices=2)
    command = command_of(Options(work=tmp_path, commit="abc"), one, (1, 3))
    assert command[1:7] == ["-m", "experiments.mqar", "--setting", "real", "--seeds", "1"]
    assert "--train-only" in command and command[-2:] == ["--commit", "abc"]
    locks = command[command.index("--exclusive") + 1 : -2]
    assert locks == [str(tmp_path / "locks" / f"device{device}") for device in (1, 3)]


def test_results_come_back_in_few_files_and_are_folded_in_once(tmp_path, monkeypatch):
    tables, out, here = tmp_path / "tables", tmp_path / "out", tmp_path / "here"
    monkeypatch.setattr(bundle, "MAX_BYTES", 200)
    found = [row("a", "real", f"run {i}", value=i) for i in range(5)]
    add_rows(table_path("a", "real", tables), found)
    add_rows(table_path("b", "small", tables), [row("b", "small", "run")])
    paths = bundle.write_bundle(tables, out, here)
    assert 1 < len(paths) <= bundle.MAX_FILES and all(path.stat().st_size <= 200 for path in paths)
    add_rows(table_path("a", "real", here), [row("a", "real", "older"), found[0]])
    assert bundle.fold([out], here) == {("a", "real"): 4, ("b", "small"): 1}
    assert bundle.fold([out], here) == {("a", "real"): 0, ("b", "small"): 0}
    assert [r["id"] for r in read_table(table_path("a", "real", here))] == ["older", *(f"run {i}" for i in range(5))]
    with pytest.raises(ValueError, match=r"has no results-\*.jsonl; expected what"):
        bundle.fold([tmp_path / "nothing"], here)
    monkeypatch.setattr(bundle, "MAX_FILES", 1)
    with pytest.raises(ValueError, match="expected 1"):
        bundle.write_bundle(tables, out, tmp_path / "nothing")


def test_a_damaged_table_names_its_line(tmp_path):
    path = tmp_path / "real.jsonl"
    add_rows(path, [row("a", "real", "one")])
    path.write_text(path.read_text() + json.dumps({"id": "two"}) + "\n")
    with pytest.raises(ValueError, match=r"real.jsonl, line 2: expected a row with study, setting, environment"):
        read_table(path)
    path.write_text("{")
    with pytest.raises(ValueError, match=r"real.jsonl, line 1: expected JSON"):
        read_table(path)


def test_names_pick_studies_settings_and_jobs(tmp_path, capsys):
    first = ORDER[0]
    assert entries(()) == list(ORDER) and entries((first.study,)) == [first]
    assert entries((f"{first.study}/small",)) == [dataclasses.replace(first, setting="small")]
    with pytest.raises(SystemExit, match="error: studies: 'foo' is not in the queue; expected some of long_con"):
        main(["--studies", "foo"])
    assert main(["--list", "--studies", first.name]) == 0
    assert f"{first.name}: " in capsys.readouterr().out
    found = left(
        entries(("beside_fla/short", "recall")), [tmp_path], ("KDA, ours", "KDA, flash", "64 pairs, T=256, KDA")
    )
    named = [[one.name for one in jobs] for jobs in found.values()]
    assert named == [["KDA, ours", "KDA, flash-linear-attention"], ["64 pairs, T=256, KDA"]]
    with pytest.raises(SystemExit, match="error: jobs: 'foo' match nothing that is left"):
        main(["--list", "--jobs", "foo"])
