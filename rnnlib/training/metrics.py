"""What a run records: metrics as CSV files that survive kills and resumes, and as TensorBoard events."""

import csv
import io
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from rnnlib.extras import from_extra
from rnnlib.files import naming, write_atomically

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
)
VALIDATION_FILE = "validation.csv"
VALIDATION_FIELDS = ("step", "tokens", "loss", "bits_per_byte", "perplexity", "validation_tokens", "validation_bytes")


def read_csv(path: str | os.PathLike) -> list[dict[str, float]]:
    """Rows of a metrics file, numbers as floats; a last row that a kill cut short is left out.

    Args:
        path: The file; without it there are no rows.
    """
    try:
        with open(path, newline="", encoding="utf-8") as file:
            text = file.read()
    except FileNotFoundError:
        return []
    lines = text.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
    reader = csv.DictReader(io.StringIO("".join(lines)))
    return [{name: float(value) for name, value in row.items()} for row in reader]


def _step(path: Path, row: str) -> int:
    try:
        return int(row.partition(",")[0])
    except ValueError:
        raise ValueError(f"{path}: expected rows that begin with a step, got {row!r}") from None


def _whole_rows(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except FileNotFoundError:
        return []
    # A kill may have cut the last line short.
    return [line for line in lines[1:] if line.endswith("\n") and line.strip()]


def recorded_steps(path: Path) -> list[int]:
    """Steps that a metrics file has rows of, in the file's order; none without the file."""
    return [_step(path, row) for row in _whole_rows(path)]


class CsvLog:
    """A CSV file with one row a step, in order, without gaps or repeats across resumes."""

    def __init__(self, path: Path, fields: Sequence[str], *, last_step: int = 0):
        """Opens the file to append after `last_step`; rows of later steps, which a resumed run does again, are dropped.

        Args:
            path: The file, created where it does not exist.
            fields: Column names, the first of which is "step".
            last_step: The last step to keep.
        """
        self._fields = tuple(fields)
        rows = [line for line in _whole_rows(path) if _step(path, line) <= last_step]
        content = ",".join(self._fields) + "\n" + "".join(rows)
        write_atomically(path, content.encode())
        self.steps = {_step(path, line) for line in rows}
        self._path = path
        # Without a buffer: a killed process loses no row, and closing has nothing left to write to a full disk.
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (open as long as the log is)

    def write(self, row: Row) -> None:
        """Appends a row and hands it to the operating system.

        Raises:
            OSError: It cannot be written; the error names the file.
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


class NoLog:
    """In place of `RunLog` in a process that does not record: it knows which evaluations are recorded."""

    def __init__(self, evaluated: Collection[int]):
        """Steps whose evaluation is recorded."""
        self._evaluated = set(evaluated)

    @property
    def evaluated(self) -> list[int]:
        """Steps whose evaluation is recorded."""
        return sorted(self._evaluated)

    def train(self, row: Row) -> None:
        """Records nothing."""

    def validation(self, row: Row) -> None:
        """Notes that another process records it."""
        self._evaluated.add(int(row["step"]))

    def has_validation(self, step: int) -> bool:
        """Whether the evaluation after this step is recorded."""
        return step in self._evaluated

    def sync(self) -> None:
        """There is nothing to wait for."""

    def close(self) -> None:
        """There is nothing to close."""


class RunLog:
    """What a run records: `metrics.csv`, `validation.csv` and TensorBoard events."""

    def __init__(
        self, folder: Path, *, last_step: int = 0, tensorboard: bool = True, tell: Callable[[str], None] = print
    ):
        """Opens the records to continue after `last_step`.

        Args:
            folder: The run's folder.
            last_step: Step of the checkpoint that the run resumes from, 0 for a new run.
            tensorboard: Also write TensorBoard events, into `<folder>/tensorboard`.
            tell: Called with a message where those can no longer be written.

        Raises:
            MissingExtraError: If events are to be written and their package is not installed. Nothing is left behind.
        """
        if tensorboard:
            # Imported here: only who writes events needs their packages, and one missing is an error before any step.
            with from_extra("train", "tensorboard=True"):
                from rnnlib.training.tensorboard import TensorBoardLog
        self._train = CsvLog(folder / TRAIN_FILE, TRAIN_FIELDS, last_step=last_step)
        self._validation = CsvLog(folder / VALIDATION_FILE, VALIDATION_FIELDS, last_step=last_step)
        self._events = TensorBoardLog(folder / "tensorboard", last_step=last_step, tell=tell) if tensorboard else None

    def train(self, row: Row) -> None:
        """Records one training step; keys are `TRAIN_FIELDS`."""
        self._train.write(row)
        self._write_events("train", row)

    def validation(self, row: Row) -> None:
        """Records one evaluation; keys are `VALIDATION_FIELDS`."""
        self._validation.write(row)
        self._write_events("validation", row)

    def _write_events(self, group: str, row: Row) -> None:
        if self._events is not None:
            self._events.write(
                int(row["step"]), {f"{group}/{name}": value for name, value in row.items() if name != "step"}
            )

    @property
    def evaluated(self) -> list[int]:
        """Steps whose evaluation is recorded."""
        return sorted(self._validation.steps)

    def has_validation(self, step: int) -> bool:
        """Whether the evaluation after this step is recorded."""
        return step in self._validation.steps

    def sync(self) -> None:
        """Waits until all rows are on the disk: before a checkpoint that counts on them."""
        self._train.sync()
        self._validation.sync()

    def close(self) -> None:
        """Closes all files."""
        self._train.close()
        self._validation.close()
        if self._events is not None:
            self._events.close()
