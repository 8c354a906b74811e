import dataclasses
import fcntl
import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.progress import Progress

from experiments.harness.records import RecordWriter, by_short_name
from experiments.kernel_benchmarks import jax_worker, marks
from experiments.kernel_benchmarks.__main__ import add, main
from experiments.kernel_benchmarks.config import PEERS as PEER_NAMES
from experiments.kernel_benchmarks.config import BenchmarkConfig, Measurement, part_of, plan, share_out
from experiments.kernel_benchmarks.figures import PEER_COLORS, STYLES, write_figures
from experiments.kernel_benchmarks.inputs import (
    CASES,
    compared_rows,
    draw,
    draw_segments,
    relative_errors,
    segment_ids,
    take_rows,
)
from experiments.kernel_benchmarks.operators import OPERATORS
from experiments.kernel_benchmarks.peers import PEERS
from experiments.kernel_benchmarks.report import markdown, sections
from experiments.kernel_benchmarks.roofline import floor_milliseconds, operations
from experiments.kernel_benchmarks.run import Processes, Runner
from experiments.kernel_benchmarks.view import View
from experiments.kernel_benchmarks.work import Work

SHAPE = (1, 24, 2, 16, 16)


def test_command_measures_on_a_cpu_and_rebuilds_from_its_json(tmp_path, capsys):
    arguments = ["--output", str(tmp_path), "--name", "cpu"]
    sizes = "--head-size 16 --dtype float32 --repeats 3 --shapes 1 24 2 --chunked-shapes 1 24 2 --error-shapes 1 24 2"
    less = (
        "--cases --scan-shapes --sweep-lengths 24 --sweep-tokens 48 --sweep-heads 2 --decode-batch 2 --decode-heads 1"
    )
    which = (
        "--operators gated_deltanet --sweep-operators gated_deltanet --implementations chunked scan --jax-processes 2"
    )
    assert main([*arguments, *sizes.split(), *less.split(), *which.split()]) == 0
    results = json.loads((tmp_path / "cpu.json").read_text())
    records = {record["kind"]: record for record in results["records"]}
    assert records.keys() >= {"time", "decode", "ceiling"} and "failure" not in records
    assert {r["pass"] for r in results["records"] if r["kind"] == "time"} == {"forward", "forward_backward"}
    assert results["versions"]["jax"] == jax.__version__ and "float32" in results["command"]
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert {"cpu.json", "cpu.md", "cpu_ratios.png", "cpu_roofline.png"} <= set(before)
    peer = {**records["time"], "implementation": "fla", "commit": "later"}
    late = {**results, "commit": "later"}
    added = add({**late, "records": [peer]}, results)
    assert added["records"] == [*results["records"], peer]
    assert added["commit"] == f"{results['commit']}, later"
    again = [{**record, "commit": "later"} for record in results["records"]]
    assert add(late, added)["records"] == [peer, *again]
    beside = {**peer, "implementation": "chunked", "beside": "pgdn"}
    assert add({**late, "records": [beside]}, results)["records"] == [*results["records"], beside]
    draws = [{**peer, "kind": "error", "seed": seed} for seed in (0, 1)]
    missed = {**peer, "kind": "failure", "of": "error", "reason": "time limit"}
    assert add({**late, "records": [draws[1], missed]}, {**results, "records": draws[:1]})["records"] == draws
    broken = {**missed, "reason": "out of memory"}
    assert add({**late, "records": [broken]}, {**results, "records": draws})["records"] == [*draws, broken]
    late_draws = [{**draw, "commit": "later"} for draw in draws]
    assert add({**late, "records": draws}, {**results, "records": [broken]})["records"] == late_draws
    untimed = {**{key: peer[key] for key in ("implementation", "operator", "shape")}, "commit": "later"}
    untimed |= {"kind": "failure", "of": "time", "case": "random", "reason": "not compiled in time"}
    assert add({**late, "records": [untimed]}, {**results, "records": [peer]})["records"] == [peer, untimed]
    assert add({**late, "records": [peer]}, {**results, "records": [untimed]})["records"] == [peer]
    (tmp_path / "cpu.md").unlink()
    assert main([*arguments, "--from-json"]) == 0
    assert (tmp_path / "cpu.md").read_bytes() == before["cpu.md"]


