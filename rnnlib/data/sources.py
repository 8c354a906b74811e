"""Documents from files: the installed Python sources, text, JSON lines, Parquet; split and de-duplicated."""

import glob
import gzip
import hashlib
import json
import os
import sysconfig
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import pyarrow
import pyarrow.parquet

from rnnlib.data.config import DataConfig, Split, SplitBy, check_split
from rnnlib.data.conversation import ROW_KEYS, conversation, field_of_messages
from rnnlib.files import open_regular, read_bytes
from rnnlib.tokenizers import without_surrogates

_PYTHON_SUFFIXES = (".py", ".pyi", ".rst", ".md", ".txt")
# Larger files there are generated tables (character maps, opcode lists), which would outweigh what people wrote.
_PYTHON_MAX_FILE_BYTES = 262_144
_PYTHON_MIN_FILE_BYTES = 256
_FEW_FILES = 100  # of fewer text files the validation split is their ends: a share of so few may be none of them
# A document is held in memory a few times over while it is decoded and tokenized.
_MAX_FILE_BYTES = 2**32
_MAX_LINE_BYTES = 2**27
_PARQUET_ROWS = 16


class _Undecodable(NamedTuple):
    """Stands for a file or line that is not in the encoding that the configuration gives."""

    why: str


def iterate_documents(config: DataConfig, split: Split) -> Iterator[str]:
    """Yields the documents of a split, in a stable order, each once.

    A document belongs to the validation split when the hash of its content falls below `validation_fraction`
    (where `split_by` comes to "document"), so equal documents never stand in both splits. The last document is cut at
    the byte limit; conversations stay whole.

    Raises:
        ValueError: a path, encoding, field or file format is wrong (names it), or the split has no text.
    """
    check_split(split)
    separate_files = bool(config.validation_paths)
    remaining = config.max_bytes(split)
    by = resolved_split(config)
    seen: set[bytes] = _digests(config, config.validation_paths) if separate_files and split == "train" else set()
    found = False
    for text in _read(config, config.validation_paths if separate_files and split == "validation" else config.paths):
        digest = _digest(text)
        if config.deduplicate or separate_files:
            if digest in seen:
                continue
            if config.deduplicate:
                seen.add(digest)
        if not separate_files:
            text = _share(config, by, split, text, digest)
        if not text:
            continue
        size = len(text) if text.isascii() else len(text.encode())
        if remaining is not None and size > remaining and config.format == "chat" and found:
            break
        if remaining is not None and size >= remaining and config.format == "text":
            text = text.encode()[:remaining].decode("utf-8", errors="ignore")
            if text:
                yield text
                found = True
            break
        yield text
        found = True
        if remaining is not None:
            remaining -= size
    if not found:
        raise ValueError(_empty_split_message(config, split))


def source_fingerprint(config: DataConfig) -> str:
    """A hash of the files that a configuration reads (names, sizes, modification times), not of their content."""
    hasher = hashlib.blake2b(digest_size=16)
    paths = list(_python_files()) if config.kind == "python" else []
    for group in (config.paths, config.validation_paths):
        paths += expand_paths(group)
        paths.append("")
    for path in paths:
        status = os.stat(path) if path else None
        hasher.update(f"{path}\0{status.st_size if status else 0}\0{status.st_mtime_ns if status else 0}\n".encode())
    return hasher.hexdigest()


def source_sizes(config: DataConfig) -> list[tuple[str, int]]:
    """Names and sizes of the files that a configuration reads, without their folders: they may be moved."""
    paths = list(_python_files()) if config.kind == "python" else expand_paths(config.paths)
    paths += expand_paths(config.validation_paths)
    return [(os.path.basename(path), os.stat(path).st_size) for path in paths]


def expand_paths(patterns: tuple[str, ...]) -> list[str]:
    """Files that the patterns name, sorted within each pattern, each once.

    Raises:
        ValueError: a pattern matches no file, or names a folder.
    """
    files: dict[str, None] = {}
    for pattern in patterns:
        # A file whose name holds glob characters is itself before it is a pattern.
        matches = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
        if os.path.isdir(pattern):
            raise ValueError(f"paths: {pattern!r} is a folder; name its files, as in '{pattern.rstrip('/')}/**/*.txt'")
        found = bool(matches)
        matches = [match for match in matches if os.path.isfile(match)]
        if found and not matches and not glob.has_magic(pattern):
            raise ValueError(f"paths: {pattern!r} is no regular file")
        if not matches:
            is_pattern = glob.has_magic(pattern)
            raise ValueError(f"paths: {'no file matches' if is_pattern else 'there is no file'} {pattern!r}")
        files.update(dict.fromkeys(matches))
    return list(files)


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.strip().encode(), digest_size=16).digest()


