"""Builds the site: `uv run --group docs python .ci/pages.py` writes README, docs/ and the API into build/site.

The command fails where a link leads to no file of the repository, where a public name has no docstring, and on all that
the generator warns of.
"""

import importlib
import inspect
import os
import pathlib
import re
import shutil
import subprocess
import sys
import types

ROOT = pathlib.Path(__file__).parents[1]
PAGES = ROOT / "build" / "pages"
# Pages of the repository's root, under their names on the site. All of docs/ follows under its own names.
ROOT_PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}


def public_modules() -> dict[str, list[str]]:
    """The packages that export names, with these names."""
    paths = ROOT.glob("rnnlib/**/__init__.py")
    names = sorted([*(".".join(path.parent.relative_to(ROOT).parts) for path in paths), "pallas_kernels.operators"])
    modules = {name: importlib.import_module(name) for name in names}
    return {name: exported for name, module in modules.items() if (exported := exported_names(module))}


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
    return ROOT_PAGES | docs


def with_links(source: str, place: str, pages: dict[str, str], problems: list[str]) -> str:
    """A page's text with links that hold on the site.

    A link to another page leads there. Pictures come along. A file that is no page becomes its name.
    """

    def replace(match: re.Match[str]) -> str:
        image, text, target = match.groups()
        path, _, anchor = target.partition("#")
        if not path or re.match(r"[a-z]+:", path):
            return match[0]
        found = pathlib.Path(os.path.normpath((ROOT / source).parent / path))
        if not found.exists() or not found.is_relative_to(ROOT):
            problems.append(f"{source}: there is no file {target!r} in the repository")
            return match[0]
        inside = str(found.relative_to(ROOT))
        if inside in pages:
            link = os.path.relpath(pages[inside], os.path.dirname(place) or ".")
            return f"[{text}]({link}{'#' + anchor if anchor else ''})"
        if image:
            (PAGES / inside).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(found, PAGES / inside)
            return f"![{text}]({os.path.relpath(inside, os.path.dirname(place) or '.')})"
        return text if inside in text else f"{text} (`{inside}`)"

    # Code is left as it is.
    pieces = re.split(r"(```.*?```)", (ROOT / source).read_text(), flags=re.DOTALL)
    link = r"(!?)\[([^\]]*)\]\(([^)\s]+)\)"
    return "".join(piece if piece.startswith("```") else re.sub(link, replace, piece) for piece in pieces)


def write_pages() -> list[str]:
    """Writes the generator's input; returns what is wrong with it."""
    shutil.rmtree(PAGES, ignore_errors=True)
    (PAGES / "api").mkdir(parents=True)
    problems: list[str] = []
    pages = site_pages()
    for source, place in pages.items():
        path = PAGES / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(with_links(source, place, pages, problems))
    modules = public_modules()
    for module, names in modules.items():
        # The module's own text, then each public name, wherever it is defined.
        parts = [f"# {module}", f"::: {module}\n    options:\n      members: false\n      show_root_heading: false"]
        for name in sorted(names):
            value = getattr(importlib.import_module(module), name)
            if (inspect.isclass(value) or inspect.isroutine(value)) and not value.__doc__:
                problems.append(f"{module}.{name} has no docstring")
            if f"{module}.{name}" not in modules:
                parts.append(f"::: {module}.{name}")
        (PAGES / "api" / f"{module}.md").write_text("\n\n".join(parts) + "\n")
    listed = "\n".join(f"- [{module}]({module}.md)" for module in modules)
    (PAGES / "api" / "index.md").write_text(f"# API reference\n\n{listed}\n")
    return problems


def main() -> int:
    """Builds the site; returns the exit code."""
    problems = write_pages()
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict"]
    built = subprocess.run(command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})
    return 1 if problems or built.returncode else 0


if __name__ == "__main__":
    sys.exit(main())
