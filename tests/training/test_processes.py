"""Several processes train as one: losses, checkpoints on any number of them, a stop, and the end of one of them."""

import json
import pathlib
import re
import socket
import subprocess
import sys

import numpy as np
import pytest

from rnnlib.training import DistributedConfig, DistributedError, launch_arguments, load_run, read_csv, train

from .on_processes import STEPS, bits, run_config


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def started_together(count, devices, corpus, folder, environment):
    """Output, errors and exit code of each process."""
    asked = {"coordinator": f"127.0.0.1:{free_port()}", "processes": count, "devices": devices}
    asked |= {"corpus": str(corpus), "folder": str(folder)}
    started = []
    for process in range(count):
        files = [open(folder / f"{count}-{process}.{kind}", "w+") for kind in ("out", "err")]  # noqa: SIM115
        command = [sys.executable, "-m", "tests.training.on_processes", json.dumps(asked | {"process": process})]
        run = subprocess.Popen(
            command,
            cwd=pathlib.Path(__file__).parents[2],
            env=environment | {"JAX_PLATFORMS": "cpu"},
            stdout=files[0],
            stderr=files[1],
        )
        started.append((run, files))
    try:
        codes = [run.wait(timeout=400) for run, _ in started]
    finally:
        for run, _ in started:
            run.kill()
    texts = []
    for _, files in started:
        for file in files:
            file.seek(0)
        texts.append([file.read() for file in files])
        for file in files:
            file.close()
    return [(out, err, code) for (out, err), code in zip(texts, codes)]


