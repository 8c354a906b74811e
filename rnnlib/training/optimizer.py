"""Learning-rate schedules, optimizers by optax, and updates that are left out where numbers are not finite."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterable
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

from pallas_kernels.common.platform import platform
from rnnlib.fields import Fraction, NaturalNumber, PositiveInteger, PositiveNumber, Range, check_fields
from rnnlib.models.variables import fuse_columns, separate_columns

Schedule = Callable[[jax.Array | int], jax.Array]

NUMBERS_OF_A_KERNEL = 6_000_000
"""Of all arrays that one kernel updates, at most, where it updates several. With nine million kernels were slower."""


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer, its schedule and gradient clipping (the papers' AdamW by default, but for the peak rate)."""

    name: Literal["adamw", "muon"] = "adamw"
    """"adamw", or "muon": Muon for matrices that mix features (see `muon_mask`), AdamW for all others."""
    learning_rate: PositiveNumber = 3e-3
    """Peak learning rate, reached at the end of the warmup."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """After the warmup: "cosine" decay, "wsd" (warmup, stable, then linear decay at the end), or "constant"."""
    schedule_steps: PositiveInteger | None = None
    """Updates that the schedule is made for; after them the rate stays at its end. Left out, all steps of the run."""
    warmup_steps: NaturalNumber | None = None
    """Updates of linear warmup from 0; left out, 5% of the schedule."""
    final_fraction: Fraction = 0.1
    """Learning rate at the end, as a fraction of the peak ("cosine" and "wsd")."""
    decay_fraction: Fraction = 0.2
    """Part of the schedule that "wsd" spends in its final decay."""
    beta1: Annotated[float, Range(at_least=0, below=1)] = 0.9
    """AdamW's decay of the first moment."""
    beta2: Annotated[float, Range(at_least=0, below=1)] = 0.95
    """AdamW's decay of the second moment."""
    epsilon: PositiveNumber = 1e-8
    """AdamW's term in the denominator."""
    muon_momentum: Annotated[float, Range(at_least=0, below=1)] = 0.95
    """Muon's decay of the momentum (Nesterov's)."""
    muon_rms: PositiveNumber = 0.2
    """Root mean square of Muon's update of a matrix, before the learning rate: with 0.2 AdamW's rate serves both."""
    weight_decay: Annotated[float, Range(at_least=0, below=math.inf)] = 0.1
    """Decoupled weight decay, times the learning rate; only on matrices that mix features (see `decay_mask`)."""
    clip_norm: Annotated[float, Range(above=0)] | None = 1.0
    """Largest global gradient norm; larger gradients are scaled down to it. None: no clipping."""

    def __post_init__(self):
        """Checks every value."""
        check_fields(self)


