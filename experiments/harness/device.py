"""Taking turns on devices."""

import contextlib
import fcntl
import pathlib
from collections.abc import Iterator, Sequence


@contextlib.contextmanager
def turn(paths: Sequence[pathlib.Path]) -> Iterator[None]:
    """Waits for lock files: several commands on one device compile side by side and train one after another.

    Args:
        paths: a lock file for each device, which all commands name in the same order; none waits for nothing.
    """
    with contextlib.ExitStack() as stack:
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            fcntl.flock(stack.enter_context(path.open("a")), fcntl.LOCK_EX)
        yield
