"""What a checkpoint has of a run, and where a run goes on from."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import jax

from rnnlib.training.checkpoint import Checkpoints
from rnnlib.training.compiled_steps import CompiledSteps
from rnnlib.training.config import TrainConfig
from rnnlib.training.distributed import broadcast_from_primary
from rnnlib.training.run import RunError, load_base, save_base
from rnnlib.training.step import TrainState, put_state, state_shardings

if TYPE_CHECKING:
    from rnnlib.data import BatchIterator


class StartingPoint(NamedTuple):
    """Where a run begins or goes on.

    Attributes:
        state: on the devices.
        step: steps done.
        tokens: tokens trained on.
    """

    state: TrainState
    step: int = 0
    tokens: int = 0


def starting_point(
    folder: Path,
    config: TrainConfig,
    steps: CompiledSteps,
    checkpoints: Checkpoints,
    batches: "BatchIterator",
    *,
    resume: bool,
    validation_fingerprint: str,
) -> StartingPoint:
    """What the latest checkpoint holds, or the start where there is none.

    The start of a run with adapters writes the model that they are of into the folder.

    Args:
        folder: the run's folder.
        config: the run's.
        steps: its compiled steps, which have the first state.
        checkpoints: the folder's.
        batches: the training data's, which are set to the saved position.
        resume: whether the run was begun before.
        validation_fingerprint: of the validation data as it is now.

    Raises:
        RunError: the checkpoint is beyond the last step of `config`, or was made with other data.
    """
    template, adaptation = steps.template, steps.adaptation
    has_adapters, frozen = config.lora.rank is not None, None
    if has_adapters and resume:
        frozen = load_base(folder, template.frozen, template.other)[0]
    if broadcast_from_primary(lambda: checkpoints.latest_step) is None:
        state = steps.first_state()
        if frozen is not None:
            state = put_state(dataclasses.replace(state, frozen=frozen), steps.mesh)
        elif has_adapters:
            save_base(folder, state)
        return StartingPoint(state)
    if adaptation is None:
        shardings = state_shardings(template, steps.mesh) if jax.process_count() > 1 else None
        state, progress = checkpoints.restore(template, shardings)
    else:
        # Whole arrays: they are divided before they are put on the devices.
        held = jax.eval_shape(adaptation.saved, template.parameters, template.frozen)
        state, progress = checkpoints.restore(dataclasses.replace(template, parameters=held, frozen=None))
        trained, frozen = adaptation.restored(state.parameters, frozen)
        state = dataclasses.replace(state, parameters=trained, frozen=frozen)
    if progress.step > config.steps:
        raise RunError(f"run {folder} is at step {progress.step}, beyond the {config.steps} asked for")
    ways = f"put it back, or begin a new run with this one's weights: --init {folder}, without --resume"
    try:
        batches.set_state(progress.data_state)
    except ValueError as error:
        raise RunError(f"{error}; {ways}") from None
    wanted = progress.data_state.get("validation")
    if wanted not in (None, validation_fingerprint):
        raise RunError(
            f"the validation data is not that of run {folder}: its files have changed "
            f"(fingerprint {validation_fingerprint}, saved {wanted}); {ways}"
        )
    return StartingPoint(put_state(state, steps.mesh), progress.step, progress.tokens)


def checkpointed(steps: CompiledSteps, state: TrainState) -> TrainState:
    """What a checkpoint has of a state: of frozen parameters and of a model with adapters, what is trained alone."""
    if steps.adaptation is None:
        return state
    held = jax.jit(steps.adaptation.saved)(state.parameters, state.frozen)
    return dataclasses.replace(state, parameters=held, frozen=None)