def learning_rate_schedule(config: OptimizerConfig, steps: int) -> Schedule:
    """Learning rate as a function of the number of updates made before.

    The first update already has a rate above 0 (`peak / warmup`), the last one has `final_fraction * peak`.

    Args:
        config: peak, schedule and warmup.
        steps: number of updates of the whole run, and of the schedule unless `config.schedule_steps` says otherwise.

    Returns:
        A function of an integer count, usable under jit, that gives a float32 scalar.

    Raises:
        ValueError: if the warmup (and the decay of "wsd") does not fit in `steps`.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    if config.schedule_steps is not None:
        steps = config.schedule_steps
    warmup = math.ceil(0.05 * steps) if config.warmup_steps is None else config.warmup_steps
    decay = math.ceil(config.decay_fraction * steps)
    if warmup > steps:
        raise ValueError(f"optimizer.warmup_steps is {warmup}, more than all {steps} steps of the schedule")
    if config.schedule == "wsd" and warmup + decay > steps:
        raise ValueError(
            f"optimizer.warmup_steps ({warmup}) and the decay of {decay} steps (optimizer.decay_fraction "
            f"{config.decay_fraction}) are more than all {steps} steps of the schedule"
        )
    peak, final = config.learning_rate, config.final_fraction

    def after_warmup(count: jax.Array) -> jax.Array:
        match config.schedule:
            case "cosine":
                progress = jnp.clip((count - warmup + 1) / max(steps - warmup, 1), 0, 1)
                return final + (1 - final) * 0.5 * (1 + jnp.cos(jnp.pi * progress))
            case "wsd":
                progress = jnp.clip((count - (steps - decay) + 1) / max(decay, 1), 0, 1)
                return 1 - (1 - final) * progress
            case _:
                return jnp.ones_like(count)

    def schedule(count: jax.Array | int) -> jax.Array:
        count = jnp.asarray(count, jnp.float32)
        return peak * jnp.where(count < warmup, (count + 1) / max(warmup, 1), after_warmup(count))

    return schedule


def decay_mask(parameters):
    """Which parameters weight decay acts on.

    Decayed: matrices that mix features (projections, MLP, untied head) and short-convolution kernels. Not decayed:
    vectors and scalars (norm scales, biases, `A_log`, `dt_bias`, per-head scales), whatever is named so even where it
    has a channel axis, and token embeddings: a row of the table is used only when its token occurs, yet decay would
    shrink it at every step, and pre-norm blocks undo the embedding's scale anyway. A tied head is the embedding, so
    it is not decayed.

    Args:
        parameters: A pytree of arrays, nested by the modules' attribute names.

    Returns:
        A pytree of bools of the same structure.
    """

    def decayed(path, value) -> bool:
        names = [str(name) for name in _names(path) if name != "value"]
        if value.ndim < 2:
            return False
        last = names[-1].lower() if names else ""
        if any(part in last for part in ("bias", "a_log", "scale", "norm")):
            return False
        return not any("embed" in name.lower() for name in names)

    return jax.tree_util.tree_map_with_path(decayed, parameters)


def muon_mask(parameters):
    """Which parameters Muon updates: matrices that weight decay acts on, but the output head and short convolutions.

    Of arrays with more axes, such as the matrices of experts, each pair of the last two axes is a matrix.

    Args:
        parameters: A pytree of arrays, nested by the modules' attribute names.

    Returns:
        A pytree of bools of the same structure.
    """

    def is_matrix(path, decayed: bool) -> bool:
        names = [str(name).lower() for name in _names(path)]
        return decayed and not any(part in name for name in names for part in ("conv", "head"))

    return jax.tree_util.tree_map_with_path(is_matrix, decay_mask(parameters))


def _names(path: tuple[Any, ...]) -> list[Hashable]:
    """The entries of a pytree's path: names of attributes, keys, and numbers in lists."""
    return [getattr(entry, "key", getattr(entry, "name", getattr(entry, "idx", ""))) for entry in path]


def alike(parameters: Any) -> list[list[int]]:
    """Which arrays have one name and shape, in different layers: their numbers among the leaves.

    Args:
        parameters: A pytree of arrays, nested by the modules' attribute names.
    """

    def kind(path: tuple[Any, ...], array: Any) -> Hashable:
        return tuple(name for name in _names(path) if not isinstance(name, int)), array.shape

    return _places(itertools.starmap(kind, jax.tree_util.tree_leaves_with_path(parameters)))


def _places(kinds: Iterable[Hashable]) -> list[list[int]]:
    """The places at which each kind occurs, in the order of the first ones."""
    found: dict[Hashable, list[int]] = {}
    for place, kind in enumerate(kinds):
        found.setdefault(kind, []).append(place)
    return list(found.values())


def gradient_norm(gradients: Any) -> jax.Array:
    """Global norm of a gradient: the root of the sum of all squares, float32.

    Arrays of one name in different layers (`alike`) are squared and summed element by element before their sum is
    taken. So XLA reads all of a name in one kernel, where a sum for each array takes one or two, most of which last as
    long as a launch. They lie on devices alike, so that nothing moves for it.

    Args:
        gradients: A pytree of arrays, nested by the modules' attribute names.
    """
    squares = [jnp.square(gradient.astype(jnp.float32)) for gradient in jax.tree.leaves(gradients)]
    sums = [jnp.sum(functools.reduce(jnp.add, [squares[i] for i in numbers])) for numbers in alike(gradients)]
    return jnp.sqrt(sum(sums, jnp.float32(0)))


def _clip(largest: float) -> optax.GradientTransformation:
    """`optax.clip_by_global_norm` with `gradient_norm`, which the training step has computed."""

    def clipped(gradients: Any, parameters: Any = None) -> Any:
        norm = gradient_norm(gradients)
        return jax.tree.map(lambda g: jnp.where(norm < largest, g, (g / norm * largest).astype(g.dtype)), gradients)

    return optax.stateless(clipped)


