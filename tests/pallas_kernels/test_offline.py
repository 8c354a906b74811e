"""Kernels as machine code, without a GPU: what an H200 runs spills nothing new, and every card's memory suffices."""

import json
import pathlib

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from experiments.kernel_benchmarks.offline.__main__ import RESULTS
from experiments.kernel_benchmarks.offline.cards import CARDS
from experiments.kernel_benchmarks.offline.cases import cases
from experiments.kernel_benchmarks.offline.compiling import (
    Kernel,
    compile_cases,
    missing_packages,
    read_mosaic_report,
    read_report,
)
from experiments.kernel_benchmarks.offline.report import card_table, forward_table, objections, short_card_table
from pallas_kernels import operators
from pallas_kernels.common.triton.backend import shared_memory
from pallas_kernels.delta_rule.config import DeltaRuleConfig, default_config

# All cases take an hour: `python -m experiments.kernel_benchmarks.offline`. These have the most used code.
COMPILED = {
    "delta-scalar-128x128-bfloat16 few heads": 11,
    "delta-channel-64x64-bfloat16 one token": 1,
    "short convolution bfloat16, norm": 2,
    "linear-scalar-64x64-bfloat16 seven tokens": 5,  # XLA's own kernels beside them are compiled, too
    "delta-scalar-128x128-bfloat16 few heads mosaic": 10,
    "delta-scalar-128x128-bfloat16 forward alone one gate mosaic": 1,
}
OTHERS = {
    "preconditioner write key 128 bfloat16": 4,
    "preconditioner write key 128 bfloat16 mosaic": 2,
    "delta-scalar-128x128-bfloat16 a program each mosaic": 6,  # without segments
    "linear-channel-128x128-bfloat16 few heads grouped packed mosaic": 12,
}
MOST_USED = {f"delta-{decay}-128x128-bfloat16 few heads" for decay in ("scalar", "channel")}
ROOT = pathlib.Path(__file__).parents[2]
LOG = """ptxas info    : Compiling entry function 'delta_output' for 'sm_90a'
ptxas info    : (C7510) Potential Performance Loss: wgmma instructions are serialized in function 'delta_output'
    120 bytes stack frame, 8 bytes spill stores, 116 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers
ptxas info    : Compiling entry function 'loop_fusion' for 'sm_90a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 0 barriers
ptxas info    : Compiling entry function 'delta_output__1' for 'sm_90a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers
"""
LAUNCHES = """1: kCustomKernel [source] loop_fusion grid: [4, 1, 1] threads: [4, 1, 1]  shared_memory: 0 bytes
2: kCustomKernel [prev=001 (1)] delta_output grid: [4, 1, 1] threads: [128, 1, 1]  shared_memory: 109056 bytes
3: kCustomKernel [prev=002 (1)] delta_output__1 grid: [4, 1, 1] threads: [128, 1, 1]  shared_memory: 512 bytes
"""
# A kernel that is called twice, another, and a second one of that name.
MOSAIC = """%1 = stablehlo.custom_call @mosaic_gpu_v2(%a) {backend_config = "", mhlo.backend_config = {module = "x"}}
%2 = stablehlo.custom_call @mosaic_gpu_v2(%1) {backend_config = "", mhlo.backend_config = {module = "x"}}
%3 = stablehlo.custom_call @mosaic_gpu_v2(%2) {backend_config = "", mhlo.backend_config = {module = "y"}}
%4 = stablehlo.custom_call @mosaic_gpu_v2(%3) {backend_config = "", mhlo.backend_config = {module = "z"}}
"""
ASSEMBLED = """ptxas warning : Registers are spilled to local memory in function 'NAME', 8 bytes spill stores
ptxas info    : (C7519) warpgroup.arrive is injected in around line 2 by compiler to allow use of registers in 'NAME'
ptxas info    : Compiling entry function 'NAME' for 'sm_90a'
    8 bytes stack frame, 8 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 8 bytes cumulative stack size, 1 bytes smem
"""
WAITING = (
    "ptxas info    : (C7512) wgmma.mma_async instructions are serialized due to registers in the function 'NAME'\n"
)
RESOURCES = """Resources(smem_scratch_bytes=1024, tmem_scratch_cols=0, barrier_counts=Counter({
Barrier(arrival_count=256, num_barriers=3, orders_tensor_core=False): 1,
Barrier(arrival_count=128, num_barriers=1, orders_tensor_core=False): 7}), scoped_gmem_semaphores={})
"""


def mosaic_dumps(**reports):
    files = {f"{stem}.ptxas": text.replace("NAME", f"{stem[:-3]}_mosaic_gpu_kernel") for stem, text in reports.items()}
    return files | {f"{stem}.resources.txt": RESOURCES for stem in reports}


def record(card, name, *numbers):
    return {"card": card, "case": "some call", "kernels": {name: numbers}}


@pytest.mark.parametrize(
    "wanted",
    [
        pytest.param(COMPILED, id="most_used"),
        pytest.param(OTHERS, id="others", marks=pytest.mark.slow),
    ],
)
def test_kernels_compile_for_an_h200_and_spill_nothing_new(wanted):
    if reason := missing_packages():
        pytest.skip(reason)
    found = compile_cases("sm_90", list(wanted))
    kernels = [result for result in found if isinstance(result, Kernel)]
    assert kernels == found
    assert {name: sum(kernel.case == name for kernel in kernels) for name in wanted} == wanted
    with_mosaic = {kernel.case for kernel in kernels if "_mosaic" in kernel.name}
    assert with_mosaic == {name for name in wanted if name.endswith("mosaic")}
    assert all(16 <= kernel.registers <= 255 for kernel in kernels)
    assert max(kernel.shared_memory for kernel in kernels) > 64 * 1024
    wrong = []
    for kernel in kernels:
        numbers = [kernel.registers, kernel.spills, kernel.shared_memory, kernel.serialized]
        wrong += objections({"card": "sm_90", "case": kernel.case, "kernels": {kernel.name: numbers}})
    assert not wrong


