"""Stages in Mosaic GPU, interpreted with races looked for, against Triton's and the scan in float64."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import operators
from pallas_kernels.attention.mosaic_gpu import bwd as attention_bwd
from pallas_kernels.common.config import KernelConfig, MosaicConfig
from pallas_kernels.common.decay import FORGOTTEN
from pallas_kernels.common.mosaic_gpu import SIDE, split
from pallas_kernels.common.triton.kernel_shape import KernelShape
from pallas_kernels.delta_rule.api import gated_delta_rule
from pallas_kernels.delta_rule.config import DeltaRuleConfig, mosaic_config
from pallas_kernels.delta_rule.inputs import kernel_shape_of
from pallas_kernels.delta_rule.inputs import make_inputs as make_kernel_inputs
from pallas_kernels.delta_rule.mosaic_gpu import bwd_tile_scheduler, pipeline, wy_tile_scheduler
from pallas_kernels.delta_rule.mosaic_gpu import stages as mosaic_stages
from pallas_kernels.delta_rule.mosaic_gpu.pipeline import DIGIT_COLUMNS, refined, rounded_and_digits
from pallas_kernels.delta_rule.triton.split_sequence import split_transitions
from pallas_kernels.delta_rule.triton.wy import wy_factors
from pallas_kernels.linear_attention.mosaic_gpu import sums as linear_sums
from rnnlib import ops
from tests.pallas_kernels import mosaic_interpreter
from tests.pallas_kernels.cases import (
    CHANNEL,
    NO,
    SCALAR,
    SHARED,
    Case,
    call_operator,
    errors,
    make_inputs,
    relative_error,
    value_and_gradients,
)
from tests.pallas_kernels.test_lowering import H200, arguments, distinct_kernels
from tests.selection import mostly_slow

SIZES = (128, 128)
# Gated DeltaNet-2; its layer gives gates in float32.
CHANNEL_GATES: dict[str, Any] = dict(decay=CHANNEL, erase=CHANNEL, write=CHANNEL, gate_dtype=jnp.float32)
CASES = {
    "scalar_decay": Case((1, 100, 1, 1, *SIZES)),
    "delta_rule_of_two_heads_a_key": Case((1, 100, 1, 2, *SIZES), decay=NO),
    "no_gates_no_state": Case((1, 100, 1, 1, *SIZES), decay=NO, erase=NO, write=NO, initial_state=False),
    "write_key_three_segments": Case((1, 250, 1, 1, *SIZES), write_key=True, segments=3),
    "packed": Case((2, 128, 1, 1, *SIZES), packed=True),
    "extreme": Case((1, 192, 1, 1, *SIZES), extreme=True, segments=2),
    "channel_decay": Case((1, 130, 1, 2, *SIZES), decay=CHANNEL, segments=2),
    "channel_decay_write_key_packed": Case((1, 100, 1, 1, *SIZES), decay=CHANNEL, write_key=True, packed=True),
    "extreme_channel_decay": Case((1, 100, 1, 1, *SIZES), decay=CHANNEL, extreme=True),
    "mild_channel_decay_without_gates": Case((1, 100, 1, 1, *SIZES), decay=CHANNEL, erase=NO, write=NO, shift=3.0),
    "channel_erase": Case((1, 100, 1, 1, *SIZES), erase=CHANNEL),
    "channel_write": Case((1, 100, 1, 1, *SIZES), write=CHANNEL, gate_dtype=jnp.float32),
    "channel_gates": Case((1, 100, 1, 1, *SIZES), **CHANNEL_GATES),
    "channel_gates_two_heads_a_key_segments": Case((1, 250, 1, 2, *SIZES), **CHANNEL_GATES, segments=2),
    "channel_gates_in_bfloat16_packed": Case(
        (1, 100, 1, 1, *SIZES), packed=True, **(CHANNEL_GATES | {"gate_dtype": None})
    ),
    "channel_gates_write_key": Case((1, 100, 1, 1, *SIZES), write_key=True, **CHANNEL_GATES),
    "extreme_channel_gates": Case((1, 100, 1, 1, *SIZES), extreme=True, **CHANNEL_GATES),
    "channel_gates_under_one_decay_a_head": Case((1, 100, 1, 1, *SIZES), **(CHANNEL_GATES | {"decay": SCALAR})),
    "channel_erase_under_channel_decay": Case((1, 100, 1, 1, *SIZES), decay=CHANNEL, erase=CHANNEL),
    "one_gate": Case((1, 100, 1, 1, *SIZES), write=SHARED),
    "one_gate_delta_rule_segments": Case((1, 250, 1, 1, *SIZES), decay=NO, write=SHARED, segments=3),
    "one_gate_channel_decay": Case((1, 130, 1, 2, *SIZES), decay=CHANNEL, write=SHARED, segments=2),
    "one_gate_write_key_packed": Case((1, 130, 1, 1, *SIZES), write=SHARED, write_key=True, packed=True),
    "one_gate_extreme": Case((1, 130, 1, 1, *SIZES), decay=CHANNEL, write=SHARED, extreme=True),
    "strong_decay": Case((1, 100, 1, 1, *SIZES), shift=-12.0),
    # Few tokens forget nearly all, and the chunk has one reference row all the same.
    "five_tokens_with_strong_channel_decay": Case((1, 5, 1, 1, *SIZES), decay=CHANNEL, shift=-8.0),
    "narrow_heads": Case((1, 70, 1, 1, 80, 72), segments=2),
}
GROUPS = {"scalar_decay": 2, "delta_rule_of_two_heads_a_key": 2, "write_key_three_segments": 2, "channel_write": 2}
GROUPS |= {"extreme": 2, "one_gate_delta_rule_segments": 2}
GROUPS |= {"packed": 2, "channel_gates": 2, "one_gate_channel_decay": 2, "one_gate_write_key_packed": 2}


def eagerly(function):
    """In place of `jax.jit`: the interpreter can't run two kernels at once, as a compiled program may."""
    return function


