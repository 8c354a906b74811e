"""Packages import one way, and nothing of another package that begins with an underscore."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
# CONTRIBUTING.md's order: a package imports those of the lines after its own.
LEVELS = (
    ("rnnlib.cli",),
    ("rnnlib.eval",),
    ("rnnlib.training",),
    ("rnnlib.inference", "rnnlib.analysis", "rnnlib.data"),
    ("rnnlib.hub",),
    ("rnnlib.models",),
    ("rnnlib.layers",),
    ("rnnlib.ops",),
    ("pallas_kernels",),
)
LEVEL = {package: level for level, packages in enumerate(LEVELS) for package in packages}


def imported_names(path: pathlib.Path) -> list[str]:
    """What a file imports, wherever in it, as full names."""
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: expected absolute imports"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def package_of(name: str) -> str:
    parts = name.split(".")
    return parts[0] if parts[0] != "rnnlib" else ".".join(parts[:2])


@pytest.mark.parametrize("package", LEVEL)
def test_a_package_imports_those_below_it(package):
    wrong = []
    for path in sorted((ROOT / package.replace(".", "/")).rglob("*.py")):
        for name in imported_names(path):
            other = package_of(name)
            if other == package or not name.startswith(("rnnlib", "pallas_kernels", "experiments", "tests")):
                continue
            is_private = any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
            is_below = LEVEL.get(other, len(LEVELS)) > LEVEL[package] and other not in ("experiments", "tests")
            if is_private or not is_below or (package == "pallas_kernels"):
                wrong.append(f"{path.relative_to(ROOT)}: {name}")
    assert wrong == []


def test_every_package_has_its_place():
    packages = {f"rnnlib.{path.parent.name}" for path in (ROOT / "rnnlib").glob("*/__init__.py")}
    # Like rnnlib's modules (fields, files, tokenizers), the sandbox imports no package and serves them all.
    assert packages - {"rnnlib.sandbox"} == set(LEVEL) - {"pallas_kernels"}