def test_missing_results_are_an_error(tmp_path):
    assert main(["--output", str(tmp_path), "--from-json"]) == 2


def test_files_of_another_run_are_not_overwritten(tmp_path, capsys):
    (tmp_path / "gpu_0").mkdir()
    assert main(["--output", str(tmp_path / "results"), "--keep", str(tmp_path)]) == 2
    assert "error: --keep:" in capsys.readouterr().out
    assert not (tmp_path / "results").exists()


def test_values_wider_than_keys():
    measurements = plan(BenchmarkConfig(head_size=64, value_size=128, scan_shapes=()))
    assert measurements and all(m.shape[3:] == (64, 128) for m in measurements)
    config = {"operators": ["gla"], "shapes": [[1, 2048, 8]], "head_size": 64, "value_size": 128}
    assert View({"config": config, "records": []}).table_points() == [("gla", (1, 2048, 8, 64, 128))]


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="operators has"):
        BenchmarkConfig(operators=("deltanets",))


def test_plan_measures_every_operator_and_shape_once():
    config = BenchmarkConfig()
    measurements = plan(config)
    assert len(set(measurements)) == len(measurements)
    assert {m.operator for m in measurements if m.implementation == "flash_qla"} == {"gated_deltanet"}
    for operator in OPERATORS:
        for sizes in config.shapes:
            shape = (*sizes, 128, 128)
            assert Measurement("error", operator, "triton", shape) in measurements
            for name in ("triton", *(["fla"] if operator in PEERS["fla"].operators else [])):
                assert Measurement("time", operator, name, shape) in measurements


def test_triton_alone_stands_for_us_where_it_is_asked_for_alone():
    config = BenchmarkConfig(operators=("deltanet",), implementations=("triton", "scan"))
    by_kind = {(m.kind, m.implementation) for m in plan(config)}
    assert {("decode", "triton"), ("decode", "scan"), ("time", "triton"), ("time", "scan")} <= by_kind
    both = plan(BenchmarkConfig(operators=("deltanet",)))
    assert ("decode", "triton") not in {(m.kind, m.implementation) for m in both}


@pytest.mark.parametrize("shares", [1, 4, 20])
def test_shares_keep_an_operator_and_its_peers_together_and_its_baseline_beside_it(shares):
    measurements = plan(BenchmarkConfig())
    parts = share_out(measurements, shares)
    assert len(parts) == min(shares, len(OPERATORS))
    assert sorted(map(str, (m for part in parts for m in part if not m.beside))) == sorted(map(str, measurements))
    for part in parts:
        operators = {m.operator for m in part if not m.beside}
        assert all(m.operator not in operators for other in parts if other is not part for m in other if not m.beside)
        timed = {(m.beside or m.operator, m.operator, m.shape) for m in part if m.implementation == "triton"}
        for m in part:
            baseline = OPERATORS[m.operator].baseline
            if m.kind == "time" and m.implementation == "triton" and baseline and not m.beside:
                assert {(m.operator, baseline, m.shape), (baseline, baseline, m.shape)} & timed


def test_time_beside_an_operator_is_its_baseline_only():
    def record(ms, **others):
        what = {"kind": "time", "pass": "forward", "implementation": "triton", "shape": [1, 64, 1, 16, 16]}
        return {**what, "operator": "gated_deltanet", "device_ms": ms, "kernels": {}, **others}

    config = {"operators": ["gated_deltanet"], "shapes": [[1, 64, 1]], "head_size": 16}
    view = View({"config": config, "records": [record(1.0), record(2.0, beside="pgdn")]})
    shape = (1, 64, 1, 16, 16)
    assert view.time("triton", "gated_deltanet", shape, "forward") == 1.0
    assert view.baseline("pgdn", "gated_deltanet", shape, "forward") == 2.0
    assert view.baseline("write_key", "gated_deltanet", shape, "forward") == 1.0
    later = {**record(3.0, commit="later"), "operator": "pgdn"}
    view = View({"config": config, "records": [record(1.0, commit="later"), record(2.0, beside="pgdn"), later]})
    assert view.baseline("pgdn", "gated_deltanet", shape, "forward") == 1.0  # not the time beside the earlier one


