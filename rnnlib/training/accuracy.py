"""Accuracy on synthetic tasks: per token, per query, and by sequence length."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from rnnlib.data.tasks import Task, TaskSplit
from rnnlib.training.evaluation import evaluation_view
from rnnlib.training.loss import loss_sums
from rnnlib.training.step import split_model


class AccuracySums(NamedTuple):
    """Sums over examples, from which every mean follows; sums of parts add up to the sums of the whole.

    Attributes:
        correct_tokens: answer tokens predicted right.
        tokens: answer tokens.
        correct_queries: queries all of whose tokens are right.
        queries: queries.
    """

    correct_tokens: Float[Array, ""]
    tokens: Float[Array, ""]
    correct_queries: Float[Array, ""]
    queries: Float[Array, ""]


def accuracy_sums(
    logits: Float[Array, "B T vocabulary"],
    targets: Int[Array, "B T"],
    query_ids: Int[Array, "B T"],
    allowed_targets: Bool[Array, "B T vocabulary"] | None = None,
) -> AccuracySums:
    """Counts right answers, the most probable token being the model's; where a logit is NaN there is no answer.

    With teacher forcing a query is right exactly when greedy decoding would give its whole answer.

    Args:
        logits: unnormalised log probabilities.
        targets: the right tokens.
        query_ids: 0, or which of its example's queries a position answers, 1 to T.
        allowed_targets: where several tokens are right: which ones.
    """
    predicted = jnp.argmax(logits, axis=-1)
    if allowed_targets is None:
        right = predicted == targets
    else:
        right = jnp.take_along_axis(allowed_targets, predicted[..., None], axis=-1)[..., 0]
    right &= ~jnp.isnan(logits).any(axis=-1)  # argmax of NaN is 0: a target of 0 would count
    asked = query_ids > 0

    def count(ids, values):
        return jnp.zeros(ids.shape[0] + 1, jnp.float32).at[ids].add(values)[1:]

    per_query = jax.vmap(count)
    tokens = per_query(query_ids, asked.astype(jnp.float32))
    correct = per_query(query_ids, (asked & right).astype(jnp.float32))
    return AccuracySums(
        correct_tokens=jnp.sum(correct),
        tokens=jnp.sum(tokens),
        correct_queries=jnp.sum((tokens > 0) & (correct == tokens), dtype=jnp.float32),
        queries=jnp.sum(tokens > 0, dtype=jnp.float32),
    )


@dataclasses.dataclass(frozen=True)
class TaskEvaluation:
    """How well a model does a task.

    Attributes:
        loss: mean cross entropy of the answer tokens, nats.
        token_accuracy: share of answer tokens that are right.
        query_accuracy: share of queries whose whole answer is right.
        tokens: answer tokens.
        queries: queries.
    """

    loss: float
    token_accuracy: float
    query_accuracy: float
    tokens: int
    queries: int


def evaluate_task(model: nnx.Module, batches: Iterable[Mapping[str, np.ndarray]]) -> TaskEvaluation:
    """Loss and accuracy of a model on a task's batches, in evaluation mode.

    Args:
        model: maps tokens `[B, T]` with `segment_ids` and `positions` to logits.
        batches: as `task_dataset` yields them.

    Raises:
        ValueError: if the batches ask nothing.
    """
    graphdef, parameters, other = split_model(evaluation_view(model))

    @jax.jit
    def step(parameters: Any, other: Any, batch: Mapping[str, Array]) -> Any:
        run = nnx.merge(graphdef, parameters, other, copy=True)
        logits = run(batch["inputs"], segment_ids=batch["segment_ids"], positions=batch["positions"])
        asked = (batch["query_ids"] > 0).astype(jnp.float32)
        no_bytes = jnp.zeros(logits.shape[-1], jnp.int32)
        nats = loss_sums(logits, batch["targets"], asked, no_bytes).nats
        return nats, accuracy_sums(logits, batch["targets"], batch["query_ids"], batch.get("allowed_targets"))

    totals = np.zeros(5)
    for batch in batches:
        nats, sums = jax.device_get(step(parameters, other, dict(batch)))
        totals += (nats, *sums)
    nats, correct_tokens, tokens, correct_queries, queries = totals.tolist()
    if not queries:
        raise ValueError("evaluate_task: the batches hold no query")
    return TaskEvaluation(
        loss=nats / tokens,
        token_accuracy=correct_tokens / tokens,
        query_accuracy=correct_queries / queries,
        tokens=round(tokens),
        queries=round(queries),
    )


def evaluate_lengths(
    model: nnx.Module,
    task: Task,
    lengths: Sequence[int],
    *,
    num_examples: int,
    batch_size: int,
    split: TaskSplit = "test",
    seed: int = 0,
) -> dict[int, TaskEvaluation]:
    """`evaluate_task` at several sequence lengths, for extrapolation beyond the length of training.

    Args:
        model: the model.
        task: the task; its other knobs stay as they are.
        lengths: sequence lengths.
        num_examples: examples a length.
        batch_size: examples a batch.
        split: "validation" to choose settings by, "test" to report.
        seed: of the examples.

    Returns:
        The evaluation at each length.
    """
    from rnnlib.data.tasks import task_dataset

    return {
        length: evaluate_task(
            model,
            task_dataset(
                task.at_length(length), batch_size=batch_size, split=split, seed=seed, num_examples=num_examples
            ),
        )
        for length in lengths
    }
