"""Taking turns on devices."""

import contextlib
import fcntl
import pathlib
from collections.abc import Iterator, Sequence


class Turn(contextlib.AbstractContextManager):
    """A turn that begins when it is first taken and ends with the context: what it was taken for again goes on at once.

    Of two commands on one device one does all of its work before the other begins.
    """

    def __init__(self, paths: Sequence[pathlib.Path]):
        """`paths` as those of `turn`."""
        self._paths = paths
        self._held: contextlib.ExitStack | None = None

    def take(self) -> None:
        """Waits for the devices, but for those that are held already."""
        if self._held is None:
            self._held = contextlib.ExitStack()
            self._held.enter_context(turn(self._paths))

    def __exit__(self, *_: object) -> None:
        """Gives the devices to whoever waits."""
        if self._held is not None:
            self._held.close()
            self._held = None


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
