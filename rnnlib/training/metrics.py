"""Metrics as CSV files that survive kills and resumes, and as TensorBoard events."""

import contextlib
import csv
import io
import math
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rnnlib.training.config_file import write_atomically

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
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (open as long as the log is)

    def write(self, row: Row) -> None:
        """Appends a row and hands it to the operating system, so that a killed process loses none."""
        values = (row[name] for name in self._fields)
        self._file.write(",".join(repr(value) for value in values) + "\n")
        self._file.flush()
        self.steps.add(int(row["step"]))

    def sync(self) -> None:
        """Waits until the rows are on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class EventLog:
    """TensorBoard events of a run, in a file made for the first of them.

    They are an extra: where they cannot be written, that is told once and the rest are left out. Written in this
    thread: tensorboardX's `SummaryWriter` has one of its own, and waits for it for ever once an error has ended it.
    """

    _FLUSH_SECONDS = 30

    def __init__(self, folder: Path, *, last_step: int, tell: Callable[[str], None]):
        """Prepares the log; writes nothing.

        Args:
            folder: Where the event file goes.
            last_step: TensorBoard shows no events of later steps from files before this one.
            tell: Called with the message that nothing more can be written.
        """
        # Imported here: a package that is missing is an error before the first step.
        from tensorboardX import RecordWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.proto.summary_pb2 import Summary

        self._folder, self._last_step, self._tell = folder, last_step, tell
        self._new_writer, self._event, self._session, self._summary = RecordWriter, Event, SessionLog, Summary
        self._writer: Any = None
        self._next_flush = -math.inf
        self._failed = False

    def write(self, step: int, values: Mapping[str, int | float]) -> None:
        """Writes the values of a step by their names."""
        if self._failed:
            return
        try:
            if self._writer is None:
                self._open()
            # The CSV file keeps numbers that are not finite; TensorBoard cannot draw them.
            finite = {name: float(value) for name, value in values.items() if math.isfinite(value)}
            scalars = [self._summary.Value(tag=name, simple_value=value) for name, value in finite.items()]
            self._write_event(step=step, summary=self._summary(value=scalars))
            if time.monotonic() >= self._next_flush:
                self._writer.flush()
                self._next_flush = time.monotonic() + self._FLUSH_SECONDS
        except OSError as error:
            self._fail(error)

    def _open(self) -> None:
        self._folder.mkdir(exist_ok=True)
        # TensorBoard reads the files of a folder in the order of their names.
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}"
        self._writer = self._new_writer(str(self._folder / name))
        self._write_event(file_version="brain.Event:2")
        # Events after the checkpoint are taken back: the resumed run writes those steps again.
        self._write_event(step=self._last_step + 1, session_log=self._session(status=self._session.START))

    def _write_event(self, **fields: Any) -> None:
        self._writer.write(self._event(wall_time=time.time(), **fields).SerializeToString())

    def _fail(self, error: OSError) -> None:
        self._failed = True
        if self._writer is not None:
            with contextlib.suppress(OSError):  # what is still to be written cannot be
                self._writer.close()
            self._writer = None
        self._tell(f"TensorBoard events in {self._folder} cannot be written ({error}); training goes on without them")

    def close(self) -> None:
        """Closes the file."""
        if self._writer is not None:
            try:
                self._writer.flush()
                self._writer.close()
            except OSError as error:
                self._fail(error)


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
        """
        self._train = CsvLog(folder / TRAIN_FILE, TRAIN_FIELDS, last_step=last_step)
        self._validation = CsvLog(folder / VALIDATION_FILE, VALIDATION_FIELDS, last_step=last_step)
        self._events = EventLog(folder / "tensorboard", last_step=last_step, tell=tell) if tensorboard else None

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
