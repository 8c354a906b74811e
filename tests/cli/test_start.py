"""The command line opens a GPU while it imports, where nothing else must come before, and collects garbage seldom."""

import contextlib
import gc

import jax
import pytest

from rnnlib.cli import start
from rnnlib.training import DistributedConfig
from rnnlib.training.distributed import DistributedError, launch_arguments


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """A machine with NVIDIA's driver."""
    monkeypatch.setattr(start, "_DRIVER", tmp_path)


def test_one_process_with_a_gpu_opens_it(driver):
    assert start.should_open(["--preset", "340m"], {})
    assert start.should_open([], {"JAX_PLATFORMS": "cuda,cpu"})
    assert not start.should_open([], {"JAX_PLATFORMS": "cpu"})
    assert not start.should_open(["--help"], {})
    assert not start.should_open(["--distributed.coordinator", "a:1"], {})


def test_without_the_driver_nothing_is_opened(tmp_path, monkeypatch):
    monkeypatch.setattr(start, "_DRIVER", tmp_path / "none")
    assert not start.should_open([], {})


@pytest.mark.parametrize(
    "environment",
    [
        {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"},
        {"JAX_NUM_PROCESSES": "2", "JAX_COORDINATOR_ADDRESS": "a:1"},
        {"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_NTASKS": "2"},
        {"OMPI_COMM_WORLD_SIZE": "2"},
        {"TPU_PROCESS_ADDRESSES": "a:1,b:1"},
        {"TPU_WORKER_HOSTNAMES": "a,b"},
    ],
)
def test_processes_that_meet_first_open_nothing(driver, environment):
    with contextlib.suppress(DistributedError):  # what says too little asks for several, too
        assert launch_arguments(DistributedConfig(), environment) is not None
    assert not start.should_open([], environment)


def test_the_thread_opens_the_devices(driver, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda,cpu")
    asked = []
    monkeypatch.setattr(jax, "device_put", lambda array, device: asked.append(device))
    opening = start.open_early([])
    assert opening is not None
    opening.join()
    assert asked == jax.local_devices() and opening.seconds > 0
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert start.open_early([]) is None


def test_garbage_is_collected_as_before_afterwards():
    given = gc.get_threshold()
    gc.set_threshold(700, 10, 5)
    try:
        with pytest.raises(KeyError), start.rare_collections():
            assert gc.get_threshold() > (10_000,)
            raise KeyError
        assert gc.get_threshold() == (700, 10, 5)
    finally:
        gc.set_threshold(*given)


def test_garbage_of_a_run_alone_is_looked_for():
    before = gc.get_freeze_count()
    with pytest.raises(KeyError), start.kept_objects():
        assert gc.get_freeze_count() > before + 10_000
        raise KeyError
    assert gc.get_freeze_count() == 0
