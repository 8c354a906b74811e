"""The same blocks of tokens read after contexts of several lengths, and after another document's text."""

import dataclasses
import json
import math
import pathlib
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from rnnlib.data import TokenCorpus, Tokenizer
from rnnlib.models import DecoderLM

FOREIGN = "foreign"
"""The arm whose context is of the longest length, but of another document where it is further back than the own."""


@dataclasses.dataclass(frozen=True)
class Blocks:
    """What is scored: blocks of held-out documents, each with what stands before it.

    Attributes:
        tokens: of each document, the token that leads it first.
        document: number of each block's document.
        start: where each block begins in it, the longest context behind it or more.
        size: tokens of a block.
    """

    tokens: list[np.ndarray]
    document: list[int]
    start: list[int]
    size: int

    @classmethod
    def of(cls, corpus: TokenCorpus, size: int, context: int, count: int) -> "Blocks":
        """The first block of every document that lies `context` tokens or more in, then the second, up to `count`.

        Raises:
            ValueError: no document is long enough.
        """
        tokens = [corpus.tokens[a:b] for a, b in zip(corpus.starts[:-1], corpus.starts[1:])]
        found = []
        for number, own in enumerate(tokens):
            # One token more: the block's last one is predicted, not read.
            starts = range(context, len(own) - size, size)
            found += [(place, number, start) for place, start in enumerate(starts)]
        if not found:
            raise ValueError(
                f"no held-out document has {context + size + 1} tokens; its blocks lie {context} tokens in"
            )
        kept = sorted(found)[:count]
        return cls(tokens, [number for _, number, _ in kept], [start for _, _, start in kept], size)

    def __len__(self) -> int:
        return len(self.document)

    def row(self, block: int, context: int) -> np.ndarray:
        """A block's tokens behind so many others of its document, with the one that its last position predicts."""
        start = self.start[block]
        return self.tokens[self.document[block]][start - context : start + self.size + 1]

    def foreign_row(self, block: int, context: int, own: int) -> np.ndarray:
        """Likewise, of which all but the last `own` tokens of context are the end of the next block's context."""
        other = (block + 1) % len(self)
        while self.document[other] == self.document[block] and other != block:
            other = (other + 1) % len(self)
        row = self.row(block, context).copy()
        row[: context - own] = self.row(other, context)[own:context]
        return row


@dataclasses.dataclass(frozen=True)
class ContextTests:
    """Tests of a trained model: nats of each block after each context.

    Attributes:
        held_out: JSON lines of long documents.
        tokenizer: the tokenizer.
        contexts: tokens before a block, ascending.
        trained: tokens a row in training: what the foreign context begins beyond.
        size: tokens of a block.
        count: most blocks.
        batch: tokens of a batch, roughly.
    """

    held_out: pathlib.Path
    tokenizer: Tokenizer
    contexts: tuple[int, ...]
    trained: int
    size: int
    count: int
    batch: int

    def prepare(self, shapes: DecoderLM, pool: Executor) -> Callable[[DecoderLM], dict[str, Any]]:
        """Begins to compile and to read the text; the function that comes back tests a model of these shapes."""
        made = {context: pool.submit(self._compile, shapes, context) for context in reversed(self.contexts)}
        reading = pool.submit(self.read)

        def test(model: DecoderLM) -> dict[str, Any]:
            blocks, state = reading.result(), nnx.split(model)[1]
            longest = self.contexts[-1]
            arms = {str(c): [blocks.row(i, c) for i in range(len(blocks))] for c in self.contexts}
            if self.trained < longest:
                arms[FOREIGN] = [blocks.foreign_row(i, longest, self.trained) for i in range(len(blocks))]
            nats = {
                name: self._nats(made[longest if name == FOREIGN else int(name)].result(), state, rows)
                for name, rows in arms.items()
            }
            token_bytes = self.tokenizer.token_bytes
            counts = self.held_out.with_name("counts.json")
            return {
                "text": json.loads(counts.read_text()) if counts.exists() else None,
                "blocks": {
                    "size": self.size,
                    "document": blocks.document,
                    "start": blocks.start,
                    "bytes": [int(token_bytes[blocks.row(i, 0)[1:]].sum()) for i in range(len(blocks))],
                    "nats": nats,
                },
            }

        return test

    def read(self) -> Blocks:
        """The blocks of the held-out text."""
        documents = (json.loads(line)["text"] for line in self.held_out.read_text().splitlines())
        corpus = TokenCorpus.from_documents(documents, self.tokenizer)
        return Blocks.of(corpus, self.size, self.contexts[-1], self.count)

    def _rows(self, context: int) -> int:
        return max(1, self.batch // (context + self.size))

    def _compile(self, shapes: DecoderLM, context: int) -> Callable[..., jax.Array]:
        graphdef, state = nnx.split(shapes)

        def block_nats(state: Any, rows: jax.Array) -> jax.Array:
            model: Any = nnx.merge(graphdef, state)
            logits = model.logits(model.hidden(rows[:, :-1])[:, -self.size :])
            return optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, -self.size :]).sum(1)

        rows = jax.ShapeDtypeStruct((self._rows(context), context + self.size + 1), jnp.int32)
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
        return jax.jit(block_nats).lower(abstract, rows).compile()

    def _nats(self, compiled: Callable[..., jax.Array], state: Any, rows: list[np.ndarray]) -> list[float]:
        at_once = self._rows(len(rows[0]) - self.size - 1)
        found: list[float] = []
        for i in range(0, len(rows), at_once):
            batch = np.stack(rows[i : i + at_once]).astype(np.int32)
            filled = np.pad(batch, [(0, at_once - len(batch)), (0, 0)])
            found += np.asarray(compiled(state, filled), np.float64)[: len(batch)].round(3).tolist()
        return found


def bits_per_byte(blocks: dict[str, Any], arm: str) -> float:
    """Of all blocks of a result together, in one arm."""
    return sum(blocks["nats"][arm]) / math.log(2) / sum(blocks["bytes"])
