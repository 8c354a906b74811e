"""Curves beside flash-linear-attention: what both get, what rounding does, and what follows from differences."""

import dataclasses

import numpy as np
import pytest

from experiments.beside_fla import ours
from experiments.beside_fla.command import jobs, main
from experiments.beside_fla.material import prepare
from experiments.beside_fla.report import (
    band,
    compare,
    from_the_mean,
    judged,
    outside,
    runs_of,
    told_outside,
    verdict,
)
from experiments.beside_fla.study import ARMS, FLOAT32, ORDERS, OURS, REORDERED, THEIRS, study
from experiments.harness.verdicts import Verdict
from rnnlib.hub import load_pretrained


def row(losses, held_out):
    return {"losses": losses, "gradient_norms": [2.0 * loss for loss in losses], "held_out": held_out}


def test_a_run_agrees_inside_the_band_of_a_reordered_one():
    first = row(np.full(40, 1.0), 1.0)
    noise = compare(row(np.full(40, 1.01), 1.002), first, 10)
    assert len(noise.losses) == 4 and noise.losses == pytest.approx(0.01) and noise.norms == pytest.approx(0.01)
    inside = compare(row(np.full(40, 0.995), 0.995), first, 10)
    assert outside(inside, noise) == (0, 0, 0) and verdict(inside, noise) is Verdict.AGREES
    later = compare(row(np.r_[np.full(30, 1.0), np.full(10, 1.03)], 1.0), first, 10)
    assert outside(later, noise) == (1, 1, 0)
    assert verdict(later, noise) is Verdict.DISAGREES, "one of four windows"
    assert verdict(compare(row(np.full(40, 1.0), 1.02), first, 10), noise) is Verdict.DISAGREES, "held out"
    many = compare(row(np.r_[np.full(39, 1.0), 1.03], 1.0), first, 1)
    assert verdict(many, compare(row(np.full(40, 1.01), 1.0), first, 1)) is Verdict.UNDECIDED, "one of forty"


def test_the_band_is_the_widest_of_all_orders():
    first, wide, narrow = (row(np.full(40, value), value) for value in (1.0, 1.02, 0.995))
    found = {arm: compare(run, first, 10) for arm, run in ((REORDERED, narrow), (ORDERS[2], wide))}
    noise, count = band(found)
    assert count == 2 and band({THEIRS: found[REORDERED]}) is None
    theirs = compare(row(np.full(40, 1.015), 1.015), first, 10)
    assert verdict(theirs, noise) is Verdict.AGREES
    assert verdict(theirs, band({REORDERED: found[REORDERED]})[0]) is Verdict.DISAGREES
    told = "outside the band of 2 orders, by chance 1 in 3: 0 and 0 of 4 windows, held out no"
    assert told_outside(theirs, noise, count) == told


def test_around_the_mean_of_ours_no_single_run_decides():
    levels = {OURS: 1.004, REORDERED: 1.0, ORDERS[0]: 1.001, ORDERS[1]: 0.999, THEIRS: 0.9985}
    runs = {arm: row(np.full(1000, level), level) for arm, level in levels.items()}
    assert from_the_mean(OURS, runs, 50).losses == pytest.approx(0.004)
    assert from_the_mean(THEIRS, runs, 50).held_out == pytest.approx(-0.0025)
    assert judged(study("real"), runs)[1] is Verdict.AGREES, "ours is the farthest of five"
    assert judged(dataclasses.replace(study("real"), around_mean=False), runs)[1] is Verdict.DISAGREES
    assert judged(study("real"), runs | {THEIRS: row(np.full(1000, 0.99), 0.99)})[1] is Verdict.DISAGREES
    without = {arm: run for arm, run in runs.items() if arm != THEIRS}
    assert judged(study("real"), without) is None and not study("short").around_mean
    assert from_the_mean(THEIRS, {arm: runs[arm] for arm in (OURS, THEIRS)}, 50) is None


def test_orders_are_permutations_of_the_rows():
    found = {tuple(ours.row_order(arm, 16)) for arm in (OURS, REORDERED, *ORDERS)}
    assert len(found) == 2 + len(ORDERS) and all(sorted(order) == list(range(16)) for order in found)
    assert tuple(ours.row_order(REORDERED, 3)) == (2, 1, 0)


def test_runs_that_read_other_files_are_not_compared():
    rows = {("KDA", arm): row(np.ones(4), 1.0) | {"material": name} for arm, name in ((OURS, "a"), (THEIRS, "b"))}
    assert list(runs_of("KDA", rows)) == [OURS] and not runs_of("DeltaNet", rows)
    rows["KDA", REORDERED] = row(np.ones(4), 1.0) | {"material": "a"}
    assert list(runs_of("KDA", rows)) == [OURS, REORDERED]


def test_rates_rise_and_fall():
    plan = study("real")
    rates = [plan.rate(step) for step in range(plan.steps)]
    assert rates[0] == pytest.approx(plan.learning_rate / plan.warmup_steps)
    assert max(rates) == pytest.approx(plan.learning_rate, rel=0.01) and rates[-1] < 1e-4 * plan.learning_rate
    assert np.argmax(rates) == plan.warmup_steps - 1


def test_runs_start_from_the_same_files(tmp_path):
    plan = dataclasses.replace(study("small"), width=16, num_layers=1, steps=3, warmup_steps=1, sequence_length=32)
    material = prepare(plan, plan.mixers[0], tmp_path)
    before, digest = material.weights.stat().st_mtime_ns, material.digest()
    assert prepare(plan, plan.mixers[0], tmp_path) == material and material.weights.stat().st_mtime_ns == before
    assert np.load(material.rows).shape == (3, plan.batch_size, 33) and len(np.load(material.rates)) == 3
    assert load_pretrained(material.weights).source.family == "delta_net"
    first, turned = (ours.train(material, arm) for arm in (OURS, REORDERED))
    assert len(first["losses"]) == 3 and all(np.isfinite(first["gradient_norms"]))
    assert first["losses"] == pytest.approx(turned["losses"], rel=1e-3)
    assert first["losses"][0] == pytest.approx(np.log(257), rel=0.1)
    np.save(material.rates, 2 * np.load(material.rates))
    assert len(digest) == 16 and material.digest() != digest


def test_what_is_left_is_asked_for_by_the_run(tmp_path, capsys):
    found = jobs("beside_fla", "short", [tmp_path])
    assert (
        len(found) == 3 * len(ARMS)
        and study("small").arms == ARMS[: -len(ORDERS)]
        and found[1].name == f"DeltaNet, {THEIRS}"
    )
    assert found[3].arguments[-1] == FLOAT32
    with pytest.raises(SystemExit):
        main(["--arms", "nobody", "--report-only"])
    assert "arms has ['nobody'], expected some of ours" in capsys.readouterr().err
