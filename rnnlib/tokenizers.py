"""Byte and byte-pair tokenizers behind one protocol."""

import contextlib
import copy
import functools
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, SupportsInt, runtime_checkable

import numpy as np
from jaxtyping import Int32

from rnnlib.extras import from_extra
from rnnlib.files import parse_json, read_text, write_atomically
from rnnlib.tokenizer_bounds import expect_bounded, is_linear

with from_extra("hub", "rnnlib.tokenizers"):
    import tokenizers

    from rnnlib.sandbox.tokenizer import LimitedTokenizer, TokenizerError

type Backend = tokenizers.Tokenizer | LimitedTokenizer

END_OF_DOCUMENT = "<|endoftext|>"
# Names that published tokenizers use for it, in order of preference.
_END_NAMES = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|eos|>", "[SEP]")
_NOT_DECODED = "the tokenizer cannot decode these tokens"
_NOT_ENCODED = "the tokenizer cannot encode this text"
_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
_MOST_LEFT_OUT = 2**16
_SURROGATES = re.compile("[\ud800-\udfff]")


def without_surrogates(text: str) -> str:
    """The text with U+FFFD for every lone surrogate, which has no bytes (JSON's escapes can spell one)."""
    return text if text.isascii() else _SURROGATES.sub("\ufffd", text)


@runtime_checkable
class Tokenizer(Protocol):
    """What the pipelines, training and generation need of a tokenizer."""

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids."""

    @property
    def end_of_document(self) -> int:
        """The id that stands between documents."""

    @property
    def token_bytes(self) -> Int32[np.ndarray, " vocabulary"]:
        """Bytes of text that each token stands for; 0 for special tokens."""

    @property
    def fingerprint(self) -> str:
        """Equal for tokenizers that give equal ids."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of many texts at once (faster), as integer arrays."""

    def decode(self, ids: Iterable[SupportsInt]) -> str:
        """The text of token ids; special tokens are left out."""


