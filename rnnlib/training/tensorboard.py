"""Metrics as TensorBoard events."""

import contextlib
import math
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# These parts alone: writers of whole logs import PyTorch or TensorFlow where it is installed, which takes seconds.
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from rnnlib.training.loggers import Logger, Split


class TensorBoardLogger(Logger):
    """TensorBoard events of a run, in a file made for the first of them.

    They are an extra: where they cannot be written, that is told once and the rest are left out. Written in this
    thread: writers with one of their own may wait for it for ever once an error has ended it.
    """

    def __init__(self, folder: Path, *, last_step: int, tell: Callable[[str], None]):
        """Prepares the log; writes nothing.

        Args:
            folder: where the event file goes.
            last_step: TensorBoard shows no events of later steps from files before this one.
            tell: called with the message that nothing more can be written.
        """
        self._folder, self._last_step, self._tell = folder, last_step, tell
        self._writer: Any = None
        self._failed = False

    def log(self, split: Split, values: Mapping[str, int | float]) -> None:
        """Writes the numbers as `train/loss` and so on."""
        if self._failed:
            return
        try:
            if self._writer is None:
                self._open()
            # The CSV file keeps numbers that are not finite; TensorBoard cannot draw them.
            finite = {name: float(x) for name, x in values.items() if name != "step" and math.isfinite(x)}
            scalars = [Summary.Value(tag=f"{split}/{name}", simple_value=x) for name, x in finite.items()]
            self._write_event(step=int(values["step"]), summary=Summary(value=scalars))
            self._writer.flush()  # to the operating system, so that a killed process loses none
        except OSError as error:
            self._fail(error)

    def _open(self) -> None:
        self._folder.mkdir(exist_ok=True)
        # TensorBoard reads the files of a folder in the order of their names.
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}"
        self._writer = RecordWriter((self._folder / name).open("wb"))
        self._write_event(file_version="brain.Event:2")
        # Events after the checkpoint are taken back: the resumed run writes those steps again.
        self._write_event(step=self._last_step + 1, session_log=SessionLog(status=SessionLog.START))

    def _write_event(self, **fields: Any) -> None:
        self._writer.write(Event(wall_time=time.time(), **fields).SerializeToString())

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
