"""What the README shows is run, and its tables are what the code says."""

import json
import pathlib
import re

from experiments.kernel_benchmarks.report import readme_table
from experiments.ridge_benchmark.report import readme_table as ridge_table
from rnnlib.layers import mixer_table

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def between(marker: str) -> str:
    return README.split(f"<!-- {marker} -->\n")[1].split(f"<!-- /{marker} -->")[0]


def test_python_blocks_run():
    """In order and in one namespace, as a reader would paste them."""
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) >= 4
    namespace: dict = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)
    assert namespace["out"].shape == namespace["v"].shape
    assert namespace["tokens"].shape == (2, 8)


def test_table_of_mixers_is_the_presets():
    assert between("mixers") == mixer_table(), "write the output of rnnlib.layers.mixer_table() into the README"


def test_cpu_figures_are_those_measured():
    rows = json.loads((ROOT / "experiments" / "cpu_benchmark" / "results.json").read_text())["rows"]
    for row in rows:
        line = f"| {row['decay']} | {row['scan_ms']:.0f} | {row['chunked_ms']:.0f} | {row['ratio']:.1f} |"
        assert line in between("cpu")


def test_gpu_figures_are_those_measured():
    results = json.loads((ROOT / "experiments" / "kernel_benchmarks" / "results" / "h200.json").read_text())
    assert between("gpu") == readme_table(results)


def test_figures_of_the_ridge_solves_are_those_measured():
    results = json.loads((ROOT / "experiments" / "ridge_benchmark" / "results" / "h200.json").read_text())
    assert between("ridge") == ridge_table(results)