def _muon(config: OptimizerConfig, schedule: Schedule) -> optax.GradientTransformation:
    """Muon of matrices; of a kernel with named columns each column's matrix is one of its own."""

    def last_two(parameters: Any) -> Any:
        return jax.tree.map(lambda x: optax.contrib.MuonDimensionNumbers(x.ndim - 2, x.ndim - 1), parameters)

    muon = optax.contrib.muon(
        schedule,
        beta=config.muon_momentum,
        weight_decay=config.weight_decay,
        consistent_rms=config.muon_rms,
        muon_weight_dimension_numbers=last_two,
    )

    def update(gradients: Any, state: Any, parameters: Any = None) -> tuple[Any, Any]:
        changes, state = muon.update(separate_columns(gradients), state, separate_columns(parameters))
        return fuse_columns(changes, gradients), state

    return optax.GradientTransformation(lambda parameters: muon.init(separate_columns(parameters)), update)


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """The optimizer that a config names, with decoupled weight decay, the schedule's rate and global-norm clipping.

    Weight decay acts on `decay_mask`; Muon (arXiv 2502.16982, its scale of updates) on `muon_mask`.

    Args:
        config: the optimizer's settings.
        steps: number of updates of the whole run (the schedule's length).

    Returns:
        An optax transformation; moments are float32 like the parameters.
    """
    clip = optax.identity() if config.clip_norm is None else _clip(config.clip_norm)
    schedule = learning_rate_schedule(config, steps)
    adamw = optax.adamw(
        schedule,
        b1=config.beta1,
        b2=config.beta2,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        mask=decay_mask,
    )
    if config.name == "adamw":
        return optax.chain(clip, adamw)

    def labels(parameters: Any) -> Any:
        return jax.tree.map(lambda is_matrix: "muon" if is_matrix else "adamw", muon_mask(parameters))

    return optax.chain(clip, optax.partition({"muon": _muon(config, schedule), "adamw": adamw}, labels))


def where_finite(finite: jax.Array, new: Any, old: Any, parameters: Any) -> Any:
    """`new` if a step's numbers were finite, else `old`.

    On a GPU a launch takes as long as AdamW's update of a million numbers, and most arrays have fewer. XLA makes one
    kernel of operations on arrays of one shape if they read an array in common, and no number alone. So those that are
    to share a kernel read their condition from a row of constants, too, which is always true.

    Args:
        finite: `[]` bool.
        new: parameters and an optimizer's state, after the update.
        old: the same before it.
        parameters: the pytree of parameters, or of its shapes. Parts of `new` with this structure are parameters or
            moments, and those of one parameter share its kernel.
    """
    structure: Any = jax.tree.structure(parameters)
    shared = _shared_conditions(jax.tree.leaves(parameters)) if platform() == "gpu" else {}

    def chosen(new: Any, old: Any) -> Any:
        if jax.tree.structure(new) != structure:
            return jnp.where(finite, new, old)
        before = jax.tree.leaves(old)
        after = [jnp.where(finite, n, o) for n, o in zip(jax.tree.leaves(new), before, strict=True)]
        for number, condition in shared.items():
            after[number] = jnp.where(condition, after[number], before[number])
        return structure.unflatten(after)

    return jax.tree.map(chosen, new, old, is_leaf=lambda part: jax.tree.structure(part) == structure)


def _shared_conditions(arrays: list[Any]) -> dict[int, jax.Array]:
    """What is true, read from the row of constants of each array that shares a kernel, by the array's number."""
    conditions: dict[int, jax.Array] = {}
    rows = 0
    for numbers in _places(array.shape for array in arrays):
        count = max(1, NUMBERS_OF_A_KERNEL // max(1, arrays[numbers[0]].size))
        for group in itertools.batched(numbers, count):
            if len(group) > 1:
                rows += 1
                # XLA takes equal constants for one row. So each has another number of ends, which nothing reads.
                row = jax.lax.optimization_barrier(np.array([True] * len(group) + [False] * rows))
                conditions |= {number: row[place] for place, number in enumerate(group)}
    return conditions
