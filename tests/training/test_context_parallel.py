"""Rows whose tokens are split over devices in training: the numbers of one device, and errors before compiling."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from rnnlib.models import DecoderLM, ModelConfig
from rnnlib.ops import context_axis
from rnnlib.training import MeshConfig
from rnnlib.training.batches import check_batch_size, check_length
from rnnlib.training.mesh import mesh_sizes
from tests.processes import result_of

from .on_context_shards import ALWAYS, MIXERS

MESH = AbstractMesh((2, 1, 4), ("data", "fsdp", "context"), axis_types=(AxisType.Auto,) * 3)


@pytest.mark.parametrize("mixers", [ALWAYS, pytest.param(MIXERS, marks=pytest.mark.slow)], ids=["two", "every kind"])
def test_a_group_of_devices_trains_as_one(mixers, process_environment):
    """Loss and gradients of a hybrid on 2 x 4 devices, and logits in a user's own map."""
    found = result_of("tests.training.on_context_shards", *mixers, environment=process_environment)
    assert all(error < 1e-5 for error in found.values()), found


def test_sizes_leave_room_for_the_devices_that_share_rows():
    assert mesh_sizes(MeshConfig(context=4), 8, rows=16) == MeshConfig(data=2, fsdp=1, context=4)
    assert mesh_sizes(MeshConfig(context=2), 8, rows=2) == MeshConfig(data=2, fsdp=1, context=2)
    found = mesh_sizes(MeshConfig(context=2), 8, rows=8, state_bytes=80, device_bytes=100)
    assert found == MeshConfig(data=2, fsdp=2, context=2)
    with pytest.raises(ValueError, match=r"^mesh.data=2 x mesh.context=8: this machine has 8 "):
        mesh_sizes(MeshConfig(data=2, context=8), 8)
    with pytest.raises(ValueError, match=r"^mesh.context=3: does not fit devices=8$"):
        mesh_sizes(MeshConfig(context=3), 8, devices=8)


def test_rows_and_tokens_come_out_even():
    check_batch_size(4, 2, MESH)
    with pytest.raises(ValueError, match=r"data.batch_size=6 .*accumulation_steps=4 .*mesh.context=4"):
        check_batch_size(6, 4, MESH)
    check_length(12, MESH)
    with pytest.raises(ValueError, match=r"^data.sequence_length=10 does not split evenly .* mesh.context=4$"):
        check_length(10, MESH)


@pytest.mark.parametrize("mixer", ["gated_deltanet", "attention", "latent_attention"])
def test_caches_are_refused(mixer):
    model = DecoderLM(ModelConfig(8, 8, 1, 1, (mixer,), mlp_width=8), rngs=nnx.Rngs(0))

    def extend(tokens):
        with context_axis("context"):
            return model.extend(tokens, model.init_cache(1, 8))[0]

    by = P(None, "context")
    mapped = jax.shard_map(extend, mesh=MESH, in_specs=by, out_specs=by)
    with pytest.raises(NotImplementedError, match="a cache: is not for tokens split over devices"):
        jax.eval_shape(mapped, jax.ShapeDtypeStruct((1, 8), jnp.int32))
