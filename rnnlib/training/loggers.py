"""Loggers: hooks that write every number of a run somewhere. `metrics.csv` and `validation.csv` are always written."""

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rnnlib.extras import from_extra
from rnnlib.training.config import TrainConfig
from rnnlib.training.hooks import Hook
from rnnlib.training.metrics import TRAIN_FIELDS, TRAIN_FILE, VALIDATION_FIELDS, VALIDATION_FILE, CsvFile
from rnnlib.training.reports import EvaluationReport, StepReport

if TYPE_CHECKING:
    from rnnlib.training.trainer import Trainer

Split = Literal["train", "validation"]


class Logger(Hook):
    """A hook that gets all numbers of a run by name; a logger of your own defines `log`, and adds itself as a hook."""

    def log(self, split: Split, values: Mapping[str, int | float]) -> None:
        """Records the numbers of a training step, or of an evaluation.

        Args:
            split: which of the two.
            values: `TRAIN_FIELDS` or `VALIDATION_FIELDS` (`rnnlib.training.metrics`), the first of which is "step".
        """
        raise NotImplementedError(f"{type(self).__name__}.log")

    def on_report(self, trainer: "Trainer", report: StepReport) -> None:
        """Records a training step."""
        values = {name: getattr(report, name) for name in TRAIN_FIELDS}
        self.log("train", values | {"tokens_per_second": round(report.tokens_per_second, 1)})

    def on_evaluation(self, trainer: "Trainer", report: EvaluationReport) -> None:
        """Records an evaluation."""
        found = report.evaluation
        row = (report.step, report.tokens, found.loss, found.bits_per_byte, found.perplexity, found.tokens, found.bytes)
        self.log("validation", dict(zip(VALIDATION_FIELDS, row, strict=True)))


class CsvLogger(Logger):
    """`metrics.csv` and `validation.csv`: the record that a resumed run goes on with."""

    def __init__(self, folder: Path, *, last_step: int = 0):
        """Opens both to continue after `last_step`, that of the checkpoint that a run resumes from."""
        self._files = {
            "train": CsvFile(folder / TRAIN_FILE, TRAIN_FIELDS, last_step=last_step),
            "validation": CsvFile(folder / VALIDATION_FILE, VALIDATION_FIELDS, last_step=last_step),
        }

    @property
    def evaluated_steps(self) -> list[int]:
        """Steps whose evaluation is recorded."""
        return sorted(self._files["validation"].steps)

    def log(self, split: Split, values: Mapping[str, int | float]) -> None:
        """Appends a row."""
        self._files[split].write(values)

    def on_save(self, trainer: "Trainer") -> None:
        """Waits until all rows are on the disk."""
        for file in self._files.values():
            file.sync()

    def close(self) -> None:
        """Closes both files."""
        for file in self._files.values():
            file.close()


def check_loggers(config: TrainConfig) -> None:
    """Looks for what the loggers of a config need.

    TensorBoard's package is not imported: `open_loggers` does so, while XLA compiles.

    Raises:
        MissingExtraError: A package of one is not installed.
    """
    if config.logging.tensorboard:
        with from_extra("train", "logging.tensorboard=True"):
            if importlib.util.find_spec("tensorboard") is None:
                raise ModuleNotFoundError(name="tensorboard")
    if config.logging.wandb is not None:
        with from_extra("wandb", f"logging.wandb={config.logging.wandb}"):
            import wandb  # noqa: F401


def open_loggers(config: TrainConfig, folder: Path, *, last_step: int, tell: Callable[[str], None]) -> list[Logger]:
    """The loggers that a config names beside the CSV files.

    Args:
        config: the run's config.
        folder: the run's folder.
        last_step: step of the checkpoint that the run resumes from, 0 for a new run.
        tell: called with a message where a logger can no longer write.
    """
    loggers: list[Logger] = []
    if config.logging.tensorboard:
        from rnnlib.training.tensorboard import TensorBoardLogger

        loggers.append(TensorBoardLogger(folder / "tensorboard", last_step=last_step, tell=tell))
    if config.logging.wandb is not None:
        from rnnlib.training.wandb_logger import WandbLogger

        loggers.append(WandbLogger(config, folder, tell=tell))
    return loggers
