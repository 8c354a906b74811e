"""The forward by `mma.sync` and `cp.async`: interpreted, against Triton's and the scan; compiled for cards."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.kernel_benchmarks.offline.cards import CARDS
from experiments.kernel_benchmarks.offline.compiling import Kernel, compile_cases, missing_packages
from pallas_kernels import operators
from pallas_kernels.common.triton.kernel_shape import KernelShape
from pallas_kernels.delta_rule.api import gated_delta_rule
from pallas_kernels.delta_rule.config import DeltaRuleConfig, mma_config
from pallas_kernels.delta_rule.inputs import kernel_shape_of
from pallas_kernels.delta_rule.inputs import make_inputs as make_kernel_inputs
from pallas_kernels.delta_rule.mosaic_mma import fwd, wy
from pallas_kernels.delta_rule.triton.wy import WYFactors
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
    scan,
)
from tests.selection import mostly_slow

CASES = {
    "scalar_decay_two_heads_a_key": Case((1, 200, 1, 2, 128, 64)),
    "delta_rule": Case((1, 100, 2, 2, 64, 128), decay=NO),
    "no_gates_no_state": Case((1, 100, 1, 1, 64, 64), decay=NO, erase=NO, write=NO, initial_state=False),
    "packed": Case((2, 130, 1, 1, 64, 64), packed=True),
    "packed_without_decay": Case((1, 130, 1, 1, 64, 64), decay=NO, packed=True),
    "one_gate": Case((1, 100, 1, 1, 64, 64), write=SHARED),
    "extreme": Case((1, 192, 1, 1, 128, 128), extreme=True),
    "one_chunk_of_narrow_heads": Case((1, 37, 1, 1, 40, 72)),
}
ALWAYS = ("scalar_decay_two_heads_a_key", "no_gates_no_state", "packed")


def in_bfloat16(name):
    return dataclasses.replace(CASES[name], dtype=jnp.bfloat16)


def in_eager_mode(function):
    """In place of `jax.jit`: the interpreter can't run two kernels at once, as a compiled program may."""
    return function


@pytest.mark.parametrize("name", mostly_slow(CASES, ALWAYS))
def test_forward_equals_tritons(name):
    """Both round at the same places; sums differ in their order."""
    mosaic_interpreter.install()
    case = in_bfloat16(name)
    arrays, ids = make_inputs(case)
    expected = call_operator(operators, case, arrays, segment_ids=ids, config=DeltaRuleConfig())
    found = call_operator(operators, case, arrays, segment_ids=ids, backend="mosaic_mma")
    for x, y in zip(found, expected, strict=True):
        assert relative_error(x, y) < 2e-3


@pytest.mark.parametrize("name", mostly_slow(CASES, ["packed"]))
def test_forward_and_tritons_backward_are_near_the_scan_in_float64(name):
    mosaic_interpreter.install()
    found = errors(in_bfloat16(name), jit=in_eager_mode, config=mma_config(DeltaRuleConfig()))
    triton = errors(in_bfloat16(name), jit=in_eager_mode, config=DeltaRuleConfig())
    assert found.keys() == triton.keys()
    for key, error in found.items():
        assert error < 1.2 * triton[key] + 1e-3, key


def test_the_copy_engine_brings_the_same_as_threads(capsys):
    """Where there are no copies by threads, from Hopper on: with barriers, and races looked for."""
    mosaic_interpreter.install()
    arrays, ids = make_inputs(in_bfloat16("packed"))
    names = "q", "k", "v", "write_key", "erase", "write", "log_decay", "initial_state"
    inputs = make_kernel_inputs(*(arrays.get(name) for name in names), ids)  # type: ignore[arg-type]
    inputs = inputs._replace(
        **{name: x[:, :128] for name, x in inputs._asdict().items() if name != "initial_state" and x is not None}
    )
    shape = kernel_shape_of(KernelShape, inputs, online=True, scale=0.1)
    results = []
    for by_threads in (True, False):
        found = wy.wy_factors(shape, inputs, by_threads=by_threads)
        prepared = WYFactors(**{**dict.fromkeys(WYFactors._fields), **found})  # type: ignore[arg-type]
        results.append((found["inverse"], *fwd.fwd_o(shape, inputs, prepared, by_threads=by_threads)))
    for x, y in zip(*results, strict=True):
        assert jnp.all(x == y)
    assert "RACE" not in "".join(capsys.readouterr())


