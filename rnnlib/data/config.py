"""What text to read, how to split it and how to feed it."""

import dataclasses
import os
import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from rnnlib.configuration import keyed_values
from rnnlib.fields import NaturalNumber, PositiveInteger, Range, check_fields

SourceName = Literal["python", "text", "jsonl", "parquet"]
Split = Literal["train", "validation"]
SplitBy = Literal["document", "tail"]
_WEIGHT = re.compile(r":[\d.]+$")
SPLITS: tuple[Split, ...] = ("train", "validation")
_PYTHON_BYTES: dict[Split, int] = {"train": 16_000_000, "validation": 262_144}


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Text data: its source, its split, and the shape of the batches.

    Attributes:
        source: "python" (the Python sources and documentation installed with this interpreter: no network, no
            paths), "text" (a document a file), "jsonl" (a document a line; .gz is read too), "parquet" (a document a
            row). None goes by the names of `paths`: .jsonl and .ndjson, .parquet, any other is text; without paths it
            is "python".
        paths: files or glob patterns (`**` crosses folders) for "text", "jsonl" and "parquet". With a weight behind,
            "books/*.txt:3", they are the parts of a mixture: of every training batch's rows a part gets its weight's
            share, and each part repeats on its own. Limits and de-duplication hold for each part.
        validation_paths: files or patterns held out for validation. Without them `validation_fraction` of `paths` is.
        format: "text", or "chat": each row of JSON lines or Parquet is a conversation. Its `messages` (objects with
            `role` and `content`; also `tools`, `documents` and `chat_template_kwargs`, where the row has them) go
            through the tokenizer's chat template, and only what the assistant says is learned.
        text_field: the field (JSON lines) or column (Parquet) that holds the text.
        messages_field: the field or column that holds the messages of format "chat"; rows without it may have
            ShareGPT's `conversations`.
        chat_template: a file with the template (Jinja) of format "chat"; None for that beside the tokenizer.
        chat_options: further variables of the template, KEY=VALUE, such as enable_thinking=false.
        encoding: of text and JSON lines files; in the latter a line feed is one byte, so that UTF-16 is for text only.
        undecodable: what becomes of a file (or a line of JSON) that is not in `encoding`: "error" or "skip", which
            leaves it out and warns once of how many there were.
        tokenizer: "byte", or the path of a Hugging Face `tokenizers` JSON file.
        sequence_length: tokens a row, T.
        batch_size: rows a batch over all processes, B.
        seed: of the order of documents and rows. 0 <= seed < 2**32.
        split_by: "document" holds out whole documents, chosen by a hash of their content, so that the choice does not
            change when other documents come or go; "tail" holds out the end of every document (for a few long ones).
            None is "tail" for fewer than 100 text files (a book in one file, for example), else "document".
        validation_fraction: the share of documents (or of each document's characters) held out. 0 < fraction < 1.
        deduplicate: drop documents whose content was seen before (in the same split and, by the hash, in the other).
        max_train_bytes: at most so many bytes of training text are read (UTF-8). None reads everything that `paths`
            name, but only 16 MB of the source "python", so that a first run starts at once; give a number to read more.
        max_validation_bytes: likewise for validation text; None reads 256 KiB of the source "python".
        streaming: begin to train when the first block of text is tokenized, and tokenize the rest meanwhile, in a
            thread; documents and rows are shuffled within blocks of 32 million characters. For text that takes long to
            tokenize; with `cache_folder` for text larger than memory.
        num_workers: worker processes that prepare training batches; 0 prepares them in this process. The batches are
            the same for any number. A script that has any must guard what it runs by `if __name__ == "__main__":`.
        prefetch: batches prepared ahead, per worker.
        cache_folder: where token arrays are kept between runs, memory-mapped (so worker processes share them and a
            corpus may be larger than memory). None keeps them in memory.
    """

    source: SourceName | None = None
    paths: tuple[str, ...] = ()
    validation_paths: tuple[str, ...] = ()
    format: Literal["text", "chat"] = "text"
    text_field: str = "text"
    messages_field: str = "messages"
    chat_template: str | None = None
    chat_options: tuple[str, ...] = ()
    encoding: str = "utf-8"
    undecodable: Literal["error", "skip"] = "error"
    tokenizer: str = "byte"
    sequence_length: PositiveInteger = 256
    batch_size: PositiveInteger = 16
    seed: Annotated[int, Range(at_least=0, below=2**32)] = 0
    split_by: SplitBy | None = None
    validation_fraction: Annotated[float, Range(above=0, below=1)] = 0.05
    deduplicate: bool = True
    max_train_bytes: PositiveInteger | None = None
    max_validation_bytes: PositiveInteger | None = None
    streaming: bool = False
    num_workers: NaturalNumber = 0
    prefetch: PositiveInteger = 2
    cache_folder: str | None = None

    def __post_init__(self) -> None:
        for name in ("paths", "validation_paths"):
            object.__setattr__(self, name, plain_paths(name, getattr(self, name)))
        for name in ("tokenizer", "cache_folder", "chat_template"):
            object.__setattr__(self, name, plain_path(getattr(self, name)))
        check_fields(self)
        if self.streaming and self.num_workers:
            raise ValueError(f"num_workers is {self.num_workers}, expected 0 with streaming: one thread reads the text")
        if self.kind == "python":
            if self.paths or self.validation_paths:
                raise ValueError(
                    f"source 'python' takes no paths (got {self.paths or self.validation_paths}); "
                    "for files choose source 'text', 'jsonl' or 'parquet' (--data.source), or leave it out"
                )
        elif not self.paths:
            raise ValueError(f"source {self.source!r} needs paths: files or glob patterns (--data.paths)")

        self._check_chat()

    def _check_chat(self) -> None:
        keyed_values("chat_options", self.chat_options)
        if self.format == "chat":
            kinds = {_kind_of_name(path) for path in self.paths} if self.source is None else {self.source}
            if wrong := kinds - {"jsonl", "parquet"} or (set() if self.paths else {"python"}):
                raise ValueError(
                    f"format is 'chat' and the source {sorted(wrong)[0]!r}, expected 'jsonl' or 'parquet' with a "
                    "conversation a row (--data.paths, --data.source)"
                )
            if self.split_by == "tail":
                raise ValueError("split_by is 'tail', expected 'document' with format 'chat': whole conversations")
        elif self.chat_template is not None or self.chat_options:
            name = "chat_options" if self.chat_template is None else "chat_template"
            raise ValueError(f"{name} is {getattr(self, name)!r}, expected it with format 'chat' alone")

    @property
    def kind(self) -> SourceName:
        """The source, where it is left out by the names of the paths; each part of a mixture has its own.

        Raises:
            ValueError: it is left out and the names are of several kinds.
        """
        if self.source is not None:
            return self.source
        kinds = {_kind_of_name(path): path for path in (*self.paths, *self.validation_paths)}
        if len(kinds) > 1 and not any(_WEIGHT.search(path) for path in self.paths):
            names = " and ".join(map(repr, kinds.values()))
            raise ValueError(f"paths are of several kinds ({names}): say by source which they are (--data.source)")
        return next(iter(kinds), "python")

    def max_bytes(self, split: Split) -> int | None:
        """The limit on the bytes of text read for a split, None for no limit."""
        limit = self.max_train_bytes if split == "train" else self.max_validation_bytes
        if limit is None and self.kind == "python":
            return _PYTHON_BYTES[split]
        return limit


def _kind_of_name(path: str) -> SourceName:
    name = _WEIGHT.sub("", path.lower()).removesuffix(".gz")  # a mixture's paths end in their weight
    return "jsonl" if name.endswith((".jsonl", ".ndjson")) else "parquet" if name.endswith(".parquet") else "text"


def plain_path(path: Any) -> Any:
    """A path as a string; anything else as it is."""
    return os.fspath(path) if isinstance(path, os.PathLike) else path


def plain_paths(name: str, value: Any) -> Any:
    """A field's paths as a tuple of strings; what is no collection as it is, for `check_fields` to refuse.

    Raises:
        ValueError: it is a single path, of which each letter would be one.
    """
    if isinstance(value, str | os.PathLike):
        raise ValueError(f"{name} must be a tuple of files or patterns, such as ({os.fspath(value)!r},)")
    return tuple(map(plain_path, value)) if isinstance(value, Iterable) else value


def check_split(split: str) -> None:
    """Raises ValueError unless `split` is "train" or "validation"."""
    if split not in SPLITS:
        raise ValueError(f"split must be 'train' or 'validation'; got {split!r}")
