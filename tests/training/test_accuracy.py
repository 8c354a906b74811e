"""Accuracy on tasks: counts against loops, and a model that knows the answer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rnnlib.data.tasks import make_task, task_dataset
from rnnlib.training.accuracy import accuracy_sums, evaluate_lengths, evaluate_task


def test_counts_equal_a_loop():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(5, 12, 7)).astype(np.float32)
    predicted = logits.argmax(-1)
    targets = np.where(rng.random((5, 12)) < 0.7, predicted, rng.integers(7, size=(5, 12))).astype(np.int32)
    # Queries of several tokens, some apart from each other, and an example that asks nothing.
    query_ids = rng.integers(4, size=(5, 12)).astype(np.int32)
    query_ids[3] = 0
    queries = {}
    for b in range(5):
        for t in range(12):
            if query_ids[b, t]:
                queries.setdefault((b, query_ids[b, t]), []).append(predicted[b, t] == targets[b, t])
    sums = jax.jit(accuracy_sums)(logits, targets, query_ids)
    assert sums.tokens == sum(map(len, queries.values())) and sums.correct_tokens == sum(map(sum, queries.values()))
    assert sums.queries == len(queries) and sums.correct_queries == sum(map(all, queries.values()))
    assert 0 < sums.correct_queries < sums.queries
    allowed = rng.random((5, 12, 7)) < 0.5
    right = np.take_along_axis(allowed, predicted[..., None], -1)[..., 0]
    assert jax.jit(accuracy_sums)(logits, targets, query_ids, allowed).correct_tokens == (right & (query_ids > 0)).sum()


def test_no_answer_is_right_where_logits_are_not_numbers():
    logits = jnp.full((2, 3, 4), jnp.nan).at[1].set(0.0).at[1, 0, 2].set(jnp.nan)
    targets = jnp.zeros((2, 3), jnp.int32)
    query_ids = jnp.arange(1, 4)[None].repeat(2, axis=0)
    allowed = jnp.ones((2, 3, 4), bool)
    for sums in (accuracy_sums(logits, targets, query_ids), accuracy_sums(logits, targets, query_ids, allowed)):
        assert sums.tokens == 6 and sums.correct_tokens == sums.correct_queries == 2


class PrefixParity(nnx.Module):
    """Knows parity up to a length; beyond, it says 0."""

    def __init__(self, known: int):
        self.known = known

    def __call__(self, tokens, *, segment_ids=None, positions=None):
        parity = jnp.where(positions < self.known, jnp.cumsum(tokens, axis=1) % 2, 0)
        return 20.0 * jax.nn.one_hot(parity, 2)


def test_evaluation_by_length():
    task = make_task("parity", sequence_length=8)
    results = evaluate_lengths(PrefixParity(16), task, (8, 16, 32), num_examples=50, batch_size=16)
    assert [results[length].query_accuracy for length in (8, 16)] == [1.0, 1.0]
    assert results[8].loss < 1e-6 and results[8].queries == results[8].tokens == 50  # padding rows do not count
    odd = [task.at_length(32).example(i, split="test")["targets"][-1] for i in range(50)]
    assert results[32].query_accuracy == pytest.approx(1 - np.mean(odd))
    assert results[32].loss == pytest.approx(20 * np.mean(odd), rel=1e-5)


def test_several_right_answers():
    class First(nnx.Module):
        """Says the lowest symbol that it was shown to be allowed."""

        def __call__(self, tokens, *, segment_ids=None, positions=None):
            return jax.nn.one_hot(jnp.zeros_like(tokens), 20)

    task = make_task("regbench", sequence_length=64, max_strings=10, max_string_length=8)
    batches = list(task_dataset(task, batch_size=4, split="test", num_examples=8))
    share = np.concatenate([batch["allowed_targets"][batch["query_ids"] > 0][:, 0] for batch in batches]).mean()
    assert evaluate_task(First(), batches).token_accuracy == pytest.approx(share)


def test_nothing_asked():
    batch = {
        name: np.zeros((2, 4), np.int32) for name in ("inputs", "targets", "query_ids", "segment_ids", "positions")
    }
    with pytest.raises(ValueError, match="hold no query"):
        evaluate_task(PrefixParity(4), [batch])