def losses(folder):
    return [row["loss"] for row in read_csv(folder / "metrics.csv")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def one(folder, corpus, compilation_cache):
    train(run_config(corpus, data=1, fsdp=1), folder / "one")
    return folder / "one"


@pytest.fixture(scope="module")
def two(folder, corpus, process_environment):
    return started_together(2, 2, corpus, folder, process_environment)


@pytest.fixture(scope="module")
def four(folder, corpus, process_environment, two):
    return started_together(4, 2, corpus, folder, process_environment)


def what_each_saw(outputs):
    found = []
    for out, err, _ in outputs:
        lines = [line for line in out.splitlines() if line.startswith("{")]
        assert lines, err[-3000:]
        found.append(json.loads(lines[-1]))
    return found


def test_two_processes_train_as_one(one, two, folder):
    seen = what_each_saw(two)
    assert seen[0] == seen[1]
    np.testing.assert_allclose(losses(folder / "two"), losses(one), rtol=1e-5)
    expected = [row["loss"] for row in read_csv(one / "validation.csv")]
    np.testing.assert_allclose(
        [row["loss"] for row in read_csv(folder / "two" / "validation.csv")], expected, rtol=1e-5
    )
    assert (folder / "two" / "loss.png").exists()


@pytest.mark.slow
def test_four_processes_train_as_one(one, four, folder):
    seen = what_each_saw(four)
    assert all(found == seen[0] for found in seen)
    np.testing.assert_allclose(losses(folder / "four"), losses(one), rtol=1e-5)


def test_a_resumed_half_repeats_bit_for_bit(two, folder):
    seen = what_each_saw(two)[0]
    assert losses(folder / "again") == losses(folder / "two")
    assert seen["again"]["bits"] == seen["whole"]["bits"] and seen["again"]["began"] != seen["whole"]["began"]


@pytest.mark.slow
def test_checkpoints_have_the_same_bits_on_any_processes(one, two, four, folder, corpus):
    assert bits(load_run(folder / "two").model) == what_each_saw(two)[0]["whole"]["bits"]
    # Two processes of two devices, then four of two, in other shares.
    assert what_each_saw(four)[0]["elastic"]["began"] == what_each_saw(two)[0]["again"]["began"]
    np.testing.assert_allclose(losses(folder / "half"), losses(one), rtol=1e-5)
    # Four processes have gone on from two; one goes on from four.
    assert bits(load_run(folder / "half").model) == what_each_saw(four)[0]["elastic"]["bits"]
    result = train(run_config(corpus, data=1, fsdp=1), folder / "half", resume=True)
    assert result.step == STEPS


def test_a_signal_to_one_process_stops_all_after_the_same_step(two, folder):
    seen = what_each_saw(two)
    stopped = seen[0]["stopped"]
    assert stopped["stopped"] == "SIGTERM" and 1 < stopped["step"] < 10
    steps = [int(row["step"]) for row in read_csv(folder / "stopped" / "metrics.csv")]
    assert steps == list(range(1, stopped["step"] + 1))
    assert bits(load_run(folder / "stopped").model) == stopped["bits"] == seen[1]["stopped"]["bits"]


def test_a_killed_process_ends_the_others_with_one_line_and_leaves_a_checkpoint(two, folder):
    (_, err, code), (_, _, killed) = two
    assert (code, killed) == (1, -9)
    lines = re.findall(r"^process 0 of 2 stops: .*|^\w*Error.*", err, re.MULTILINE)
    # Gloo may see the closed connection before the sign of life is missed.
    assert len(lines) == 1 and ("process 1: no sign of life" in lines[0] or "onnection" in lines[0]), err[-2000:]
    assert load_run(folder / "killed").step == 3


@pytest.mark.slow
def test_an_error_in_one_process_ends_all_with_its_text(four):
    assert [code for _, _, code in four] == [1] * 4
    for process, (_, err, _) in enumerate(four):
        if process == 2:
            assert "OSError: no space left on device" in err
        else:
            assert f"process {process} of 4 stops: process 2: no space left on device" in err, err[-2000:]


SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, None),  # the script of sbatch, without srun
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, None),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, {"local_device_ids": []}),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_TASKS_PER_NODE": "8(x2)"}, {}),
        (
            SLURM | {"SLURM_NTASKS": "16", "SLURM_STEP_TASKS_PER_NODE": "8(x2)", "CUDA_VISIBLE_DEVICES": "3"},
            {"local_device_ids": []},
        ),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, None),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, {}),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, {"local_device_ids": []}),
        ({"KUBERNETES_SERVICE_HOST": "k", "JOB_COMPLETION_INDEX": "1"}, None),  # a sweep
        (
            {
                "KUBERNETES_SERVICE_HOST": "k",
                "JOB_COMPLETION_INDEX": "1",
                "JAX_COORDINATOR_ADDRESS": "train-workers-0-0.train:8476",
                "JAX_NUM_PROCESSES": "4",
            },
            {"coordinator_address": "train-workers-0-0.train:8476", "num_processes": 4, "process_id": 1},
        ),
        ({"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, None),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "1"}, {}),
        ({"TPU_WORKER_HOSTNAMES": "a", "MEGASCALE_NUM_SLICES": "2"}, {}),
    ],
)
def test_launchers_are_found(environment, expected, monkeypatch):
    monkeypatch.setattr("rnnlib.training.distributed._has_kubernetes", lambda: False)
    found = launch_arguments(DistributedConfig(), environment)
    if expected is not None and "process_id" in expected:
        expected = expected | {"cluster_detection_method": "deactivate"}
    assert found == expected


def test_flags_come_before_the_environment():
    found = launch_arguments(DistributedConfig("a:1", 3, 2), SLURM | {"SLURM_STEP_NUM_TASKS": "16"})
    assert (found["coordinator_address"], found["num_processes"], found["process_id"]) == ("a:1", 3, 2)
    assert launch_arguments(DistributedConfig(processes=1), SLURM | {"SLURM_STEP_NUM_TASKS": "16"}) is None


@pytest.mark.parametrize(
    ("config", "environment", "message"),
    [
        ({"coordinator": "a:1"}, {}, "no distributed.processes and no distributed.process, expected"),
        ({"processes": 2, "process": 0}, {}, "no distributed.coordinator, expected"),
        ({"coordinator": "a:1", "process": 4}, {"JAX_NUM_PROCESSES": "4"}, "process=4: expected below"),
        ({"coordinator": "a:1", "processes": 2}, {"JAX_PROCESS_ID": "x"}, "'x', expected a number"),
    ],
)
def test_half_of_what_is_needed_is_refused(config, environment, message):
    with pytest.raises(DistributedError, match=message):
        launch_arguments(DistributedConfig(**config), environment)


@pytest.mark.parametrize("wrong", [{"coordinator": "host"}, {"processes": 2, "process": 2}, {"lost_seconds": 1.0}])
def test_settings_that_cannot_be_are_refused(wrong):
    with pytest.raises(ValueError, match=r"^DistributedConfig: "):
        DistributedConfig(**wrong)
