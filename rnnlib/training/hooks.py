"""What a run does beside its steps: evaluation, checkpoints, records, the display of progress, the plot of losses.

`Trainer.add_hook` takes a `Hook`, or a function that is called with the trainer after every so many steps.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from rnnlib.training.config import TrainConfig
from rnnlib.training.distributed import is_primary
from rnnlib.training.plots import plot_losses
from rnnlib.training.reports import EvaluationReport, NonFiniteLossError, StepReport

if TYPE_CHECKING:
    from rnnlib.training.trainer import Trainer


class Hook:
    """Something that a run does beside its steps. Each method does nothing unless a hook has its own.

    All processes of a run call all of its hooks, at the same places in the same order.

    Attributes:
        every: `on_step` is called after every so many steps, and after the last one.
    """

    every: int = 1

    def on_start(self, trainer: "Trainer") -> None:
        """Before the first step of a call of `Trainer.run`."""

    def on_report(self, trainer: "Trainer", report: StepReport) -> None:
        """The metrics of a step are there. It is called for every step, in order.

        On a GPU the next step is computed meanwhile: `report.step` may be one less than `trainer.step`.
        """

    def on_step(self, trainer: "Trainer") -> None:
        """A step is done, and `trainer` holds the state after it. Its metrics may not be there yet."""

    def on_evaluation(self, trainer: "Trainer", report: EvaluationReport) -> None:
        """The model was evaluated after step `report.step`."""

    def on_save(self, trainer: "Trainer") -> None:
        """A checkpoint is about to be written: what belongs to its steps has to be on the disk before."""

    def on_end(self, trainer: "Trainer") -> None:
        """After the last step, or after the one at which a signal stopped the run. Not called after an error."""

    def close(self) -> None:
        """The run is closed, after an error, too."""


class Periodically(Hook):
    """Calls a function with the trainer after every so many steps, and after the last one."""

    def __init__(self, function: Callable[["Trainer"], None], every: int):
        """Of a function, and a number of steps."""
        self._function, self.every = function, every

    def on_step(self, trainer: "Trainer") -> None:
        """Calls the function."""
        self._function(trainer)


class EvaluatePeriodically(Hook):
    """Evaluates on the validation text; a resumed run makes up for an evaluation that a signal had interrupted."""

    def __init__(self, every: int):
        """After every so many steps, and after the last one."""
        self.every = every

    def on_start(self, trainer: "Trainer") -> None:
        """Evaluates where the run had stopped, if it is due there and was not done."""
        if trainer.step > 0 and trainer.is_due(self.every):
            self.on_step(trainer)

    def on_step(self, trainer: "Trainer") -> None:
        """Evaluates."""
        if trainer.step not in trainer.evaluated_steps:
            trainer.evaluate()


class SaveCheckpoints(Hook):
    """Saves after every so many steps, after evaluations better than all before, if those are kept, and at the end."""

    def __init__(self, every: int, *, keep_every: int | None, keep_best: bool):
        """See `CheckpointConfig`."""
        self._every, self._keep_every, self._keep_best = every, keep_every, keep_best
        self._is_best = False

    def on_evaluation(self, trainer: "Trainer", report: EvaluationReport) -> None:
        """Notes whether this is the best model so far."""
        best = trainer.checkpoints.best_loss
        self._is_best = self._keep_best and (best is None or report.loss < best)

    def on_step(self, trainer: "Trainer") -> None:
        """Saves, if it is time or the model is the best so far."""
        due = any(every is not None and trainer.step % every == 0 for every in (self._every, self._keep_every))
        if due or self._is_best:
            trainer.save()
        self._is_best = False

    def on_end(self, trainer: "Trainer") -> None:
        """Saves what is not saved, and waits until it is written."""
        if trainer.saved_step != trainer.step:
            trainer.save()
        trainer.checkpoints.wait()


class ShowProgress(Hook):
    """Shows steps and evaluations on the trainer's reporter."""

    def on_report(self, trainer: "Trainer", report: StepReport) -> None:
        """Shows a step."""
        trainer.reporter.step(report)

    def on_evaluation(self, trainer: "Trainer", report: EvaluationReport) -> None:
        """Shows an evaluation."""
        trainer.reporter.evaluation(report.step, report.evaluation)

    def on_end(self, trainer: "Trainer") -> None:
        """Says by what the run was stopped."""
        if trainer.stop_signal is not None:
            trainer.reporter.message(f"{trainer.stop_signal.name}: saving and stopping")


class StopAtNonFiniteLoss(Hook):
    """Ends training once loss or gradient was not finite in too many steps; those steps' updates were left out."""

    def __init__(self, allowed: int):
        """With so many allowed."""
        self._allowed = allowed

    def on_report(self, trainer: "Trainer", report: StepReport) -> None:
        """Says that an update was left out.

        Raises:
            NonFiniteLossError: one too many was.
        """
        if report.finite:
            return
        what = f"step {report.step}: loss {report.loss} or gradient norm {report.gradient_norm} is not finite"
        if report.skipped <= self._allowed:
            counted = f"{report.skipped} of at most {self._allowed}"
            trainer.reporter.message(f"{what}; the update is left out ({counted})")
            return
        checkpoints = trainer.checkpoints
        checkpoints.wait()
        last = checkpoints.latest_step
        good = "there is no checkpoint yet" if last is None else f"last good checkpoint: {checkpoints.path(last)}"
        raise NonFiniteLossError(f"{what}; {good}")


class PlotLosses(Hook):
    """Draws the run's losses at the end."""

    def on_end(self, trainer: "Trainer") -> None:
        """Draws `loss.png`."""
        if trainer.step > 0:
            plot_losses(trainer.folder, title=trainer.title)


def configured_hooks(config: TrainConfig) -> list[Hook]:
    """The hooks that a config names, without its loggers, in the order in which they are called."""
    checkpoint = config.checkpoint
    return [
        EvaluatePeriodically(config.evaluation.every),
        ShowProgress(),
        SaveCheckpoints(checkpoint.every, keep_every=checkpoint.keep_every, keep_best=checkpoint.keep_best > 0),
        StopAtNonFiniteLoss(config.max_skipped_steps),
        *([PlotLosses()] if config.logging.picture and is_primary() else []),
    ]
