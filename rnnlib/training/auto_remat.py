"""What the backward pass computes again, chosen by what fits into a device's memory (`ModelConfig.remat="auto"`)."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from rnnlib.models import ModelConfig
from rnnlib.training.memory import planned_bytes

# Of a device's memory, what the step's plan may take. The rest is for what is not in the plan: the next batch, the
# evaluation's program, what libraries take for themselves, and gaps between arrays.
_FOR_STEP = 0.9

# From the fastest step to the smallest.
_WAYS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("nothing", {"remat": False}),
    ("blocks but for their products with weights", {"remat": True, "remat_keeps": "products"}),
    ("whole blocks", {"remat": True, "remat_keeps": "input"}),
)


@dataclasses.dataclass(frozen=True)
class RematChoice:
    """What was chosen.

    Attributes:
        model: the configuration, with `remat` and `remat_keeps` as chosen.
        step: the compiled training step of that model.
        line: what was chosen and why, for people.
    """

    model: ModelConfig
    step: Any
    line: str


def choose_remat(
    model: ModelConfig,
    compile_step: Callable[[ModelConfig], Any],
    device_bytes: int,
    *,
    broadcast: Callable[[Callable[[], bool]], bool] = lambda decide: decide(),
) -> RematChoice:
    """The training step that computes the least again of those that fit into a device's memory.

    Steps are compiled until one fits: nothing computed again, then blocks but for their products with weights, then
    whole blocks, which is taken whether it fits or not. Their sizes are those of XLA's own memory plans. Where such a
    plan cannot be had, or a step is too large to compile, it does not fit.

    Args:
        model: the configuration; its `remat` and `remat_keeps` are not read.
        compile_step: compiles the training step of a model; the result has jax's `memory_analysis`.
        device_bytes: memory of one device. Nine tenths of it may be taken.
        broadcast: makes a decision one for all processes.
    """
    tried: list[str] = []
    for name, options in _WAYS:
        chosen, last = model.replace(**options), name == _WAYS[-1][0]
        step, size = None, None
        try:
            step = compile_step(chosen)
            size = planned_bytes(step)
        except jax.errors.JaxRuntimeError as error:
            if last or "RESOURCE_EXHAUSTED" not in str(error):
                raise
        fits = size is not None and size <= _FOR_STEP * device_bytes
        if broadcast(lambda fits=fits: fits) or last:  # type: ignore[misc]
            needs = "" if size is None else f"; the step takes {in_gigabytes(size)} of {in_gigabytes(device_bytes)}"
            rejected = f" ({', '.join(tried)})" if tried else ""
            return RematChoice(chosen, step, f"recomputed in the backward pass: {name}{needs}{rejected}")
        tried.append(f"with {name}: {'too large' if size is None else in_gigabytes(size)}")
    raise AssertionError("the last way is always taken")


def in_gigabytes(size: float | int) -> str:
    """A size in bytes for people."""
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
