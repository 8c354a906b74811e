"""Programs compile for TPUs; the page of what the compiler says has the committed results."""

import json

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from rnnlib.cli.main import main
from rnnlib.training import flops
from rnnlib.training.tpu import TPUS, described_tpus, missing_compiler
from tests.tpu import table
from tests.tpu.compiling import CHIPS, compile_case, names
from tests.tpu.traffic import Program, Traffic


def test_the_page_has_the_results():
    results = [json.loads(text) for text in table.RESULTS.read_text().splitlines()]
    assert {entry["case"] for entry in results} <= set(names()) and {entry["chip"] for entry in results} <= set(CHIPS)
    assert table.table(results) in table.PAGE.read_text(), "run `python -m tests.tpu.table`"


@pytest.fixture
def uncached():
    """Compiled programs are not kept: a TPU's cannot be read back where no TPU is."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


@pytest.mark.tpu
@pytest.mark.usefixtures("uncached")
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("case", names())
def test_compiles(case, chip):
    if reason := missing_compiler():
        pytest.skip(reason)
    assert compile_case(case, chip).temporary >= 0


PROGRAM = """
%body (state: (s32[], f32[8,128], f32[4,8,128])) -> (s32[], f32[8,128], f32[4,8,128]) {
  %state = (s32[], f32[8,128]{1,0:T(8,128)S(1)}, f32[4,8,128]{2,1,0:T(8,128)}) parameter(0)
  %turn = s32[] get-tuple-element(%state), index=0
  %sum = f32[8,128]{1,0:T(8,128)S(1)} get-tuple-element(%state), index=1
  %rows = f32[4,8,128]{2,1,0:T(8,128)} get-tuple-element(%state), index=2
  %zero = s32[] constant(0)
  %row = f32[1,8,128]{2,1,0:T(8,128)S(1)} dynamic-slice(%rows, %turn, %zero, %zero), dynamic_slice_sizes={1,8,128}
  %flat = f32[8,128]{1,0:T(8,128)S(1)} bitcast(%row)
  %more = f32[8,128]{1,0:T(8,128)S(1)} add(%sum, %flat), backend_config={"estimated_cycles":"10"}
  %one = s32[] constant(1)
  %next = s32[] add(%turn, %one)
  ROOT %after = (s32[], f32[8,128]{1,0:T(8,128)S(1)}, f32[4,8,128]{2,1,0:T(8,128)}) tuple(%next, %more, %rows)
}

%test (state.1: (s32[], f32[8,128], f32[4,8,128])) -> pred[] {
  %state.1 = (s32[], f32[8,128]{1,0:T(8,128)S(1)}, f32[4,8,128]{2,1,0:T(8,128)}) parameter(0)
  %turn.1 = s32[] get-tuple-element(%state.1), index=0
  %end = s32[] constant(4)
  ROOT %less = pred[] compare(%turn.1, %end), direction=LT
}

ENTRY %main (first: s32[], before: f32[8,128], all: f32[4,8,128]) -> f32[8,128] {
  %first = s32[] parameter(0)
  %before = f32[8,128]{1,0:T(8,128)} parameter(1)
  %all = f32[4,8,128]{2,1,0:T(8,128)} parameter(2)
  %start = f32[8,128]{1,0:T(8,128)S(1)} copy(%before)
  %in = (s32[], f32[8,128]{1,0:T(8,128)S(1)}, f32[4,8,128]{2,1,0:T(8,128)}) tuple(%first, %start, %all)
  %while = (s32[], f32[8,128]{1,0:S(1)}, f32[4,8,128]{2,1,0:T(8,128)}) while(%in), condition=%test, body=%body
  %last = f32[8,128]{1,0:T(8,128)S(1)} get-tuple-element(%while), index=1
  ROOT %out = f32[8,128]{1,0:T(8,128)} copy(%last)
}
"""


def test_traffic_counts_a_loops_body_as_often_as_it_runs():
    block, number = 4 * 8 * 128, 4
    once = Traffic(main=2 * block + block + 3 * number, all=4 * block + 2 * block + 3 * block + 3 * number, cycles=10)
    body = Traffic(main=block + 3 * number, all=5 * block + 3 * number, cycles=10)
    assert Program(PROGRAM).traffic(loops=False) == once
    assert Program(PROGRAM).traffic() == once + body * 3


def test_published_figures_have_the_names_of_jax():
    assert flops.PEAK["TPU v6 lite"] == 918e12 and flops.PEAK["TPU7x"] == 2307e12 / 2
    assert TPUS["v5e"].sizes() == [1, 4, 8, 16, 32, 64, 128, 256] and TPUS["tpu7x"].sizes()[:3] == [2, 8, 16]
    with pytest.raises(ValueError, match="v6e with 12 devices, expected one of"):
        described_tpus("v6e", 12)
    with pytest.raises(ValueError, match="name is 'v1', expected one of v4, v5e"):
        described_tpus("v1", 1)


@pytest.mark.tpu
@pytest.mark.parametrize("name", TPUS)
def test_described_devices_are_those_of_the_table(name):
    if reason := missing_compiler():
        pytest.skip(reason)
    for count in TPUS[name].sizes()[:4]:
        found = described_tpus(name, count)
        assert len(found) == count and {device.device_kind for device in found} == {TPUS[name].device_kind}


@pytest.mark.tpu
def test_a_step_is_planned_on_the_command_line(capsys):
    if reason := missing_compiler():
        pytest.skip(reason)
    sizes = ["--model.width", "64", "--model.num-layers", "1", "--data.sequence-length", "128"]
    assert main(["mesh", "--tpu", "v6e", "--devices", "4", "--mesh.fsdp", "2", *sizes]) == 0
    shown = capsys.readouterr().out
    assert "compiling for 4 x TPU v6 lite" in shown and "the compiled step, of 34.36" in shown
    large = ["--model.vocabulary-size", "60000000", *sizes]
    assert main(["mesh", "--tpu", "v5e", "--devices", "1", *large]) != 0
    assert "the step does not fit on 1 x TPU v5 lite: it takes" in capsys.readouterr().err
