"""What only several GPUs can show: meshes of GPUs train as one GPU, and so do processes with one GPU each.

`test_mesh.py`, `test_context_parallel.py` and `test_tensor_parallel.py` have the same on virtual CPUs.
"""

import concurrent.futures
import os
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from rnnlib.training import read_csv

from .on_all_meshes import GPU_BOUND, MODELS, on_gpus

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1500)]
STEPS = 6


def need_gpus(count):
    if jax.device_count() < count:
        pytest.skip(f"needs {count} GPUs")


@pytest.mark.parametrize("name", MODELS)
def test_meshes_of_gpus_train_as_one_gpu(name):
    """In float32; in bfloat16 a mesh is about as far from one GPU as that is from its float32."""
    need_gpus(2)
    found = on_gpus(name, 2)
    for sizes, here in found["meshes"].items():
        assert here["float32"]["error"] < GPU_BOUND, sizes
        assert here["bfloat16"]["error"] < 2 * found["rounding"]["error"], sizes


def train(folder, corpus, *flags, process=None, port=None):
    """Runs `rnnlib train`, as one of two processes with a GPU of its own, or as one with all GPUs."""
    command = [sys.executable, "-m", "rnnlib.cli.main", "train", "--run", str(folder), "--steps", str(STEPS)]
    command += ["--data.source", "text", "--data.paths", f"{corpus}/*.txt", "--data.split-by", "tail"]
    command += ["--data.batch-size", "4", "--data.sequence-length", "128"]
    command += ["--model.width", "128", "--model.num-layers", "2", "--model.num-heads", "2", "--checkpoint.every", "3"]
    command += ["--no-deterministic", *flags]
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if process is not None:
        environment |= {"CUDA_VISIBLE_DEVICES": str(process)}
        command += ["--distributed.coordinator", f"127.0.0.1:{port}", "--distributed.processes", "2"]
        command += ["--distributed.process", str(process)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def losses(folder):
    return [row["loss"] for row in read_csv(folder / "metrics.csv")]


def test_processes_with_one_gpu_each_train_as_one(tmp_path, corpus):
    """Two processes, parameters in shares over both; one goes on with the checkpoint of two, on one GPU."""
    need_gpus(2)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    shares = ("--mesh.fsdp", "2")
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        both = [pool.submit(train, tmp_path / "two", corpus, *shares, process=i, port=port) for i in range(2)]
        one = pool.submit(train, tmp_path / "one", corpus, "--devices", "1")
        for running in (*both, one):
            running.result()
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), rtol=2e-3)
    train(tmp_path / "two", corpus, "--devices", "1", "--mesh.fsdp", "1", "--resume", "--steps", str(2 * STEPS))
    assert len(losses(tmp_path / "two")) == 2 * STEPS