class ByteTokenizer:
    """UTF-8 bytes are ids 0 to 255; 256 ends a document."""

    vocabulary_size = 257
    end_of_document = 256
    fingerprint = "byte"

    @property
    def token_bytes(self) -> Int32[np.ndarray, " vocabulary"]:
        """One byte each, none for the end of a document."""
        counts = np.ones(self.vocabulary_size, np.int32)
        counts[self.end_of_document] = 0
        return counts

    def encode(self, text: str) -> list[int]:
        """The UTF-8 bytes of `text`."""
        return list(without_surrogates(text).encode())

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The UTF-8 bytes of each text."""
        return [np.frombuffer(without_surrogates(text).encode(), np.uint8) for text in texts]

    def decode(self, ids: Iterable[SupportsInt]) -> str:
        """The text; bytes that are not UTF-8 (a character cut in half) become the replacement character."""
        return bytes(int(i) for i in ids if 0 <= int(i) < 256).decode("utf-8", errors="replace")


class FileTokenizer:
    """A Hugging Face `tokenizers` tokenizer, by which text is only text.

    Where a document holds the name of a special token (`<|endoftext|>` in a text about tokenizers), it is encoded as
    these characters: as the token's id it would end the document in its middle, and its bytes be neither counted nor
    decoded.
    """

    def __init__(self, tokenizer: Backend, *, end_token: str | None = None):
        """Wraps a tokenizer.

        Args:
            tokenizer: the tokenizer, whose truncation and padding are switched off. One of the package's own class
                encodes in this process, without a limit on its time.
            end_token: name of the token that ends a document; None, or one that the tokenizer lacks, for the first of
                the published names that it has, or `<|endoftext|>`, which is added.
        """
        self._tokenizer = tokenizer
        # Truncation or padding stored with a tokenizer would drop or add tokens of a document.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        names = _END_NAMES if end_token is None else (end_token, *_END_NAMES)
        if not any(tokenizer.token_to_id(name) is not None for name in names):
            tokenizer.add_special_tokens([END_OF_DOCUMENT])
        known = ((name, tokenizer.token_to_id(name)) for name in names)
        self.end_token, self.end_of_document = next((name, index) for name, index in known if index is not None)
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(index for index, token in added.items() if token.special)
        # Ids may have gaps, so the largest counts and not their number.
        self.vocabulary_size: int = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.token_bytes: Int32[np.ndarray, " vocabulary"] = _count_bytes(tokenizer, self.vocabulary_size)
        self.fingerprint: str = hashlib.blake2b(tokenizer.to_str().encode(), digest_size=16).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Token ids, without special tokens.

        Raises:
            ValueError: the tokenizer fails on this text, as a damaged one may.
        """
        with _one_error(_NOT_ENCODED):
            return self._tokenizer.encode(without_surrogates(text), add_special_tokens=False).ids

    def encode_marked(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a prompt, in which names of special tokens stand for these tokens.

        Args:
            text: the prompt, such as a chat template gives.
            add_special_tokens: add what the tokenizer puts around a text, such as a token at its beginning.
        """
        self._tokenizer.encode_special_tokens = False
        try:
            with _one_error(_NOT_ENCODED):
                return self._tokenizer.encode(without_surrogates(text), add_special_tokens=add_special_tokens).ids
        finally:
            self._tokenizer.encode_special_tokens = True

    def encode_marked_batch(self, texts: Sequence[str]) -> list[tuple[np.ndarray, list[tuple[int, int]]]]:
        """Of each text its token ids, as `encode_marked` gives them, and each token's place in it, in characters."""
        with _one_error(_NOT_ENCODED):
            encodings = self._marked.encode_batch(list(map(without_surrogates, texts)), add_special_tokens=False)
        return [(np.asarray(encoding.ids, np.int32), encoding.offsets) for encoding in encodings]

    @functools.cached_property
    def _marked(self) -> Backend:
        """The tokenizer with special tokens in texts, apart from the other, which threads may use meanwhile."""
        limited = isinstance(self._tokenizer, LimitedTokenizer)
        marked = copy.copy(self._tokenizer) if limited else tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
        marked.encode_special_tokens = False
        return marked

    def decode_marked(self, ids: Iterable[SupportsInt]) -> str:
        """The text, in which special tokens stand by their names."""
        with _one_error(_NOT_DECODED):
            return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    def is_special(self, token: int) -> bool:
        """Whether a token is special, so that `decode` leaves it out."""
        return int(token) in self._special

    def token_name(self, token: int) -> str | None:
        """The name of a token by its id; None where there is none."""
        return self._tokenizer.id_to_token(token)

    def within(self, vocabulary_size: int, *, needed: Iterable[str] = (), template: str = "") -> "FileTokenizer":
        """The tokenizer without the tokens from `vocabulary_size` on, for a model that has so many.

        Tokens can be left out if no text gives them: special tokens, whose names are text from then on, and tokens
        that no merge of pairs makes.

        Args:
            vocabulary_size: the number of the model's tokens.
            needed: names of special tokens that cannot be left out; the end of a document is one in any case.
            template: a chat template, whose special tokens cannot be left out either.

        Returns:
            This tokenizer if it has no such tokens, or else another.

        Raises:
            ValueError: a token that would have to be left out is needed, or some text gives it.
        """
        if self.vocabulary_size <= vocabulary_size:
            return self
        if self.vocabulary_size > vocabulary_size + _MOST_LEFT_OUT:
            raise ValueError(
                f"the model has {vocabulary_size} tokens and the tokenizer {self.vocabulary_size}, expected at most "
                f"{_MOST_LEFT_OUT} more: is it the model's tokenizer?"
            )
        definition = json.loads(self._tokenizer.to_str())
        made = _made_by_merges(definition)
        special = {entry["content"] for entry in definition["added_tokens"] if entry["special"]}
        needed = {self.end_token, *needed}
        around_texts = json.dumps(definition["post_processor"], ensure_ascii=False)
        dropped = set()
        for token, index in sorted(self._tokenizer.get_vocab(with_added_tokens=True).items(), key=lambda pair: pair[1]):
            if index < vocabulary_size:
                continue
            if token in special:
                is_met = token in needed or token in template or token in around_texts
            else:
                is_met = made is None or token in made or len(token) == 1 or bool(_BYTE.fullmatch(token))
            if is_met:
                raise ValueError(
                    f"the model has {vocabulary_size} tokens and the tokenizer {self.vocabulary_size}, of which "
                    f"{token!r} is number {index}, expected below {vocabulary_size}: is it the model's tokenizer?"
                )
            dropped.add(token)
        added = [entry for entry in definition["added_tokens"] if entry["content"] not in dropped]
        model = definition["model"]
        if isinstance(model["vocab"], dict):
            model["vocab"] = {token: index for token, index in model["vocab"].items() if token not in dropped}
        smaller = definition | {"added_tokens": added, "model": model}
        return FileTokenizer(
            _build(smaller, limited=isinstance(self._tokenizer, LimitedTokenizer)), end_token=self.end_token
        )

    def token_number(self, name: str) -> int | None:
        """The id of a token by its name; None where there is none."""
        return self._tokenizer.token_to_id(name)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each text, encoded in parallel threads."""
        texts = list(map(without_surrogates, texts))
        with _one_error(_NOT_ENCODED):
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.asarray(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, ids: Iterable[SupportsInt]) -> str:
        """The text; special tokens are left out."""
        with _one_error(_NOT_DECODED):
            return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the JSON file; a reader never sees half of it."""
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        write_atomically(path, self._tokenizer.to_str(pretty=True).encode())


def load_tokenizer(name: str | os.PathLike[str], *, end_token: str | None = None) -> ByteTokenizer | FileTokenizer:
    """The tokenizer called "byte", or the one in a Hugging Face `tokenizers` JSON file.

    Without a known end-of-document token (such as "<|endoftext|>" or "</s>") one is added after the file's tokens.

    Args:
        name: "byte", or the file.
        end_token: name of the file's end-of-document token, where it is known.

    Raises:
        ValueError: there is no such file, or it is not a tokenizer.
    """
    if name == "byte":
        return ByteTokenizer()
    if not os.path.exists(name):
        raise ValueError(f"tokenizer must be 'byte' or a tokenizers JSON file; there is no file {os.fspath(name)!r}")
    return FileTokenizer(read_backend(name), end_token=end_token)


def read_backend(path: str | os.PathLike[str]) -> Backend:
    """The tokenizer in a Hugging Face `tokenizers` JSON file.

    It is as that library has it if its steps are known to be fast (`tokenizer_bounds.is_linear`), or else runs in a
    process of its own with a limit on its time.

    Raises:
        ValueError: the file is none of a tokenizer, or of one that would take far more than published ones.
    """
    where = os.fspath(path)
    definition = parse_json(read_text(path), where)
    expect_bounded(definition, where)
    with _one_error(f"{where}: not a tokenizers JSON file"):
        return _build(definition, limited=not is_linear(definition))


def _build(definition: Mapping[str, Any], *, limited: bool) -> Backend:
    return LimitedTokenizer(definition) if limited else tokenizers.Tokenizer.from_str(json.dumps(definition))


@contextlib.contextmanager
def _one_error(what: str) -> Iterator[None]:
    """Within it, what the package raises, `Exception` itself and panics that are not even one, is a ValueError."""
    try:
        yield
    except BaseException as error:
        if type(error) in (Exception, TokenizerError) or type(error).__name__ == "PanicException":
            raise ValueError(f"{what} ({error})") from error
        raise


def train_tokenizer(
    documents: Iterable[str],
    *,
    vocabulary_size: int,
    path: str | os.PathLike[str] | None = None,
    progress: bool = False,
) -> FileTokenizer:
    """Learns a byte-level byte-pair encoding; any text encodes without unknown tokens, and decodes to itself.

    Args:
        documents: texts to count pairs in.
        vocabulary_size: number of tokens, the 256 bytes and the end of document among them. Fewer are learned when
            the documents are too short for so many merges.
        path: where to write the tokenizers JSON file (atomically); None does not write it.
        progress: show a progress bar.

    Raises:
        ValueError: `vocabulary_size` is below 257.
    """
    if vocabulary_size < 257:
        raise ValueError(
            f"vocabulary_size must be at least 257 (256 bytes and the end of document); got {vocabulary_size}"
        )
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=progress,
    )
    tokenizer.train_from_iterator(documents, trainer)
    result = FileTokenizer(tokenizer)
    if path is not None:
        result.save(path)
    return result