def schedule_of(case: Case, groups: int) -> DeltaRuleConfig:
    return mosaic_config(
        DeltaRuleConfig(num_splits=case.segments),
        1 if groups == 1 else 1000,
        132,
        has_write_key=case.write_key,
        has_channel_decay=case.decay == CHANNEL,
        has_channel_erase=case.erase == CHANNEL,
        has_channel_write=case.write == CHANNEL,
        has_wide_erase=case.gate_dtype == jnp.float32,
        has_values=case.write == SCALAR,
    )


# Gates by channel without extreme chunks and one gate for both have tests of their own below.
ALWAYS = ("delta_rule_of_two_heads_a_key", "channel_decay_write_key_packed", "extreme_channel_gates", "narrow_heads")
ALWAYS += ("five_tokens_with_strong_channel_decay", "packed")


@pytest.mark.parametrize("name", mostly_slow(CASES, ALWAYS))
def test_stages_equal_those_in_triton(name, capsys):
    """Both round at the same places but one; sums differ in their order.

    Under a channel-wise decay the first stage does not round the keys that pairs are written with, where Triton's does.
    """
    mosaic_interpreter.install()
    case = dataclasses.replace(CASES[name], dtype=jnp.bfloat16)
    arrays, ids = make_inputs(case)
    batch, _, _, value_heads, key_size, value_size = case.shape
    shapes = arrays["v"].shape, (batch, value_heads, key_size, value_size)

    def run(schedule):
        return value_and_gradients(
            lambda **x: call_operator(operators, case, x, segment_ids=ids, config=schedule),
            arrays,
            *shapes,
            jit=eagerly,
        )

    expected = run(DeltaRuleConfig(num_splits=case.segments))
    found = run(schedule_of(case, GROUPS.get(name, 1)))
    if case.write == SHARED:  # whose gradient is another sum, of other rounded numbers
        gates = found[1].pop("erase"), expected[1].pop("erase")
        # Among the hundred tokens of "one_gate" the last ones make most of the difference.
        assert relative_error(*gates) < (1.2e-2 if name == "one_gate" else 8e-3)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        # A sum at a tie rounds to the other bfloat16 number, 4e-3 off; few are. Without a decay that is not forgotten.
        assert relative_error(x, y) < {CHANNEL: 3e-3, NO: 2e-3}.get(case.decay, 1e-3)
    assert "RACE" not in "".join(capsys.readouterr())


