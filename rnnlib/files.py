"""Files: read with bounds where they may be anyone's, and written such that no reader sees half of one."""

import contextlib
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

# The largest files of JSON that are published: an index of 91,000 arrays takes 9 MB, a tokenizer of 262,144 tokens 33.
MAX_JSON_BYTES = 2**26
_MAX_DEPTH = 64
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a regular file for reading: to read a pipe, a device or a file of /proc may never end.

    Raises:
        ValueError: it is no regular file.
        OSError: it cannot be opened.
    """
    _expect_regular(path, os.stat(path))  # to open a device may already do something
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        found = os.fstat(handle)
        _expect_regular(path, found)
        if found.st_size == 0 and hasattr(os, "fstatvfs") and os.fstatvfs(handle).f_blocks == 0:
            raise ValueError(f"{os.fspath(path)}: expected a regular file, not one that the system makes up")
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def _expect_regular(path: str | os.PathLike[str], found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise ValueError(f"{os.fspath(path)}: expected a regular file, not {kind}")


def read_bytes(path: str | os.PathLike[str], *, at_most: int) -> bytes:
    """The content of a regular file of at most so many bytes.

    Raises:
        ValueError: it is no regular file, or larger.
        OSError: it cannot be read.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(min(size, at_most) + 1)  # to ask for more would take that much memory at once
    if max(size, len(content)) > at_most:
        raise ValueError(f"{os.fspath(path)}: expected at most {at_most:,} bytes")
    return content


def read_text(path: str | os.PathLike[str], *, at_most: int = MAX_JSON_BYTES) -> str:
    """The text of a regular file in UTF-8 of at most so many bytes; errors as in `read_bytes`."""
    try:
        return read_bytes(path, at_most=at_most).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{os.fspath(path)}: expected UTF-8 ({error})") from None


def read_json(path: str | os.PathLike[str], *, at_most: int = MAX_JSON_BYTES, **options: Any) -> Any:
    """What a file of JSON says.

    Args:
        path: the file.
        at_most: bytes.
        options: as `json.loads` takes them.

    Raises:
        ValueError: it is no regular file, larger, no JSON, or nested too deeply.
        OSError: it cannot be read.
    """
    return parse_json(read_text(path, at_most=at_most), os.fspath(path), **options)


def parse_json(text: str | bytes, where: str, **options: Any) -> Any:
    """What a text of JSON says; `where` names it in errors, and options are as `json.loads` takes them.

    Raises:
        ValueError: it is no JSON, or nested too deeply.
    """
    try:
        value = json.loads(text, **options)
    except RecursionError:
        raise ValueError(f"{where}: expected JSON (it is nested too deeply)") from None
    except ValueError as error:
        raise ValueError(f"{where}: expected JSON ({error})") from None
    expect_shallow(value, where)
    return value


def expect_shallow(value: Any, where: str, *, max_entries: int | None = None) -> None:
    """ValueError where lists and mappings are nested so deeply, or hold so much, that to walk through them could fail.

    Args:
        value: what a file of JSON or YAML says. With YAML's aliases a list can stand in itself, or often.
        where: its name, for errors.
        max_entries: how many entries there may be, those of something that stands twice counted twice.
    """
    level, entries = [value], 0
    for _ in range(_MAX_DEPTH):
        below: list[Any] = []
        for holder in level:
            if isinstance(holder, dict | list | tuple):
                entries += len(holder)
                if max_entries is not None and entries > max_entries:
                    raise ValueError(f"{where}: expected at most {max_entries:,} entries")
                below += holder.values() if isinstance(holder, dict) else holder
        if not below:
            return
        level = below
    raise ValueError(f"{where}: expected at most {_MAX_DEPTH} levels, it is nested too deeply")


def file_within(folder: Path, name: str, where: str | os.PathLike[str]) -> Path:
    """The path of a folder's own file that another file names.

    Args:
        folder: the folder.
        name: the name that the file has in it.
        where: what names it, for errors.

    Raises:
        ValueError: the name is not that of a file in the folder itself, or the file is a link that leads out of it.
    """
    if not re.fullmatch(r"[^/\\:\x00-\x1f\x7f]+", name) or name in (".", ".."):
        raise ValueError(f"{os.fspath(where)}: {name[:80]!r}, expected the name of a file in {folder}")
    expect_within(folder, folder / name)
    return folder / name


def expect_within(folder: Path, path: Path) -> None:
    """ValueError if a folder's file is a link that leads out of the folder: such a file could be any of the reader's.

    The cache of the Hugging Face hub may have its links, from `snapshots/REVISION/` to `blobs/`.
    """
    target, home = path.resolve(), folder.resolve()
    cached = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    if not (target.is_relative_to(home) or target.is_relative_to(cached)):
        raise ValueError(f"{path}: expected a file of the folder, not a link to {target}")


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


@contextlib.contextmanager
def unfinished_folder(path: Path) -> Iterator[Path]:
    """An empty folder beside a path, its owner's alone, to be filled and renamed; it is removed where it was not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}-unfinished-"))
    try:
        yield staged
    finally:
        shutil.rmtree(staged, ignore_errors=True)


@contextlib.contextmanager
def new_folder(path: str | os.PathLike[str], *, or_other: bool = False) -> Iterator[Path]:
    """A folder to fill, which gets its name when the block ends: it is there whole, or not at all.

    Args:
        path: the folder, which must not exist; those above it are made.
        or_other: whether one that another process has made meanwhile stays in its place.

    Raises:
        OSError: it cannot be made; nothing of it is left.
    """
    path = Path(path)
    with unfinished_folder(path) as staged:
        yield staged
        try:
            staged.rename(path)
        except OSError:
            if not (or_other and path.is_dir()):
                raise