def _made_by_merges(definition: Mapping[str, Any]) -> set[str] | None:
    """The tokens of a tokenizer's definition that some text may give beside single ones; None where it may be any."""
    model = definition["model"]
    if model.get("type") != "BPE" or model.get("ignore_merges"):
        return None
    added = {entry["content"] for entry in definition["added_tokens"]}
    return added.union("".join(merge.split(" ") if isinstance(merge, str) else merge) for merge in model["merges"])


def _count_bytes(tokenizer: Backend, size: int) -> np.ndarray:
    """Bytes of text behind each token.

    Exact for byte-level vocabularies (each character of a token is a byte) and for SentencePiece ones (a low line
    block is a space, <0x41> a byte), but that a tokenizer which puts a space before each document counts it. Other
    kinds drop spaces between words, which then are not counted; an unknown token counts as none.
    """
    definition = json.loads(tokenizer.to_str())
    byte_level = '"ByteLevel"' in json.dumps([definition["pre_tokenizer"], definition["decoder"]])
    special = {entry["id"] for entry in definition["added_tokens"] if entry["special"]}
    added = {entry["id"] for entry in definition["added_tokens"]}
    counts = np.zeros(size, np.int32)
    for token, index in tokenizer.get_vocab(with_added_tokens=True).items():
        if index in special:
            continue
        if byte_level and index not in added:
            counts[index] = len(token)
        elif re.fullmatch("<0x[0-9A-Fa-f]{2}>", token):
            counts[index] = 1
        else:
            counts[index] = len(token.replace("▁", " ").removeprefix("##").encode())
    return counts