def _digests(config: DataConfig, paths: tuple[str, ...]) -> set[bytes]:
    return {_digest(text) for text in _read(config, paths)}


def resolved_split(config: DataConfig) -> SplitBy:
    """How a configuration holds text out; `split_by` left out goes by how many files there are."""
    if config.split_by is not None:
        return config.split_by
    few = config.kind == "text" and not config.validation_paths and len(expand_paths(config.paths)) < _FEW_FILES
    return "tail" if few else "document"


def _share(config: DataConfig, by: SplitBy, split: Split, text: str, digest: bytes) -> str:
    """The part of a document that belongs to a split: all, none, or its head or tail."""
    if by == "tail":
        cut = len(text) - max(1, round(len(text) * config.validation_fraction))
        return text[:cut] if split == "train" else text[cut:]
    held_out = int.from_bytes(digest[:8], "big") < config.validation_fraction * 2**64
    return text if held_out == (split == "validation") else ""


def _empty_split_message(config: DataConfig, split: Split) -> str:
    origin = "source 'python'" if config.kind == "python" else f"paths {list(config.paths)}"
    if config.validation_paths:
        origin = f"validation_paths {list(config.validation_paths)}" if split == "validation" else origin
        return f"the {split} split is empty: {origin} holds no text that is not in the other split"
    return (
        f"the {split} split is empty: {origin} has no document for it with validation_fraction "
        f"{config.validation_fraction}; with few documents set split_by='tail' (--data.split-by tail), or name "
        "validation_paths (--data.validation-paths)"
    )


def _read(config: DataConfig, paths: tuple[str, ...]) -> Iterator[str]:
    """Documents that are not blank."""
    if config.kind == "python":
        documents = _read_python()
    else:
        reader = {"text": _read_text, "jsonl": _read_json_lines, "parquet": _read_parquet}[config.kind]
        documents = _decodable(text for path in expand_paths(paths) for text in _named_errors(config, path, reader))
    return (text for text in documents if text and not text.isspace())


def _decodable(documents: Iterable[str | _Undecodable]) -> Iterator[str]:
    """The documents without those that could not be decoded, of which one warning tells at the end."""
    skipped: list[str] = []
    for document in documents:
        if isinstance(document, _Undecodable):
            skipped.append(document.why)
        else:
            yield document
    if skipped:
        warnings.warn(f"left out as undecodable: {len(skipped)}, the first of them {skipped[0]}", stacklevel=2)


def _python_files() -> Iterator[str]:
    """Sources and documentation under the interpreter's library folders, in a stable mixed order."""
    folders = sysconfig.get_paths()
    found: list[tuple[bytes, str]] = []
    for root in dict.fromkeys(folders[name] for name in ("stdlib", "purelib", "platlib")):
        below = len(os.path.join(root, ""))
        for folder, subfolders, names in os.walk(root):
            # The packages' folder may lie within the standard library's: it is walked as its own root.
            subfolders[:] = [
                name for name in subfolders if name not in ("__pycache__", "site-packages", "dist-packages")
            ]
            for name in names:
                if name.endswith(_PYTHON_SUFFIXES) or (name == "METADATA" and folder.endswith(".dist-info")):
                    path = os.path.join(folder, name)
                    # Ordered by a hash of the name, so that the first bytes are a sample of everything.
                    found.append((hashlib.blake2b(path[below:].encode()).digest(), path))
    return (path for _, path in sorted(found))


def _read_python() -> Iterator[str]:
    for path in _python_files():
        try:
            if not _PYTHON_MIN_FILE_BYTES <= os.path.getsize(path) <= _PYTHON_MAX_FILE_BYTES:
                continue
            with open(path, encoding="utf-8") as file:
                yield file.read()
        except (UnicodeDecodeError, OSError):  # test files in other encodings, and links that lead nowhere
            continue


def _named_errors(
    config: DataConfig, path: str, reader: Callable[[DataConfig, str], Iterator[str | _Undecodable]]
) -> Iterator[str | _Undecodable]:
    """A file's documents; what the file system or a format's reader says becomes one line that names the file."""
    try:
        yield from reader(config, path)
    except (OSError, EOFError, zlib.error, pyarrow.ArrowException) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"{path}: not readable as {config.kind} ({reason})") from error


