"""A process that the operating system limits and this module ends.

Within Python nothing can end a call into C that takes an hour or all memory, so such calls are made in another process.
"""

import contextlib
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from rnnlib.sandbox.program import OUT_OF_MEMORY, READY

_START_SECONDS = 120.0
_PROGRAM = pathlib.Path(__file__).with_name("program.py")


class LimitError(ValueError):
    """A request took more time or memory than it may; the message is one line."""


class LimitedProcess:
    """A process that answers requests, started when it is first asked, and again when it ended or this one was forked.

    Requests of several threads wait for each other.
    """

    def __init__(
        self,
        program: pathlib.Path,
        packages: Sequence[str],
        *,
        memory_bytes: int,
        max_answer: int,
        first: Mapping[str, Any] | None = None,
    ):
        """Describes the process.

        Args:
            program: the file that answers; see `rnnlib.sandbox.program`.
            packages: what it imports beside the standard library.
            memory_bytes: the memory that the program allows itself, for errors.
            max_answer: bytes of the longest answer.
            first: the request that every start begins with.
        """
        self._program = program
        self._packages = tuple(packages)
        self._memory_bytes = memory_bytes
        self._max_answer = max_answer
        self._first = first
        self._lock = threading.Lock()
        self._running: _Running | None = None
        self._finalizer: weakref.finalize | None = None

    def ask(self, request: Mapping[str, Any], *, seconds: float, first_seconds: float = 0.0) -> dict[str, Any]:
        """The answer to a request.

        Args:
            request: an object of JSON.
            seconds: the time that it may take.
            first_seconds: the time that the first request may take, where the process is started.

        Raises:
            LimitError: it took more time or memory.
            TypeError, ValueError, RecursionError: JSON cannot hold the request.
        """
        message = json.dumps({"request": dict(request), "seconds": seconds}).encode() + b"\n"
        with self._lock:
            running = self._running
            if running is None or running.owner != os.getpid() or not running.is_alive:
                running = self._running = _Running(self._program, self._packages)
                if self._finalizer is not None:
                    self._finalizer.detach()
                self._finalizer = weakref.finalize(self, running.end_own)
                if self._first is not None:
                    first = json.dumps({"request": dict(self._first), "seconds": first_seconds}).encode() + b"\n"
                    answer = self._answer(running, first, first_seconds)
                    if "error" in answer:
                        running.end()
                        return answer
            return self._answer(running, message, seconds)

    def end(self) -> None:
        """Ends the process, if it runs; the next request starts another."""
        with self._lock:
            if self._running is not None:
                self._running.end_own()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_running": None, "_finalizer": None, "_lock": None}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    def _answer(self, running: "_Running", message: bytes, seconds: float) -> dict[str, Any]:
        try:
            line = running.exchange(message, seconds, self._max_answer)
        except BaseException:  # an interrupt may leave half of a request or an answer in the pipes
            running.end()
            raise
        if not line.endswith(b"\n"):
            if running.end() == OUT_OF_MEMORY:
                raise LimitError(f"it takes more than {self._memory_bytes // 2**20} MiB of memory")
            raise LimitError(f"it takes more than {seconds:g} s, or more memory than there is")
        return json.loads(line)


class _Running:
    """A process that was started."""

    def __init__(self, program: pathlib.Path, packages: Sequence[str]):
        found = [importlib.util.find_spec(name) for name in packages]
        folders = {os.path.dirname(os.path.dirname(spec.origin)) for spec in found if spec and spec.origin}
        self.owner = os.getpid()
        # -I: neither the working directory, nor the user's folders or variables, give it code. It gets no secrets.
        self.process = subprocess.Popen(
            [sys.executable, "-I", str(_PROGRAM), str(program), *sorted(folders)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in ("TZ", "SYSTEMROOT") if name in os.environ},
            start_new_session=True,
        )
        if self.exchange(b"", _START_SECONDS, len(READY)) != READY:
            self.end()
            raise RuntimeError(f"a limited process did not start: {sys.executable} {_PROGRAM} {program}")

    def exchange(self, message: bytes, seconds: float, max_answer: int) -> bytes:
        """The line that answers a message; empty or without its end if the process ended, or had to be ended."""
        assert self.process.stdin is not None and self.process.stdout is not None
        timer = threading.Timer(seconds, self.process.kill)
        timer.daemon = True
        timer.start()
        try:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.write(message)
                self.process.stdin.flush()
            return self.process.stdout.readline(max_answer)
        finally:
            timer.cancel()

    def end(self) -> int:
        """Ends the process; its exit code."""
        self.process.kill()
        with contextlib.suppress(BrokenPipeError), self.process:
            pass
        return self.process.wait()

    def end_own(self) -> None:
        """Ends the process, unless this one is a fork of the one that started it."""
        if self.owner == os.getpid():
            self.end()

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None