WHOLE = {
    "one_gate": Case((1, 300, 1, 2, *SIZES), write=SHARED),
    "one_gate_delta_rule": Case((1, 130, 1, 1, *SIZES), decay=NO, write=SHARED),
    "scalar_decay": Case((2, 100, 1, 1, *SIZES)),
    "no_gates_no_state": Case((1, 130, 1, 1, *SIZES), decay=NO, erase=NO, write=NO, initial_state=False),
    "strong_decay": Case((1, 130, 1, 1, *SIZES), shift=-12.0, initial_state=False),
}


@pytest.mark.parametrize("name", mostly_slow(WHOLE, ("one_gate", "no_gates_no_state")))
def test_the_whole_forward_in_one_kernel(name, monkeypatch, capsys):
    """Without a gradient, beside Triton's stages; nothing else of the backend runs."""
    mosaic_interpreter.install()
    monkeypatch.setattr(mosaic_stages, "wy_factors", None)
    case = dataclasses.replace(WHOLE[name], dtype=jnp.bfloat16)
    arrays, _ = make_inputs(case)
    expected = call_operator(operators, case, arrays, config=DeltaRuleConfig())
    found = call_operator(operators, case, arrays, config=schedule_of(case, 2))
    for x, y in zip(found, expected, strict=True):
        assert relative_error(x, y) < (2e-3 if case.decay == NO else 1e-3)
    assert "RACE" not in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("decay", "gate"),
    [(SCALAR, SCALAR), pytest.param(CHANNEL, SCALAR, marks=pytest.mark.slow), (CHANNEL, CHANNEL)],
)
@pytest.mark.parametrize("packed", mostly_slow([False, True], [True]))
def test_first_stage_equals_that_in_triton(decay, gate, packed, capsys):
    """With writes that enlarge the state, a chunk that is extreme, and more chunks than warpgroups."""
    mosaic_interpreter.install()
    case = Case((1, 192, 1, 2, *SIZES), decay=decay, erase=gate, write_key=packed, packed=packed, dtype=jnp.bfloat16)
    arrays, ids = make_inputs(case)
    erase = arrays["erase"].at[:, ::16].set(2.5)
    log_decay = arrays["log_decay"].at[:, 70:128, 0].add(-4.0)
    given = (arrays[name] for name in ("q", "k", "v"))
    x = make_kernel_inputs(*given, arrays.get("write_key"), erase, None, log_decay, None, ids)
    problem = kernel_shape_of(KernelShape, x, online=True, scale=0.1, num_splits=3)
    expected = wy_factors(problem, x, KernelConfig())
    groups = 2 if decay == CHANNEL else 3
    launch = KernelConfig(mosaic=MosaicConfig(groups, num_stages=2, num_ctas=1))
    found = mosaic_stages.wy_factors(problem, x, launch)
    assert jnp.max(expected.growth) > 0.3
    if decay == CHANNEL:
        assert 0 < jnp.sum(expected.extreme) < expected.extreme.size
    for name, wanted in expected._asdict().items():
        assert (wanted is None) == (getattr(found, name) is None)
        # The pairs with rounded keys are Triton's alone; sums of the log decay have 16 bits of each number here.
        limit = 5e-3 if name == "inverse" else 1e-4 if name in ("kept", "front", "tail") else 2e-3
        assert wanted is None or relative_error(getattr(found, name), wanted) < limit, name
    assert "RACE" not in "".join(capsys.readouterr())


