"""Documents as one flat array of tokens, in memory or memory-mapped from a cache folder."""

import dataclasses
import hashlib
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator

import numpy as np
from jaxtyping import Int64

from rnnlib.data.config import DataConfig, Split, check_split
from rnnlib.data.mixture import mixture
from rnnlib.data.sources import iterate_documents, resolved_split, source_fingerprint
from rnnlib.files import naming, open_regular, read_json
from rnnlib.tokenizers import Tokenizer, without_surrogates

_BATCH_CHARACTERS = 4_000_000  # documents are tokenized in batches of about so many characters
_FORMAT = 3


class DamagedTokensError(ValueError):
    """A token cache that holds what no tokenizer wrote."""


@dataclasses.dataclass(frozen=True)
class TokenCorpus:
    """Documents' tokens, one after the other.

    Attributes:
        tokens: uint16 (int32 for larger vocabularies) `[num_tokens]`; each document is led by the end-of-document id,
            from which its first token is predicted.
        starts: where each document's leading id stands, and at the end the number of tokens.
        end_of_document: the id that leads each document.
        text_bytes: bytes of UTF-8 text.
        fingerprint: hash of tokens and starts; equal corpora have equal fingerprints.
        vocabulary_size: what all tokens are below; None if it is not known.
    """

    tokens: np.ndarray
    starts: Int64[np.ndarray, " documents_plus_one"]
    end_of_document: int
    text_bytes: int
    fingerprint: str
    vocabulary_size: int | None = None

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens from one place to another.

        Raises:
            DamagedTokensError: one of them is not in the vocabulary. A model would read it as NaN.
        """
        tokens = self.tokens[start:stop]
        if (
            self.vocabulary_size is not None
            and tokens.size
            and not 0 <= tokens.min() <= tokens.max() < self.vocabulary_size
        ):
            where = os.path.dirname(self.tokens.filename or "") if isinstance(self.tokens, np.memmap) else "the corpus"
            raise DamagedTokensError(
                f"{where}: damaged tokens, from {tokens.min()} to {tokens.max()} at {start}, expected 0 to "
                f"{self.vocabulary_size - 1}: delete the folder"
            )
        return tokens

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self.starts) - 1

    @property
    def num_tokens(self) -> int:
        """Number of tokens, the id that leads each document counted."""
        return int(self.starts[-1])

    @classmethod
    def from_documents(cls, documents: Iterable[str], tokenizer: Tokenizer, folder: str | None = None) -> "TokenCorpus":
        """Tokenizes documents.

        Args:
            documents: texts, read as a stream.
            tokenizer: gives the ids.
            folder: an existing folder to write the tokens to (memory-mapped then) instead of keeping them in memory.
        """
        dtype = np.dtype(np.uint16 if tokenizer.vocabulary_size <= 2**16 else np.int32)
        hasher = hashlib.blake2b(digest_size=16)
        pieces: list[np.ndarray] = []
        lengths: list[int] = []
        text_bytes = 0
        file = open(os.path.join(folder, "tokens.bin"), "wb") if folder else None  # noqa: SIM115
        try:
            for batch in in_batches(documents, _BATCH_CHARACTERS):
                text_bytes += sum(len(without_surrogates(text).encode()) for text in batch)
                encoded = tokenizer.encode_batch(batch)
                lead = np.array([tokenizer.end_of_document])
                flat = np.concatenate([part for ids in encoded for part in (lead, ids)]).astype(dtype)
                lengths += [len(ids) + 1 for ids in encoded]
                content = flat.tobytes()
                hasher.update(content)
                if file:
                    file.write(content)
                else:
                    pieces.append(flat)
        finally:
            if file:
                file.close()
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.asarray(lengths, np.int64), dtype=np.int64)])
        hasher.update(starts.tobytes())
        corpus = cls(
            tokens=np.concatenate(pieces) if pieces else np.zeros(0, dtype),
            starts=starts,
            end_of_document=tokenizer.end_of_document,
            text_bytes=text_bytes,
            fingerprint=hasher.hexdigest(),
            vocabulary_size=tokenizer.vocabulary_size,
        )
        if folder:
            np.save(os.path.join(folder, "starts.npy"), starts)
            meta = {
                "end_of_document": corpus.end_of_document,
                "text_bytes": text_bytes,
                "fingerprint": corpus.fingerprint,
                "vocabulary_size": corpus.vocabulary_size,
                "dtype": dtype.name,
            }
            with open(os.path.join(folder, "corpus.json"), "w", encoding="utf-8") as out:
                json.dump(meta, out)
            return cls.load(folder)
        return corpus

    @classmethod
    def load(cls, folder: str) -> "TokenCorpus":
        """Opens a corpus written by `from_documents`; its tokens stay on the disk until they are read.

        Raises:
            ValueError: the folder's files are not those that were written, or not whole.
        """
        try:
            meta = read_json(os.path.join(folder, "corpus.json"))
            dtype = {"uint16": np.uint16, "int32": np.int32}[meta.pop("dtype")]
            for name in ("starts.npy", "tokens.bin"):
                open_regular(os.path.join(folder, name)).close()
            # Through a map, whose shape is compared with the file's size, and into memory.
            starts = np.array(np.load(os.path.join(folder, "starts.npy"), mmap_mode="r"))
            if starts.dtype != np.int64 or starts.ndim != 1 or starts[0] != 0 or not (np.diff(starts) > 0).all():
                raise ValueError(f"starts.npy has {starts.dtype}{list(starts.shape)} in no order")
            tokens = np.memmap(os.path.join(folder, "tokens.bin"), dtype=dtype, mode="r")
            corpus = cls(tokens=tokens, starts=starts, **meta)
        except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{folder}: damaged tokens ({error}), expected them as written: delete the folder"
            ) from error
        if len(tokens) != starts[-1]:
            raise ValueError(
                f"{folder}: damaged tokens, {len(tokens):,} in tokens.bin, expected {starts[-1]:,} as written: delete "
                "the folder"
            )
        return corpus

    def __getstate__(self) -> dict[str, object]:
        # A memory-mapped array travels to worker processes as its path, not as its content.
        state = dict(self.__dict__)
        if isinstance(self.tokens, np.memmap) and self.tokens.filename:
            state["tokens"] = (os.fspath(self.tokens.filename), self.tokens.dtype.name)
        return state

    def __setstate__(self, state: dict[str, object]) -> None:
        tokens = state["tokens"]
        if isinstance(tokens, tuple):
            state = {**state, "tokens": np.memmap(tokens[0], dtype=tokens[1], mode="r")}
        self.__dict__.update(state)


def load_corpus(config: DataConfig, split: Split, tokenizer: Tokenizer) -> TokenCorpus:
    """Reads and tokenizes a split, or opens it from the cache folder when its files have not changed since.

    Raises:
        ValueError: see `iterate_documents`; or the cache folder is not a folder, or what it holds is damaged.
        OSError: the cache cannot be written (a full disk); nothing of it is left.
    """
    check_split(split)
    if config.cache_folder is None:
        return TokenCorpus.from_documents(_documents(config, split), tokenizer)
    if os.path.exists(config.cache_folder) and not os.path.isdir(config.cache_folder):
        raise ValueError(f"cache_folder: {config.cache_folder!r} is not a folder")
    folder = os.path.join(config.cache_folder, f"{split}-{cache_key(config, split, tokenizer)}")
    if not os.path.isdir(folder):
        os.makedirs(config.cache_folder, exist_ok=True)
        temporary = tempfile.mkdtemp(dir=config.cache_folder, prefix=".writing-")
        try:
            with naming(config.cache_folder):
                TokenCorpus.from_documents(_documents(config, split), tokenizer, temporary)
            try:
                os.rename(temporary, folder)
            except OSError:
                if not os.path.isdir(folder):  # otherwise another process has just written the same
                    raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return TokenCorpus.load(folder)


def _documents(config: DataConfig, split: Split) -> Iterator[str]:
    """A split's documents, of a mixture one part after the other."""
    return itertools.chain.from_iterable(iterate_documents(part, split) for part, _ in mixture(config))


def cache_key(config: DataConfig, split: Split, tokenizer: Tokenizer, *, files: bool = True) -> str:
    """A hash of what tokens depend on.

    Args:
        config: What is read.
        split: The split.
        tokenizer: The tokenizer.
        files: The files' names, sizes and times, too.
    """
    fields = (
        _FORMAT,
        config.kind,
        config.text_field,
        config.encoding,
        config.undecodable,
        *(resolved_split(part) for part, _ in mixture(config)),
        config.validation_fraction,
        config.deduplicate,
        config.max_bytes(split),
        tokenizer.fingerprint,
        *([source_fingerprint(part) for part, _ in mixture(config)] if files else []),
    )
    return hashlib.blake2b(repr(fields).encode(), digest_size=16).hexdigest()


def in_batches(documents: Iterable[str], characters: int) -> Iterator[list[str]]:
    """Documents in batches of about so many characters, read as a stream."""
    batch: list[str] = []
    size = 0
    for text in documents:
        batch.append(text)
        size += len(text)
        if size >= characters:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
