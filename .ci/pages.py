"""Builds the site: `uv run --group docs python .ci/pages.py` writes it into build/site.

The site is README, docs/, the notebooks, the studies and the API reference. The command fails where a link leads
nowhere, a public name has no docstring or no entry in the reference, and on all that the generator warns of.
"""

import importlib
import inspect
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import types
from typing import Any

import latex2mathml.converter
import nbconvert
import nbformat
from check_site import problems_of_site

ROOT = pathlib.Path(__file__).parents[1]
PAGES = ROOT / "build" / "pages"
SITE = ROOT / "build" / "site"
CONFIG = ROOT / "build" / "mkdocs.yml"
# Pages of the repository's root, under their names on the site. All of docs/ follows under its own names.
ROOT_PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
# The navigation: pages by their places on the site, in the order of a reader. Studies and modules follow by themselves,
# and a page that stands nowhere here is a guide.
GROUPS = {
    "Start": ["index.md", "install.md", "notebooks/first_model.md", "fla.md", "glossary.md"],
    "Guides": [
        "training.md",
        "decoding.md",
        "evaluation.md",
        "published.md",
        "hub.md",
        "mixers.md",
        "notebooks/your_own_mixer.md",
        "devices.md",
        "scale.md",
        "tpu.md",
        "notebooks/pretrained.md",
        "notebooks/eigenvalues.md",
        "notebooks/preconditioner_distributions.md",
        "notebooks/ridge_solvers.md",
    ],
    "Reference": ["equations.md", "numerics.md", "kernels.md", "triton.md"],
    "Studies": ["studies/README.md"],
    "Project": ["contributing.md", "changelog.md", "security.md", "citing.md"],
}


def public_modules() -> dict[str, list[str]]:
    """The packages that export names, with these names."""
    paths = ROOT.glob("rnnlib/**/__init__.py")
    names = sorted(".".join(path.parent.relative_to(ROOT).parts) for path in paths)
    modules = {name: importlib.import_module(name) for name in names}
    found = {name: exported for name, module in modules.items() if (exported := exported_names(module))}

    def is_shown_by_its_parent(name: str) -> bool:  # an operator's own package
        parent = modules.get(name.rpartition(".")[0])
        return parent is not None and all(getattr(parent, n, None) is getattr(modules[name], n) for n in found[name])

    operators = importlib.import_module("pallas_kernels.operators")
    kernels = [getattr(operators, name) for name in operators.__all__]
    shown = {name: exported for name, exported in found.items() if not is_shown_by_its_parent(name)}
    return shown | {module.__name__: own_names(module) for module in kernels}


def own_names(module: types.ModuleType) -> list[str]:
    """The public functions and classes that a module defines."""
    named = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    return [name for name, value in named.items() if getattr(value, "__module__", None) == module.__name__]


