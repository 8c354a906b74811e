"""Results as a few files that are brought back from another machine, and folded into the studies' tables here."""

import json
import pathlib
from collections.abc import Sequence

from experiments.harness.tables import Row, add_rows, read_table, table_path, write_text

MAX_BYTES = 15_000_000
"""Of one file."""
MAX_FILES = 7
"""Of results; the log is one more."""
_TAIL = 40


def write_bundle(tables: pathlib.Path, out: pathlib.Path, known: pathlib.Path) -> list[pathlib.Path]:
    """Writes the new rows of all tables under a folder into a few files.

    Args:
        tables: a folder of studies' folders, as `--output` of a study's command.
        known: likewise, with the rows that are not new.
        out: where `results-1.jsonl` and perhaps more go.

    Raises:
        ValueError: the rows do not fit.
    """
    parts: list[list[str]] = [[]]
    size = 0
    for path in sorted(tables.glob("*/results/*.jsonl")):
        old = {row["id"]: row for row in read_table(known / path.relative_to(tables))}
        for row in read_table(path):
            if old.get(row["id"]) == row:
                continue
            line = json.dumps(row) + "\n"
            if size + len(line) > MAX_BYTES:
                parts.append([])
                size = 0
            parts[-1].append(line)
            size += len(line)
    if len(parts) > MAX_FILES:
        raise ValueError(f"results in {tables} need {len(parts)} files of {MAX_BYTES} bytes; expected {MAX_FILES}")
    paths = [out / f"results-{number}.jsonl" for number in range(1, len(parts) + 1)]
    for path, lines in zip(paths, parts, strict=True):
        write_text(path, "".join(lines))
    return paths


def read_bundle(folder: pathlib.Path) -> list[Row]:
    """The rows that were brought back in a folder.

    Raises:
        ValueError: there are no results.
    """
    paths = sorted(folder.glob("results-*.jsonl"))
    if not paths:
        raise ValueError(f"{folder} has no results-*.jsonl; expected what `python -m experiments.queue` left in --out")
    return [row for path in paths for row in read_table(path)]


def fold(folders: Sequence[pathlib.Path], output: pathlib.Path) -> dict[tuple[str, str], int]:
    """Adds what was brought back to the studies' tables.

    Args:
        folders: each as `--out` left it.
        output: folder of the studies' folders.

    Returns:
        For each study and setting, how many rows are new or changed.
    """
    found: dict[tuple[str, str], list[Row]] = {}
    for folder in folders:
        for row in read_bundle(folder):
            found.setdefault((row["study"], row["setting"]), []).append(row)
    return {key: add_rows(table_path(*key, output), rows) for key, rows in found.items()}


def unpack(folder: pathlib.Path, tables: pathlib.Path) -> None:
    """Puts what an earlier call left in `--out` back into tables, so that a machine that lost them goes on."""
    if list(folder.glob("results-*.jsonl")):
        fold([folder], tables)


def tail(log: pathlib.Path) -> str:
    """The last lines of a log."""
    return "".join(log.read_text(errors="replace").splitlines(keepends=True)[-_TAIL:])
