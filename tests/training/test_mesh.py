"""Meshes: the same numbers on every one, an even share of the state on each device, and errors before compiling."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rnnlib.training import MeshConfig, Trainer, make_mesh
from rnnlib.training.mesh import mesh_sizes

from .on_meshes import MESHES, MODELS


def on_eight_devices(environment, *arguments):
    process = subprocess.run(
        [sys.executable, "-m", "tests.training.on_meshes", *arguments],
        cwd=pathlib.Path(__file__).parents[2],
        env=environment | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(process.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def on_meshes(process_environment):
    return on_eight_devices(process_environment, "meshes")


CASES = [(name, data, fsdp) for name, meshes in MESHES.items() for data, fsdp in meshes]


@pytest.mark.parametrize(("name", "data", "fsdp"), CASES)
def test_every_mesh_trains_as_one_device(on_meshes, name, data, fsdp):
    one, found = on_meshes[name], on_meshes[f"{name} {data} {fsdp}"]
    np.testing.assert_allclose(found["rows"], one["rows"], rtol=1e-5)
    assert found["gradient"] < 1e-5
    if "evaluation" in found:
        np.testing.assert_allclose(found["evaluation"], one["evaluation"], rtol=1e-5)


@pytest.mark.parametrize(("name", "data", "fsdp"), CASES)
def test_each_device_has_its_share(on_meshes, name, data, fsdp):
    """Vectors are whole: they are a few hundredths of these tiny models. XLA's memory plan counts the batch too."""
    one, found = on_meshes[name], on_meshes[f"{name} {data} {fsdp}"]
    assert 1 / fsdp <= found["share"] < 1 / fsdp + (0.07 if fsdp > 1 else 1e-9)
    assert abs(found["bytes"] / one["bytes"] - found["share"]) < 0.05


@pytest.mark.parametrize(("name", "data", "fsdp"), CASES)
def test_a_step_has_these_collectives_and_no_other(on_meshes, name, data, fsdp):
    found = on_meshes[f"{name} {data} {fsdp}"]
    blocks, outside = found["sharded in blocks"], found["sharded outside"]
    if name.startswith("scanned"):
        blocks //= 2  # a loop over both blocks
    # The backward pass of a recomputed block gathers its matrices again.
    gathers = blocks * (2 if "remat" in MODELS[name][0] else 1) + outside
    # All-reduces: loss and gradients of vectors over all devices, gradients of shares over "data", squares of these.
    expected = {"all-gather": gathers, "reduce-scatter": blocks + outside, "all-reduce": 3}
    assert found["collectives"] == (expected if fsdp > 1 else {"all-reduce": 1})


def test_runs_go_on_on_any_mesh(process_environment, corpus):
    """On the same mesh bit for bit, on another to rounding."""
    found = on_eight_devices(process_environment, "runs", str(corpus))
    assert found["same"] == found["whole"]
    for name in ("other", "one"):
        assert found[name]["losses"][:2] == found["whole"]["losses"][:2]
        np.testing.assert_allclose(found[name]["losses"], found["whole"]["losses"], rtol=1e-5)


@pytest.mark.parametrize(
    ("mesh", "devices", "message"),
    [
        ({"fsdp": 64}, None, r"^mesh.fsdp=64: this machine has \d+ cpu device"),
        ({"data": 8, "fsdp": 8}, None, r"^mesh.data=8 x mesh.fsdp=8: this machine has \d+ cpu device"),
        ({"data": 1, "fsdp": 1}, 64, r"^devices=64: this machine has \d+ cpu device"),
    ],
)
def test_meshes_without_enough_devices_are_refused(tiny_config, mesh, devices, message):
    with pytest.raises(ValueError, match=message):
        Trainer(dataclasses.replace(tiny_config, mesh=MeshConfig(**mesh), devices=devices), read_data=False)


def test_sizes_that_are_none_are_refused():
    with pytest.raises(ValueError, match="data is 0, expected -1"):
        MeshConfig(data=0)
    with pytest.raises(ValueError, match="fsdp is 0, expected an integer of at least 1"):
        MeshConfig(fsdp=0)
    with pytest.raises(ValueError, match=r"^mesh.fsdp=3: does not fit devices=8$"):
        mesh_sizes(MeshConfig(fsdp=3), 8, devices=8)
    with pytest.raises(ValueError, match=r"^mesh.data=2 x mesh.fsdp=2: does not fit devices=8$"):
        mesh_sizes(MeshConfig(data=2, fsdp=2), 8, devices=8)
    assert make_mesh(1) is None


def test_a_state_that_does_not_fit_one_device_is_shared():
    def chosen(state_bytes, **options):
        return mesh_sizes(MeshConfig(), 8, rows=32, state_bytes=state_bytes, device_bytes=100, **options)

    assert chosen(70) == MeshConfig(data=8, fsdp=1)
    assert chosen(80) == MeshConfig(data=4, fsdp=2)
    assert chosen(200) == MeshConfig(data=2, fsdp=4)
    assert chosen(80, devices=4) == MeshConfig(data=2, fsdp=2)
    # What fits nowhere is shared as far as it goes: XLA says how much is missing.
    assert chosen(10_000) == MeshConfig(data=8, fsdp=1)


sizes = st.integers(1, 9)


@given(st.just(-1) | sizes, st.none() | sizes, sizes, st.none() | sizes, st.none() | sizes, st.integers(0, 500))
def test_drawn_sizes_are_a_mesh_of_what_was_asked_or_refused(data, fsdp, available, devices, rows, state_bytes):
    config = MeshConfig(data=data, fsdp=fsdp)
    options = {"devices": devices, "rows": rows, "state_bytes": state_bytes, "device_bytes": 100}
    try:
        found = mesh_sizes(config, available, **options)
    except ValueError as error:
        assert "this machine has" in str(error) or "does not fit devices" in str(error)
        return
    assert data in (-1, found.data) and fsdp in (None, found.fsdp)
    assert found.data * found.fsdp <= available and devices in (None, found.data * found.fsdp)
    assert mesh_sizes(found, available, **options) == found
