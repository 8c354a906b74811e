"""The metrics of a run as CSV files, which survive kills and resumes."""

import csv
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from rnnlib.files import naming, open_regular, write_atomically

Row = Mapping[str, int | float]

TRAIN_FILE = "metrics.csv"
TRAIN_FIELDS = (
    "step",
    "tokens",
    "loss",
    "bits_per_byte",
    "learning_rate",
    "gradient_norm",
    "skipped",
    "tokens_per_second",
    "utilization",
)
VALIDATION_FILE = "validation.csv"
VALIDATION_FIELDS = ("step", "tokens", "loss", "bits_per_byte", "perplexity", "validation_tokens", "validation_bytes")


def read_csv(path: str | os.PathLike) -> list[dict[str, float]]:
    """Rows of a metrics file, numbers as floats; a last row that a kill cut short is left out.

    Args:
        path: the file; without it there are no rows.

    Raises:
        ValueError: it is no regular file, or a row has no numbers.
    """
    try:
        text = _read(path)
    except FileNotFoundError:
        return []
    lines = text.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
    reader = csv.DictReader(io.StringIO("".join(lines)))
    try:
        return [{name: float(value) for name, value in row.items()} for row in reader]
    except (TypeError, ValueError, csv.Error) as error:  # too few or too many entries in a row, or no numbers
        raise ValueError(f"{os.fspath(path)}, line {reader.line_num}: expected numbers ({error})") from None


def _read(path: str | os.PathLike) -> str:
    with open_regular(path) as file:
        return file.read().decode("utf-8", errors="replace")


def _step(path: Path, row: str) -> int:
    try:
        return int(row.partition(",")[0])
    except ValueError:
        raise ValueError(f"{path}: expected rows that begin with a step, got {row!r}") from None


def _whole_rows(path: Path) -> list[str]:
    try:
        lines = _read(path).splitlines(keepends=True)
    except FileNotFoundError:
        return []
    # A kill may have cut the last line short.
    return [line for line in lines[1:] if line.endswith("\n") and line.strip()]


def recorded_steps(path: Path) -> list[int]:
    """Steps that a metrics file has rows of, in the file's order; none without the file."""
    return [_step(path, row) for row in _whole_rows(path)]


class CsvFile:
    """A CSV file with one row a step, in order, without gaps or repeats across resumes."""

    def __init__(self, path: Path, fields: Sequence[str], *, last_step: int = 0):
        """Opens the file to append after `last_step`; rows of later steps, which a resumed run does again, are dropped.

        Args:
            path: the file, created where it does not exist.
            fields: column names, the first of which is "step".
            last_step: the last step to keep.
        """
        self._fields = tuple(fields)
        rows = [line for line in _whole_rows(path) if _step(path, line) <= last_step]
        # Older runs lack the last columns.
        rows = [line.rstrip("\n") + ",nan" * (len(fields) - 1 - line.count(",")) + "\n" for line in rows]
        content = ",".join(self._fields) + "\n" + "".join(rows)
        write_atomically(path, content.encode())
        self.steps = {_step(path, line) for line in rows}
        self._path = path
        # Without a buffer: a killed process loses no row, and closing has nothing left to write to a full disk.
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (open as long as the log is)

    def write(self, row: Row) -> None:
        """Appends a row and hands it to the operating system.

        Raises:
            OSError: it cannot be written; the error names the file.
        """
        left = (",".join(repr(row[name]) for name in self._fields) + "\n").encode()
        with naming(self._path):
            while left:
                left = left[self._file.write(left) :]
        self.steps.add(int(row["step"]))

    def sync(self) -> None:
        """Waits until the rows are on the disk."""
        with naming(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
