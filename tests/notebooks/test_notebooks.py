"""The notebooks run from top to bottom, and what they were saved with is there to see."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

nbformat = pytest.importorskip("nbformat")

ROOT = pathlib.Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NAMES = [path.stem for path in NOTEBOOKS]
WIDGET = "application/vnd.jupyter.widget-view+json"


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def pictures(notebook):
    return [output for cell in code_cells(notebook) for output in cell.outputs if "image/png" in output.get("data", {})]


def test_the_issue_s_notebooks_are_here():
    assert {"eigenvalues", "preconditioner_distributions", "ridge_solvers"} <= set(NAMES)


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


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_runs_from_top_to_bottom(path):
    cells = code_cells(nbformat.read(path, as_version=4))
    parameters = [cell for cell in cells if "parameters" in cell.metadata.get("tags", ())]
    for cell in parameters:  # as trained and as deep as it needs to be for every cell to run
        names = [line.split(" = ")[0] for line in cell.source.splitlines()]
        assert names in (["steps"], ["steps", "layers"])
        cell.source = "\n".join(f"{name} = {small}" for name, small in zip(names, (2, 2)))
    assert len(parameters) == 1
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".pytest_cache" / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.notebooks.run_cells"],
        input=json.dumps([cell.source for cell in cells]),
        env=os.environ | cache,
        cwd=path.parent,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for cell, shown in zip(cells, json.loads(done.stdout), strict=True):
        saved = [list(output.data) for output in cell.outputs if output.output_type == "display_data"]
        widgets = sum(WIDGET in types for types in saved)  # each draws when it is shown, into itself
        assert sum("image/png" in types for types in shown) == sum("image/png" in types for types in saved) + widgets
        assert sum(WIDGET in types for types in shown) == widgets