def test_what_was_compiled_for_all_cards_is_as_it_should_be():
    results = json.loads((RESULTS / "offline.json").read_text())
    records = results["records"]
    assert [line for record in records for line in objections(record)] == []
    for card in CARDS:
        found = {record["case"] for record in records if record["card"] == card}
        assert MOST_USED <= found <= set(cases(card, every=True)), "compile the cases again"
    assert card_table(results) in (ROOT / "docs" / "kernels.md").read_text()
    assert short_card_table(results) in (ROOT / "README.md").read_text()
    assert forward_table(results) in (ROOT / "docs" / "triton.md").read_text()


def test_reports_are_read():
    wide, second = read_report("a call", ["delta_output", "delta_output"], LOG, LAUNCHES)
    assert wide == Kernel("a call", "delta_output", 255, 8, 109056, True)
    assert second == Kernel("a call", "delta_output__1", 40, 0, 512, False)
    with pytest.raises(ValueError, match="said nothing of delta_states"):
        read_report("a call", ["delta_output", "delta_states"], LOG, LAUNCHES)


def test_reports_of_mosaic_kernels_are_read():
    dumps = mosaic_dumps(delta_output_10=ASSEMBLED, delta_output_09=ASSEMBLED, delta_states_11=WAITING + ASSEMBLED)
    kernels = read_mosaic_report("a call", MOSAIC, dumps)
    assert kernels == [
        Kernel("a call", "delta_output_mosaic", 168, 8, 1024 + 8 * (3 + 7), False),
        Kernel("a call", "delta_output_mosaic__1", 168, 8, 1104, False),
        Kernel("a call", "delta_states_mosaic", 168, 8, 1104, True),
    ]
    of_own_numbers = {name.replace("11.res", "04.res").replace("10.res", "12.res"): x for name, x in dumps.items()}
    assert read_mosaic_report("a call", MOSAIC, of_own_numbers) == kernels
    assert read_mosaic_report("a call", "no such kernel", {}) == []
    with pytest.raises(ValueError, match=r"3 kernels and reported 1 \(delta_states_11\)"):
        read_mosaic_report("a call", MOSAIC, mosaic_dumps(delta_states_11=ASSEMBLED))
    with pytest.raises(ValueError, match="delta_output_10 lacks"):
        read_mosaic_report("a call", MOSAIC, {k: x for k, x in dumps.items() if k != "delta_output_10.resources.txt"})
    with pytest.raises(ValueError, match="delta_output_10 lacks"):
        read_mosaic_report("a call", MOSAIC, dumps | {"delta_output_10.ptxas": WAITING})


def test_mosaic_kernels_are_compiled_for_hopper_cards_alone():
    have = {card for card in CARDS for name in cases(card, every=True) if name.endswith("mosaic")}
    assert have == {"sm_90"}


def test_kernels_that_spill_wait_or_do_not_fit_are_objected_to():
    assert objections(record("sm_90", "delta_states", 255, 0, 227 * 1024, False)) == []
    assert "232449 bytes of shared memory" in objections(record("sm_90", "delta_states", 8, 0, 232449, False))[0]
    assert "serialized" in objections(record("sm_90", "delta_states", 8, 0, 0, True))[0]
    assert "spills 4000 bytes" in objections(record("sm_90", "delta_states", 255, 4000, 0, False))[0]
    assert len(objections(record("sm_86", "delta_states", 255, 4000, 100 * 1024, False))) == 1  # no room; spills may be
    refused = {"card": "sm_86", "case": "some call", "refused": "RuntimeError: no"}
    assert objections(refused) == ["sm_86, some call: RuntimeError: no"]
    assert objections(refused | {"refused": "f: the Triton kernels do not support x"}) == []


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "uv sync --group offline" in missing_packages()


@pytest.mark.parametrize(
    ("kind", "kibibytes"),
    [("NVIDIA H100 80GB HBM3", 227), ("NVIDIA A100-SXM4-80GB", 163), ("NVIDIA A10", 99), ("NVIDIA L40S", 99)],
)
def test_a_described_card_has_the_shared_memory_of_its_kind(kind, kibibytes):
    device = AbstractDevice(device_kind=kind, num_cores=None, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        assert shared_memory() == kibibytes * 1024


def test_small_cards_refuse_ridge_solves_whose_products_do_not_fit():
    x, narrow = (jnp.zeros((1, 64, 1, size), jnp.bfloat16) for size in (128, 64))
    device = AbstractDevice(device_kind="NVIDIA A10", num_cores=None, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        assert operators.ridge.unsupported_reason(x, x) is None
        assert "shared memory" in operators.ridge.unsupported_reason(x, x, adaptive=False)
        assert "shared memory" in operators.ridge.unsupported_reason(x, x, precision="split")
        assert operators.ridge.unsupported_reason(narrow, narrow, precision="split") is None
    assert operators.ridge.unsupported_reason(x, x, precision="split") is None


def test_small_cards_have_defaults_of_their_own_where_others_do_not_fit():
    small = 99 * 1024
    assert default_config(128, "bfloat16") == DeltaRuleConfig()
    assert default_config(128, "bfloat16", shared_memory=small).gradients.block == 32
    assert default_config(256, "bfloat16", 2, small).output.num_stages == 1
    assert default_config(256, "bfloat16", 2, small).num_splits == 2
    assert default_config(256, "bfloat16").output.num_stages == 2
