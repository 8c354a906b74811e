"""Metrics to Weights & Biases."""

import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path

import wandb

from rnnlib.configuration import to_plain
from rnnlib.files import read_text
from rnnlib.training.config import TrainConfig
from rnnlib.training.loggers import Logger, Split

_ID_FILE = "wandb/run_id"


class WandbLogger(Logger):
    """Logs every number to a project of Weights & Biases, the config beside them.

    The x-axis of all curves is `step`, a number of ours: a resumed run logs the steps after its checkpoint again. A
    run keeps its id, so that a resumed one goes on in the same curves. WANDB_MODE=offline writes into the run's folder
    alone, and `wandb sync RUN/wandb/offline-run-*` sends it later.
    """

    def __init__(self, config: TrainConfig, folder: Path, *, tell: Callable[[str], None]):
        """Begins the run there, or goes on with it.

        Args:
            config: the training config, whose `logging.wandb` names the project.
            folder: the run's folder.
            tell: called with a message where nothing more can be logged.

        Raises:
            ValueError: Weights & Biases refuses, as without a key.
        """
        self._tell, self._failed = tell, False
        path = folder / _ID_FILE
        path.parent.mkdir(exist_ok=True)
        if not path.exists():
            path.write_text(secrets.token_hex(4))
        try:
            self._run = wandb.init(
                project=config.logging.wandb,
                dir=folder,
                id=read_text(path, at_most=1000).strip(),
                resume=None if os.environ.get("WANDB_MODE") == "offline" else "allow",
                name=folder.name,
                config=to_plain(config),
                settings=wandb.Settings(silent=True, console="off"),
            )
        except wandb.Error as error:
            raise ValueError(
                f"logging.wandb={config.logging.wandb}: {' '.join(str(error).split())}; WANDB_MODE=offline needs no key"
            ) from error
        for split in ("train", "validation"):
            self._run.define_metric(f"{split}/*", step_metric="step")

    def log(self, split: Split, values: Mapping[str, int | float]) -> None:
        """Logs the numbers as `train/loss` and so on."""
        if self._failed:
            return
        named = {"step" if name == "step" else f"{split}/{name}": value for name, value in values.items()}
        try:
            self._run.log(named)
        except (wandb.Error, OSError) as error:
            self._failed = True
            self._tell(f"Weights & Biases cannot be written to ({error}); training goes on without it")

    def close(self) -> None:
        """Sends what is left, and ends the run there."""
        self._run.finish()