@pytest.mark.parametrize("stage", mostly_slow(["reverse", "gradients"], ["reverse"]))
def test_a_shared_gate_has_its_gradient_where_one_stage_is_triton(stage):
    """The reverse pass in Mosaic GPU finds all of it; without that both stages find a part, as in Triton."""
    mosaic_interpreter.install()
    case = dataclasses.replace(CASES["one_gate"], dtype=jnp.bfloat16)
    whole = schedule_of(case, 1)
    mixed = dataclasses.replace(whole, **{stage: KernelConfig()})
    found, expected = (
        errors(case, jit=eagerly, config=x) for x in (mixed, DeltaRuleConfig() if stage == "reverse" else whole)
    )
    assert found == pytest.approx(expected, rel=1e-2)


def test_digits_beyond_bfloat16_leave_an_eighth_of_its_last_one():
    sizes = 10.0 ** np.random.default_rng(0).uniform(-30, 30, (SIDE, SIDE))
    x = np.float32(np.random.default_rng(1).choice([-1, 1], (SIDE, SIDE)) * sizes)
    ties = np.float32(1 + np.arange(1, SIDE + 1) / 256)  # every second one is half-way between two bfloat16 numbers
    x[0], x[1] = ties, -ties
    rounded, digits = rounded_and_digits(jnp.asarray(x))
    assert (rounded.dtype, digits.dtype, digits.shape) == (jnp.bfloat16, jnp.int16, (SIDE, DIGIT_COLUMNS))
    last_digit = 2.0 ** (np.frexp(x)[1] - 8)
    assert np.all(np.abs(np.float64(rounded) - x) <= last_digit / 2)
    assert np.all(np.abs(np.float64(refined(rounded, digits)) - x) <= last_digit / 8)
    nothing = jnp.zeros((SIDE, SIDE))
    assert np.all(np.abs(refined(*rounded_and_digits(nothing))) < 1e-38)
    assert np.all(np.isnan(refined(*rounded_and_digits(nothing + jnp.nan))))


@pytest.mark.parametrize("rounds", [True, False])
def test_two_parts_are_a_number_but_for_its_last_digits(rounds):
    sizes = 10.0 ** np.random.default_rng(0).uniform(-30, 30, 10000)
    x = np.float32(np.random.default_rng(1).choice([-1, 1], 10000) * sizes)
    high, low = split(jnp.asarray(x), rounds=rounds)
    assert high.dtype == low.dtype == jnp.bfloat16
    assert np.all(
        np.abs(np.float64(high) + np.float64(low) - x) <= 2.0 ** (-17 if rounds else -16) * np.abs(np.float64(x))
    )
    assert rounds or np.all(np.abs(np.float64(high)) <= np.abs(x))


@pytest.mark.parametrize("decay", mostly_slow([SCALAR, CHANNEL], [SCALAR]))
def test_a_shared_gates_gradient_is_as_exact_as_in_triton(decay, monkeypatch):
    """Without the further digits of what tokens write it would not be, on these inputs."""
    mosaic_interpreter.install()
    seed = {SCALAR: 2, CHANNEL: 0}[decay]
    # In float32: a rounded gradient is off by that alone.
    case = Case((1, 128, 1, 1, *SIZES), decay=decay, write=SHARED, dtype=jnp.bfloat16, gate_dtype=jnp.float32)
    schedule = schedule_of(case, 1)
    in_triton, found = (errors(case, seed, jit=eagerly, config=x)["d_erase"] for x in (DeltaRuleConfig(), schedule))
    assert found < 1.1 * in_triton
    fwd_h = mosaic_stages.fwd_h

    def without_digits(*arguments, with_digits):
        assert with_digits
        return fwd_h(*arguments, with_digits=False)

    monkeypatch.setattr(mosaic_stages, "fwd_h", without_digits)
    assert errors(case, seed, jit=eagerly, config=schedule)["d_erase"] > 2 * found


