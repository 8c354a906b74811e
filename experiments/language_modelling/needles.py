"""Needles that a language model finds without having been taught: RULER's tasks, teacher-forced, whole answers.

The study's plan stands in `experiments/s_niah/PLAN.md`; studies of models add these tests to their own.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.harness.page import markdown_table
from experiments.harness.tables import Row
from experiments.harness.verdicts import Interval, Verdict, above, between_counts
from experiments.language_modelling.study import Tests
from rnnlib.data.tasks import Task, make_task, task_dataset
from rnnlib.models import DecoderLM
from rnnlib.training.accuracy import accuracy_sums

TASKS = (("S-NIAH-1", "s_niah_1"), ("S-NIAH-2", "s_niah_2"), ("S-NIAH-3", "s_niah_3"), ("MK-NIAH-1", "mk_niah_1"))
LENGTHS = (1024, 2048, 4096, 8192)
MARGIN = 0.1
"""Of the share of found needles: less counts as equal."""
EQUAL_LOSS = 0.01
"""Models whose bits per byte differ by no more of them are compared."""
_READ = ("inputs", "targets", "query_ids", "segment_ids", "positions")


@dataclasses.dataclass(frozen=True)
class NeedleTests:
    """Tests of a trained model on tasks that it was not trained on.

    Attributes:
        tokenizer: "byte" or a tokenizers JSON file, the model's own.
        lengths: tokens of the texts.
        examples: of each task and length.
        tokens: a batch.
    """

    tokenizer: str
    lengths: tuple[int, ...] = LENGTHS
    examples: int = 500
    tokens: int = 32_768

    def task(self, name: str, length: int) -> Task:
        """A task at a length."""
        return make_task(name, sequence_length=length, tokenizer=self.tokenizer)

    def prepare(self, shapes: DecoderLM, pool: Executor) -> Callable[[DecoderLM], dict[str, Any]]:
        """Begins to compile; the function that comes back counts found needles, `[found, all]` by task and length."""
        made = {length: pool.submit(_compiled, shapes, length, self._rows(length)) for length in self.lengths}

        def test(model: DecoderLM) -> dict[str, Any]:
            state = nnx.split(model)[1]
            found: dict[str, dict[str, list[int]]] = {}
            for (label, name), length in itertools.product(TASKS, self.lengths):
                batches = task_dataset(
                    self.task(name, length), batch_size=self._rows(length), split="test", num_examples=self.examples
                )
                counts = [np.asarray(made[length].result()(state, _arrays(batch))) for batch in batches]
                found.setdefault(label, {})[str(length)] = [int(n) for n in np.sum(counts, axis=0)]
            return {"needles": found}

        return test

    def _rows(self, length: int) -> int:
        return max(1, self.tokens // length)


def _arrays(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {name: batch[name] for name in _READ}


def _compiled(shapes: DecoderLM, length: int, rows: int) -> Callable[..., jax.Array]:
    graphdef, state = nnx.split(shapes)

    def found(state: Any, batch: dict[str, jax.Array]) -> jax.Array:
        run: Any = nnx.merge(graphdef, state)
        logits = run(batch["inputs"], segment_ids=batch["segment_ids"], positions=batch["positions"])
        sums = accuracy_sums(logits, batch["targets"], batch["query_ids"])
        return jnp.stack([sums.correct_queries, sums.queries])

    batch = dict.fromkeys(_READ, jax.ShapeDtypeStruct((rows, length), jnp.int32))
    given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    return jax.jit(found).lower(given, batch).compile()


@dataclasses.dataclass(frozen=True)
class SeveralTests:
    """Several tests as one: their results in one row.

    Attributes:
        parts: the tests; none has a result that another has too.
    """

    parts: tuple[Tests, ...]

    def prepare(self, shapes: DecoderLM, pool: Executor) -> Callable[[DecoderLM], dict[str, Any]]:
        """As `Tests.prepare`."""
        tests = [part.prepare(shapes, pool) for part in self.parts]

        def test(model: DecoderLM) -> dict[str, Any]:
            found: dict[str, Any] = {}
            for each in tests:
                found |= each(model)
            return found

        return test


def found_by(rows: Sequence[Row]) -> tuple[int, int]:
    """Needles that a model's seeds found, of how many, over all tasks and lengths."""
    counts = [count for row in rows for by_length in row["needles"].values() for count in by_length.values()]
    return sum(found for found, _ in counts), sum(asked for _, asked in counts)


def comparisons(
    runs: Mapping[str, Sequence[Row]], erasing: Sequence[str], additive: Sequence[str], length: int
) -> list[tuple[str, str, Interval, Verdict]]:
    """The plan's hypothesis for each delta rule and additive rule of equal loss.

    Args:
        runs: the reported runs of each mixer, by its label.
        erasing: labels of delta rules.
        additive: labels of additive rules.
        length: tokens of the rows that bits per byte are of.

    Returns:
        Of each pair its labels, the difference of the shares of found needles, and what follows.
    """

    def bits(label: str) -> float:
        return float(np.mean([row["test"][str(length)]["bits_per_byte"] for row in runs[label]]))

    tested = {label for label, rows in runs.items() if rows and all("needles" in row for row in rows)}
    pairs = [(a, b) for a in erasing for b in additive if {a, b} <= tested]
    equal = [(a, b) for a, b in pairs if abs(bits(a) / bits(b) - 1) <= EQUAL_LOSS]
    found = [(a, b, between_counts(found_by(runs[a]), found_by(runs[b]))) for a, b in equal]
    return [(a, b, interval, above(MARGIN).judge(interval)) for a, b, interval in found]


def needles_table(
    runs: Mapping[str, Sequence[Row]], erasing: Sequence[str], additive: Sequence[str], length: int
) -> str:
    """Markdown: percent of found needles by task and length, then the comparisons; arguments as `comparisons`."""
    tested = {label: rows for label, rows in runs.items() if rows and all("needles" in row for row in rows)}
    if not tested:
        return "No results yet.\n"
    first = next(iter(tested.values()))[0]["needles"]
    columns = [(task, text) for task, by_length in first.items() for text in by_length]
    rows = []
    for label, own in tested.items():
        shares = [np.sum([row["needles"][task][text] for row in own], axis=0) for task, text in columns]
        rows.append([label, *(f"{100 * found / asked:.1f}" for found, asked in shares)])
    lines = markdown_table(["mixer, % found", *(f"{task}, T={text}" for task, text in columns)], rows)
    answers = comparisons(runs, erasing, additive, length)
    lines += ["", *(f"- {a} finds more than {b}: {interval}, {verdict.value}" for a, b, interval, verdict in answers)]
    if not answers:
        lines.append("No delta rule and additive rule here are of equal bits per byte (within 1 %): no verdict.")
    return "\n".join(lines) + "\n"
