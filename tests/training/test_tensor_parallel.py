"""Sharded layers in training: the numbers of one device, what is sent, and errors before compiling."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType

from rnnlib.layers import Experts, SigmoidGain
from rnnlib.layers.normalization import RMSNorm
from rnnlib.models import ModelConfig, abstract_model
from rnnlib.training import MeshConfig
from rnnlib.training.batches import check_batch_size
from rnnlib.training.mesh import mesh_sizes, parameter_specs
from rnnlib.training.step import split_for_mesh, split_model
from tests.processes import result_of


def of_shards(count):
    return AbstractMesh((1, 1, count), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)


@pytest.fixture(scope="module")
def trained(process_environment, corpus):
    return result_of("tests.training.on_tensor_shards", "test", str(corpus), environment=process_environment)


def test_devices_that_share_layers_train_as_one(trained):
    """Loss, norm and gradients, in loops, parts and experts."""
    assert trained["loop"]["error"] < 1e-5, trained["loop"]
    np.testing.assert_allclose(*trained["evaluation"], rtol=1e-6)


@pytest.mark.slow
def test_devices_that_share_rows_tokens_and_parameters_too_train_as_one(process_environment):
    """Loss, norm and gradients."""
    every = result_of("tests.training.on_tensor_shards", "every axis", environment=process_environment)
    assert every["error"] < 1e-6, every


def test_a_device_holds_its_share(trained):
    """A quarter, and the norms, routers and low ranks that all have."""
    assert 0.25 < trained["share"] < 0.32


def test_devices_that_share_layers_exchange_what_a_token_has_and_no_matrix(trained):
    """No logits, no heads: by the shape of what is summed over the four devices, how often in a step of two parts."""
    sums = {name: count for name, count in trained["collectives"].items() if " of 1 " not in name}
    # The squares of each parameter's gradient, and counts.
    assert sums.pop("all-reduce of 4 []") < 100
    layers, parts = 2, 2
    assert sums == {
        # The residual stream: embedding, mixers and feed-forwards, forwards and back; mixers once more in blocks that
        # are recomputed.
        "all-reduce of 4 [2, 8, 16]": parts * (2 * (1 + 2 * layers) + layers),
        # Largest logit, normalizer and target's logit of each token; gradients of the norms of the residual stream.
        "all-reduce of 4 [16]": parts * 3 + 2 * layers + 1,
        # Gradients of parameters that all have: a head's norm; router and low ranks of decay and gate.
        "all-reduce of 4 [4]": layers,
        "all-reduce of 4 [16, 4]": 3 * layers,
    }


def test_checkpoints_are_restored_on_any_mesh(trained):
    """Bit for bit: from four devices that share layers to FSDP, to one device, and to both kinds of shares."""
    restored = trained["restored"]
    assert all(restored[name][0] and restored[name][1] > 40 for name in ("fsdp", "one", "tensor"))
    assert restored["fsdp over"] == ["fsdp"] and restored["tensor over"] == ["fsdp", "tensor"]


def test_sizes_leave_room_for_the_devices_that_share_layers():
    assert mesh_sizes(MeshConfig(tensor=2), 8, rows=16) == MeshConfig(data=4, fsdp=1, tensor=2)
    found = mesh_sizes(MeshConfig(context=2, tensor=2), 8, rows=8, state_bytes=300, device_bytes=100)
    assert found == MeshConfig(data=1, fsdp=2, context=2, tensor=2)
    with pytest.raises(ValueError, match=r"^mesh.data=2 x mesh.tensor=8: this machine has 8 "):
        mesh_sizes(MeshConfig(data=2, tensor=8), 8)
    with pytest.raises(ValueError, match=r"^mesh.tensor=3: does not fit devices=8$"):
        mesh_sizes(MeshConfig(tensor=3), 8, devices=8)
    check_batch_size(1, 1, of_shards(4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 2}, r"mesh.tensor=4: does not divide the value heads of a mixer \(--model.num-heads\), 2;"),
        ({"mlp_width": 6}, r"mesh.tensor=4: does not divide the width of a feed-forward \(--model.mlp-width\), 6;"),
        ({"vocabulary_size": 6}, r"mesh.tensor=4: does not divide the vocabulary \(--model.vocabulary-size\), 6;"),
        ({"feed_forwards": Experts(2, 1, 6)}, r"mesh.tensor=4: does not divide the width of an expert "),
        (
            {"mixers": ("attention",), "mixer_overrides": {"attention": {"key_heads": 2}}},
            r"mesh.tensor=4: does not divide the key heads of a mixer",
        ),
        (
            {
                "mixers": ("gated_kalmanet",),
                "mixer_overrides": {"*": {"solve.sketch_size": 2, "solve.sketch": "random"}},
            },
            r"mesh.tensor=4: blocks.0.mixer.solve.projection is not trained, and only parameters are sharded",
        ),
    ],
)
def test_what_does_not_come_out_even_is_refused(options, message):
    sizes = {"vocabulary_size": 8, "width": 16, "num_layers": 1, "num_heads": 4, "mlp_width": 8}
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: split_for_mesh(abstract_model(ModelConfig(**(sizes | options))), of_shards(4))[1])


@dataclasses.dataclass(frozen=True)
class OwnGain(SigmoidGain):
    """A part of one's own."""


@dataclasses.dataclass(frozen=True)
class OwnGainOfHeads(OwnGain):
    """One that says that it mixes no heads."""

    heads_apart = True


def test_parts_of_ones_own_say_that_they_mix_no_heads():
    def shared(gain):
        overrides = {"*": {"gain": gain}}
        model = abstract_model(ModelConfig(8, 16, 1, 4, ("deltanet",), mixer_overrides=overrides, mlp_width=8))
        return split_for_mesh(model, of_shards(2))[1]

    assert jax.tree.leaves(shared(OwnGainOfHeads()))
    with pytest.raises(ValueError, match=r"^mesh.tensor=2: gain is OwnGain, a part of your own; expected heads_apart"):
        shared(OwnGain())


def test_a_model_that_is_not_its_configs_is_refused():
    model = abstract_model(ModelConfig(8, 16, 1, 4, mlp_width=8))
    model.blocks[0].mixer_norm = RMSNorm(16)
    with pytest.raises(ValueError, match=r"mixer_norm is rnnlib.*.RMSNorm, expected flax.*.RMSNorm as its"):
        split_for_mesh(model, of_shards(2))


def test_only_models_that_say_how_are_shared():
    with pytest.raises(ValueError, match=r"mesh.tensor=2: the model is Linear, expected a DecoderLM"):
        split_for_mesh(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), of_shards(2))
    parameters = split_model(abstract_model(ModelConfig(8, 16, 1, 4, mlp_width=8)))[1]
    with pytest.raises(ValueError, match=r"mesh.tensor=2: parameters do not say how they are sharded"):
        parameter_specs(parameters, of_shards(2))


def test_a_run_goes_on_with_layers_shared_out_and_back(trained):
    """By `train`: two steps on two devices that share layers, two more on one, as four on one to rounding."""
    run = trained["run"]
    np.testing.assert_allclose(run["both"], run["one"], rtol=1e-5)
    assert len(run["one"]) == 4 and run["one"] != run["both"]  # rounded in another order
    assert run["refused"].startswith(
        "mesh.tensor=2: does not divide the value heads of a mixer (--model.num-heads), 1;"
    )
