"""The pages are run, their tables are what the code and the results say, and their links lead somewhere."""

import importlib
import json
import pathlib
import re
import shlex

import pytest

from experiments.kernel_benchmarks.report import readme_table
from experiments.ridge_benchmark.report import readme_table as ridge_table
from rnnlib.cli import train
from rnnlib.cli.arguments import parse
from rnnlib.cli.errors import CommandError
from rnnlib.cli.main import COMMANDS
from rnnlib.hub import FAMILIES
from rnnlib.layers import mixer_names, mixer_table, presets

ROOT = pathlib.Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
RUN = [page for page in PAGES if "```python\n" in page.read_text()]


def name_of(page: pathlib.Path) -> str:
    return str(page.relative_to(ROOT))


def between(page: pathlib.Path, marker: str) -> str:
    return page.read_text().split(f"<!-- {marker} -->\n")[1].split(f"<!-- /{marker} -->")[0]


@pytest.mark.parametrize("page", RUN, ids=name_of)
def test_python_blocks_run(page, monkeypatch, unchecked_shapes):
    """In order and in one namespace, as a reader would paste them."""
    monkeypatch.setattr(presets, "_PRESETS", dict(presets._PRESETS))  # a page may register its own
    namespace: dict = {"__name__": "page"}
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL), start=1):
        exec(compile(block, f"{name_of(page)}, block {number}", "exec"), namespace)


class UnderstoodError(Exception):
    """A command's arguments were read; it need not run."""


def test_commands_are_understood(monkeypatch):
    """Every `rnnlib ...` of a page: its flags exist and take the values that they are given."""

    def understand(*arguments, **options):
        parse(*arguments, **options)
        raise UnderstoodError

    modules = {name: importlib.import_module(module) for name, (module, _) in COMMANDS.items()}
    for module in {*modules.values(), train}:
        if hasattr(module, "parse"):
            monkeypatch.setattr(module, "parse", understand)
    lines = {line for page in PAGES for line in page.read_text().splitlines() if "`" not in line}
    commands = [shlex.split(line, comments=True) for line in lines if re.match(r"(\w+=\S+ )?rnnlib ", line)]
    wrong, model = {}, str(ROOT / "experiments" / "demonstration" / "model")
    for words in commands:
        command, *argv = words[words.index("rnnlib") + 1 :]
        # Of a run to continue the settings are read first, and there is none.
        argv = [model if word in ("MODEL", "FOLDER") else word for word in argv if word != "--resume"]
        with pytest.raises((UnderstoodError, CommandError)) as error:
            modules[command].run(argv)
        if not isinstance(error.value, UnderstoodError):
            wrong[" ".join(words)] = str(error.value)
    assert len(commands) > 40 and not wrong


def anchors(page: pathlib.Path) -> set[str]:
    """Of a page's headings, as they are shown on the web: lower case, no punctuation, hyphens for spaces."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ +(.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: pathlib.Path) -> list[str]:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        to = (page.parent / path).resolve() if path else page
        if not to.exists() or (anchor and to.suffix == ".md" and anchor not in anchors(to)):
            broken.append(target)
    return broken


def test_links_between_pages_lead_somewhere():
    pages = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *(ROOT / "experiments").rglob("*.md")]
    links = {name_of(page): broken for page in pages if (broken := broken_links(page))}
    assert len(pages) > 20 and not links


def test_every_page_is_linked_from_the_readme():
    targets = set(re.findall(r"\]\(([^)\s#]+)", README.read_text()))
    assert {name_of(page) for page in PAGES if page.parent == ROOT / "docs"} <= targets


def test_every_family_of_published_models_stands_in_the_page():
    page = (ROOT / "docs" / "hub.md").read_text()
    assert [name for name in FAMILIES if f"| `{name}` |" not in page] == []


def test_every_mixer_has_its_equation():
    page = (ROOT / "docs" / "equations.md").read_text()
    assert [name for name in mixer_names() if f"`{name}`" not in page] == []


def test_the_readme_is_short():
    assert len(README.read_text().splitlines()) <= 150


def test_table_of_mixers_is_the_presets():
    assert between(README, "mixers") == mixer_table(), "write the output of rnnlib.layers.mixer_table() into the README"


def test_cpu_figures_are_those_measured():
    rows = json.loads((ROOT / "experiments" / "cpu_benchmark" / "results.json").read_text())["rows"]
    for row in rows:
        line = f"| {row['decay']} | {row['scan_ms']:.0f} | {row['chunked_ms']:.0f} | {row['ratio']:.1f} |"
        assert line in between(ROOT / "docs" / "kernels.md", "cpu")


def test_gpu_figures_are_those_measured():
    results = json.loads((ROOT / "experiments" / "kernel_benchmarks" / "results" / "h200_hopper.json").read_text())
    assert between(ROOT / "docs" / "kernels.md", "gpu") == readme_table(results)


def test_figures_of_the_ridge_solves_are_those_measured():
    results = json.loads((ROOT / "experiments" / "ridge_benchmark" / "results" / "h200.json").read_text())
    assert between(ROOT / "docs" / "kernels.md", "ridge") == ridge_table(results)