def _read_text(config: DataConfig, path: str) -> Iterator[str | _Undecodable]:
    content = read_bytes(path, at_most=_MAX_FILE_BYTES)
    # Some editors begin UTF-8 files with a byte order mark, which is no text.
    text = _decode(config, path, content)
    yield text if isinstance(text, _Undecodable) else text.removeprefix("\ufeff")


def _decode(config: DataConfig, path: str, content: bytes, line: int | None = None) -> str | _Undecodable:
    where = path if line is None else f"{path}, line {line}"
    try:
        return content.decode(config.encoding)
    except UnicodeDecodeError as error:
        why = f"{where}: not valid {config.encoding} at byte {error.start}"
        if config.undecodable == "skip":
            return _Undecodable(why)
        flags = "--data.encoding, --data.undecodable"
        advice = f"set encoding to the file's, or undecodable to 'skip' to leave it out ({flags})"
        raise ValueError(f"{why}; {advice}") from error
    except LookupError as error:
        raise ValueError(f"encoding {config.encoding!r} is not known to Python") from error


def _read_json_lines(config: DataConfig, path: str) -> Iterator[str | _Undecodable]:
    with open_regular(path) as stored, gzip.open(stored) if path.endswith(".gz") else stored as file:
        number = 0
        # A few bytes of gzip may unpack to gigabytes in one line.
        while content := file.readline(_MAX_LINE_BYTES + 1):
            number += 1
            if len(content) > _MAX_LINE_BYTES:
                raise ValueError(f"{path}, line {number}: expected at most {_MAX_LINE_BYTES:,} bytes a line")
            line = _decode(config, path, content, number)
            if isinstance(line, _Undecodable):
                yield line
            elif not line.isspace():
                yield _json_text(config, path, number, line)


def _json_text(config: DataConfig, path: str, number: int, line: str) -> str:
    try:
        record = json.loads(line)
    except RecursionError:
        raise ValueError(f"{path}, line {number}: not JSON (it is nested too deeply)") from None
    except ValueError as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else error
        raise ValueError(f"{path}, line {number}: not JSON ({reason})") from error
    setting = "messages_field" if config.format == "chat" else "text_field"
    field = getattr(config, setting)
    if config.format == "chat" and isinstance(record, dict):
        field = field_of_messages(record, field) or field
    if not isinstance(record, dict) or field not in record:
        has = f"has the fields {sorted(record)}" if isinstance(record, dict) else f"is a {type(record).__name__}"
        raise ValueError(f"{path}, line {number}: no field {field!r} ({setting}); it {has}")
    if config.format == "chat":
        return conversation(record, field, f"{path}, line {number}")
    text = record[config.text_field]
    if not isinstance(text, str | None):
        raise ValueError(f"{path}, line {number}: field {config.text_field!r} holds {type(text).__name__}, not text")
    return without_surrogates(text or "")


def _read_parquet(config: DataConfig, path: str) -> Iterator[str | _Undecodable]:
    with open_regular(path) as stored, pyarrow.parquet.ParquetFile(stored) as file:
        names = file.schema_arrow.names
        if config.format == "chat":
            yield from _conversations(config, path, file)
            return
        if config.text_field not in names:
            raise ValueError(f"{path}: no column {config.text_field!r} (text_field); it has the columns {names}")
        kind = file.schema_arrow.field(config.text_field).type
        kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
        if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
            raise ValueError(f"{path}: column {config.text_field!r} holds {kind}, not text")
        # Few rows at a time: one long text in a file's dictionary may stand for any number of them. Of short texts it
        # takes a microsecond more for each than a thousand rows at a time would.
        for batch in file.iter_batches(batch_size=_PARQUET_ROWS, columns=[config.text_field]):
            for text in batch.column(0):
                yield text.as_py() or ""


def _conversations(config: DataConfig, path: str, file: pyarrow.parquet.ParquetFile) -> Iterator[str]:
    names = file.schema_arrow.names
    field = field_of_messages(names, config.messages_field)
    if field is None:
        raise ValueError(f"{path}: no column {config.messages_field!r} (messages_field); it has the columns {names}")
    wanted = [name for name in dict.fromkeys((field, "system", *ROW_KEYS)) if name in names]
    number = 0
    for batch in file.iter_batches(batch_size=_PARQUET_ROWS, columns=wanted):
        for record in batch.to_pylist():
            number += 1
            yield conversation(record, field, f"{path}, row {number}")
