"""Layers and models whose matmuls of few rows are one kernel's, as while decoding on a GPU; interpreted."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from rnnlib.layers import InputProjection, MixerShape, residual
from rnnlib.layers.linear import gated_product
from rnnlib.models import DecoderLM, ModelConfig
from rnnlib.ops.skinny_gemm import skinny_matmuls
from tests.ops.test_skinny_gemm import assert_close, normal, sum_in_parts
from tests.selection import mostly_slow

# Modules that ask whether the kernel serves few rows.
SERVED = [f"rnnlib.layers.{name}" for name in ("input_projection", "linear", "residual")] + ["rnnlib.ops.skinny_gemm"]


def serve(monkeypatch):
    """Kernels serve as they would on a GPU, interpreted; returns the list of their names, which calls fill."""
    names = []

    def serves(name, condition):
        def answer(*arguments, **options):
            if condition(*arguments):
                names.append(name)
                return True
            return False

        return answer

    few = serves("skinny_matmuls", lambda x, kernels: x.shape[-2] == 1)
    for module in SERVED:
        monkeypatch.setattr(f"{module}.skinny_kernel_supports", few)
    one = serves("one_token", lambda calls: all(x.x.shape[1] == 1 and x.initial_state is not None for x, _ in calls))
    monkeypatch.setattr("rnnlib.layers.qkv_branch.one_launch_supports", one)
    norm = serves("rms_norm", lambda x, scale, *others: x.shape[1] == 1)
    for module in ("rnnlib.layers.normalization", "rnnlib.layers.output_projection", "rnnlib.layers.residual"):
        monkeypatch.setattr(f"{module}.norm_kernel_supports", norm)
    return names


def test_maps_of_one_input_share_a_launch(monkeypatch):
    shape, (x,) = MixerShape(8, 1, 1, 8, 8), normal((3, 1, 8))
    names = {"first": 8, "second": 3, "apart": 4, "biased": 5}
    maps = {name: shape.project(n, use_bias=name == "biased", rngs=nnx.Rngs(n)) for name, n in names.items()}
    projection = InputProjection(shape, maps, shared=["first", "second"])

    def columns():
        inputs = projection(x)
        return [inputs[name] for name in names]

    plain = columns()
    served = serve(monkeypatch)
    launches = []
    for module in ("input_projection", "linear"):
        monkeypatch.setattr(
            f"rnnlib.layers.{module}.skinny_matmuls",
            lambda x, kernels, **options: launches.append(len(kernels)) or skinny_matmuls(x, kernels, **options),
        )
    assert_close(columns(), plain, rtol=1e-5, atol=1e-6)
    assert launches == [3] and served  # the biased one by itself
    projection.separate("second")
    assert projection.columns == (("first", 0, 8),) and projection.second.kernel.shape == (8, 3)
    assert_close(columns(), plain, rtol=1e-5, atol=1e-6)
    projection.fuse()
    assert projection.second is None and projection.kernel.shape == (8, 64)
    assert_close(columns(), plain, rtol=1e-5, atol=1e-6)
    gate, up = (nnx.Linear(8, 6, use_bias=False, dtype=jnp.float32, rngs=nnx.Rngs(i)) for i in range(2))
    assert_close(gated_product(x, gate, up), nnx.silu(gate(x)) * up(x), rtol=1e-5, atol=1e-6)
    assert launches == [3, 3, 3, 2]


class OwnBlock(nnx.Module):
    """A layer of one's own, which knows arrays alone."""

    def __init__(self, block):
        self.block = block

    def __call__(self, x, **options):
        return self.block(2 * x, **options)


@pytest.mark.parametrize("parts", mostly_slow([False, True], [True]))
@pytest.mark.parametrize(
    "mixers", mostly_slow([("gated_deltanet",), ("kda", "attention"), ("mamba2",)], [("kda", "attention")])
)
def test_a_model_decodes_the_same_by_kernels(mixers, parts, monkeypatch):
    config = ModelConfig(
        vocabulary_size=17, width=16, num_layers=4 if parts else 2, num_heads=2, mlp_width=24, mixers=mixers
    )
    if parts:
        sum_in_parts(monkeypatch)

    def split(config):
        model = DecoderLM(config, rngs=nnx.Rngs(0))
        if parts:
            model.blocks[2] = OwnBlock(model.blocks[2])
            model.blocks[2].mixer = model.blocks[2].block.mixer
        return nnx.split(model)

    graph, state = split(config)
    tokens = jnp.arange(14).reshape(2, 7) % 17

    def logits(graph):
        model = nnx.merge(graph, state)
        _, cache = model.extend(tokens[:, :4], model.init_cache(2, 8))
        found = []
        for i in range(4, 7):
            one, cache = jax.jit(model.extend)(tokens[:, i : i + 1], cache)
            found.append(one)
        return jnp.concatenate(found, axis=1), cache

    plain = logits(graph)
    served = serve(monkeypatch)
    # Another configuration of the same computation: what was traced of the first is not taken again.
    start = {config.mixers[0]: {"initializer.scale": 0.4 if parts else 0.3}}
    launches = []
    of_sum = residual.rms_norm_of_sum
    monkeypatch.setattr(
        residual, "rms_norm_of_sum", lambda *arrays, **options: launches.append(1) or of_sum(*arrays, **options)
    )
    other = split(config.replace(mixer_overrides=start))[0]
    assert_close(logits(other), plain, rtol=1e-4, atol=1e-4)
    assert {"skinny_matmuls", "one_token", "rms_norm"} <= set(served)
    assert bool(launches) == parts
