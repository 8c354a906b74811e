"""Files that a reader never sees half written."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def naming(path: str | os.PathLike) -> Iterator[None]:
    """Within it, an error of the operating system names the file, which one of writing (a full disk) does not."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
        raise


def write_atomically(path: str | os.PathLike, content: bytes) -> None:
    """Writes a file such that a reader, or a run after a crash, finds the old content or the new one, whole.

    Raises:
        OSError: It cannot be written; the error names the file, and nothing is left behind.
    """
    path = Path(path)
    with naming(path):
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
