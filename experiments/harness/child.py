"""Modules that run in processes of their own, so that frameworks do not share a card's memory. Imports no framework."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any


class Child:
    """A process that runs a module. What it prints goes to files: however much that is, nobody needs to read it."""

    def __init__(
        self, module: str, *arguments: object, python: str = sys.executable, variables: Mapping[str, str] | None = None
    ) -> None:
        """Starts it.

        Args:
            module: what `python -m` runs.
            arguments: of its command line.
            python: interpreter.
            variables: of its environment, beside those of this process.
        """
        self._printed, self._errors = (tempfile.TemporaryFile("w+", errors="replace") for _ in range(2))  # noqa: SIM115
        self._process = subprocess.Popen(
            [python, "-m", module, *map(str, arguments)],
            env={**os.environ, **(variables or {})},
            stdin=subprocess.PIPE,
            stdout=self._printed,
            stderr=self._errors,
            text=True,
        )

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stops it where it is until the context ends."""
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def finish(self, given: str = "", seconds: float | None = None) -> tuple[list[str], str]:
        """Waits until it ends, for so long at most, and ends it then.

        Args:
            given: what it reads on its standard input.
            seconds: None waits as long as it takes.

        Returns:
            The lines that it printed, and "" or, where it failed, what it said.
        """
        failure = ""
        try:
            self._process.communicate(given, timeout=None if seconds is None else max(0.1, seconds))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            failure = f"not done in {seconds:.0f} s"
        for file in (self._printed, self._errors):
            file.seek(0)
        if self._process.returncode and not failure:
            failure = self._errors.read().strip() or f"exit status {self._process.returncode}"
        return self._printed.read().splitlines(), failure

    def end(self) -> None:
        """Ends it, if it still runs."""
        if self.is_running:
            self._process.terminate()


def answer(child: Child, given: Any = None, seconds: float | None = None) -> Any:
    """The value of JSON that a process prints last, asked by one on its standard input.

    Raises:
        RuntimeError: it failed, or took longer; the message is the end of what it said.
    """
    lines, failure = child.finish("" if given is None else json.dumps(given), seconds)
    if failure:
        raise RuntimeError(failure[-3000:])
    return json.loads(lines[-1])


def last_line(text: str) -> str:
    """Of what a process said, for a record."""
    return text.strip().rpartition("\n")[2][:200]
