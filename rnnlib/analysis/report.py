"""All statistics of a model on a text, layer by layer."""

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Bool, Int

from rnnlib.analysis.distribution import Distribution, distribution
from rnnlib.analysis.dynamics import decays, key_products, write_eigenvalues
from rnnlib.analysis.gram import ConditionNumbers, GramSpectrum, conditions_over_time, gram_spectrum, key_gram
from rnnlib.analysis.layers import LayerActivations, iterate_layers
from rnnlib.analysis.saturation import Saturation, log_gram, saturation
from rnnlib.models import DecoderLM


@dataclasses.dataclass(frozen=True)
class PreconditionerReport:
    """Statistics of a diagonal preconditioner (figures 2 and 11 to 13).

    Attributes:
        log_gram: distribution of log A, before squashing.
        applied: distribution of B, after it; None for preconditioners that do not squash.
        saturation: how far squash functions saturate, over time; None likewise.
        center: learned centers `[H]`; None likewise.
    """

    log_gram: Distribution
    applied: Distribution | None
    saturation: Saturation | None
    center: np.ndarray | None


@dataclasses.dataclass(frozen=True)
class LayerReport:
    """Statistics of one layer.

    Attributes:
        layer: number of the block.
        mixer: the mixer's name.
        spectrum: of the key Gram of each sequence and head.
        conditions: effective condition numbers over time.
        key_product: distribution of `k . k~`.
        write_eigenvalue: distribution of the eigenvalue along the write key.
        decay: distribution of alpha.
        gain: distribution of the erase gate.
        preconditioner: of the layer's preconditioner; None without one.
    """

    layer: int
    mixer: str
    spectrum: GramSpectrum
    conditions: ConditionNumbers
    key_product: Distribution
    write_eigenvalue: Distribution
    decay: Distribution
    gain: Distribution
    preconditioner: PreconditionerReport | None


def iterate_reports(
    model: DecoderLM,
    tokens: Int[Array, "B T"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    positions: Int[Array, "B T"] | None = None,
    valid: Bool[Array, "B T"] | None = None,
    layers: Collection[int] | None = None,
    times: Sequence[int] | None = None,
    every: int = 16,
) -> Iterator[LayerReport]:
    """The statistics of each recurrent layer, one layer held at a time.

    A Preconditioned Gated DeltaNet of 342M float32 weights (1.4 GB) at T = 2048 took 2.2 GiB of a CPU's memory in all.

    Args:
        model: the model.
        tokens: token numbers.
        segment_ids: documents packed into a row.
        positions: of each token in its document, as in `iterate_layers`.
        valid: false for tokens that are not counted, as in `iterate_layers`; rows without any are left out. Condition
            numbers and saturation are NaN at such tokens of other rows.
        layers: numbers of blocks; None gives all.
        times: numbers of tokens at which condition numbers are taken; None is 8 of them, doubling up to T.
        every: eigenvalues of transitions with a decay per channel are taken of every n-th token.
    """
    length = tokens.shape[-1]
    if times is None:
        times = sorted({max(1, length >> shift) for shift in range(8)})
    rows = {"segment_ids": segment_ids, "positions": positions, "valid": valid}
    for activations in iterate_layers(model, tokens, **rows, layers=layers):
        yield report(activations, times=times, every=every)


def report(activations: LayerActivations, *, times: Sequence[int], every: int = 16) -> LayerReport:
    """The statistics of one layer's activations; arguments as `iterate_reports`.

    Raises:
        ValueError: `every` is less than 1, or `times` are not increasing numbers from 1 to T.
    """
    if every < 1:
        raise ValueError(f"every is {every}, expected at least 1")
    if activations.valid is not None:
        activations = _rows(activations, np.asarray(activations.valid).any(axis=1))
    alpha = decays(activations)
    step = every if alpha.ndim == 4 else 1
    return LayerReport(
        layer=activations.layer,
        mixer=activations.mixer,
        spectrum=gram_spectrum(key_gram(activations.key, activations.valid)),
        conditions=conditions_over_time(activations, times),
        key_product=_distribution(activations, key_products(activations)),
        write_eigenvalue=_distribution(
            activations, write_eigenvalues(activations, every=step), every=step, bounds=(-1.0, 1.0)
        ),
        decay=_distribution(activations, alpha, bounds=(0.0, 1.0)),
        gain=_distribution(
            activations, activations.erase, bounds=(0.0, max(1.0, float(np.max(activations.erase, initial=0.0))))
        ),
        preconditioner=_preconditioner_report(activations),
    )


def _rows(activations: LayerActivations, rows: np.ndarray) -> LayerActivations:
    """The activations of some of the sequences, chosen by `[B]` of bool."""

    def choose(part: Any) -> dict[str, Any]:
        values = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
        return {name: x[rows] for name, x in values.items() if hasattr(x, "shape") and x.ndim > 1}

    preconditioner = activations.preconditioner
    if preconditioner is not None:
        preconditioner = dataclasses.replace(preconditioner, **choose(preconditioner))
    return dataclasses.replace(activations, **choose(activations), preconditioner=preconditioner)


def _only_valid(activations: LayerActivations, values: ArrayLike, every: int = 1) -> np.ndarray:
    """Values `[B, T, ...]` of every n-th token, NaN where that is not valid."""
    values = np.asarray(values, np.float64)
    if activations.valid is None:
        return values
    valid = np.asarray(activations.valid)[:, ::every]
    return np.where(valid.reshape(*valid.shape, *(1,) * (values.ndim - 2)), values, np.nan)


def _distribution(activations: LayerActivations, values: ArrayLike, *, every: int = 1, **options: Any) -> Distribution:
    return distribution(_only_valid(activations, values, every), head_axis=2, **options)


def _preconditioner_report(activations: LayerActivations) -> PreconditionerReport | None:
    preconditioner = activations.preconditioner
    if preconditioner is None:
        return None
    logs = _distribution(activations, log_gram(preconditioner.gram, preconditioner.eps))
    if preconditioner.applied is None or preconditioner.center is None:
        return PreconditionerReport(logs, None, None, None)
    saturated = saturation(preconditioner.gram, preconditioner.center, preconditioner.eps)
    return PreconditionerReport(
        log_gram=logs,
        applied=_distribution(activations, preconditioner.applied),
        saturation=Saturation(*(_only_valid(activations, values) for values in saturated)),
        center=np.asarray(preconditioner.center),
    )