def test_cases_are_what_they_are_called():
    key = draw("k", SHAPE, "repeated keys")
    assert np.all(key == key[:, :1]) and np.all(draw("beta", SHAPE, "repeated keys") == 1)
    assert np.all(draw("head_decay", SHAPE, "repeated keys") == 0)
    long = (1, 512, 2, 16, 16)
    assert np.any(draw("head_decay", long, "hard resets") == -1000)
    assert set(np.unique(draw("channel_decay", long, "extreme gates"))) == {-20, 0}
    for name in ("head_decay", "channel_decay"):
        assert all(np.all(draw(name, SHAPE, case) <= 0) for case in CASES)
    for case in CASES:
        bounded, a, b = (draw(name, long, case) for name in ("bounded_decay", "a", "b"))
        transition = np.exp(bounded)[0, :50, 0, :, None] * np.eye(16) - b[0, :50, 0, :, None] * a[0, :50, 0, None]
        assert bounded.min() >= np.float32(-0.61) and np.linalg.norm(transition, 2, axis=(1, 2)).max() <= 1 + 1e-6
    ids = segment_ids(long)[0]
    starts = np.flatnonzero(np.diff(ids)) + 1
    assert np.array_equal(starts, draw_segments(long)[1:-1])


@pytest.mark.parametrize(("name", "is_packed"), [("kda", False), ("pgdn", False), ("pkda", True), ("dplr", False)])
def test_reference_is_the_scan_at_rows_compared(name, is_packed):
    operator, shape = OPERATORS[name], (2, 8, 3, 16, 16)
    ids = jnp.asarray([[0, 0, 1, 1, 2, 2, 2, 2]] * 4) if is_packed else None
    names = operator.all_arrays
    whole = {key: jnp.asarray(draw(key, shape)) for key in names}
    rows = {key: take_rows(key, x, shape) for key, x in whole.items()}
    block, jax_worker.REFERENCE_BLOCK = jax_worker.REFERENCE_BLOCK, 4
    try:
        found = jax.jit(lambda x: jax_worker.reference(name, x, ids))(rows)
    finally:
        jax_worker.REFERENCE_BLOCK = block
    ids = None if ids is None else ids[:2]
    wanted = jax.jit(lambda x: jax_worker.forward_backward(name, "scan", x, ids))(whole)
    errors = relative_errors((key, take_rows(key, x, shape), found[key]) for key, x in wanted.items())
    assert set(errors) == {"out", "final_state", *operator.arrays}
    assert max(errors.values()) < 1e-5
    assert jax_worker.is_consistent(rows, found)
    for key in ("q", "v", "out"):
        assert not jax_worker.is_consistent(rows, {**found, key: found[key].at[2].multiply(-1.0)})


def test_relative_error_of_what_is_not_finite():
    assert relative_errors([("x", np.array([np.nan]), np.array([1.0]))]) == {"x": None}
    assert relative_errors([("x", np.array([1.0, 3.0]), np.array([1.0, 2.0]))])["x"] == pytest.approx(5**-0.5, rel=1e-3)


def test_operations_and_floor_of_a_known_case():
    shape = (1, 32768, 8, 128, 128)
    # 4096 chunks of 11.5 million operations; q, k, v and o alone are 268 MB.
    assert operations("gated_deltanet", shape, "forward") == pytest.approx(4096 * 11.5e6, rel=0.01)
    assert floor_milliseconds("gated_deltanet", shape, "forward", 4300, 790) == pytest.approx(0.0635, rel=0.02)


