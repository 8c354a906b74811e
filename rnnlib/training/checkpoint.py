"""Checkpoints through orbax: model, optimizer, counters and the position in the data, saved in the background."""

import contextlib
import dataclasses
import json
import math
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from rnnlib.files import parse_json
from rnnlib.models.variables import fuse_columns, separate_columns
from rnnlib.training.orbax_errors import quiet_background_threads, reason_in_one_line, reasons_of_damage
from rnnlib.training.step import TrainState


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged, cannot be written or does not fit the model."""


@dataclasses.dataclass(frozen=True)
class Progress:
    """What a run has done, beside the arrays of its state.

    Attributes:
        step: training steps done, skipped ones included.
        tokens: tokens predicted in them.
        data_state: the data iterator's state after them and the validation data's fingerprint, as JSON holds them.
    """

    step: int
    tokens: int
    data_state: Any


def _name(path) -> str:
    # An nnx variable is a pytree node of its own, whose one leaf is called "value".
    return jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")


_LOSS = "validation_loss"


def _loss(metrics: Any) -> float:
    """The validation loss by which checkpoints are ranked; one that is not a number is the worst."""
    loss = float(metrics[_LOSS])
    return math.inf if math.isnan(loss) else loss


def _is_key(value: Any) -> bool:
    return jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)


def _wrap_key(data: np.ndarray, dtype: Any) -> jax.Array:
    # `jax.random.key_impl` wants a key and not the shape of one.
    for implementation in ("threefry2x32", "rbg", "unsafe_rbg"):
        key = jax.random.wrap_key_data(jax.numpy.asarray(data), impl=implementation)
        if key.dtype == dtype:
            return key
    raise CheckpointError(f"random keys of type {dtype} cannot be restored")


def to_host(tree: Any) -> dict[str, np.ndarray]:
    """A pytree of arrays as NumPy arrays by path, copied: the originals may be donated or deleted afterwards.

    Random keys become their key data. On a CPU, `jax.device_get` alone may share memory with the device's buffer.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    arrays = {_name(path): jax.random.key_data(value) if _is_key(value) else value for path, value in leaves}
    return {name: np.array(value) for name, value in jax.device_get(arrays).items()}


