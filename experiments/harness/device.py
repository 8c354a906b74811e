"""Taking turns on a device."""

import contextlib
import fcntl
import pathlib
from collections.abc import Iterator
from typing import IO


@contextlib.contextmanager
def turn(path: pathlib.Path | None) -> Iterator[IO[str] | None]:
    """Waits for a lock file: several commands on one device compile side by side and train one after another.

    Args:
        path: the lock file; None waits for nothing.

    Yields:
        The open file, or None. What is written to it stays for the next one.
    """
    if path is None:
        yield None
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file
