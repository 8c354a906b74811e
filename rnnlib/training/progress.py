"""Progress on the screen: a live bar on a terminal, a plain line now and then elsewhere."""

import contextlib
import math
import sys
import time
from types import TracebackType
from typing import Any

from rnnlib.training.evaluation import Evaluation
from rnnlib.training.reports import StepReport


def format_seconds(seconds: float | int | None) -> str:
    """`1:02:03`, `4:05`, or `-:--` for None."""
    if seconds is None:
        return "-:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class _Screen:
    """A text stream that drops what it cannot write any more."""

    def __init__(self, stream: Any):
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class ProgressReporter:
    """Shows training progress; used as a context manager around the loop.

    Where the stream takes no more (`| head`, a closed terminal) it shows nothing and training goes on: what counts is
    in the run's files.
    """

    def __init__(self, steps: int, *, plain_seconds: float | int = 10.0, stream: Any = None):
        """Prepares the display.

        Args:
            steps: steps of the whole run.
            plain_seconds: seconds between lines where the stream is not a terminal.
            stream: text file to write to; standard output by default.
        """
        self._steps = steps
        self._plain_seconds = plain_seconds
        self._stream: Any = _Screen(stream if stream is not None else sys.stdout)
        self._last_line = -float("inf")
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> "ProgressReporter":
        if self._stream.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn
            from rich.table import Column

            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),
                TextColumn("{task.completed:.0f}/{task.total:.0f}", table_column=Column(no_wrap=True)),
                TextColumn("{task.fields[numbers]}", table_column=Column(no_wrap=True)),
                console=Console(file=self._stream),
                expand=True,
            )
            self._task = self._bar.add_task("compiling", total=self._steps, numbers="")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, report: StepReport) -> None:
        """Shows a training step."""
        speed = "-" if math.isnan(report.tokens_per_second) else f"{report.tokens_per_second:,.0f}"
        left = format_seconds(report.seconds_left)
        rest = f"{report.bits_per_byte:.3f} bits/byte  {speed} tokens/s  {left} left"
        if self._bar is not None:
            numbers = f"loss {report.loss:.3f}  {rest}"
            self._bar.update(self._task, completed=report.step, description="training", numbers=numbers)
        elif report.step == self._steps or time.monotonic() - self._last_line >= self._plain_seconds:
            self._last_line = time.monotonic()
            self.message(f"step {report.step}/{self._steps}  loss {report.loss:.3f} nats/token  {rest}")

    def evaluation(self, step: int, result: Evaluation) -> None:
        """Shows an evaluation."""
        self.message(
            f"step {step}/{self._steps}  validation: loss {result.loss:.3f} nats/token  "
            f"{result.bits_per_byte:.3f} bits/byte  perplexity {result.perplexity:.2f}"
        )

    def phase(self, name: str) -> None:
        """Names what is going on, where there is a live display."""
        if self._bar is not None:
            self._bar.update(self._task, description=name)

    def message(self, text: str) -> None:
        """Shows a line that stays."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        else:
            print(text, file=self._stream, flush=True)
