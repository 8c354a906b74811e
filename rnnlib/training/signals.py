"""A clean stop: signals that ask a run to save and end."""

import contextlib
import os
import signal
import sys
import threading
from typing import Any


class StopSignals:
    """While entered, SIGTERM, SIGHUP (a closed terminal) and the first Ctrl-C only ask to stop.

    Standard error says so at once: a first step may have minutes of compiling before it. A second Ctrl-C interrupts. A
    SIGHUP that is ignored, as under nohup, stays so.

    Attributes:
        received: the last signal that asked to stop; None before any.
    """

    def __init__(self):
        self.received: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def _receive(self, number: int, frame: Any) -> None:
        if self.received == signal.SIGINT == number:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
        again = "; Ctrl-C again stops at once" if number == signal.SIGINT else ""
        # Not print, in the middle of which a handler may come; and there may be no standard error.
        with contextlib.suppress(AttributeError, OSError, ValueError):
            os.write(sys.stderr.fileno(), f"stopping after this step{again}\n".encode())

    def __enter__(self) -> "StopSignals":
        # Only the main thread may set handlers; elsewhere the caller decides what signals do.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                    continue
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *error) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
