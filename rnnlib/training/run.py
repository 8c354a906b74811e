"""Run folders: making one, continuing one, and reading a trained model back.

A run folder holds `config.yaml`, `checkpoints/<step>/`, `metrics.csv`, `validation.csv`, `tensorboard/`, `loss.png`
and, for any tokenizer but the bytes, `tokenizer.json`; one that trains adapters has their model in `base/`.
"""

import dataclasses
import fcntl
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Literal

import jax
from flax import nnx

from rnnlib.configuration import to_plain
from rnnlib.data import FileTokenizer, Tokenizer, load_tokenizer
from rnnlib.data.chat import ChatEncoder, ChatTemplate, chat_encoder
from rnnlib.files import new_folder
from rnnlib.hub.special_tokens import copy_tokenizer_files, end_token
from rnnlib.models import DecoderLM
from rnnlib.tokenizers import read_backend
from rnnlib.training.adaptation import Lora
from rnnlib.training.checkpoint import Checkpoints, Progress
from rnnlib.training.config import TrainConfig
from rnnlib.training.config_file import load_config, save_config
from rnnlib.training.metrics import TRAIN_FILE, recorded_steps
from rnnlib.training.step import TrainState, put_state, split_model

CONFIG_FILE = "config.yaml"
TOKENIZER_FILE = "tokenizer.json"
CHECKPOINTS = "checkpoints"
BASE = "base"

# What may differ between a run and its continuation: nothing here changes the batches or the model's arrays. A corpus
# may have moved: the fingerprint of its tokens is compared with the checkpoint's.
_MAY_CHANGE = (
    "mesh",
    "optimizer",
    "evaluation",
    "checkpoint",
    "logging",
    "steps",
    "max_skipped_steps",
    "accumulation_steps",
    "deterministic",
    "devices",
)
_MAY_CHANGE_DATA = ("paths", "validation_paths", "num_workers", "prefetch", "cache_folder")
_MAY_CHANGE_MODEL = ("remat", "remat_keeps", "scan_layers")


class RunError(ValueError):
    """A run folder that cannot be made, continued or read; the message says which and why."""


def split_step(folder: str | os.PathLike) -> tuple[Path, int | Literal["best"] | None]:
    """A run's folder, and which of its checkpoints is meant: `runs/001@2000`, `runs/001@best`; None for the latest.

    A folder that exists under the whole name is meant itself.
    """
    folder = Path(folder)
    name, _, step = folder.name.rpartition("@")
    if not name or not (step == "best" or step.isdecimal()) or folder.exists():
        return folder, None
    return folder.with_name(name), "best" if step == "best" else int(step)


def next_run_folder(parent: Path) -> Path:
    """The first of `parent/001`, `parent/002`, ... after all that exist."""
    numbers = [int(entry.name) for entry in parent.iterdir() if entry.name.isdecimal()] if parent.is_dir() else []
    return parent / f"{max(numbers, default=0) + 1:03}"


def check_new_folder(folder: Path) -> None:
    """Raises RunError where a new run cannot be made, before anything is computed."""
    if folder.exists() or folder.is_symlink():
        raise RunError(f"run folder {folder} exists: choose another, or continue it with --resume")
    parent = folder.absolute().parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        raise RunError(f"run folder {folder} cannot be made: {parent} is not a folder")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise RunError(f"run folder {folder} cannot be made: {parent} cannot be written to")


def create_run(
    folder: Path,
    config: TrainConfig,
    tokenizer: Tokenizer,
    *,
    origin: Path | None = None,
    template: ChatTemplate | None = None,
) -> None:
    """Makes a run folder that holds its config and tokenizer from the moment that it is there.

    Args:
        folder: the run's folder.
        config: its config.
        tokenizer: its tokenizer.
        origin: the folder of the model that training begins with; what says how to use its tokenizer is copied.
        template: the chat template that its conversations go through.

    Raises:
        RunError: if it exists or cannot be made.
    """
    check_new_folder(folder)
    try:
        with new_folder(folder.absolute()) as staged:
            save_config(config, staged / CONFIG_FILE)
            if isinstance(tokenizer, FileTokenizer):
                tokenizer.save(staged / TOKENIZER_FILE)
            if origin is not None:
                copy_tokenizer_files(origin, staged)
            if template is not None:
                template.save(staged)
            staged.chmod(0o755)
    except OSError as error:
        raise RunError(f"run folder {folder} cannot be made: {error.strerror}") from error