@pytest.mark.parametrize("decay", mostly_slow([SCALAR, CHANNEL], [SCALAR]))
def test_a_log_decay_in_bfloat16_has_its_gradient_in_bfloat16(decay):
    mosaic_interpreter.install()
    case = Case((1, 70, 1, 1, *SIZES), decay=decay, dtype=jnp.bfloat16)
    arrays, _ = make_inputs(case)
    arrays["log_decay"] = arrays["log_decay"].astype(jnp.bfloat16)

    def gradient(schedule):
        return value_and_gradients(
            lambda **x: gated_delta_rule(**x, config=schedule),
            arrays,
            arrays["v"].shape,
            (1, 1, *SIZES),
            jit=eagerly,
        )[1]["log_decay"]

    found, expected = gradient(schedule_of(case, 1)), gradient(DeltaRuleConfig())
    assert found.dtype == expected.dtype == jnp.bfloat16
    assert relative_error(found, expected) < 1e-3


@pytest.mark.parametrize(
    ("decay", "groups"),
    [
        pytest.param(SCALAR, 1, marks=pytest.mark.slow),
        (SCALAR, 2),
        (CHANNEL, 1),
        pytest.param(NO, 2, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_maps_of_segments_equal_those_in_triton(decay, groups, capsys):
    """With a segment that forgets, one that does not, one that is shorter, and writes that enlarge the state."""
    mosaic_interpreter.install()
    arrays, _ = make_inputs(Case((1, 320, 1, 2, *SIZES), decay=decay, dtype=jnp.bfloat16))
    erase = arrays["erase"].at[:, ::16].set(2.5)
    log_decay: Any = arrays.get("log_decay")
    if decay is not None:
        is_first = (jnp.arange(320) < 128).reshape(1, 320, *[1] * (log_decay.ndim - 2))
        log_decay = jnp.where(is_first, log_decay, 0.1 * log_decay).at[:, :, 1].multiply(0.2)
    x = make_kernel_inputs(
        arrays["q"], arrays["k"], arrays["v"], None, erase, arrays["write"], log_decay, arrays["initial_state"], None
    )
    problem = kernel_shape_of(KernelShape, x, online=True, scale=1.0, num_splits=3)
    prepared: Any = wy_factors(problem, x, KernelConfig())
    expected: Any = split_transitions(problem, x, prepared, KernelConfig())
    found: Any = mosaic_stages.split_transitions(
        problem, x, prepared, KernelConfig(mosaic=MosaicConfig(groups, num_stages=2))
    )
    assert relative_error(found.offset, expected.offset) < 1e-3

    def transition(maps):
        return maps.transition.astype(jnp.float32) + maps.transition_rest.astype(jnp.float32)

    assert relative_error(transition(found), transition(expected)) < 1e-3
    if decay is None:
        assert found.survival is None
    else:
        assert jnp.max(prepared.growth) > 0.3
        assert relative_error(found.survival, expected.survival) < 1e-6
        is_forgotten = expected.survival <= FORGOTTEN
        assert is_forgotten.any() and not is_forgotten.all()
        assert (jnp.any(transition(found) != 0, axis=(3, 4)) == ~is_forgotten).all()
    assert "RACE" not in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    "gates",
    mostly_slow([{}, {"write": SHARED}, CHANNEL_GATES], [CHANNEL_GATES]),
    ids=["scalar", "shared", "channel"],
)
def test_errors_stay_within_rounding(gates):
    mosaic_interpreter.install()
    case = Case((1, 192, 1, 1, *SIZES), dtype=jnp.bfloat16, segments=3, **gates)
    found = errors(case, jit=eagerly, config=schedule_of(case, 2))
    assert all(error < 1e-2 for error in found.values()), found
    # What goes through the inverse is not rounded before.
    assert found["out"] < 3e-3 and found["state"] < 2.4e-3 and found["d_v"] < 2.8e-3, found


def test_warpgroups_ask_for_no_more_registers_than_their_program_starts_with():
    """What is asked for beyond these is waited for, for ever; no interpreter shows it."""
    programs = [[attention_bwd._REGISTERS[0]] * 2 + [attention_bwd._REGISTERS[1]] * 2]
    programs.append([bwd_tile_scheduler._REGISTERS[0]] * 2 + [bwd_tile_scheduler._REGISTERS[1]])
    passes = pipeline._REGISTERS, pipeline._REGISTERS_WITH_SCORES, pipeline.REGISTERS_WITH_FACTORS
    for table in (*passes, wy_tile_scheduler._REGISTERS, linear_sums._REGISTERS):
        programs += [[computing] * n + others for n, (computing, *others) in table.items()]
    for program in programs:
        at_start = min(65536 // (128 * len(program)), 255) // 8 * 8  # of a thread, as the assembler gives them
        assert sum(program) <= at_start * len(program) and all(count % 8 == 0 for count in program)
        # The first compute, and ask for more; the others give back: to come down to more is an illegal instruction.
        assert all(count <= at_start for count in program if count != program[0])


def test_a_program_has_more_channels_where_heads_fill_the_card():
    few = mosaic_config(DeltaRuleConfig(), 128, 132)
    assert few.output.mosaic == MosaicConfig(
        num_compute_warpgroups=1, num_stages=3
    ) and few.reverse.mosaic == MosaicConfig(1, 2)
    many = mosaic_config(DeltaRuleConfig(), 256, 132)
    assert many.reverse.mosaic == MosaicConfig(num_compute_warpgroups=2, num_stages=2)
    # Both stages agree on where the queries' scores are found.
    assert many.output.mosaic == MosaicConfig(2, 3, scores_in_output=True)
    assert many.prepare.mosaic == MosaicConfig(3, num_stages=1, scores_in_output=True)
    split = mosaic_config(DeltaRuleConfig(num_splits=2), 256, 132)
    assert split.output.mosaic == MosaicConfig(2, 3, scores_in_output=True)
    # One kernel is the whole forward where nothing else takes the first stage's results.
    assert many.forward.mosaic == many.output.mosaic
    others: Any = {"has_documents": True}, {"has_write_key": True}, {"has_channel_decay": True}
    without = few, split, *(mosaic_config(DeltaRuleConfig(), 256, 132, **facts) for facts in others)
    assert all(config.forward.mosaic is None for config in without)
    # Its tiles of two blocks of values would take more shared memory than there is.
    assert mosaic_config(DeltaRuleConfig(), 256, 132, has_channel_decay=True).reverse.mosaic == MosaicConfig(1, 2)
    # Without the values there is room.
    one_gate = mosaic_config(DeltaRuleConfig(), 256, 132, has_channel_decay=True, has_values=False)
    assert one_gate.reverse.mosaic == one_gate.offsets.mosaic == MosaicConfig(2, 2)
    gates = {"has_channel_decay": True, "has_channel_erase": True, "has_channel_write": True, "has_values": False}
    wide = mosaic_config(DeltaRuleConfig(), 256, 132, has_wide_erase=True, **gates)
    assert wide.output.mosaic == wide.states.mosaic == wide.reverse.mosaic == MosaicConfig(2, 2)
    assert wide.gradients.mosaic == MosaicConfig(num_compute_warpgroups=2, num_stages=1, num_ctas=132)
    # One block of channels beside such a gate's in float32 and a write key in the first stage, else two.
    assert wide.prepare.mosaic == MosaicConfig(num_compute_warpgroups=2, num_stages=2, num_ctas=132)
    both = mosaic_config(DeltaRuleConfig(), 256, 132, has_wide_erase=True, has_write_key=True, **gates)
    assert both.prepare.mosaic == MosaicConfig(num_compute_warpgroups=2, num_stages=1, num_ctas=132)
    one_decay = mosaic_config(DeltaRuleConfig(), 256, 132, has_channel_erase=True)
    assert one_decay.gradients.mosaic is None and one_decay.output.mosaic is not None
    assert few.maps.mosaic == MosaicConfig(2, 2)  # it has twice as many programs
    assert (
        few.prepare.mosaic == MosaicConfig(num_compute_warpgroups=3, num_stages=1) and one_decay.prepare.mosaic is None
    )
    assert mosaic_config(DeltaRuleConfig(), 128, 132, has_write_key=True).prepare.mosaic == MosaicConfig(
        num_compute_warpgroups=2, num_stages=1
    )
    assert DeltaRuleConfig().output.mosaic is None


def lowered(function, *x):
    with jax.sharding.use_abstract_mesh(H200):
        return jax.jit(function).trace(*x).lower(lowering_platforms=("cuda",)).as_text()


def loss(x, implementation=None):
    out, state = ops.gated_delta_rule(**x, implementation=implementation)
    return jnp.sum(out.astype(jnp.float32) ** 2) + jnp.sum(state)


@pytest.mark.parametrize(
    ("decay", "channels", "here", "triton_kernels"),
    [
        pytest.param("none", False, 5, 1, marks=pytest.mark.slow),
        pytest.param("scalar", False, 5, 1, marks=pytest.mark.slow),
        ("channel", False, 5, 5),
        pytest.param("channel", True, 5, 4, marks=pytest.mark.slow),
        ("scalar", True, 3, 3),
    ],
)
@pytest.mark.parametrize("implementation", mostly_slow([None, "mosaic"], [None]))
def test_hopper_cards_take_them_unasked(decay, channels, here, triton_kernels, implementation):
    """The first stage, output, states, the gradient's pass, and the gradients of arguments.

    Triton has the list of extreme chunks and their first and last stages, the last of an erase gate by channel under
    one decay a head, and zeros of closed gates (of one number a token).
    """
    x = arguments(decay, channels, jnp.bfloat16, length=64)
    text = lowered(jax.grad(lambda x: loss(x, implementation)), x)
    assert text.count("mosaic_gpu_v2") == here
    assert text.count("xla.gpu.triton") == triton_kernels


def test_layers_share_their_kernels():
    """A deeper program has no more kernels to compile."""

    def of_layers(count):
        def loss(x):
            out = x["v"]
            for _ in range(count):
                out, _ = ops.gated_delta_rule(**x | {"v": out})
            return jnp.sum(out.astype(jnp.float32))

        text = lowered(jax.grad(loss), arguments("scalar", False, jnp.bfloat16, length=64))
        return len(distinct_kernels(text))

    assert of_layers(6) == of_layers(3)


def test_hopper_cards_take_what_is_named():
    x = arguments("scalar", False, jnp.bfloat16, length=64)
    for implementation, here, triton_kernels in (("mosaic", 5, 1), ("triton", 0, 7)):
        text = lowered(jax.grad(lambda x, name=implementation: loss(x, name)), x)
        assert (text.count("mosaic_gpu_v2"), text.count("xla.gpu.triton")) == (here, triton_kernels)


def test_the_first_forward_of_a_recomputed_block_is_that_without_a_gradient():
    """One kernel for its first stage and output, where the call has such; nothing of it is kept."""
    x = jax.ShapeDtypeStruct((2, 128, 72, 128), jnp.bfloat16)
    row = jax.ShapeDtypeStruct(x.shape[:3], jnp.float32)
    arrays = {"q": x, "k": x, "v": x, "beta": row, "log_decay": row}

    def kernels(recomputed):
        run = recomputed(lambda x: loss(x, "mosaic"))
        return lowered(jax.value_and_grad(run), arrays).count("mosaic_gpu_v2")

    assert (kernels(lambda run: run), kernels(jax.checkpoint)) == (5, 6)


def test_hopper_cards_take_those_of_segments_unasked():
    """Maps of splits and of the gradient, too; both of their compositions and zeros of closed gates are Triton's."""
    x = arguments("scalar", False, jnp.bfloat16, length=4096)
    text = lowered(jax.grad(lambda x: loss(x, "mosaic")), x)
    assert text.count("mosaic_gpu_v2") == 7
    assert text.count("xla.gpu.triton") == 3


@pytest.mark.parametrize("length", mostly_slow([256, 4096], [4096]), ids=["one_segment", "segments"])
@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=str)
def test_they_lower_on_rows_split_over_devices(kind, length):
    """By the operators themselves on an Explicit axis, else within `jax.shard_map`, which checks what varies."""
    mesh = AbstractMesh((2,), ("x",), axis_types=(kind,), abstract_device=H200.abstract_device)
    x = arguments("scalar", False, jnp.bfloat16, length=length)
    sharding = NamedSharding(mesh, P("x")) if kind == AxisType.Explicit else None
    x = {name: jax.ShapeDtypeStruct((2, *a.shape[1:]), a.dtype, sharding=sharding) for name, a in x.items()}
    gradient = jax.grad(loss)
    if kind == AxisType.Auto:
        gradient = jax.shard_map(gradient, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=True)
    with jax.sharding.use_abstract_mesh(mesh):
        text = jax.jit(gradient).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") >= (4 if length == 256 else 6)


@pytest.mark.parametrize("decay", mostly_slow(["scalar", "channel"], ["scalar"]))
def test_they_lower_on_tokens_split_over_devices(decay):
    """The map of a shard is composed of its segments', in both directions, and no stage runs twice."""
    mesh = AbstractMesh((2,), ("x",), axis_types=(AxisType.Auto,), abstract_device=H200.abstract_device)
    x = arguments(decay, False, jnp.bfloat16, length=512)
    by_token = {name: P(None, "x") for name in x} | {"initial_state": P()}

    def split_loss(x):
        with ops.context_axis("x"):
            return jax.lax.psum(loss(x), "x")

    gradient = jax.shard_map(
        jax.grad(split_loss), mesh=mesh, in_specs=({name: by_token[name] for name in x},), out_specs=by_token
    )
    with jax.sharding.use_abstract_mesh(mesh):
        text = jax.jit(gradient).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 7
    assert text.count('name = "delta_compose_segments') == 2


def test_they_lower_under_vmap_and_in_64_bits(x64):
    x = arguments("scalar", False, jnp.bfloat16)
    x = {name: jax.ShapeDtypeStruct((2, *a.shape), a.dtype) for name, a in x.items()}
    text = lowered(jax.grad(lambda x: jax.vmap(lambda y: loss(y, "mosaic"))(x).sum()), x)
    assert text.count("mosaic_gpu_v2") >= 3


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"dtype": jnp.float32}, "matrices of dtype float32"),
        ({"size": (64, 64)}, "key size 64 with value size 64"),
        ({"length": 1}, "a single token"),
    ],
    ids=str,
)
def test_other_calls_stay_in_triton(changed, reason):
    given = {"dtype": jnp.bfloat16, "size": (128, 128), "length": 256} | changed
    x = arguments("scalar", False, given["dtype"], given["size"], given["length"])
    assert "mosaic_gpu_v2" not in lowered(loss, x)
    with pytest.raises(NotImplementedError, match=reason):
        lowered(lambda x: loss(x, "mosaic"), x)


