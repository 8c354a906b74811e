"""Meshes: the same numbers on every one, an even share of the state on each device, and errors before compiling."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh

from experiments.several_gpus.collectives import Collective, collectives
from rnnlib.training import MeshConfig, Trainer, make_mesh, make_train_step
from rnnlib.training.mesh import abstract_mesh, mesh_sizes
from tests.processes import result_of

from .on_meshes import ALWAYS, MESHES

# On a busy machine the fixtures take longer than a test may.
pytestmark = pytest.mark.timeout(1500)


def on_eight_devices(environment, *arguments):
    return result_of("tests.training.on_meshes", *arguments, environment=environment, timeout=1200)


@pytest.fixture(scope="module")
def on_meshes_always(process_environment):
    return on_eight_devices(process_environment, "meshes", *ALWAYS)


@pytest.fixture(scope="module")
def on_meshes_slowly(process_environment):
    return on_eight_devices(process_environment, "meshes", *(name for name in MESHES if name not in ALWAYS))


@pytest.fixture
def on_meshes(request, name):
    return request.getfixturevalue("on_meshes_always" if name in ALWAYS else "on_meshes_slowly")


@pytest.fixture(scope="module")
def memory(process_environment):
    return on_eight_devices(process_environment, "memory")


CASES = [
    pytest.param(name, data, fsdp, marks=() if name in ALWAYS else pytest.mark.slow)
    for name, meshes in MESHES.items()
    for data, fsdp in meshes
]


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
    """Matrices are gathered, their gradients scattered; of anything else, as an operator's arguments, nothing is."""
    found = on_meshes[f"{name} {data} {fsdp}"]
    assert found["collectives"] == found["wanted"]
    assert found["groups"] == ([fsdp] if fsdp > 1 else [])
    # Over all devices: three sums of the loss and the gradients of vectors. Over "data": gradients of shards. Over
    # "fsdp": squares of these, a sum for each name, for the norm that is reported and the one that is clipped.
    over_all, over_data, over_fsdp = found["vectors"] + 3 * 4, found["shares"], 2 * 4 * found["sums"]
    assert found["all-reduced"] == {
        (8, 1): [over_all, over_all, 0],
        (1, 8): [over_all + over_fsdp, 0, over_all + over_fsdp],
    }.get((data, fsdp), [over_all, over_data, over_fsdp])


@pytest.mark.slow
def test_what_a_device_needs_falls_with_the_size_of_fsdp(memory):
    """By XLA's memory plan: what is kept, and what a step takes beside it (gradients and what becomes of them)."""
    plans = {size: memory["by size"][f"{size} 8"] for size in (1, 2, 4, 8)}
    for size, plan in plans.items():
        assert 1 / size <= plan["kept"] / plans[1]["kept"] < 1 / size + 0.01
    taken = {size: plan["kept"] + plan["temporary"] for size, plan in plans.items()}
    assert taken[8] < taken[4] < taken[2] < taken[1]
    # What does not fall: gathered matrices of two blocks at a time, and activations. All four would be a whole copy.
    assert 2 * taken[8] - taken[4] < 3.2 * memory["block"] < 0.8 * memory["parameters"]


@pytest.mark.parametrize(("name", "data", "fsdp"), CASES)
def test_a_plan_has_the_bytes_of_the_compiled_step(on_meshes, name, data, fsdp):
    planned, found = on_meshes[f"{name} {data} {fsdp}"]["sent"]
    assert planned == found


@pytest.mark.slow
def test_a_plan_has_the_memory_of_the_compiled_step(memory):
    assert all(sizes["planned"] == sizes["own"] for sizes in memory["by size"].values())


@pytest.mark.slow
def test_drawn_models_train_on_drawn_meshes_as_on_one_device(process_environment):
    """More of them: `XLA_FLAGS= python -m tests.training.on_meshes drawn 20`."""
    drawn = on_eight_devices(process_environment, "drawn", "4")
    assert len(drawn) >= 2
    for case, found in drawn.items():
        assert max(found.values()) < 1e-5, case


def test_collectives_are_read_with_their_loops():
    text = """HloModule step
%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %g = f32[8,4]{1,0} all-gather(%x), replica_groups=mesh['data'=2,'fsdp'=4] {'fsdp'}, dimensions={0}
}
ENTRY %main (a: f32[4]) -> f32[4] {
  %w = (s32[], f32[4]) while(%t), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %r = (f32[4]{0}, bf16[]) all-reduce(%y, %z), replica_groups={{0,1},{2,3}}, to_apply=%add
}
%c (p: (s32[], f32[4])) -> pred[] {
}
%add (a: f32[], b: f32[]) -> f32[] {
}
"""
    gathers, reduces = Collective("all-gather", ((8, 4),), 128, 3, 4), Collective("all-reduce", ((4,), ()), 18, 1, 2)
    assert collectives(text) == [gathers, reduces]
    with pytest.raises(ValueError, match="in a loop of unknown length"):
        collectives(text.replace("known_trip_count", "unknown"))


@pytest.mark.slow
def test_runs_go_on_on_any_mesh(process_environment, corpus):
    """On the same mesh bit for bit, on another to rounding.

    Always run: `on_meshes.restores_elsewhere`,
    `test_tensor_parallel.test_a_run_goes_on_with_layers_shared_out_and_back` and
    `test_processes.test_a_resumed_half_repeats_bit_for_bit`.
    """
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


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        (None, {"xla_gpu_deterministic_ops": True}),
        ((2, 4), {"xla_gpu_deterministic_ops": True}),
        ((2, 2, 2), {"xla_gpu_deterministic_ops": True}),
        ((4, 1, 1, 2), {"xla_gpu_deterministic_ops": True}),
        ((8, 1), {"xla_gpu_deterministic_ops": True, "xla_gpu_enable_latency_hiding_scheduler": False}),
        ((4, 1, 2), {"xla_gpu_deterministic_ops": True, "xla_gpu_enable_latency_hiding_scheduler": False}),
    ],
)
def test_steps_of_copies_are_compiled_without_latency_hiding(monkeypatch, sizes, options):
    """On GPUs: with it, a step of copies keeps all that recomputation had saved (experiments/several_gpus)."""
    given = []

    def jit(step, *, compiler_options, **_):
        given.append(compiler_options)
        return step

    mesh = None
    if sizes is not None:
        shape = abstract_mesh(MeshConfig(*sizes)).shape
        mesh = Mesh(np.array(jax.devices() * 8).reshape(tuple(shape.values())), tuple(shape))
    graph = nnx.split(nnx.Linear(1, 1, rngs=nnx.Rngs(0)))[0]
    monkeypatch.setattr("rnnlib.training.step.jax.default_backend", lambda: "gpu")
    monkeypatch.setattr("rnnlib.training.step.jax.jit", jit)
    make_train_step(graph, optax.sgd(1.0), lambda _: 1.0, np.ones(4, np.int32), mesh)
    assert given == [options]


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