def test_a_copy_that_is_not_awaited_is_noticed(monkeypatch):
    """By the interpreter, which copies as late as it can: what has not come is not a number."""
    mosaic_interpreter.install()
    case = in_bfloat16("no_gates_no_state")
    arrays, _ = make_inputs(case)
    wait = fwd.wait_for_copies
    monkeypatch.setattr(fwd, "wait_for_copies", lambda running, *arrived: wait(running + 1, *arrived))
    out, _ = call_operator(operators, case, arrays, backend="mosaic_mma")
    assert jnp.any(jnp.isnan(out))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"decay": CHANNEL}, "log_decay of shape"),
        ({"write": CHANNEL}, "write of shape"),
        ({"write_key": True}, "a write key"),
        ({"dtype": jnp.float32}, "matrices of dtype float32"),
        ({"shape": (1, 70, 1, 1, 32, 64)}, "key size 32"),
        ({"shape": (1, 1, 1, 1, 64, 64)}, "a single token"),
    ],
)
def test_other_calls_are_refused(options, reason):
    case = dataclasses.replace(in_bfloat16("delta_rule"), **options)
    arrays, _ = make_inputs(case)
    with pytest.raises(NotImplementedError, match=f"mma kernels do not support {reason}"):
        gated_delta_rule(**arrays, backend="mosaic_mma")


@pytest.mark.parametrize("card", mostly_slow(["sm_80", "sm_86", "sm_89", "sm_90", "sm_120"], ["sm_120"]))
def test_forward_compiles_for_cards_without_wgmma(card):
    if reason := missing_packages():
        pytest.skip(reason)
    found = compile_cases(card, ["delta-scalar-128x128-bfloat16 forward mosaic_mma"])
    assert [kernel.name for kernel in found if isinstance(kernel, Kernel)] == [
        "delta_mma_factors_mosaic",
        "delta_mma_output_mosaic",
    ]
    for kernel in found:
        assert isinstance(kernel, Kernel)
        assert kernel.spills <= 96 and kernel.shared_memory <= CARDS[card].shared_memory, kernel


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2, 1100, 3, 6, 128, 128), (1, 4096, 2, 2, 64, 64), (4, 200, 40, 40, 128, 64)])
@pytest.mark.parametrize("decay, packed", [(NO, False), (SCALAR, True)], ids=["no_decay", "decay_packed"])
def test_on_a_gpu(shape, decay, packed):
    """Near the scan in float64 and Triton's kernels, and twenty times the same bits: a race of warps shows that way."""
    case = Case(shape, decay=decay, packed=packed, dtype=jnp.bfloat16)
    arrays, ids = make_inputs(case)
    run = jax.jit(functools.partial(call_operator, operators, case, segment_ids=ids, backend="mosaic_mma"))
    found = jax.block_until_ready(run(arrays))
    with jax.enable_x64(True):
        doubles = {name: x.astype(jnp.float64) for name, x in arrays.items()}
        expected = jax.tree.map(np.asarray, jax.jit(lambda x: scan(case, x, ids))(doubles))
    triton = jax.jit(functools.partial(call_operator, operators, case, segment_ids=ids, backend="triton"))(arrays)
    for x, near, y in zip(found, triton, expected, strict=True):
        assert relative_error(x, y) < 1e-2
        assert relative_error(x, near) < 5e-3
    for _ in range(20):
        for x, y in zip(run(arrays), found, strict=True):
            assert (x == y).all()