def exported_names(module: types.ModuleType) -> list[str]:
    """What a package exports: `__all__`, or for those that import their public names as themselves, these."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    named = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    ours = ("rnnlib.", "pallas_kernels.")
    return [name for name, value in named.items() if str(getattr(value, "__module__", "")).startswith(ours)]


def site_pages() -> dict[str, str]:
    """Pages of the repository by path, each with its place on the site."""
    docs = {str(path.relative_to(ROOT)): str(path.relative_to(ROOT / "docs")) for path in ROOT.glob("docs/**/*.md")}
    studies = {str(path.relative_to(ROOT)): str(path.relative_to(ROOT)) for path in ROOT.glob("experiments/**/*.md")}
    notebooks = {f"notebooks/{path.name}": f"notebooks/{path.stem}.md" for path in ROOT.glob("notebooks/*.ipynb")}
    root = {source: place for source, place in ROOT_PAGES.items() if (ROOT / source).exists()}
    return root | docs | {path: re.sub("^experiments", "studies", place) for path, place in studies.items()} | notebooks


def with_links(text: str, source: str, place: str, pages: dict[str, str], problems: list[str]) -> str:
    """A page's text with links that hold on the site.

    A link to another page leads there. Pictures come along. A file that is no page becomes its name.
    """

    def replace(match: re.Match[str]) -> str:
        image, text, target = match.groups()
        path, _, anchor = target.partition("#")
        made = (PAGES / place).parent / path  # a notebook's picture
        if not path or re.match(r"[a-z]+:", path) or (image and made.exists()):
            return match[0]
        found = pathlib.Path(os.path.normpath((ROOT / source).parent / path))
        if not found.exists() or not found.is_relative_to(ROOT):
            problems.append(f"{source}: there is no file {target!r} in the repository")
            return match[0]
        if found.is_dir() and (found / "README.md").exists():
            found /= "README.md"
        inside = str(found.relative_to(ROOT))
        if inside in pages:
            link = os.path.relpath(pages[inside], os.path.dirname(place) or ".")
            return f"[{text}]({link}{'#' + anchor if anchor else ''})"
        if image:
            (PAGES / inside).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(found, PAGES / inside)
            return f"![{text}]({os.path.relpath(inside, os.path.dirname(place) or '.')})"
        return text if inside in text else f"{text} (`{inside}`)"

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", replace, text)


def with_mathematics(text: str) -> str:
    r"""Text whose TeX between dollars, `$x$` and `$$x$$`, is MathML, which browsers show without a script."""

    def convert(match: re.Match[str]) -> str:
        shown = match[1] is not None
        tex = (match[1] or match[2]).strip()
        if shown:
            return latex2mathml.converter.convert(tex, display="block")
        # In a span: Markdown takes a line that begins with an element which it does not know for a block.
        return f"<span>{latex2mathml.converter.convert(tex)}</span>"

    return re.sub(r"\$\$(.+?)\$\$|(?<![\w$\\])\$([^\s$](?:[^$\n]*[^\s$])?)\$(?![\w$])", convert, text, flags=re.DOTALL)


def outside_of_code(text: str, change: Any) -> str:
    """A text that is changed where it is no code."""
    pieces = re.split(r"(^ *```.*?^ *```|`[^`\n]+`)", text, flags=re.DOTALL | re.MULTILINE)
    return "".join(piece if i % 2 else change(piece) for i, piece in enumerate(pieces))


def notebook_page(source: str, place: str) -> str:
    """A notebook as a page: its text, code and pictures; controls need a notebook that runs."""
    notebook = nbformat.read(ROOT / source, as_version=4)
    for cell in notebook.cells:
        outputs = cell.get("outputs", [])
        cell["outputs"] = [o for o in outputs if "application/vnd.jupyter.widget-view+json" not in o.get("data", {})]
    body, resources = nbconvert.MarkdownExporter().from_notebook_node(notebook)
    for name, content in resources["outputs"].items():
        path = PAGES / place.removesuffix(".md") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        body = body.replace(f"]({name})", f"]({pathlib.Path(place).stem}/{name})")
    return f"{body}\n\n*This page is `{source}`. Run it to turn its controls.*\n"


def reference_page(module: str, names: list[str], problems: list[str]) -> str:
    """The module's own text, then each public name under that name, wherever it is defined.

    A function is looked up where it is defined: `rnnlib.ops.gated_delta_rule` is a function, and a folder as well.
    """
    parts = [f"# {module}", f"::: {module}\n    options:\n      members: false\n      show_root_heading: false"]
    imported = importlib.import_module(module)
    for name in sorted(names, key=str.lower):
        value, public = getattr(imported, name), f"{module}.{name}"
        if inspect.ismodule(value):
            continue
        is_defined = inspect.isclass(value) or inspect.isroutine(value)
        if is_defined and not value.__doc__:
            problems.append(f"{public} has no docstring")
        defined = f"{value.__module__}.{value.__qualname__}" if is_defined else public
        heading = f"      heading: {name}\n      toc_label: {name}\n"
        parts.append(f'<a id="{public}"></a>\n\n::: {defined}\n    options:\n{heading}'.rstrip())
    return "\n\n".join(parts) + "\n"


def write_pages() -> list[str]:
    """Writes the generator's input; returns what is wrong with it."""
    shutil.rmtree(PAGES, ignore_errors=True)
    (PAGES / "api").mkdir(parents=True)
    problems: list[str] = []
    pages = site_pages()
    for source, place in pages.items():
        text = notebook_page(source, place) if source.endswith(".ipynb") else (ROOT / source).read_text()
        links = outside_of_code_blocks(text, lambda t, s=source, p=place: with_links(t, s, p, pages, problems))
        path = PAGES / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(outside_of_code(links, with_mathematics))
    shutil.copy(ROOT / "docs" / "site.css", PAGES)
    modules = public_modules()
    for module, names in modules.items():
        (PAGES / "api" / f"{module}.md").write_text(reference_page(module, names, problems))
    write_navigation(sorted(pages.values()), list(modules))
    return problems


def outside_of_code_blocks(text: str, change: Any) -> str:
    """A text that is changed where it is in no block of code; a link's text may hold code within a line."""
    pieces = re.split(r"(^ *```.*?^ *```)", text, flags=re.DOTALL | re.MULTILINE)
    return "".join(piece if i % 2 else change(piece) for i, piece in enumerate(pieces))


def write_navigation(places: list[str], modules: list[str]) -> None:
    """Writes the site's settings: those of mkdocs.yml and the navigation."""
    groups: dict[str, list[Any]] = {
        name: [place for place in group if place in places] for name, group in GROUPS.items()
    }
    studies = [place for place in places if place.startswith("studies/") and place != "studies/README.md"]
    groups["Studies"] += [place for place in studies if place.count("/") == 2 and place.endswith("README.md")]
    groups["Reference"].append({"API": [{module: f"api/{module}.md"} for module in modules]})
    listed = {place for group in groups.values() for place in group if isinstance(place, str)}
    groups["Guides"] += sorted(set(places) - listed - set(studies))  # a page that no group names is a guide
    settings = {
        "INHERIT": "../mkdocs.yml",
        "docs_dir": str(PAGES),
        "site_dir": str(SITE),
        "nav": [{name: group} for name, group in groups.items()],
        "not_in_nav": "\n".join(sorted(set(studies) - listed)),
    }
    CONFIG.write_text(json.dumps(settings, indent=1))  # JSON is YAML


def main() -> int:
    """Builds the site; returns the exit code."""
    problems = write_pages()
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--config-file", str(CONFIG)]
    built = subprocess.run(command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})
    if not built.returncode:
        names = {
            module: [n for n in names if not inspect.ismodule(getattr(importlib.import_module(module), n))]
            for module, names in public_modules().items()
        }
        problems += problems_of_site(SITE, names)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems or built.returncode else 0


if __name__ == "__main__":
    sys.exit(main())
