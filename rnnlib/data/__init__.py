"""Text and task data as batches: sources, tokenizers, packing, grain pipelines."""

from rnnlib.extras import from_extra

with from_extra("train", "rnnlib.data"):
    from rnnlib.data.config import DataConfig, SourceName, Split
    from rnnlib.data.corpus import DamagedTokensError, TokenCorpus, load_corpus
    from rnnlib.data.packing import PackedDocuments
    from rnnlib.data.pipeline import Batch, BatchDataset, BatchIterator, make_dataset
    from rnnlib.data.sources import iterate_documents
    from rnnlib.tokenizers import ByteTokenizer, FileTokenizer, Tokenizer, load_tokenizer, train_tokenizer

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
