"""The text that the demonstration model learns: the documentation that Python's standard library ships."""

import ast
import inspect
import itertools
import json
import pathlib
import sysconfig
from collections.abc import Iterator
from pydoc_data.topics import topics

_LEFT_OUT = {"site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "pydoc_data", "__pycache__"}
_LONGEST_ANSWER = 400
_NAMED = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def docstrings() -> Iterator[tuple[str, str]]:
    """Qualified names and documentation of the standard library's modules, classes and functions, in order."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if _LEFT_OUT & set(parts) or any(part.startswith("_") and part != "__init__" for part in parts):
            continue
        module = ".".join(part for part in parts if part != "__init__")
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError, OSError):
            continue
        yield from _of_node(tree, module)


def _of_node(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Module | _NAMED):
        text = ast.get_docstring(node)
        if text and len(text) > 20 and text.isascii():
            yield name, inspect.cleandoc(text)
        for child in node.body:
            if isinstance(child, _NAMED) and not child.name.startswith("_"):
                yield from _of_node(child, f"{name}.{child.name}")


def documents() -> list[str]:
    """Texts: the language's reference by topic, and each module's documentation in one."""
    found = [text.strip() for text in topics.values()]
    for _, entries in itertools.groupby(docstrings(), key=lambda entry: entry[0].partition(".")[0]):
        found.append("\n\n".join(f"{name}\n{text}" for name, text in entries))
    return found


def conversations() -> list[dict[str, list[dict[str, str]]]]:
    """Questions about names of the standard library, answered by the first paragraph of their documentation."""
    found = []
    for name, text in docstrings():
        answer = " ".join(text.split("\n\n")[0].split())
        if not 20 < len(answer) <= _LONGEST_ANSWER or ":param" in answer:
            continue
        found += [
            {"messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]}
            for ask in (f"What is {name}?", f"What does {name.rpartition('.')[2]} of {name.rpartition('.')[0]} do?")
            if "." in name or ask.startswith("What is")
        ]
    return found


def write(folder: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """Writes both as JSON lines: a document a line, and a conversation a line."""
    texts, chats = folder / "text.jsonl", folder / "chat.jsonl"
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents()))
    chats.write_text("".join(json.dumps(row) + "\n" for row in conversations()))
    return texts, chats