def test_marks_tell_met_from_missed():
    config = {
        "operators": ["gated_deltanet", "kda"],
        "sweep_operators": ["gated_deltanet"],
        "shapes": [[1, 32768, 8]],
        "sweep_lengths": [2048, 4096],
        "sweep_tokens": 4096,
        "sweep_heads": 8,
        "scan_shapes": [[1, 2048, 32, 64]],
        "head_size": 128,
    }

    def record(implementation, operator, shape, ms, **others):
        what = {"kind": "time", "pass": "forward", "implementation": implementation, "operator": operator}
        return {**what, "shape": shape, "device_ms": ms, "wall_ms": ms, "kernels": {}, "peak_mib": 1.0, **others}

    long = [1, 32768, 8, 128, 128]
    records = [
        record("triton", "gated_deltanet", long, 0.2),
        record("fla", "gated_deltanet", long, 1.0),
        record("flash_qla", "gated_deltanet", long, 0.19),
        record("triton", "kda", long, 0.3),
        record("triton", "gated_deltanet", [2, 2048, 8, 128, 128], 1.0),
        record("triton", "gated_deltanet", [1, 4096, 8, 128, 128], 1.1),
        {"kind": "error", "implementation": "triton", "operator": "kda", "shape": long, "case": "random"}
        | {"errors": {"out": None}, "identical": True},
        {"kind": "error", "implementation": "fla", "operator": "kda", "shape": long, "case": "random"}
        | {"errors": {"out": 0.01}, "identical": False},
    ]
    found = {mark.title: mark for mark in marks.evaluate(View({"config": config, "records": records}))}
    assert found["Device time, forward, over FLA's"].met is True
    assert found["Device time, forward + backward, over FLA's"].met is None
    assert found["GDN, forward, over FlashQLA's"].met is False
    assert found["KDA over Gated DeltaNet, forward"].met is False
    assert found["Gated DeltaNet, forward: time a token over T, largest over smallest"].met is True
    assert found["Error over FLA's, medians over seeds, any result"].met is False  # not finite
    assert found["Reruns bit-identical"].met is True


def test_a_forward_only_peer_has_dashes_for_its_backward(tmp_path):
    shape = (1, 2048, 8, 128, 128)
    config = BenchmarkConfig(operators=("gated_deltanet", "kda"), shapes=(shape[:3],), sweep_lengths=(2048, 4096))
    measurements = [m for m in plan(config) if m.implementation == "flashinfer"]
    assert {m.operator for m in measurements} == {"gated_deltanet"}
    assert {m.kind for m in measurements} == {"time", "error"}

    records = []
    for name, ms in (("triton", 0.2), ("fla", 0.5), ("flashinfer", 0.1)):
        what = {"implementation": name, "operator": "gated_deltanet"}
        runs = ("forward",) if name in PEERS and PEERS[name].forward_only else ("forward", "forward_backward")
        errors = {"out": 3e-3, "final_state": 2e-3} | ({"q": 1e-3} if len(runs) > 1 else {})
        for length in config.sweep_lengths:
            for run in runs:
                times = {"device_ms": ms, "wall_ms": ms, "kernels": {"kernel": ms}, "peak_mib": 1.0}
                times |= {"versions": {"fla-core": "0.6.0", "triton": "3.7.1"}} if name == "fla" else {}
                records.append({"kind": "time", **what, "shape": [1, length, *shape[2:]], "pass": run, **times})
        where = {"shape": list(shape), "case": "random", "seed": 0}
        records.append({"kind": "error", **what, **where, "errors": errors, "identical": True})
    about = {"device": "card", "versions": {}, "commit": "c", "command": "python", "date": "2026"}
    results = {**about, "config": dataclasses.asdict(config), "records": records}
    tables = {section.title: section for section in sections(results)}

    def cell(table, row, column):
        return tables[table].rows[row][tables[table].header.index(column)]

    assert cell("Device time, forward", 0, "FlashInfer") == "0.100"
    after = tables["Device time, forward"].header.index("FlashInfer") + 1
    assert tables["Device time, forward"].rows[0][after] == "2.00"
    assert cell("Device time, forward + backward", 0, "FlashInfer") == "-"
    assert tables["Device time, forward + backward"].rows[0][after] == "-"
    assert cell("Wall time and memory", 0, "fwd + bwd FlashInfer") == cell("Wall time and memory", 0, "MiB FlashInfer")
    assert cell("Wall time and memory", 0, "MiB FlashInfer") == "-"
    swept = [row for row in tables["Time against length"].rows if row[1] == "FlashInfer"]
    assert [(row[3], row[5]) for row in swept] == [("0.100", "-")] * 2
    (errors,) = (row for row in tables["Errors"].rows if row[3] == "FlashInfer")
    assert errors[4] == "out 3.0e-03 final_state 2.0e-03 q -"
    found = {mark.title: mark for mark in marks.evaluate(View(results))}
    assert found["GDN, forward, over FlashInfer's"].met is False
    assert "Not measured" not in tables and len(write_figures(results, tmp_path, "peer")) == 2
    assert "\n\nFLA was timed with fla-core 0.6.0, triton 3.7.1.\n" in markdown(results)
    assert "TileLang's in" not in markdown(results)
    times = [r for r in records if r["kind"] == "time" and r["implementation"] == "fla"]
    replaced = [{**r, "kernels": {"kernel_kernel": 1.0}} for r in times if r["shape"][1] == 2048]
    shown = markdown({**results, "records": [*times, *replaced]})
    assert "TileLang's in the backward pass of Gated DeltaNet (1 of 3 shapes).\n" in shown


