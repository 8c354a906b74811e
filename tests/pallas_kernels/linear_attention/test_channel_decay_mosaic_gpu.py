"""Linear attention under a decay of one number a channel in Mosaic GPU, interpreted, against the scan in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels.common.config import MosaicConfig
from pallas_kernels.common.mosaic_gpu import SIDE
from pallas_kernels.delta_rule.config import DeltaRuleConfig, mosaic_config
from pallas_kernels.delta_rule.mosaic_gpu import bwd_dqkg_channel
from pallas_kernels.delta_rule.mosaic_gpu.rounded_rests import WIDTH, refined, rounded_and_rests
from pallas_kernels.linear_attention import api
from rnnlib import ops
from tests.pallas_kernels import mosaic_interpreter
from tests.pallas_kernels.cases import CHANNEL, NO, Case, errors
from tests.pallas_kernels.test_lowering import H200
from tests.selection import mostly_slow

BASE: dict[str, Any] = {"online": False, "decay": CHANNEL, "dtype": jnp.bfloat16}
CASES = {
    "decay_alone": Case((1, 100, 1, 1, 128, 128), write=NO, **BASE),
    "two_heads_a_key_in_splits": Case((1, 250, 1, 2, 128, 128), segments=2, **BASE),
    "documents_in_splits_gate_by_channel": Case(
        (1, 250, 1, 1, 128, 128), segments=3, packed=True, write=CHANNEL, **BASE
    ),
    "extreme_documents": Case((1, 130, 1, 2, 128, 128), extreme=True, packed=True, **BASE),
    "mild_decay_over_ten_chunks": Case((1, 600, 1, 1, 128, 128), shift=9.0, write=NO, **BASE),
    "few_tokens_strong_decay": Case((1, 5, 1, 1, 128, 128), shift=-8.0, **BASE),
    "heads_of_other_sizes": Case((2, 70, 1, 1, 80, 72), initial_state=False, **BASE),
    "values_of_256": Case((1, 100, 1, 1, 128, 256), **BASE),
}
ONE_GROUP = ("two_heads_a_key_in_splits", "few_tokens_strong_decay")
"""Those whose programs have 64 value channels; others have 128."""


@pytest.mark.parametrize("name", mostly_slow(CASES, ("documents_in_splits_gate_by_channel", "extreme_documents")))
def test_results_and_gradients_are_those_of_the_scan(name, monkeypatch, capsys):
    mosaic_interpreter.install()
    monkeypatch.setattr(api.delta_rule, "is_hopper", lambda: True)
    case = CASES[name]
    config = mosaic_config(
        DeltaRuleConfig(num_splits=case.segments), 1 if name in ONE_GROUP else 1000, 132, online=False
    )
    # Not compiled: the interpreter can't run two kernels at once, as a compiled program may.
    found = errors(case, jit=lambda function: function, config=config, backend="mosaic")
    # The gate is in the values, whose rounded gradient its own is a sum of.
    assert found.pop("d_write", 0.0) < 5e-3 and all(error < 4e-3 for error in found.values()), found
    assert "RACE" not in "".join(capsys.readouterr())


def test_all_stages_but_those_of_extreme_chunks_are_in_mosaic_gpu():
    many, few = (mosaic_config(DeltaRuleConfig(), programs, 132, online=False) for programs in (256, 64))
    for name in ("maps", "output", "states", "offsets", "reverse"):
        assert getattr(many, name).mosaic == MosaicConfig(num_compute_warpgroups=2, num_stages=3)
        assert getattr(few, name).mosaic == MosaicConfig(num_compute_warpgroups=1, num_stages=3)
    assert many.gradients.mosaic == many.prepare.mosaic == MosaicConfig(2, num_stages=2, num_ctas=132)

    def loss(x):
        out, state = ops.linear_attention(**x, implementation="mosaic")
        return jnp.sum(out.astype(jnp.float32) ** 2) + jnp.sum(state)

    x = dict.fromkeys(("q", "k", "v", "log_decay"), jnp.zeros((1, 64, 2, 128), jnp.bfloat16))
    with jax.sharding.use_abstract_mesh(H200):
        text = jax.jit(jax.grad(loss)).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert (text.count("mosaic_gpu_v2"), text.count("xla.gpu.triton")) == (5, 4)


def test_rests_leave_a_sixteenth_of_what_rounding_takes():
    random = np.random.default_rng(0)
    x = np.float32(random.choice([-1, 1], (SIDE, 128)) * 10.0 ** random.uniform(-30, 30, (SIDE, 128)))
    ties = np.float32(1 + np.arange(1, SIDE + 1) / 256)  # every second one is half-way between two bfloat16 numbers
    x[0], x[1] = np.tile(ties, 2), np.tile(-ties, 2)
    rounded, rests = rounded_and_rests(jnp.asarray(x))
    assert rounded.dtype == jnp.bfloat16 and [(y.shape, y.dtype) for y in rests] == [((SIDE, WIDTH), jnp.int32)] * 2
    last_digit = 2.0 ** (np.frexp(x)[1] - 8)
    assert np.all(np.abs(np.float64(rounded) - x) <= last_digit / 2)
    found = np.concatenate([refined(rounded[:, i * SIDE :][:, :SIDE], y) for i, y in enumerate(rests)], axis=1)
    assert np.all(np.abs(np.float64(found) - x) <= last_digit / 32)
    # All bits, as a card has it.
    assert jnp.all(
        jnp.isnan(rounded_and_rests(lax.bitcast_convert_type(jnp.full((SIDE, SIDE), 0x7FFFFFFF), jnp.float32))[0])
    )


@pytest.mark.slow
def test_the_decays_gradient_is_exact_where_little_decays(monkeypatch):
    mosaic_interpreter.install()
    monkeypatch.setattr(api.delta_rule, "is_hopper", lambda: True)
    case = Case((1, 260, 1, 1, 128, 128), shift=9.0, write=NO, initial_state=True, **BASE)
    config = mosaic_config(DeltaRuleConfig(), 1000, 132, online=False)
    found = errors(case, jit=lambda function: function, config=config, backend="mosaic")["d_log_decay"]
    monkeypatch.setattr(bwd_dqkg_channel, "refined", lambda rounded, rests: rounded.astype(jnp.float32))
    without = errors(case, jit=lambda function: function, config=config, backend="mosaic")["d_log_decay"]
    assert found < 1.6e-3 and without > 1.4 * found


def test_other_heads_are_refused_with_the_reason(monkeypatch):
    monkeypatch.setattr(api.delta_rule, "is_hopper", lambda: True)

    def reason(keys, values, length=64, dtype=jnp.bfloat16):
        q, v = (jnp.zeros((1, length, 2, size), dtype) for size in (keys, values))
        return api.unsupported_reason(q, q, v, q, backend="mosaic")

    assert reason(128, 128) is reason(80, 256) is None
    assert reason(64, 128) == "key size 64 with value size 128 (65 to 128 each)"
    assert reason(128, 192) == "key size 128 with value size 192 (65 to 128 each)"
    assert "single token" in reason(128, 128, length=1) and "float32" in reason(128, 128, dtype=jnp.float32)


def test_they_are_chosen_for_more_chunks_than_those_of_one_decay_a_head():
    def faster(length, channels=True, values=128):
        v = jnp.zeros((1, length, 8, values), jnp.bfloat16)
        return api.is_mosaic_faster(v, v if channels else v[..., 0])

    assert faster(8192) and not faster(8191)
    assert faster(2048, channels=False) and not faster(2047, channels=False)
    assert faster(4096, values=256) and not faster(4096)  # two heads that share a key


def test_a_call_takes_them_by_itself():
    def kernels(length):
        x = dict.fromkeys(("q", "k", "v", "log_decay"), jax.ShapeDtypeStruct((1, length, 8, 128), jnp.bfloat16))
        with jax.sharding.use_abstract_mesh(H200):
            traced = jax.jit(lambda x: ops.linear_attention(**x)[0]).trace(x)
        return traced.lower(lowering_platforms=("cuda",)).as_text().count("mosaic_gpu_v2")

    assert (kernels(4096), kernels(8192)) == (0, 3)
