"""Bits per byte of held-out text in rows of several lengths: what the models of the study are tested by."""

import dataclasses
import math
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from rnnlib.data import DataConfig, TokenCorpus, Tokenizer, iterate_documents, make_dataset
from rnnlib.models import DecoderLM
from rnnlib.training import bits_per_byte

_BATCH = ("inputs", "targets", "segment_ids", "positions", "loss_weights")


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """The held-out documents in two halves: one to choose the learning rate by, one to report."""

    validation: TokenCorpus
    test: TokenCorpus


def hold_out(data: DataConfig, tokenizer: Tokenizer) -> HeldOut:
    """Every other held-out document to each half."""
    documents = list(iterate_documents(data, "validation"))
    return HeldOut(
        TokenCorpus.from_documents(documents[0::2], tokenizer), TokenCorpus.from_documents(documents[1::2], tokenizer)
    )


class BitsPerByte:
    """Bits per byte of a text, in all and by the position in the document; compiled when it is made."""

    def __init__(self, model: DecoderLM, length: int, tokens: int, tokenizer: Tokenizer):
        """Compiles.

        Args:
            model: the model, or one of shapes alone.
            length: tokens a row. A document that is longer goes on in the next row from an empty state.
            tokens: tokens a batch.
            tokenizer: gives the bytes that each token stands for.
        """
        token_bytes = jnp.asarray(tokenizer.token_bytes, jnp.float32)
        graphdef, state = nnx.split(model)
        buckets = math.ceil(math.log2(length)) + 1

        def sums(state: Any, batch: dict[str, jax.Array]) -> jax.Array:
            run: Any = nnx.merge(graphdef, state)
            logits = run(batch["inputs"], segment_ids=batch["segment_ids"], positions=batch["positions"])
            weights = batch["loss_weights"]
            counted = weights > 0  # what padding is read as has no influence, not even if it is not finite
            nats = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.where(counted, batch["targets"], 0))
            nats = jnp.where(counted, nats, 0.0)
            # Bits of the position: 0, 1, 2 to 3, 4 to 7. A logarithm that is rounded up would be one too many.
            bucket = 32 - jax.lax.clz(batch["positions"])
            values = jnp.stack([nats * weights, token_bytes[batch["targets"]] * weights, weights], -1)
            return jnp.zeros((buckets, 3)).at[bucket].add(values)

        self._rows = DataConfig(sequence_length=length, batch_size=max(1, tokens // length))
        self._tokenizer = tokenizer
        shape = (self._rows.batch_size, length)
        integers = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name in _BATCH if name != "loss_weights"}
        batch = integers | {"loss_weights": jax.ShapeDtypeStruct(shape, jnp.float32)}
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
        self._sums = jax.jit(sums).lower(shapes, batch).compile()

    def __call__(self, model: DecoderLM, corpus: TokenCorpus) -> dict[str, Any]:
        """Tests a model of the shapes that this was made for.

        Args:
            model: the model.
            corpus: the text.

        Returns:
            `bits_per_byte`, `tokens`, and `by_position`: pairs of the largest position of a bucket and its bits per
            byte.
        """
        state = nnx.split(model)[1]
        batches = make_dataset(self._rows, split="validation", tokenizer=self._tokenizer, corpus=corpus)
        parts = [self._sums(state, {name: batch[name] for name in _BATCH}) for batch in batches]
        totals = np.sum([np.asarray(part, np.float64) for part in parts], axis=0)
        nats, num_bytes, num_tokens = totals.sum(0).tolist()
        return {
            "bits_per_byte": bits_per_byte(nats, num_bytes),
            "tokens": round(num_tokens),
            "by_position": [
                [2**i, round(bits_per_byte(n, b), 5)] for i, (n, b, count) in enumerate(totals.tolist()) if count and b
            ],
        }


@dataclasses.dataclass(frozen=True)
class LengthTests:
    """Tests of a trained model: one half of the held-out text at the trained length, the other at several.

    Attributes:
        data: the text, its tokenizer and the trained length.
        lengths: tokens a row.
        tokens: a batch.
        tokenizer: the tokenizer.
    """

    data: DataConfig
    lengths: tuple[int, ...]
    tokens: int
    tokenizer: Tokenizer

    def prepare(self, shapes: DecoderLM, pool: Executor) -> Callable[[DecoderLM], dict[str, Any]]:
        """Begins to compile and to read the text; the function that comes back tests a model of these shapes."""
        trained = self.data.sequence_length
        made = {
            length: pool.submit(BitsPerByte, shapes, length, self.tokens, self.tokenizer)
            for length in dict.fromkeys((trained, *self.lengths))
        }
        reading = pool.submit(hold_out, self.data, self.tokenizer)

        def test(model: DecoderLM) -> dict[str, Any]:
            testers, text = {length: future.result() for length, future in made.items()}, reading.result()
            return {
                "validation": testers[trained](model, text.validation),
                "test": {str(length): testers[length](model, text.test) for length in self.lengths},
            }

        return test