def check_own_files(folder: Path) -> None:
    """Raises RunError where a run's folder has a link that leads out of it: continuing would write through it.

    The folder itself may be a link, as to another disk.
    """
    home = folder.resolve()
    for parent, folders, files in os.walk(home):
        for path in (Path(parent, name) for name in (*folders, *files)):
            if path.is_symlink() and not path.resolve().is_relative_to(home):
                raise RunError(
                    f"run {folder} cannot be continued: {path.relative_to(home)} is a link to {path.resolve()}, which "
                    "would be written; the run's folder as a whole may be a link"
                )


def lock_run(folder: Path) -> IO[str]:
    """Takes the run for this process; the lock ends with the returned file, or the process.

    Raises:
        RunError: if another process trains in it.
    """
    # A link is not followed and a pipe not waited for: either may be anyone's, in a folder that came from elsewhere.
    file = open(folder / ".lock", "a", opener=_open_own)  # noqa: SIM115 (open as long as the lock is held)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise RunError(f"run {folder} is being trained by another process") from None
    return file


def _open_own(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def load_run_config(folder: Path) -> TrainConfig:
    """The config that a run was started with (or last continued with).

    Raises:
        RunError: if the folder is no run.
        ConfigError: if its config file is damaged.
    """
    if not (folder / CONFIG_FILE).is_file():
        reason = "is not a run folder: it has no config.yaml" if folder.is_dir() else "does not exist"
        raise RunError(f"run {folder} {reason}")
    return load_config(TrainConfig, folder / CONFIG_FILE)


def load_run_tokenizer(folder: Path, config: TrainConfig) -> Tokenizer:
    """The run's tokenizer, from its own copy where it is a file.

    Raises:
        RunError: if the copy is gone: the file that it was made of may hold another tokenizer by now.
    """
    if config.data.tokenizer == "byte":
        return load_tokenizer("byte")
    copy = folder / TOKENIZER_FILE
    if not copy.is_file():
        raise RunError(f"run {folder} has no {TOKENIZER_FILE}, expected its copy of {config.data.tokenizer}")
    # Beside a published model's tokenizer stands how it calls the end of a document.
    backend = read_backend(copy)
    return FileTokenizer(backend, end_token=end_token(folder, backend))


def load_run_chat(folder: Path, config: TrainConfig, tokenizer: Tokenizer) -> ChatEncoder | None:
    """What encodes a run's conversations, by its own copy of the template; None if it is trained on text.

    Raises:
        ValueError: if the copy is gone.
    """
    data = config.data
    return (
        chat_encoder(dataclasses.replace(data, chat_template=None), tokenizer, folder)
        if data.format == "chat"
        else None
    )


def check_continues(config: TrainConfig, saved: TrainConfig) -> None:
    """Raises RunError if `config` cannot continue a run of `saved`, naming the first setting that differs."""

    def compare(new: Any, old: Any, name: str) -> None:
        if isinstance(new, dict) and isinstance(old, dict) and new.keys() == old.keys():
            for key in new:
                compare(new[key], old[key], f"{name}.{key}" if name else key)
        elif new != old:
            raise RunError(f"{name} is {new!r} but {old!r} in the run to continue: it cannot change in a run")

    def fixed(config: TrainConfig) -> dict[str, Any]:
        plain = {key: value for key, value in to_plain(config).items() if key not in _MAY_CHANGE}
        plain["data"] = {key: value for key, value in plain["data"].items() if key not in _MAY_CHANGE_DATA}
        plain["model"] = {key: value for key, value in plain["model"].items() if key not in _MAY_CHANGE_MODEL}
        return plain

    compare(fixed(config), fixed(saved), "")


def check_checkpoints_not_lost(folder: Path, saved: TrainConfig) -> None:
    """Raises RunError for a run whose record says that it had a whole checkpoint, and which has none.

    Without a checkpoint a run goes on from the start and its rows are dropped. That is right where it was interrupted
    before its first checkpoint was whole, and not where its checkpoints were lost.
    """
    checkpoints = folder / CHECKPOINTS
    # Looked at without orbax, which writes into the folder that it opens.
    if checkpoints.is_dir() and any(entry.name.isdecimal() for entry in checkpoints.iterdir()):
        return
    steps = recorded_steps(folder / TRAIN_FILE)
    last = max(steps, default=0)
    # A checkpoint is written while the next steps are done, but the second is not begun before the first is whole. The
    # picture is drawn when the last one is.
    if last > 2 * saved.checkpoint.every or (last >= saved.steps and (folder / "loss.png").exists()):
        raise RunError(
            f"run {folder} has {len(steps)} rows in {TRAIN_FILE} and no whole checkpoint, expected one in "
            f"{checkpoints} to continue from: put it back, or begin again in another folder"
        )


@dataclasses.dataclass(frozen=True)
class LoadedRun:
    """A trained model with what is needed to use it.

    Attributes:
        folder: the run's folder.
        config: its config, with the dtype that it was read for.
        model: the model at the checkpoint.
        tokenizer: its tokenizer.
        step: training steps done.
        tokens: tokens trained on.
        factors: of a run that trains adapters, which the model has in its matrices: `A` `[in, rank]` and `B`
            `[rank, out]` by the matrix's path; else None.
    """

    folder: Path
    config: TrainConfig
    model: DecoderLM
    tokenizer: Tokenizer
    step: int
    tokens: int
    factors: Mapping[str, tuple[Any, Any]] | None = None


def load_run(folder: str | os.PathLike, *, dtype: str | None = None) -> LoadedRun:
    """Reads the model of a run's checkpoint.

    Args:
        folder: the run's folder, whose latest checkpoint is read; or `FOLDER@STEP`, `FOLDER@best` (`split_step`).
        dtype: what the model computes in, such as "bfloat16"; None as in training.

    Raises:
        RunError, ConfigError, CheckpointError: all ValueErrors, saying what is missing.
    """
    folder, step = split_step(folder)
    config = load_run_config(folder)
    if dtype is not None:
        changes: dict[str, Any] = {"dtype": dtype}
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, **changes))
    tokenizer = load_run_tokenizer(folder, config)
    model = nnx.eval_shape(lambda: DecoderLM(config.model, rngs=nnx.Rngs(config.seed)))
    graphdef, parameters, other = split_model(model)
    adapter = None
    if config.lora.rank is not None:
        adapter = Lora(config.lora, parameters, seed=config.seed, model=model)
        base = load_base(folder, parameters, other)[0]
        parameters = jax.eval_shape(adapter.split, parameters)[0]
    with Checkpoints(folder / CHECKPOINTS, writable=False) as checkpoints:
        parameters, other, progress = checkpoints.restore_model(parameters, other, step)
    factors = None
    if adapter is not None:
        factors = adapter.factors(parameters)
        parameters = jax.jit(adapter.parameters)(parameters, base)
    model = nnx.merge(graphdef, *put_state((parameters, other), None))
    return LoadedRun(folder, config, model, tokenizer, progress.step, progress.tokens, factors)


def save_base(folder: Path, state: TrainState) -> None:
    """Writes the model that a run adapts, once: checkpoints hold its adapters alone."""
    with Checkpoints(folder / BASE, keep=1) as checkpoints:
        whole = dataclasses.replace(state, parameters=state.frozen, frozen=None, optimizer={})
        checkpoints.save(whole, Progress(0, 0, {}))


def load_base(folder: Path, parameters: Any, other: Any) -> tuple[Any, Any]:
    """The parameters and other variables of the model that a run adapts.

    Args:
        folder: the run's folder.
        parameters: of the model's structure.
        other: likewise its other variables.

    Raises:
        CheckpointError: it is not there, or damaged.
    """
    with Checkpoints(folder / BASE, writable=False) as checkpoints:
        return checkpoints.restore_model(parameters, other)[:2]
