"""Text and task data as batches: sources, tokenizers, packing, grain pipelines."""

import importlib
from typing import TYPE_CHECKING, Any

from rnnlib.extras import from_extra

if TYPE_CHECKING:
    from rnnlib.data.packing import PackedDocuments
    from rnnlib.data.pipeline import Batch, BatchDataset, BatchIterator, make_dataset

with from_extra("train", "rnnlib.data"):
    from rnnlib.data.config import DataConfig, SourceName, Split
    from rnnlib.data.corpus import DamagedTokensError, TokenCorpus, load_corpus
    from rnnlib.data.sources import iterate_documents
    from rnnlib.tokenizers import ByteTokenizer, FileTokenizer, Tokenizer, load_tokenizer, train_tokenizer

# What is made of grain is imported when it is first used: with orbax, which grain imports, it would be a sixth of what
# `rnnlib train` imports before it traces the step, and datasets are made later.
_FROM = dict.fromkeys(("Batch", "BatchDataset", "BatchIterator", "make_dataset"), "pipeline")
_FROM |= {"PackedDocuments": "packing"}

__all__ = [
    "Batch",
    "BatchDataset",
    "BatchIterator",
    "ByteTokenizer",
    "DamagedTokensError",
    "DataConfig",
    "FileTokenizer",
    "PackedDocuments",
    "SourceName",
    "Split",
    "TokenCorpus",
    "Tokenizer",
    "iterate_documents",
    "load_corpus",
    "load_tokenizer",
    "make_dataset",
    "train_tokenizer",
]


def __getattr__(name: str) -> Any:
    if name not in _FROM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with from_extra("train", f"{__name__}.{name}"):
        return getattr(importlib.import_module(f"{__name__}.{_FROM[name]}"), name)
