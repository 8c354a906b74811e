"""What text to read, how to split it and how to feed it."""

import dataclasses
import os
from typing import Literal

SourceName = Literal["python", "text", "jsonl", "parquet"]
Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")
_PYTHON_BYTES: dict[Split, int] = {"train": 16_000_000, "validation": 262_144}
SOURCES: tuple[SourceName, ...] = ("python", "text", "jsonl", "parquet")


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Text data: its source, its split, and the shape of the batches.

    Attributes:
        source: "python" (the Python sources and documentation installed with this interpreter: no network, no
            paths), "text" (a document a file), "jsonl" (a document a line; .gz is read too), "parquet" (a document a
            row).
        paths: files or glob patterns (`**` crosses folders) for "text", "jsonl" and "parquet".
        validation_paths: files or patterns held out for validation. Without them `validation_fraction` of `paths` is.
        text_field: the field (JSON lines) or column (Parquet) that holds the text.
        encoding: of text and JSON lines files.
        tokenizer: "byte", or the path of a Hugging Face `tokenizers` JSON file.
        sequence_length: tokens a row, T.
        batch_size: rows a batch over all processes, B.
        seed: of the order of documents and rows. 0 <= seed < 2**32.
        split_by: "document" holds out whole documents, chosen by a hash of their content, so that the choice does not
            change when other documents come or go; "tail" holds out the end of every document (for a few long ones).
        validation_fraction: the share of documents (or of each document's characters) held out. 0 < fraction < 1.
        deduplicate: drop documents whose content was seen before (in the same split and, by the hash, in the other).
        max_train_bytes: at most so many bytes of training text are read (UTF-8). None reads everything that `paths`
            name, but only 16 MB of the source "python", so that a first run starts at once; give a number to read more.
        max_validation_bytes: likewise for validation text; None reads 256 KiB of the source "python".
        num_workers: worker processes that prepare training batches; 0 prepares them in this process. The batches are
            the same for any number. A script that has any must guard what it runs by `if __name__ == "__main__":`.
        prefetch: batches prepared ahead, per worker.
        cache_folder: where token arrays are kept between runs, memory-mapped (so worker processes share them and a
            corpus may be larger than memory). None keeps them in memory.
    """

    source: SourceName = "python"
    paths: tuple[str, ...] = ()
    validation_paths: tuple[str, ...] = ()
    text_field: str = "text"
    encoding: str = "utf-8"
    tokenizer: str = "byte"
    sequence_length: int = 256
    batch_size: int = 16
    seed: int = 0
    split_by: Literal["document", "tail"] = "document"
    validation_fraction: float = 0.05
    deduplicate: bool = True
    max_train_bytes: int | None = None
    max_validation_bytes: int | None = None
    num_workers: int = 0
    prefetch: int = 2
    cache_folder: str | None = None

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise ValueError(f"source must be one of {', '.join(SOURCES)}; got {self.source!r}")
        for name in ("paths", "validation_paths"):
            value = getattr(self, name)
            if isinstance(value, str | os.PathLike):
                raise ValueError(f"{name} must be a tuple of files or patterns, such as ({os.fspath(value)!r},)")
            object.__setattr__(self, name, tuple(os.fspath(path) for path in value))
        if self.source == "python":
            if self.paths or self.validation_paths:
                raise ValueError(
                    f"source 'python' takes no paths (got {self.paths or self.validation_paths}); "
                    "for files choose source 'text', 'jsonl' or 'parquet'"
                )
        elif not self.paths:
            raise ValueError(f"source {self.source!r} needs paths: files or glob patterns")
        for name in ("sequence_length", "batch_size", "prefetch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        if self.num_workers < 0:
            raise ValueError(f"num_workers must be at least 0; got {self.num_workers}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be in [0, 2**32); got {self.seed}")
        if self.split_by not in ("document", "tail"):
            raise ValueError(f"split_by must be 'document' or 'tail'; got {self.split_by!r}")
        if not 0 < self.validation_fraction < 1:
            raise ValueError(f"validation_fraction must lie between 0 and 1; got {self.validation_fraction}")
        for name in ("max_train_bytes", "max_validation_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1 or None; got {value}")

    def max_bytes(self, split: Split) -> int | None:
        """The limit on the bytes of text read for a split, None for no limit."""
        limit = self.max_train_bytes if split == "train" else self.max_validation_bytes
        if limit is None and self.source == "python":
            return _PYTHON_BYTES[split]
        return limit


def check_split(split: str) -> None:
    """Raises ValueError unless `split` is "train" or "validation"."""
    if split not in SPLITS:
        raise ValueError(f"split must be 'train' or 'validation'; got {split!r}")