def _on_devices(tree: Any) -> dict[str, jax.Array]:
    """As `to_host`, but left where they are: several processes write their own shards, and copy them before."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {_name(path): jax.random.key_data(value) if _is_key(value) else value for path, value in leaves}


def from_host(template: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """Rebuilds a pytree like `template` out of `to_host`'s arrays, or such arrays on devices.

    Raises:
        CheckpointError: if an array is missing, or its shape or dtype is not the template's.
    """

    def rebuild(path, value):
        name = _name(path)
        if name not in arrays:
            raise CheckpointError(f"the checkpoint holds no {name}: it is of another model or optimizer")
        stored = arrays[name]
        if _is_key(value):
            return _wrap_key(stored, value.dtype)
        _expect_fit(name, stored, value)
        return stored

    return jax.tree_util.tree_map_with_path(rebuild, template)


def _expect_fit(name: str, stored: Any, value: Any) -> None:
    if tuple(stored.shape) != tuple(value.shape) or stored.dtype != value.dtype:
        raise CheckpointError(
            f"the checkpoint's {name} is {stored.dtype}{list(stored.shape)}, "
            f"but the model's is {value.dtype}{list(value.shape)}"
        )


def _split(state: TrainState) -> dict[str, Any]:
    # The model on its own: generation and evaluation do not read the optimizer.
    return {
        "model": {"parameters": state.parameters, "other": state.other},
        "optimizer": {"optimizer": state.optimizer, "updates": state.updates, "skipped": state.skipped},
    }


class Checkpoints:
    """The checkpoints of a run, `<folder>/<step>/`.

    Arrays have the names of the model's variables, and of the columns of its input projections: devices may store these
    otherwise (tensor parallelism).

    A checkpoint appears under its name only when it is whole (orbax writes to a temporary folder and renames it), so a
    process that is killed while saving leaves the checkpoint before it as the latest.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int = 2,
        keep_every: int | None = None,
        keep_best: int = 0,
        writable: bool = True,
    ):
        """Opens the folder.

        Args:
            folder: where checkpoints are; created if `writable`.
            keep: how many of the latest are kept.
            keep_every: those of steps that are a multiple of this are kept, too.
            keep_best: so many of those with the lowest validation loss are kept, too.
            writable: also removes what interrupted saves left behind.

        Raises:
            CheckpointError: if not writable and the folder does not exist.
        """
        from orbax.checkpoint import v1 as ocp  # takes seconds to import; `--help` does without

        self.folder = folder.absolute()
        if not writable and not self.folder.is_dir():
            raise CheckpointError(f"{folder} holds no checkpoint")
        policies = ocp.training.preservation_policies
        kept: list[Any] = [policies.LatestN(keep)]
        if keep_every is not None:
            kept.append(policies.EveryNSteps(keep_every))
        if keep_best:
            kept.append(
                policies.BestN(get_metric_fn=_loss, reverse=True, n=keep_best, keep_checkpoints_without_metrics=False)
            )
        self._checkpointer = ocp.training.Checkpointer(
            self.folder,
            save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),
            preservation_policy=policies.AnyPreservationPolicy(kept),
            cleanup_tmp_directories=writable,
        )
        quiet_background_threads()
        self._saving: Any = None

    @property
    def latest_step(self) -> int | None:
        """Step of the latest whole checkpoint."""
        latest = self._checkpointer.latest
        return None if latest is None else latest.step

    @property
    def steps(self) -> list[int]:
        """Steps of all whole checkpoints, in order."""
        return [found.step for found in self._checkpointer.checkpoints]

    @property
    def best_step(self) -> int | None:
        """Step of the checkpoint with the lowest validation loss; None where none was evaluated."""
        found = [checkpoint for checkpoint in self._checkpointer.checkpoints if checkpoint.metrics]
        return min(found, key=lambda checkpoint: _loss(checkpoint.metrics)).step if found else None

    @property
    def best_loss(self) -> float | None:
        """The lowest validation loss of a checkpoint; None where none was evaluated."""
        losses = [_loss(checkpoint.metrics) for checkpoint in self._checkpointer.checkpoints if checkpoint.metrics]
        return min(losses, default=None)

    def save(self, state: TrainState, progress: Progress, *, validation_loss: float | None = None) -> None:
        """Copies the state to the host and starts to write it in the background; a save under way is awaited first.

        All processes of a run call it. Each writes its own shards, and process 0 gives the checkpoint its name when
        all of them are written.

        Args:
            state: the training state; may be donated as soon as this returns.
            progress: step, tokens and data position that belong to it.
            validation_loss: that of the model, nats per token, where it was evaluated.
        """
        self.wait()
        arrays = to_host if jax.process_count() == 1 else _on_devices
        written: dict[str, dict[str, Any]] = {
            name: arrays(part) for name, part in _split(separate_columns(state)).items()
        }
        text = json.dumps(dataclasses.asdict(progress)).encode()
        written["progress"] = {"json": np.frombuffer(text, np.uint8)}
        with self._named_error(f"checkpoint {self.path(progress.step)} cannot be written"):
            self._saving = self._checkpointer.save_checkpointables_async(
                progress.step,
                written,
                force=True,
                metrics=None if validation_loss is None else {_LOSS: validation_loss},
            )

    def wait(self) -> None:
        """Waits until nothing is being written; raises CheckpointError if it could not be."""
        if self._saving is not None:
            saving, self._saving = self._saving, None
            with self._named_error(f"a checkpoint in {self.folder} could not be written"):
                saving.result()

    @contextlib.contextmanager
    def _named_error(self, what: str, advice: str = "") -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(f"{what} ({reason_in_one_line(error)}){advice}") from error

    def restore(self, state: TrainState, shardings: TrainState | None = None) -> tuple[TrainState, Progress]:
        """Reads the latest checkpoint, which any number of devices and processes may have written.

        Args:
            state: A state of the run's structure (arrays or `jax.ShapeDtypeStruct`s).
            shardings: where each array is to lie, from `state_shardings`; each process reads its own shards.

        Returns:
            The saved state as NumPy arrays, or with `shardings` as arrays that lie there, and its progress.

        Raises:
            CheckpointError: if there is none, it cannot be read, or it is not of this model and optimizer.
        """
        parts = _split(separate_columns(state))
        targets: dict[str, Any] = {}
        for part in () if shardings is None else _split(separate_columns(shardings)).values():
            targets |= {_name(path): sharding for path, sharding in jax.tree_util.tree_leaves_with_path(part)}
        loaded = self._load(*parts, "progress", targets=targets, wanted=parts)
        restored = {name: from_host(part, loaded[name]) for name, part in parts.items()}
        progress = self._progress(loaded)
        found = fuse_columns(TrainState(**restored["model"], **restored["optimizer"]), state)
        return (found if shardings is None else jax.device_put(found, shardings)), progress

    def restore_model(
        self, parameters: Any, other: Any, step: int | Literal["best"] | None = None
    ) -> tuple[Any, Any, Progress]:
        """Reads only the model (and the progress) of a checkpoint; arguments and errors as in `restore`.

        Args:
            parameters: of the model's structure.
            other: likewise its other variables.
            step: of the checkpoint, or the one with the lowest validation loss; None for the latest.
        """
        if step == "best":
            step = self.best_step
            if step is None:
                raise CheckpointError(f"{self.folder} holds no checkpoint that was evaluated, expected one for @best")
        elif step is not None and step not in self.steps:
            there = ", ".join(map(str, self.steps)) or "none"
            raise CheckpointError(f"{self.folder} holds no checkpoint of step {step}, expected one of: {there}")
        wanted = {"parameters": parameters, "other": other}
        separate = separate_columns(wanted)
        loaded = self._load("model", "progress", wanted={"model": separate}, step=step)
        model = fuse_columns(from_host(separate, loaded["model"]), wanted)
        return model["parameters"], model["other"], self._progress(loaded)

    def _progress(self, loaded: Mapping[str, Any]) -> Progress:
        with self._named_error(f"a checkpoint in {self.folder} cannot be read"):
            return Progress(**parse_json(bytes(loaded["progress"]["json"]), "progress"))

    def _load(
        self,
        *names: str,
        targets: Mapping[str, Any] = types.MappingProxyType({}),
        wanted: Mapping[str, Any] = types.MappingProxyType({}),
        step: int | None = None,
    ) -> dict[str, Any]:
        step = self.latest_step if step is None else step
        if step is None:
            raise CheckpointError(f"{self.folder} holds no checkpoint")
        what = f"checkpoint {self.path(step)} cannot be read"
        # Everything that was saved, as NumPy arrays or where `targets` says; from_host compares it with the model.
        advice = "; if it is damaged, move that folder away and the checkpoint before it is taken"
        with self._named_error(what, advice), reasons_of_damage() as reasons:
            saved = self._checkpointer.checkpointables_metadata(step).metadata
            for name in names:
                if saved.get(name) is None:
                    raise ValueError(reasons.get(name, f"it has no part {name!r}"))
                # Before anything of that size is allocated.
                for path, value in jax.tree_util.tree_leaves_with_path(wanted.get(name, {})):
                    if (found := saved[name].get(_name(path))) is not None and not _is_key(value):
                        _expect_fit(_name(path), found, value)

            def template(name: str) -> dict[str, Any]:
                def of(key: str, found: Any) -> Any:
                    if key in targets:
                        return jax.ShapeDtypeStruct(found.shape, found.dtype, sharding=targets[key])
                    return np.empty(found.shape, found.dtype)

                return {key: of(key, found) for key, found in saved[name].items()}

            # One part at a time: the others' reads would go on in the background after an error, and complain.
            return {name: self._checkpointer.load_checkpointables(step, {name: template(name)})[name] for name in names}

    def path(self, step: int) -> Path:
        """Folder of a step's checkpoint."""
        return self.folder / str(step)

    def close(self) -> None:
        """Waits for a save under way and ends the background threads."""
        # Orbax raises once more in closing what went wrong in saving.
        with self._named_error(f"a checkpoint in {self.folder} could not be written"):
            try:
                self.wait()
            finally:
                self._checkpointer.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *error) -> None:
        self.close()
