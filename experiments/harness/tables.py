"""Result tables: a file of JSON lines for each study and setting, a row for each run, one reader for all.

Every row has `study`, `setting`, an `id` that is unique in its table, and an `environment` (device, versions, commit,
command, date). Rows are added under a lock, and a file is written whole or not at all: a reader never sees half of it.
"""

import contextlib
import fcntl
import functools
import json
import os
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

EXPERIMENTS = pathlib.Path(__file__).parents[1]

Row = dict[str, Any]


def table_path(study: str, setting: str, output: pathlib.Path = EXPERIMENTS) -> pathlib.Path:
    """The table of a study at a setting, under the folder of all studies' results."""
    return output / study / "results" / f"{setting}.jsonl"


def read_table(path: pathlib.Path) -> Sequence[Row]:
    """All rows, in the order of their ids; none where there is no table. They are shared: do not change them.

    Raises:
        ValueError: a line is no row; the message names the file and the line.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        return ()
    return _parsed(path, (status.st_ino, status.st_mtime_ns, status.st_size))


@functools.lru_cache(maxsize=64)
def _parsed(path: pathlib.Path, state: tuple[int, int, int]) -> Sequence[Row]:
    del state  # of the file: another one is another entry
    return tuple(_rows(path))


def _rows(path: pathlib.Path) -> Iterator[Row]:
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: expected JSON, got {line[:40]!r} ({error.msg})") from error
        missing = [name for name in ("study", "setting", "id", "environment") if name not in row]
        if missing:
            raise ValueError(f"{path}, line {number}: expected a row with {', '.join(missing)}, got {line[:40]!r}")
        yield row


def add_rows(path: pathlib.Path, rows: Iterable[Row]) -> int:
    """Adds rows to a table; one whose id is there already takes that row's place.

    Args:
        path: the table. Several processes may add to it.
        rows: rows of this study and setting.

    Returns:
        How many rows are new or changed.
    """
    added = {row["id"]: row for row in rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.parent):
        before = {row["id"]: row for row in read_table(path)}
        changed = sum(before.get(name) != row for name, row in added.items())
        if changed:
            merged = before | added
            write_text(path, "".join(json.dumps(merged[name]) + "\n" for name in sorted(merged)))
    return changed


def add_row(path: pathlib.Path, study: str, name: str, content: dict[str, Any]) -> None:
    """Adds one row to a table, or puts it in the place of the one of that name.

    Args:
        path: the table; its name is the setting's.
        study: whose it is.
        name: the row's id.
        content: the rest, the environment among it.
    """
    add_rows(path, [{"study": study, "setting": path.stem, "id": name, **content}])


@contextlib.contextmanager
def _locked(folder: pathlib.Path) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def write_text(path: pathlib.Path, text: str) -> None:
    """Writes a file whole or not at all: a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(text)
    partial.replace(path)
