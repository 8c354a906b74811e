"""The tables of the CPU's times: how they are made, and that the page shows what the results say."""

import pytest

from experiments.cpu_benchmark.job import parts
from experiments.cpu_benchmark.parts import IDLE, UNNAMED, operations, shares
from experiments.cpu_benchmark.report import FOLDER, tables

PROGRAM = """HloModule jit_step

FileNames
1 "/somewhere/rnnlib/training/step.py"
2 "/somewhere/rnnlib/layers/mixer.py"
3 "/somewhere/rnnlib/ops/chunk.py"

FunctionNames
1 "step"

FileLocations
1 {file_name_id=1 function_name_id=1 line=3}
2 {file_name_id=2 function_name_id=1 line=4}
3 {file_name_id=3 function_name_id=1 line=5}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=3}

ENTRY %main (x: f32[2]) -> f32[2] {
  %add.1 = f32[2]{0} add(%x, %x), metadata={op_name="jit(step)/add" stack_frame_id=1}
  %dot.2 = f32[2]{0} fusion(%add.1), metadata={op_name="jit(step)/transpose(jvp())/dot" stack_frame_id=3}
  %dot.3 = f32[2]{0} fusion(%dot.2), metadata={op_name="jit(step)/jvp()/dot" stack_frame_id=2}
  ROOT %copy = f32[2]{0} copy(%dot.3)
}
"""


def test_operations_belong_to_the_part_that_they_were_traced_from():
    assert operations(PROGRAM) == {
        "add.1": ("AdamW, clipping, whether all is finite", "forward"),
        "dot.2": ("delta rule", "backward"),
        "dot.3": ("projections of the mixer, decay, gain", "forward"),
        "copy": (UNNAMED, "forward"),
    }


def test_moments_are_shared_by_what_runs_in_them():
    spans = {"while": (0, 10), "a": (1, 4), "b": (2, 2), "c": (12, 1)}
    events = [{"name": name, "ts": start, "dur": length} for name, (start, length) in spans.items()]
    found = shares(events)
    assert found == {"while": 6, "a": 3, "b": 1, "c": 1, IDLE: 2}
    assert sum(found.values()) == 13


def test_seconds_of_a_run_are_those_between_its_lines():
    lines = [
        (2.0, "reading data: ..."),
        (5.0, "run runs/001: ..."),
        (5.5, "compiling; ..."),
        (9.0, "step 1/4  loss ..."),
        (10.0, "step 2/4  loss ..."),
        (13.0, "step 2/4  validation: ..."),
        (16.0, "step 3/4  loss ..."),
        (17.0, "step 4/4  loss ..."),
        (18.0, "step 4/4  validation: ..."),
        (20.0, "trained on ..."),
        (24.0, "more of them: ..."),
    ]
    found, step = parts(lines, 25.0)
    assert step == 1.0 and sum(found.values()) == pytest.approx(25.0)
    assert found == {
        "import": 2.0,
        "data, first parameters": 3.0,
        "compile the step": 4.0,
        "steps": 3.0,
        "evaluations": 4.0,
        "checkpoints, picture": 4.0,
        "sample": 4.0,
        "end": 1.0,
    }


def test_the_page_shows_what_the_results_say():
    page = (FOLDER / "README.md").read_text()
    for marker, table in tables().items():
        assert page.split(f"<!-- {marker} -->\n")[1].split(f"<!-- /{marker} -->")[0] == table
