"""Plans of meshes that share layers or rows: the collectives and the state of the compiled step."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import pytest

from rnnlib.data import DataConfig
from rnnlib.models import ModelConfig
from rnnlib.training import MeshConfig, TrainConfig, plan_step
from rnnlib.training.adaptation import LoraConfig

from .on_plans import ALWAYS, DRAWN

OTHERS = [mesh for mesh in DRAWN if mesh not in ALWAYS]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("meshes", [ALWAYS, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["always", "others"])
def test_plans_of_shared_layers_and_rows_have_the_bytes_of_compiled_steps(meshes, process_environment):
    """To the byte, but that XLA passes equal segment ids on once: `python -m tests.training.on_plans all` has more."""
    process = subprocess.run(
        [sys.executable, "-m", "tests.training.on_plans", *meshes],
        cwd=pathlib.Path(__file__).parents[2],
        env=process_environment | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    results = json.loads(process.stdout.splitlines()[-1])
    assert len(results) == len(meshes)
    for name, case in results.items():
        planned, found = case["planned"], case["found"]
        passed_on = {key for key in planned if key.startswith("collective-permute")}
        assert planned.keys() == found.keys(), name
        assert {key: planned[key] for key in planned.keys() - passed_on} == {
            key: found[key] for key in found.keys() - passed_on
        }, name
        for key in passed_on:
            assert found[key] <= planned[key], name
            assert planned[key] < 1.05 * found[key] or key.endswith("arrays"), name
        # The compiled step has the batch beside the state: at most five arrays of a number a token, and counters.
        state, arguments = case["state"]
        assert 0 < arguments - state <= 5 * 4 * 16 * 4 + 8, name


def test_a_step_is_planned_on_a_machine_with_gpus(monkeypatch):
    """There training steps are compiled with options for determinism, which a traced step cannot have."""
    config = TrainConfig(model=ModelConfig(64, 32, 1, 2, ("gated_deltanet",)), data=DataConfig(batch_size=8))
    wanted = plan_step(config, 8)
    monkeypatch.setattr("rnnlib.training.step.jax.default_backend", lambda: "gpu")
    assert plan_step(config, 8) == wanted


def test_adapted_runs_are_planned():
    config = TrainConfig(
        model=ModelConfig(64, 32, 1, 2, ("gated_deltanet",), mlp_width=64),
        data=DataConfig(batch_size=8),
        mesh=MeshConfig(data=1, fsdp=2, tensor=2),
    )
    whole = plan_step(config, 4)
    lora = plan_step(dataclasses.replace(config, lora=LoraConfig(rank=2, targets=("q_proj", "down"))), 4)
    assert (whole.num_frozen, whole.merged, lora.num_frozen) == (0, 0, whole.num_parameters)
    assert lora.num_parameters == 2 * (32 + 32) + 2 * (64 + 32)
    assert lora.merged == 4 * (32 * 32 + 64 * 32) // 4 and lora.optimizer < whole.optimizer / 10
    frozen = plan_step(dataclasses.replace(config, freeze=("feed_forward",)), 4)
    assert frozen.num_parameters + frozen.num_frozen == whole.num_parameters and frozen.merged == 0
    assert frozen.parameters == whole.parameters and frozen.gradients < whole.gradients
    assert frozen.num_frozen == 3 * 32 * 64