def test_runs_are_joined_with_the_last_time_of_each(tmp_path, capsys):
    """An operator that no run timed as a call takes it has Triton's kernels; lengths, errors and such are left out."""
    shape, other = (1, 2048, 8, 128, 128), (1, 4096, 8, 128, 128)
    config = BenchmarkConfig(operators=("linear_attention", "kda"), shapes=(shape[:3],))
    about = {"device": "card", "versions": {}, "notes": ["of one run"]}

    def time(name, operator, ms, shape=shape):
        times = {"device_ms": ms, "wall_ms": ms, "kernels": {}, "peak_mib": 1.0}
        what = {"kind": "time", "implementation": name, "operator": operator, "shape": list(shape)}
        return [{**what, "pass": run, **times} for run in ("forward", "forward_backward")]

    operators = ("linear_attention", "kda")
    first = [*(r for op in operators for r in time("triton", op, 0.4)), *time("scan", "kda", 9.0)]
    first += [*time("triton", "kda", 0.8, other), {"kind": "ceiling", "copy_gb_s": 1.0, "matmul_tflops": 1.0}]
    first += [*time("fla", "kda", 0.5), *({**r, "commit": "b"} for r in time("fla", "linear_attention", 0.5))]
    first.append({"kind": "error", "implementation": "fla", "operator": "kda", "shape": list(shape), "case": "random"})
    second = [*time("ours", "kda", 0.2), *time("fla", "kda", 0.6)]
    second.append({"kind": "failure", "of": "time", "implementation": "fla", "operator": "kda", "reason": "time limit"})
    runs = ("old", "a, b", "2026-11-21", first), ("new", "c", "2026-11-28 to 2026-11-29", second)
    for name, commit, date, records in runs:
        run = {**about, "date": date, "commit": commit, "command": name}
        run |= {"config": json.loads(json.dumps(vars(config), default=str))}
        (tmp_path / f"{name}.json").write_text(json.dumps({**run, "records": records}))
    arguments = ["--output", str(tmp_path), "--name", "both", "--join"]
    assert main([*arguments, "old", "newer"]) == 2 and "there is no" in capsys.readouterr().out
    assert main([*arguments, "old", "new"]) == 0
    results = json.loads((tmp_path / "both.json").read_text())
    assert (results["commit"], results["command"]) == ("a, b, c", "old && new")
    assert results["date"] == "2026-11-21 to 2026-11-29"
    assert {r["kind"] for r in results["records"]} == {"time", "ceiling"}
    view = View(results)
    found = {(name, op): view.time(name, op, shape, "forward") for name in ("ours", "fla") for op in operators}
    assert list(found.values()) == [0.4, 0.2, 0.5, 0.6]
    assert view.baseline("kda", "linear_attention", shape, "forward") is None  # it was timed by another commit
    assert view.baseline("kda", "kda", shape, "forward") == 0.2
    mixed = View({**results, "records": [*results["records"], *time("triton", "kda", 0.8, other)]})
    assert mixed.time("ours", "kda", other, "forward") == 0.8  # where no run timed it as a call takes it
    assert view.time("triton", "kda", other, "forward") is None and not view.has("scan")
    tables = {section.title: section for section in sections(results)}
    assert set(tables["Commits"].rows) == {
        ("ours", "Linear attention", "a"),
        ("ours", "KDA", "c"),
        ("ours, Triton alone", "Linear attention, KDA", "a"),
        ("FLA", "Linear attention", "b"),
        ("FLA", "KDA", "c"),
    }
    assert "Times of old, new" in (tmp_path / "both.md").read_text()


