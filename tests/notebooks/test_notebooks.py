"""The notebooks run from top to bottom, and what they were saved with is there to see."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from rnnlib.data import DataConfig
from rnnlib.models import ModelConfig
from rnnlib.training import LoggingConfig, TrainConfig, train
from tests.selection import mostly_slow

nbformat = pytest.importorskip("nbformat")

ROOT = pathlib.Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NAMES = [path.stem for path in NOTEBOOKS]
# As trained and as deep as they need to be for every cell to run.
SMALL = {"steps": 2, "layers": 2}
# A published model with other mixers than the one that its notebook was saved with, and decays per channel.
PUBLISHED = {"folder": repr(str(ROOT / "tests" / "hub" / "golden" / "kimi_linear" / "moe")), "text": repr("A text.")}

# Before and after the cells: keeps each picture's controls, then sets each to another value, which redraws it.
KEEP_CONTROLS = """
import explore

def kept(draw, _show=explore.explore, without_effect=explore.all_matter, **controls):
    _show(draw, without_effect=without_effect, **controls)
    kept.controls.extend(controls.values())

kept.controls = []
explore.explore = kept
"""
TURN_CONTROLS = """
turned = []
for control in kept.controls:
    if hasattr(control, "options"):
        others = [value for _, value in control._options_full if value != control.value][-1:]
    elif hasattr(control, "max"):
        others = [control.min if control.value == control.max else control.max]
    else:
        others = [control.value + "x"]
    for value in others:
        control.value = value
        turned.append(control)
single = {control for control in kept.controls if len(getattr(control, "options", ())) == 1}  # as the layer of the run
assert set(turned) | single == set(kept.controls)
assert len(turned) > len(kept.controls) / 2 or not kept.controls
"""
WIDGET = "application/vnd.jupyter.widget-view+json"


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def pictures(notebook):
    return [output for cell in code_cells(notebook) for output in cell.outputs if "image/png" in output.get("data", {})]


def test_the_issue_s_notebooks_are_here():
    wanted = "eigenvalues preconditioner_distributions ridge_solvers first_model your_own_mixer pretrained"
    assert set(wanted.split()) <= set(NAMES)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_saved_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    counts = [cell.execution_count for cell in code_cells(notebook)]
    assert counts == list(range(1, len(counts) + 1)), "saved after running top to bottom"
    assert len(pictures(notebook)) >= 4
    assert all(output.output_type != "error" for cell in code_cells(notebook) for output in cell.outputs)
    text = path.read_text()
    assert not re.search(r"/(root|home|Users|tmp|work)/", text), "paths of the machine that it was run on"
    assert path.stat().st_size < 1_000_000
    last = notebook.cells[-1]
    assert last.cell_type == "markdown" and "paper" in last.source, "ends in what to see, and how it compares"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a run that no notebook made: their controls of models must open it."""
    parent = tmp_path_factory.mktemp("runs")
    config = TrainConfig(
        model=ModelConfig(
            vocabulary_size=257,
            width=32,
            num_layers=2,
            num_heads=2,
            mixers=("pgdn", "sliding_window_attention"),
            window=8,
        ),
        data=DataConfig(sequence_length=32, batch_size=2, max_train_bytes=20_000, max_validation_bytes=20_000),
        logging=LoggingConfig(tensorboard=False, picture=False),
        steps=1,
    )
    train(config, parent / "001")
    return parent


ALWAYS = [path for path in NOTEBOOKS if path.stem == "pretrained"]


@pytest.mark.parametrize("path", mostly_slow(NOTEBOOKS, ALWAYS), ids=NAMES)
def test_runs_from_top_to_bottom(path, runs, tmp_path):
    runs = shutil.copytree(runs, tmp_path / "runs")  # of its own: some notebooks train another run beside it
    cells = code_cells(nbformat.read(path, as_version=4))
    parameters = [cell for cell in cells if "parameters" in cell.metadata.get("tags", ())]
    small = PUBLISHED if path.stem == "pretrained" else SMALL | {"runs": repr(str(runs))}
    for cell in parameters:
        names = [line.split(" = ")[0] for line in cell.source.splitlines()]
        assert {"steps", "folder"} & set(names) and set(names) <= set(small)
        cell.source = "\n".join(f"{name} = {small[name]}" for name in names)
    assert len(parameters) == 1
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".pytest_cache" / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.notebooks.run_cells"],
        input=json.dumps([KEEP_CONTROLS, *(cell.source for cell in cells), TURN_CONTROLS]),
        env=os.environ | cache,
        cwd=path.parent,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    _, *of_cells, redrawn = json.loads(done.stdout)
    for cell, shown in zip(cells, of_cells, strict=True):
        saved = [list(output.data) for output in cell.outputs if output.output_type == "display_data"]
        widgets = sum(WIDGET in types for types in saved)
        # What `interact` draws goes into its widget; `explore` shows a picture of its own.
        inside = widgets if "ipywidgets.interact(" in cell.source else 0
        assert sum("image/png" in types for types in shown) == sum("image/png" in types for types in saved) + inside
        assert sum(WIDGET in types for types in shown) == widgets
    if any("explore(" in cell.source for cell in cells):
        assert redrawn and [shown for shown in redrawn if "image/png" not in shown] == []
