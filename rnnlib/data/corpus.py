"""Documents as one flat array of tokens, in memory or memory-mapped from a cache folder."""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from typing import IO

import numpy as np
from jaxtyping import Int64

from rnnlib.data.config import DataConfig, Split, check_split
from rnnlib.data.conversation import ConversationEncoder
from rnnlib.data.mixture import mixture
from rnnlib.data.sources import iterate_documents, resolved_split, source_fingerprint
from rnnlib.files import naming, new_folder, open_regular, read_json
from rnnlib.tokenizers import Tokenizer, without_surrogates

_BATCH_CHARACTERS = 4_000_000  # documents are tokenized in batches of about so many characters
_FORMAT = 3


class DamagedTokensError(ValueError):
    """A token cache that holds what no tokenizer wrote."""


@dataclasses.dataclass(frozen=True)
class TokenCorpus:
    """Documents' tokens, one after the other.

    Attributes:
        tokens: uint16 (int32 for larger vocabularies) `[num_tokens]`; a document of text is led by the end-of-document
            id, from which its first token is predicted. Conversations begin with their own first token.
        starts: where each document begins, and at the end the number of tokens.
        end_of_document: the id that leads each document.
        text_bytes: bytes of UTF-8 text.
        fingerprint: hash of tokens and starts; equal corpora have equal fingerprints.
        vocabulary_size: what all tokens are below; None if it is not known.
        weights: uint8 `[num_tokens]`, 1 for each token that is to be predicted, else 0; None if all are.
    """

    tokens: np.ndarray
    starts: Int64[np.ndarray, " documents_plus_one"]
    end_of_document: int
    text_bytes: int
    fingerprint: str
    vocabulary_size: int | None = None
    weights: np.ndarray | None = None

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
    def from_documents(
        cls,
        documents: Iterable[str],
        tokenizer: Tokenizer,
        folder: str | None = None,
        *,
        chat: ConversationEncoder | None = None,
    ) -> "TokenCorpus":
        """Tokenizes documents.

        Args:
            documents: texts, or conversations, read as a stream.
            tokenizer: gives the ids.
            folder: an existing folder to write the tokens to (memory-mapped then) instead of keeping them in memory.
            chat: gives the ids and weights of documents that are conversations.
        """
        dtype = np.dtype(np.uint16 if tokenizer.vocabulary_size <= 2**16 else np.int32)
        hasher = hashlib.blake2b(digest_size=16)
        pieces: dict[str, list[np.ndarray]] = {"tokens": [], "weights": []}
        lengths: list[int] = []
        text_bytes = 0
        with contextlib.ExitStack() as stack:
            files: dict[str, IO[bytes]] = {}
            for name in () if folder is None else ("tokens",) if chat is None else ("tokens", "weights"):
                files[name] = stack.enter_context(open(os.path.join(folder, f"{name}.bin"), "wb"))  # type: ignore[arg-type]
            for batch in in_batches(documents, _BATCH_CHARACTERS):
                text_bytes += sum(len(without_surrogates(text).encode()) for text in batch)
                arrays: dict[str, list[np.ndarray]] = {}
                if chat is None:
                    lead = np.array([tokenizer.end_of_document])
                    arrays["tokens"] = [np.concatenate([lead, ids]) for ids in tokenizer.encode_batch(batch)]
                else:
                    encoded = chat.encode(batch)
                    arrays["tokens"], arrays["weights"] = [ids for ids, _ in encoded], [own for _, own in encoded]
                lengths += map(len, arrays["tokens"])
                for name, parts in arrays.items():
                    flat = np.concatenate(parts).astype(dtype if name == "tokens" else np.uint8)
                    content = flat.tobytes()
                    hasher.update(content)
                    if name in files:
                        files[name].write(content)
                    else:
                        pieces[name].append(flat)
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.asarray(lengths, np.int64), dtype=np.int64)])
        hasher.update(starts.tobytes())
        held = {name: np.concatenate(parts) if parts else np.zeros(0, dtype) for name, parts in pieces.items()}
        corpus = cls(
            tokens=held["tokens"],
            starts=starts,
            end_of_document=tokenizer.end_of_document,
            text_bytes=text_bytes,
            fingerprint=hasher.hexdigest(),
            vocabulary_size=tokenizer.vocabulary_size,
            weights=None if chat is None else held["weights"].astype(np.uint8),
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
            weights = None
            if os.path.exists(os.path.join(folder, "weights.bin")):
                open_regular(os.path.join(folder, "weights.bin")).close()
                weights = np.memmap(os.path.join(folder, "weights.bin"), dtype=np.uint8, mode="r")
            corpus = cls(tokens=tokens, starts=starts, weights=weights, **meta)
        except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{folder}: damaged tokens ({error}), expected them as written: delete the folder"
            ) from error
        for name, found in (("tokens.bin", tokens), ("weights.bin", tokens if weights is None else weights)):
            if len(found) != starts[-1]:
                raise ValueError(
                    f"{folder}: damaged tokens, {len(found):,} in {name}, expected {starts[-1]:,} as written: delete "
                    "the folder"
                )
        return corpus

    def __getstate__(self) -> dict[str, object]:
        # A memory-mapped array travels to worker processes as its path, not as its content.
        state = dict(self.__dict__)
        for name in ("tokens", "weights"):
            array = state[name]
            if isinstance(array, np.memmap) and array.filename:
                state[name] = (os.fspath(array.filename), array.dtype.name)
        return state

    def __setstate__(self, state: dict[str, object]) -> None:
        for name in ("tokens", "weights"):
            found = state[name]
            if isinstance(found, tuple):
                state = {**state, name: np.memmap(found[0], dtype=found[1], mode="r")}
        self.__dict__.update(state)


def load_corpus(
    config: DataConfig, split: Split, tokenizer: Tokenizer, chat: ConversationEncoder | None = None
) -> TokenCorpus:
    """Reads and tokenizes a split, or opens it from the cache folder when its files have not changed since.

    Args:
        config: what is read.
        split: the split.
        tokenizer: the tokenizer.
        chat: encodes the conversations of format "chat".

    Raises:
        ValueError: see `iterate_documents`; or the cache folder is not a folder, or what it holds is damaged.
        OSError: the cache cannot be written (a full disk); nothing of it is left.
    """
    check_split(split)
    if config.cache_folder is None:
        return TokenCorpus.from_documents(_documents(config, split), tokenizer, chat=chat)
    if os.path.exists(config.cache_folder) and not os.path.isdir(config.cache_folder):
        raise ValueError(f"cache_folder: {config.cache_folder!r} is not a folder")
    folder = os.path.join(config.cache_folder, f"{split}-{cache_key(config, split, tokenizer, chat)}")
    if not os.path.isdir(folder):
        with naming(config.cache_folder), new_folder(folder, or_other=True) as staged:
            TokenCorpus.from_documents(_documents(config, split), tokenizer, os.fspath(staged), chat=chat)
    return TokenCorpus.load(folder)


def _documents(config: DataConfig, split: Split) -> Iterator[str]:
    """A split's documents, of a mixture one part after the other."""
    return itertools.chain.from_iterable(iterate_documents(part, split) for part, _ in mixture(config))


def cache_key(
    config: DataConfig,
    split: Split,
    tokenizer: Tokenizer,
    chat: ConversationEncoder | None = None,
    *,
    files: bool = True,
) -> str:
    """A hash of what tokens depend on.

    Args:
        config: What is read.
        split: The split.
        tokenizer: The tokenizer.
        chat: Encodes the conversations of format "chat".
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
        *([] if chat is None else [chat.fingerprint, config.messages_field]),
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
