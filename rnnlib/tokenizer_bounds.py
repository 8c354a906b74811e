"""What a tokenizer's JSON file would cost, read from the file before the `tokenizers` package builds it.

The package takes what a file says: token number 4 * 10^9, a normalizer that writes a hundred letters for one eight
times in a row, a regular expression that backtracks. `expect_bounded` refuses sizes far beyond those of published
tokenizers; `is_linear` knows the steps and regular expressions whose time grows with the text's length and not faster.
"""

import base64
import binascii
import struct
from collections.abc import Mapping
from typing import Any

MAX_TOKENS = 2**20
# Published tokenizers write up to three bytes for a space, and 18 characters for the longest ligature.
MAX_GROWTH = 1024
# Unigram and WordPiece look for each token at each character.
_LONGEST_TOKEN = 1024
_LONGEST_WORD = 1024
_LARGEST = "the largest published vocabularies have 262,144"

# Regular expressions of published tokenizers. tests/data/test_limited_tokenizers.py measures them on long runs of
# letters, digits, spaces and signs.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+{end}"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*{end}"
)
LINEAR_PATTERNS = frozenset(
    {
        # GPT-2, and in two other spellings.
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
        r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        # Llama 3, OLMo 2, GLM 4; Qwen 2 and 3; Qwen 3.5; Ling and Ring.
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
        # GPT-4o, Llama 4; MiniMax; Mistral's Tekken, Nemotron.
        _CASED.replace("{end}", f"{_CONTRACTIONS}?") + rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",
        _CASED.replace("{end}", f"{_CONTRACTIONS}?") + rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",
        _CASED.replace("{end}", "") + rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",
        # DeepSeek V3, in three steps; DeepSeek's first models.
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
        rf" ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
        r"[\r\n]",
        r"\s?\p{L}+",
        r"\s?\p{P}+",
        # Falcon; BLOOM; CLIP.
        "[0-9][0-9][0-9]",
        r" ?[^(\s|[.,!?…。，、।۔،])]+",
        r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
        # Replacements of normalizers: T5, CLIP.
        " {2,}",
        r"\s+",
        r"\n",
    }
)
_LINEAR_STEPS = {
    "normalizer": {
        *("NFC", "NFD", "NFKC", "NFKD", "Nmt", "Lowercase", "StripAccents", "Strip", "Prepend", "ByteLevel"),
        *("BertNormalizer", "Replace", "Sequence"),
    },
    "pre_tokenizer": {
        *("ByteLevel", "Split", "Digits", "Punctuation", "Metaspace", "Whitespace", "WhitespaceSplit"),
        *("BertPreTokenizer", "CharDelimiterSplit", "UnicodeScripts", "Sequence"),
    },
    "decoder": {
        *("ByteLevel", "WordPiece", "Metaspace", "ByteFallback", "Fuse", "Strip", "BPEDecoder", "Replace", "Sequence"),
    },
}


def expect_bounded(definition: Any, where: str) -> None:
    """Raises ValueError if a tokenizer would take, or make of a text, far more than published ones.

    Args:
        definition: what the JSON file says.
        where: the file's name, for errors.
    """
    if not isinstance(definition, Mapping) or not isinstance(definition.get("model"), Mapping):
        raise ValueError(f"{where}: not a tokenizers JSON file (it has no model)")
    model = definition["model"]
    vocabulary, added, merges = model.get("vocab"), definition.get("added_tokens"), model.get("merges")
    for name, entries in (("vocab", vocabulary), ("added_tokens", added), ("merges", merges)):
        if isinstance(entries, list | dict) and len(entries) > MAX_TOKENS:
            raise ValueError(
                f"{where}: {name} has {len(entries):,} entries, expected at most {MAX_TOKENS:,}: {_LARGEST}"
            )
    numbers = [(token, number) for token, number in vocabulary.items()] if isinstance(vocabulary, Mapping) else []
    if isinstance(added, list):
        numbers += [(entry.get("content"), entry.get("id")) for entry in added if isinstance(entry, Mapping)]
    for token, number in numbers:
        if isinstance(number, int) and number >= MAX_TOKENS:
            raise ValueError(f"{where}: token {token!r:.80} is {number}, expected below {MAX_TOKENS}: {_LARGEST}")
    for part in ("normalizer", "decoder"):
        growth = 1
        for step in _steps(definition.get(part)):
            growth *= _growth(step)
            if growth > MAX_GROWTH:
                raise ValueError(
                    f"{where}: its {part} may make a text more than {MAX_GROWTH} times as long, expected no "
                    "replacements that multiply it"
                )


def is_linear(definition: Mapping[str, Any]) -> bool:
    """Whether a tokenizer is known to take time in proportion to its text, by what its file says."""
    try:
        return _has_linear_steps(definition) and _has_linear_model(definition["model"])
    except (TypeError, LookupError):  # a damaged file: the package will say what is wrong
        return False


def _has_linear_steps(definition: Mapping[str, Any]) -> bool:
    for part, known in _LINEAR_STEPS.items():
        for step in _steps(definition.get(part)):
            if step.get("type") not in known:
                return False
            pattern = step.get("pattern")
            if isinstance(pattern, Mapping) and "String" not in pattern and pattern.get("Regex") not in LINEAR_PATTERNS:
                return False
    return True


def _has_linear_model(model: Mapping[str, Any]) -> bool:
    if model.get("type", "BPE") == "BPE":
        return not model.get("dropout")
    if model["type"] == "WordLevel":
        return True
    vocabulary = model.get("vocab") or ()
    tokens = vocabulary if isinstance(vocabulary, Mapping) else (entry[0] for entry in vocabulary)
    if any(len(token) > _LONGEST_TOKEN for token in tokens):
        return False
    return model["type"] == "Unigram" or model.get("max_input_chars_per_word", _LONGEST_WORD + 1) <= _LONGEST_WORD


def _steps(part: Any) -> list[Mapping[str, Any]]:
    """The steps of a normalizer, pre-tokenizer or decoder, and those of nested sequences, in order."""
    waiting, found = [part], []
    while waiting:
        step = waiting.pop(0)
        if isinstance(step, Mapping):
            found.append(step)
            for name in ("normalizers", "pretokenizers", "decoders"):
                inner = step.get(name)
                waiting[:0] = inner if isinstance(inner, list) else []
    return found


def _growth(step: Mapping[str, Any]) -> int:
    """A bound on the characters that a step writes for one."""
    if step.get("type") == "Replace":
        content, pattern = step.get("content"), step.get("pattern")
        written = len(content) if isinstance(content, str) else 0
        literal = pattern.get("String") if isinstance(pattern, Mapping) else None
        if isinstance(literal, str) and literal:
            return max(1, -(-written // len(literal)))
        return 1 + written  # a regular expression may match between characters
    if step.get("type") == "Precompiled":
        return _longest_replacement(step.get("precompiled_charsmap"))
    return 1


def _longest_replacement(charsmap: Any) -> int:
    """Bytes of the longest text in SentencePiece's table of replacements: a trie of some bytes, then texts."""
    try:
        table = base64.b64decode(charsmap)
        (size,) = struct.unpack_from("<I", table)
    except (TypeError, binascii.Error, ValueError, struct.error):
        return 1  # no table: the package says so
    return max(1, *map(len, table[4 + size :].split(b"\0")))
