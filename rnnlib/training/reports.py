"""What a run tells of its steps, its evaluations and its end."""

import collections
import contextlib
import dataclasses
import math
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rnnlib.training.evaluation import Evaluation
from rnnlib.training.loss import bits_per_byte
from rnnlib.training.step import StepMetrics


class NonFiniteLossError(ArithmeticError):
    """Loss or gradient was not finite in more steps than may be skipped."""


@dataclasses.dataclass(frozen=True)
class StepReport:
    """Metrics of one training step.

    Attributes:
        step: number of the step, from 1.
        tokens: tokens trained on so far.
        loss: nats per token.
        bits_per_byte: the same per byte of text.
        tokens_per_second: recent speed; NaN for the step that compiles.
        seconds_left: estimated time to the last step; None before it can be told.
        learning_rate: rate of its update.
        gradient_norm: global norm of its gradient, before clipping.
        skipped: updates left out so far.
        utilization: part of the devices' peak that the model's own operations take ("MFU"); NaN where the peak is not
            known.
        finite: whether loss and gradient were finite, that is, the update was applied.
    """

    step: int
    tokens: int
    loss: float
    bits_per_byte: float
    tokens_per_second: float
    seconds_left: float | None
    learning_rate: float = math.nan
    gradient_norm: float = math.nan
    skipped: int = 0
    utilization: float = math.nan
    finite: bool = True

    @classmethod
    def of(cls, metrics: StepMetrics, **rest: Any) -> "StepReport":
        """The report of a step by its metrics; `rest` are the fields that these do not have."""
        nats, tokens = float(metrics.nats), float(metrics.tokens)
        return cls(
            loss=nats / tokens if tokens > 0 else math.nan,
            bits_per_byte=bits_per_byte(nats, float(metrics.bytes)),
            learning_rate=float(metrics.learning_rate),
            gradient_norm=float(metrics.gradient_norm),
            skipped=int(metrics.skipped),
            finite=bool(metrics.finite),
            **rest,
        )


@dataclasses.dataclass(frozen=True)
class EvaluationReport:
    """An evaluation in the course of a run.

    Attributes:
        step: steps done before it.
        tokens: tokens trained on before it.
        evaluation: its numbers.
    """

    step: int
    tokens: int
    evaluation: Evaluation

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.evaluation.loss


class Speed:
    """Tokens per second over the last steps, without the time that evaluation and saving take."""

    def __init__(self, window: int = 20):
        self._marks: collections.deque[tuple[float, int]] = collections.deque(maxlen=window + 1)
        self._paused = 0.0

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Leaves out the time that is spent within."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._paused += time.perf_counter() - start

    def mark(self, tokens: int) -> tuple[float, float | None]:
        """Notes that a step is done; returns tokens per second and seconds per step (NaN, None after the first)."""
        self._marks.append((time.perf_counter() - self._paused, tokens))
        (start, first), (end, last) = self._marks[0], self._marks[-1]
        if end <= start:
            return float("nan"), None
        return (last - first) / (end - start), (end - start) / (len(self._marks) - 1)


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """How a call of `train` ended.

    Attributes:
        folder: the run's folder.
        step: steps done, saved in the latest checkpoint.
        tokens: tokens trained on.
        evaluation: the last evaluation on held-out text; None when stopped before any in this call.
        stopped_by: the signal that stopped training early; None when all steps and the last evaluation are done.
        seconds: time that this call took.
    """

    folder: Path
    step: int
    tokens: int
    evaluation: Evaluation | None
    stopped_by: signal.Signals | None
    seconds: float
