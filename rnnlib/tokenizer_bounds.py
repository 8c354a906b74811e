"""Bounds on a tokenizer's JSON file, checked before the `tokenizers` package builds it.

The package takes what a file says: token number 4 * 10^9, a normalizer that writes a hundred letters for one, eight
times in a row. What such a file would cost is read here from the file.
"""

import base64
import binascii
import struct
from collections.abc import Iterator, Mapping
from typing import Any

MAX_TOKENS = 2**20
# Published tokenizers write up to three bytes for a space, and 18 characters for the longest ligature.
MAX_GROWTH = 1024
_LARGEST = "the largest published vocabularies have 262,144"


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


def _steps(part: Any) -> Iterator[Mapping[str, Any]]:
    """The steps of a normalizer or decoder, those of nested sequences one by one."""
    waiting = [part]
    while waiting:
        step = waiting.pop(0)
        if isinstance(step, Mapping):
            yield step
            for name in ("normalizers", "decoders"):
                inner = step.get(name)
                waiting[:0] = inner if isinstance(inner, list) else []


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
