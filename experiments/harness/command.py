"""What every command line of the studies shares."""

import contextlib
import os
import sys
from collections.abc import Iterator


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
