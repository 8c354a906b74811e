r"""Tokenizers out of files that nobody vouches for, run with limits on time and memory.

A regular expression in a tokenizer's file may backtrack: for `(a+)+$` the time doubles with each letter, for
`a*a*b|a*\s\s` it grows with the cube of a text's length. Tokenizers that are known to take time in proportion to the
text (`rnnlib.tokenizer_bounds.is_linear`), which most published ones are, run in this process. All others run in a
process of their own, where each call has a deadline: texts and ids are passed much faster than they are tokenized.
"""

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rnnlib.extras import from_extra
from rnnlib.sandbox.process import LimitedProcess, LimitError
from rnnlib.sandbox.tokenizer_process import MEMORY_BYTES

with from_extra("hub", "rnnlib.tokenizers"):
    import tokenizers

BUILD_SECONDS = 120.0
CALL_SECONDS = 10.0
# Published tokenizers encode more than a million a second, on one core.
CHARACTERS_PER_SECOND = 20_000
_MAX_ANSWER_BYTES = 2**31
_STEPS = ("normalizer", "pre_tokenizer", "decoder")


class TokenizerError(ValueError):
    """A tokenizer that cannot be built or fails on a text, or takes more time or memory than allowed; one line."""


@dataclasses.dataclass(frozen=True)
class Encoded:
    """What a text became.

    Attributes:
        ids: its tokens.
        offsets: the place of each in the text, `(begin, end)` in characters; none unless asked for.
    """

    ids: list[int]
    offsets: list[tuple[int, int]]


class LimitedTokenizer:
    """A tokenizer with the methods of `tokenizers.Tokenizer` that this library uses, which encodes in another process.

    Names and numbers of tokens are looked up here, in a tokenizer without the steps that handle text. The other process
    is started by the first text, and ended with this object.
    """

    def __init__(self, definition: Mapping[str, Any]):
        """Builds the tokenizer in the other process, to see that it can be built, and here without its steps.

        Args:
            definition: what tokenizer.json says.

        Raises:
            TokenizerError: it is no tokenizer, or building it takes more time or memory than allowed.
        """
        self.encode_special_tokens = False
        self._process = _start(json.dumps(definition))
        self._steps = self._ask({"parts": _STEPS}, 0)
        self._vocabulary = tokenizers.Tokenizer.from_str(json.dumps({**definition, **dict.fromkeys(_STEPS)}))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Encoded:
        """The ids of a text."""
        return self.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]

    def encode_batch_fast(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[Encoded]:
        """The ids of each text."""
        return self._encode(texts, add_special_tokens=add_special_tokens, offsets=False)

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[Encoded]:
        """The ids of each text, and their places in it."""
        return self._encode(texts, add_special_tokens=add_special_tokens, offsets=True)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ids."""
        ids = list(ids)
        return self._ask({"ids": ids, "skip_special_tokens": skip_special_tokens}, len(ids))["text"]

    def add_tokens(self, tokens: Sequence[str | tokenizers.AddedToken]) -> int:
        """Adds tokens; how many are new."""
        return self._added(self._vocabulary.add_tokens(list(tokens)))

    def add_special_tokens(self, tokens: Sequence[str | tokenizers.AddedToken]) -> int:
        """Adds special tokens; how many are new."""
        return self._added(self._vocabulary.add_special_tokens(list(tokens)))

    def get_added_tokens_decoder(self) -> dict[int, tokenizers.AddedToken]:
        """The added tokens by their ids."""
        return self._vocabulary.get_added_tokens_decoder()

    def get_vocab(self, *, with_added_tokens: bool = True) -> dict[str, int]:
        """The ids of all tokens by their names."""
        return self._vocabulary.get_vocab(with_added_tokens=with_added_tokens)

    def token_to_id(self, token: str) -> int | None:
        """The id of a token by its name; None where there is none."""
        return self._vocabulary.token_to_id(token)

    def id_to_token(self, number: int) -> str | None:
        """The name of a token by its id; None where there is none."""
        return self._vocabulary.id_to_token(number)

    def no_truncation(self) -> None:
        """Encodes texts of any length whole."""
        self._vocabulary.no_truncation()

    def no_padding(self) -> None:
        """Adds nothing to short texts."""
        self._vocabulary.no_padding()

    def to_str(self, pretty: bool = False) -> str:
        """The content of tokenizer.json."""
        separators = None if pretty else (",", ":")
        definition = json.loads(self._vocabulary.to_str()) | self._steps
        return json.dumps(definition, ensure_ascii=False, indent=2 if pretty else None, separators=separators)

    def _encode(self, texts: Sequence[str], *, add_special_tokens: bool, offsets: bool) -> list[Encoded]:
        request = {
            "texts": list(texts),
            "encode_special_tokens": self.encode_special_tokens,
            "add_special_tokens": add_special_tokens,
            "offsets": offsets,
        }
        answer = self._ask(request, sum(map(len, texts)))
        places = answer["offsets"] if offsets else [[] for _ in texts]
        return [
            Encoded(ids, [(begin, end) for begin, end in found])
            for ids, found in zip(answer["ids"], places, strict=True)
        ]

    def _added(self, count: int) -> int:
        """Another process has the new tokens."""
        if count:
            self._process.end()
            self._process = _start(self.to_str())
        return count

    def _ask(self, request: Mapping[str, Any], length: int) -> dict[str, Any]:
        """The answer for a request of texts or ids that are so long together."""
        seconds = round(CALL_SECONDS + length / CHARACTERS_PER_SECOND, 1)
        try:
            answer = self._process.ask(request, seconds=seconds, first_seconds=BUILD_SECONDS)
        except LimitError as error:
            raise TokenizerError(
                f"{error} for {length:,} characters or tokens: it is none of those whose steps are known to be fast"
            ) from None
        if "error" in answer:
            raise TokenizerError(answer["error"])
        return answer


def _start(definition: str) -> LimitedProcess:
    """A process that begins with a definition."""
    return LimitedProcess(
        pathlib.Path(__file__).with_name("tokenizer_process.py"),
        ("tokenizers",),
        memory_bytes=MEMORY_BYTES,
        max_answer=_MAX_ANSWER_BYTES,
        first={"definition": definition},
    )