def test_every_peer_has_a_place_in_configuration_and_pictures():
    assert set(PEER_NAMES) == set(PEERS) == set(STYLES) - {"ours", "triton", "chunked"}
    assert set(PEERS) == set(PEER_COLORS) - {"chunked"}


def test_a_peer_in_jax_is_measured_as_ours_are(tmp_path, monkeypatch):
    """A stand-in for jla, which computes by our scan: its times, its errors and what it is called with."""
    (tmp_path / "jla" / "ops").mkdir(parents=True)
    (tmp_path / "jla" / "__init__.py").touch()
    (tmp_path / "jla" / "ops" / "mosaic_gpu.py").write_text(
        "import time\nimport jla.ops\ntime.sleep(0.5)\njla.ops.KERNELS.append('all')\n"
    )
    (tmp_path / "jla" / "ops" / "__init__.py").write_text(
        """
import jax.numpy as jnp
from rnnlib import ops

KERNELS = []

def linear_attention(kind, q, k, v, *, g=None, beta=None, b=None, w=None, output_final_state, segment_ids):
    assert KERNELS and kind in ("gdn2", "gated_deltanet") and output_final_state
    assert beta is None or beta.dtype == jnp.float32
    gates = {"erase": b, "write": w} if kind == "gdn2" else {"beta": beta.astype(q.dtype)}
    return ops.gated_delta_rule(q, k, v, log_decay=g, **gates, segment_ids=segment_ids, implementation="scan")
"""
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.syspath_prepend(tmp_path)
    which = "--operators gated_deltanet gated_deltanet2 --implementations chunked jla --head-size 16 --seeds 1"
    sizes = "--shapes 1 24 2 --chunked-shapes 1 24 2 --error-shapes 1 24 2 --case-shape 1 24 2 --cases packed"
    arguments = [*which.split(), *sizes.split(), "--sweep-operators", "--decode-batch", "0", "--repeats", "1"]
    assert main(["--output", str(tmp_path), "--name", "cpu", "--dtype", "float32", *arguments]) == 0
    records = json.loads((tmp_path / "cpu.json").read_text())["records"]
    found = [r for r in records if r.get("implementation") == "jla"]
    assert {r["kind"] for r in records} == {"worker", "prepared", "ceiling", "time", "error"}
    assert {(r["operator"], r["pass"]) for r in found if r["kind"] == "time"} == {
        (operator, run) for operator in ("gated_deltanet", "gated_deltanet2") for run in ("forward", "forward_backward")
    }
    errors = [r for r in found if r["kind"] == "error"]
    assert len(errors) == 4 and all(error < 1e-5 for r in errors for error in r["errors"].values())
    assert "jla: `jla.ops.linear_attention`" in (tmp_path / "cpu.md").read_text()


def test_what_is_timed_of_a_peer():
    torch = pytest.importorskip("torch")
    from experiments.kernel_benchmarks.torch_worker import passes

    tensors = {name: torch.ones(1, 4, 2, 3) for name in (*OPERATORS["gated_deltanet"].arrays, "d_out")}

    def call(x, *, final, bounds=None):
        assert not final
        return sum(x[name] for name in OPERATORS["gated_deltanet"].arrays), None

    forward = passes("gated_deltanet", call, tensors, forward_only=True)
    assert list(forward) == ["forward"] and not any(x.requires_grad for x in tensors.values())
    assert not forward["forward"]().requires_grad
    both = passes("gated_deltanet", call, tensors)
    assert len(both["forward_backward"]()) == len(OPERATORS["gated_deltanet"].arrays)


def test_errors_are_compared_by_medians_over_seeds():
    ours = {"out": [3e-3, 1e-3, 2e-3], "beta": [1.0e-3, 1.1e-3, 5e-3], "k": [2.0, 2.0, 2.0], "v": [1e-3, None, None]}
    theirs = {"out": [2e-3, 2e-3, 2e-3], "beta": [1e-3, 1e-3, 1e-3], "k": [3.0, 3.0, 3.0], "v": [1e-3] * 3}
    what = {"kind": "error", "operator": "kda", "shape": list(SHAPE), "case": "random"}

    def records(name, errors, identical):
        each = [{result: x[seed] for result, x in errors.items()} for seed in range(3)]
        return [
            {**what, "implementation": name, "seed": seed, "errors": x, "identical": identical or seed != 1}
            for seed, x in enumerate(each)
        ]

    # One seed that only we have counts for nothing beside FLA's.
    more = {**what, "implementation": "triton", "seed": 3, "errors": {"out": 1.0}, "identical": True}
    view = View({"config": {}, "records": [*records("triton", ours, True), *records("fla", theirs, False), more]})
    by_name = view.errors()["kda", SHAPE, "random"]
    assert by_name["triton"].median("out") == pytest.approx(2.5e-3) and by_name["triton"].median("q") is None
    assert by_name["triton"].identical and not by_name["fla"].identical
    found = {c.result: c for c in view.error_comparisons()}
    assert found.keys() == {"out", "beta", "v"}  # where both are above 1, the gradient itself is rounding
    assert (found["out"].ratio, found["out"].seeds) == (1.0, 3)
    assert found["beta"].ratio == pytest.approx(1.1) and found["v"].ratio == np.inf
    assert found["beta"].low == pytest.approx(1.0) and found["beta"].high == pytest.approx(5.0)
    old = {**what, "implementation": "triton", "errors": {"out": 2e-3}, "identical": True}
    assert View({"config": {}, "records": [old]}).errors()["kda", SHAPE, "random"]["triton"].median("out") == 2e-3


def test_errors_alone_with_several_seeds(tmp_path):
    arguments = ["--output", str(tmp_path), "--name", "cpu", "--only", "error", "--seeds", "2", "--head-size", "16"]
    which = "--dtype float32 --operators pgdn --implementations triton --error-shapes 1 24 2 --cases --sweep-operators"
    assert main([*arguments, *which.split()]) == 0
    records = [r for r in json.loads((tmp_path / "cpu.json").read_text())["records"] if "operator" in r]
    assert [(r["kind"], r["seed"]) for r in records] == [("error", 0), ("error", 1)]
    assert records[0]["errors"] != records[1]["errors"]
    assert all(error < 1e-4 for r in records for error in r["errors"].values())


def test_a_peer_that_compiles_for_too_long_is_ended_and_said_to_be(tmp_path, monkeypatch):
    """So are the processes that it started, before anything is timed."""
    script, started = tmp_path / "python", tmp_path / "started"
    script.write_text(f"#!/bin/sh\ntrap '' TERM\nsleep 60 &\necho $! > {started}\nwait\nsleep 60\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr("experiments.kernel_benchmarks.run.STOPPING", 0.5)
    with Progress(disable=True) as progress:
        runner = Runner(Work((), (), "bfloat16", 1, time.time() + 60, tmp_path), progress, Processes(), None)
        process = runner.start("torch_worker", "fla", "warm")
        (record,) = runner.wait("compiling peers", {process: ""}, until=time.time() + 0.5)
    assert record["kind"] == "failure" and "torch_worker_fla_warm: stopped, out of time" in record["reason"]
    stat = pathlib.Path("/proc", started.read_text().strip(), "stat")
    assert not stat.exists() or " Z " in stat.read_text()


def test_parts_hold_all_measurements_once_and_what_is_compared_together():
    shapes = tuple((1, length, 2, 16, 16) for length in (8, 16, 24))
    whole = [
        Measurement(kind, "kda", name, shape)
        for kind, shape, name in itertools.product(("time", "error"), shapes, ("ours", "jla"))
    ]
    parts = [part_of(whole, n, 2) for n in range(2)]
    assert sorted(map(str, itertools.chain(*parts))) == sorted(map(str, whole))
    assert [{m.shape for m in part} for part in parts] == [{shapes[0], shapes[2]}, {shapes[1]}]
    with pytest.raises(ValueError, match="jax_processes is 0"):
        BenchmarkConfig(jax_processes=0)


def test_an_interrupted_run_writes_what_was_measured(tmp_path):
    """Also where it waits for its turn, as beside another command that holds the card."""
    lock, kept, file = tmp_path / "lock", tmp_path / "kept", tmp_path / "part.json"
    sizes = "--head-size 16 --dtype float32 --shapes 1 2 1 --chunked-shapes 1 2 1 --scan-shapes --sweep-operators"
    which = "--operators deltanet --implementations chunked --only time --name part --decode-batch 0"
    where = ["--exclusive", str(lock), "--keep", str(kept), "--output", str(tmp_path)]
    command = [sys.executable, "-m", "experiments.kernel_benchmarks", *sizes.split(), *which.split(), *where]
    with lock.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        records = kept / "gpu_0" / "jax_0.jsonl"
        while not (records.exists() and '"prepared"' in records.read_text()):
            assert process.poll() is None
            time.sleep(0.1)
        RecordWriter(records)({"kind": "ceiling", "copy_gb_s": 1.0, "matmul_tflops": 2.0})
        time.sleep(0.5)  # by then it waits for the lock file
        process.send_signal(signal.SIGTERM)
        assert "what was measured is written" in process.communicate(timeout=60)[0]
    assert process.returncode == 130
    results = json.loads(file.read_text())
    kinds = [record["kind"] for record in results["records"]]
    assert "ceiling" in kinds and results["records"][-1]["reason"].startswith("interrupted")
    assert "interrupted: what follows" in file.with_suffix(".md").read_text()
    whole = {**results, "records": [], "commit": "later"}
    assert "interrupted" not in str(add(whole, results)["records"])


def test_what_is_not_compiled_in_half_of_the_time_is_said_and_the_rest_is_measured(tmp_path, monkeypatch):
    """Of two programs the second waits for the first, which takes all of the time that there is for preparing."""
    shape = (1, 2, 1, 16, 16)
    measurements = tuple(Measurement("time", name, "chunked", shape) for name in ("deltanet", "kda"))
    session = jax_worker.Session(Work(measurements, ("chunked",), "float32", 1, time.time() + 60, tmp_path))

    def compile_unit(unit, work):
        time.sleep(0.5)
        return f"compiled {unit.operator} {unit.run}"

    monkeypatch.setattr(jax_worker, "compile_unit", compile_unit)
    monkeypatch.setattr(jax_worker.os, "cpu_count", lambda: 2)
    session.prepare(until=time.time() + 0.1)
    found = {(unit.operator, unit.run): text for unit, text in session.compiled.items()}
    assert found["deltanet", "forward"] == "compiled deltanet forward"
    assert found["deltanet", "forward_backward"] == "compiled deltanet forward_backward"
    assert found["kda", "forward"] == "TimeoutError: not compiled in time"
    (record,) = session.measure(measurements[1])
    assert record["kind"] == "failure" and record["reason"] == "TimeoutError: not compiled in time"


def test_kernels_whose_short_names_are_the_same_add_up():
    assert by_short_name({"gemm_a": 0.1, "norm": 0.25, "gemm_b": 0.2}, length=4) == {"gemm": 0.3, "norm": 0.25}
    assert list(by_short_name({"a": 1.0, "b": 2.0})) == ["b", "a"]


@pytest.mark.parametrize("sizes", [(1, 8), (4, 8), (1, 3)])
def test_rows_compared_are_spread(sizes):
    rows = list(zip(*compared_rows((sizes[0], 64, sizes[1], 16, 16))))
    assert len(set(rows)) == len(rows) == min(4, sizes[0] * sizes[1])
    assert rows[0] == (0, 0) and rows[-1] == (sizes[0] - 1, sizes[1] - 1)
