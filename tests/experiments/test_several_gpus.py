"""The study of several GPUs, on two virtual devices of a CPU."""

import json
import os
import subprocess
import sys

import pytest

from experiments.kernel_benchmarks.offline.compiling import missing_packages
from experiments.several_gpus.__main__ import FOLDER, efficiency, main, table
from experiments.several_gpus.offline import step_memory
from tests.processes import ROOT


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_one_command_times_meshes(tmp_path):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    command = [sys.executable, "-m", "experiments.several_gpus", "--axes", "data", "tensor", "--output", str(tmp_path)]
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    (run,) = json.loads((tmp_path / "small.json").read_text())
    records = run["records"]
    assert [(r["axis"], r["latency_hiding"]) for r in records] == [("data", False), ("data", True), ("tensor", True)]
    for record in records:
        assert record["rows"] * record["length"] == 2 * 256, "each device has the study's tokens"
        assert record["losses"] == pytest.approx(records[0]["losses"], rel=2e-2), "the same tokens on every mesh"
        assert record["plan"]["sent_bytes"] > 0
    half = records[0] | {"tokens_per_second_ahead": records[0]["tokens_per_second_ahead"] / 2, "devices": 1}
    assert efficiency(records[0], half) == 1
    assert "| tiny | Gated DeltaNet | tensor 2 |" in done.stdout


@pytest.mark.skipif(missing_packages() is not None, reason=str(missing_packages()))
@pytest.mark.timeout(900)
@pytest.mark.slow
def test_copies_on_two_gpus_take_no_more_memory_than_one_gpu():
    """Compiled for H100s without one, blocks recomputed. With latency hiding it would be half as much again."""
    one, two = (step_memory(mesh, 2, latency_hiding=False, preset="340m") for mesh in (None, (2, 1, 1, 1)))
    assert two < 1.05 * one


def test_failures_have_a_row():
    where = {"device": "cpu", "packages": {"jax": "0"}, "commit": "0123456789", "date": "2026-11-25T00:00"}
    record = {"model": "tiny", "mixer": "KDA", "axis": "data", "devices": 2, "latency_hiding": True, "error": "no room"}
    text = table([{"devices": 2, "steps": 2, "environment": where, "records": [record]}])
    assert "| tiny | KDA | data 2 | yes | 1 |  | failed |" in text


def test_the_page_has_the_table_of_the_results():
    assert table(json.loads((FOLDER / "real.json").read_text())) in (FOLDER / "README.md").read_text()


def test_one_device_is_refused_in_a_line(capsys, tmp_path):
    with pytest.raises(SystemExit, match="error: models are tiny"):
        main(["--models", "7B", "--output", str(tmp_path)])
    with pytest.raises(SystemExit, match="error: there is 1 cpu device, expected at least 2"):
        main(["--output", str(tmp_path)])
