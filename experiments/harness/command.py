"""What every command line of the studies shares."""

import contextlib
import dataclasses
import os
import pathlib
import signal
import sys
from collections.abc import Iterator

from experiments.harness.tables import EXPERIMENTS


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """What the commands of all studies that train take."""

    mixers: tuple[str, ...] = ()
    """Only mixers of these labels, or whose label contains one of these, in this order."""
    rates: tuple[float, ...] = ()
    """Only these learning rates, also others than the study's."""
    seeds: tuple[int, ...] = ()
    """Only these seeds, also others than the study's."""
    steps: int | None = None
    """Training steps, in place of the study's."""
    report_only: bool = False
    """Train nothing; write table and figure from the results that are there."""
    train_only: bool = False
    """Write no table and no figure."""
    output: pathlib.Path = EXPERIMENTS
    """Folder of the studies' folders, to which results and figures go."""
    work: pathlib.Path = pathlib.Path("runs")
    """Folder for checkpoints and tokens."""
    seconds: float | None = None
    """Begin no new run after this time."""
    exclusive: tuple[pathlib.Path, ...] = ()
    """Lock files of devices: of several commands with the same one, one trains at a time, while the others compile."""
    commit: str | None = None
    """Commit to record where there is no git repository."""

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")

    @property
    def is_whole(self) -> bool:
        """Whether nothing of the study is left out or changed, so that its page may be written."""
        return not (self.mixers or self.rates or self.seeds or self.steps) and self.output == EXPERIMENTS


@contextlib.contextmanager
def errors_as_lines() -> Iterator[None]:
    """An option that does not fit, and Ctrl-C, end the program with one line in place of a traceback."""
    with interrupts_as_lines():
        try:
            yield
        except ValueError as error:
            sys.exit(f"error: {error}")


@contextlib.contextmanager
def interrupts_as_lines() -> Iterator[None]:
    """Ctrl-C ends the program with one line in place of a traceback."""
    try:
        yield
    except KeyboardInterrupt:
        sys.stdout.flush()
        print("interrupted: what is done is kept, the same command goes on", file=sys.stderr, flush=True)
        os._exit(130)  # Python would wait for threads that compile, which nothing can stop


@contextlib.contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """SIGTERM, as `timeout` sends it, interrupts as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