def test_other_devices_and_backends_are_refused():
    x = {name: jnp.zeros(a.shape, a.dtype) for name, a in arguments("scalar", False, jnp.bfloat16, length=64).items()}
    with pytest.raises(NotImplementedError, match="Hopper"):
        loss(x, "mosaic")
    with pytest.raises(ValueError, match="backend is 'cutlass', expected 'triton', 'mosaic' or 'mosaic_mma'"):
        gated_delta_rule(x["q"], x["k"], x["v"], backend="cutlass")


@pytest.mark.gpu
@pytest.mark.parametrize("length, value_heads", [(1100, 4), (200, 72)], ids=["in_segments", "more_than_processors"])
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name, length, value_heads):
    """Twice the same, too, bit by bit."""
    _, _, heads, own_heads, *sizes = CASES[name].shape
    shape = (1, length, value_heads * heads // own_heads, value_heads, *sizes)
    case = dataclasses.replace(CASES[name], dtype=jnp.bfloat16, shape=shape)
    found = errors(case, backend="mosaic")
    assert all(error < 1e-2 for error in found.values()), found
    arrays, ids = make_inputs(case)
    run = jax.jit(
        jax.grad(lambda x: jnp.sum(call_operator(operators, case, x, segment_ids=ids, backend="mosaic")[0] ** 2))
    )
    for x, y in zip(jax.tree.leaves(run(arrays)), jax.tree.leaves(run(arrays)), strict=True):
        assert (x == y).all()
