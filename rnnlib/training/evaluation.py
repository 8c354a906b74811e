"""Evaluation on held-out text."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from rnnlib.training.batches import Batch, put_batch
from rnnlib.training.loss import LossSums, bits_per_byte
from rnnlib.training.mesh import param_shardings, replicated
from rnnlib.training.step import make_evaluation_step, split_for_mesh

if TYPE_CHECKING:
    from rnnlib.data import BatchDataset


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The loss of a model on a text.

    Attributes:
        loss: mean cross entropy, nats per token.
        bits_per_byte: bits per byte of text; comparable between tokenizers.
        perplexity: `exp(loss)`, per token.
        tokens: tokens predicted.
        bytes: bytes that they stand for.
    """

    loss: float
    bits_per_byte: float
    perplexity: float
    tokens: int
    bytes: int


def evaluate(
    model: nnx.Module, batches: Iterable[Batch], *, token_bytes: np.ndarray, mesh: Mesh | None = None
) -> Evaluation:
    """Mean loss of a model over batches, in evaluation mode (no dropout).

    Args:
        model: maps tokens `[B, T]` with `segment_ids` and `positions` to logits.
        batches: as `rnnlib.data` yields them: `inputs`, `targets`, `segment_ids`, `positions` int32 `[B, T]` and
            `loss_weights` float32 `[B, T]`.
        token_bytes: bytes that each token of the vocabulary stands for.
        mesh: devices that each batch is split over, from `make_mesh`.

    Returns:
        The means, weighted by `loss_weights`.

    Raises:
        ValueError: if no token is to be predicted.
    """
    graphdef, parameters, other = split_for_mesh(evaluation_view(model), mesh)
    step = make_evaluation_step(graphdef, token_bytes, mesh)
    parameters = jax.device_put(parameters, param_shardings(parameters, mesh))
    return evaluate_with(step, parameters, jax.device_put(other, replicated(mesh)), batches, mesh)


def spread_batches(dataset: "BatchDataset", count: int | None) -> Iterator[Batch]:
    """Reads `count` batches at even distances through a finite dataset, always the same ones; None or too many: all.

    The first batches alone would be a few documents, and say little about the rest.
    """
    length = len(dataset)
    count = length if count is None else min(count, length)
    return (dataset.read(index * length // count) for index in range(count))


def evaluation_view(model: nnx.Module) -> nnx.Module:
    """A copy of the model, sharing its arrays, in evaluation mode."""
    view = nnx.merge(*nnx.split(model))
    view.eval()
    return view


def evaluate_with(
    step: Callable[[Any, Any, Batch], LossSums],
    parameters: Any,
    other: Any,
    batches: Iterable[Batch],
    mesh: Mesh | None = None,
) -> Evaluation:
    """`evaluate` with a compiled step from `make_evaluation_step`, so that a training loop compiles it once."""
    # In float64 on the host: a long evaluation sums more tokens than float32 counts exactly. One batch behind, so that
    # the device has the next batch to go on with, and no more batches lie in its memory.
    totals = np.zeros(3)
    behind: LossSums | None = None
    for batch in batches:
        sums = step(parameters, other, put_batch(batch, mesh))
        if behind is not None:
            totals += jax.device_get(behind)
        behind = sums
    if behind is not None:
        totals += jax.device_get(behind)
    nats, tokens, num_bytes = totals.tolist()
    if not tokens > 0:
        raise ValueError("evaluation: the batches hold no token to predict")
    loss = nats / tokens
    return Evaluation(
        loss=loss,
        bits_per_byte=bits_per_byte(nats, num_bytes),
        perplexity=math.exp(loss) if loss < 700 else math.inf,
        tokens=round(tokens),
        bytes=round(num_bytes),
    )
