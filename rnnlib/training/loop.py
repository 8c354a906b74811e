"""The training loop: compiled steps, evaluation, checkpoints, records, and a clean stop at any moment."""

import collections
import contextlib
import dataclasses
import io
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from pallas_kernels.common.platform import platform
from rnnlib.data import BatchDataset, Tokenizer, load_tokenizer, make_dataset
from rnnlib.models import DecoderLM
from rnnlib.training.checkpoint import Checkpoints, Progress
from rnnlib.training.compiled_steps import CompiledSteps
from rnnlib.training.config import TrainConfig
from rnnlib.training.config_file import from_plain, save_config, to_plain
from rnnlib.training.distributed import await_shared, broadcast_from_primary, is_primary
from rnnlib.training.evaluation import Evaluation, evaluate_with, spread_batches
from rnnlib.training.loss import bits_per_byte
from rnnlib.training.mesh import process_rows, replicated
from rnnlib.training.metrics import TRAIN_FILE, NoLog, RunLog, recorded_steps
from rnnlib.training.plots import plot_losses
from rnnlib.training.progress import ProgressReporter, Speed, StepReport
from rnnlib.training.run import (
    CHECKPOINTS,
    CONFIG_FILE,
    RunError,
    check_continues,
    check_new_folder,
    create_run,
    load_run_config,
    load_run_tokenizer,
    lock_run,
)
from rnnlib.training.signals import StopSignals
from rnnlib.training.step import (
    StepMetrics,
    put_batch,
    put_state,
    state_shardings,
)


class NonFiniteLossError(ArithmeticError):
    """Loss or gradient was not finite in more steps than may be skipped."""


class _Interrupted(Exception):
    """A signal asked to stop in the middle of an evaluation."""


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """How a call of `train` ended.

    Attributes:
        folder: The run's folder.
        step: Steps done, saved in the latest checkpoint.
        tokens: Tokens trained on.
        evaluation: The last evaluation on held-out text; None when stopped before any in this call.
        stopped_by: The signal that stopped training early; None when all steps and the last evaluation are done.
        seconds: Time that this call took.
    """

    folder: Path
    step: int
    tokens: int
    evaluation: Evaluation | None
    stopped_by: signal.Signals | None
    seconds: float


def _check_checkpoints_not_lost(folder: Path, saved: TrainConfig) -> None:
    # Without a checkpoint a run goes on from the start and its rows are dropped. That is right where it was
    # interrupted before its first checkpoint was whole, and not where its checkpoints were lost.
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


class Trainer:
    """A training run in three parts: all that can be wrong with a config, then the folder, then the steps.

    Making a `Trainer` reads the data and traces the training step, so that a wrong path, size or name is an error
    before there is a folder; `open` makes or restores the run folder; `run` trains. With `read_data=False` the data
    is read by `read_data`, which another thread may do while `compile` compiles, or else by `open`.

    Attributes:
        config: The config, its vocabulary size made that of the tokenizer.
        tokenizer: The tokenizer.
        folder: The run's folder, once open.
        start_step: The step that training goes on from, once open.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        tokenizer: Tokenizer | None = None,
        read_data: bool = True,
        initial: DecoderLM | None = None,
        origin: Path | None = None,
    ):
        """Prepares a run and checks it; writes nothing.

        Args:
            config: What to train, on what.
            tokenizer: In place of the one that `config.data.tokenizer` names.
            read_data: Read the data now.
            initial: The model to begin a new run with, of `config.model` but for what computes it; its arrays are the
                first step's to reuse. None for fresh weights.
            origin: The folder that `initial` is from; what says how to use its tokenizer is copied into the run's.

        Raises:
            ValueError: If a path, size or name in the config is wrong, or `initial` is another model; the message
                names it.
        """
        # As the run folder will hold it: lists are tuples, NumPy's numbers Python's.
        config = from_plain(TrainConfig, to_plain(config))
        self.tokenizer = tokenizer if tokenizer is not None else load_tokenizer(config.data.tokenizer)
        vocabulary = max(config.model.vocabulary_size, self.tokenizer.vocabulary_size)
        model_config = dataclasses.replace(config.model, vocabulary_size=vocabulary)
        self.config = config = dataclasses.replace(config, model=model_config)
        self._program = CompiledSteps(config, self.tokenizer.token_bytes, initial)
        self._origin = origin
        self._data: tuple[BatchDataset, BatchDataset] | None = None
        self._resources: contextlib.ExitStack | None = None
        if read_data:
            self.read_data()
        self._program.check_step()

    def read_data(self) -> tuple[BatchDataset, BatchDataset]:
        """Training and validation data, read when first asked for.

        Raises:
            ValueError: If a path or name in the config is wrong, or a split is empty.
        """
        if self._data is None:
            data, parts = self.config.data, self.config.accumulation_steps
            rows = process_rows(self._program.mesh, data.batch_size, parts)
            train = make_dataset(data, split="train", tokenizer=self.tokenizer, own_rows=rows)
            rows = process_rows(self._program.mesh, data.batch_size)
            self._data = train, make_dataset(data, split="validation", tokenizer=self.tokenizer, own_rows=rows)
        return self._data

    @property
    def step(self) -> int:
        """Steps done.

        Raises:
            RuntimeError: If no run was opened.
        """
        self._check_opened("step")
        return self._step

    def _check_opened(self, asked: str) -> None:
        if not hasattr(self, "_state"):
            raise RuntimeError(f"Trainer.{asked}: no run was opened, expected a call of Trainer.open before")

    @property
    def num_parameters(self) -> int:
        """Trained numbers in the model."""
        return sum(leaf.size for leaf in jax.tree.leaves(self._program.template.parameters))

    @property
    def _finished(self) -> bool:
        return self._step == self.config.steps and self._log.has_validation(self._step)

    @property
    def device_description(self) -> str:
        """What trains, for people."""
        return self._program.device_description

    def compile(self) -> None:
        """Compiles both steps now and not when each is first used; on several devices it does nothing."""
        self._program.compile()

    def open(self, folder: str | os.PathLike, *, resume: bool = False) -> None:
        """Makes the run folder, or restores what is in it; nothing is changed in a folder that does not fit.

        Args:
            folder: The run's folder.
            resume: Continue the run in it, from its latest checkpoint (or from the start, if it has none yet).

        Raises:
            ValueError: If the folder exists (new run), is no run, is one of another model or other data or has lost its
                checkpoints (resume).
        """
        folder = Path(folder)
        train_data, self._validation_data = self.read_data()
        if not resume:
            broadcast_from_primary(lambda: create_run(folder, self.config, self.tokenizer, origin=self._origin))
            await_shared(folder / CONFIG_FILE)
        saved = load_run_config(folder)
        check_continues(self.config, saved)
        self.folder = folder
        self._recorded = 0
        with contextlib.ExitStack() as stack:
            if not resume:
                stack.push(self._remove_if_nothing_was_done)
            self._prepare(folder, saved, stack, resume=resume)
            checkpoints = stack.enter_context(Checkpoints(folder / CHECKPOINTS, keep=self.config.checkpoint.keep))
            self._batches = iter(train_data)
            stack.callback(self._batches.close)
            if broadcast_from_primary(lambda: checkpoints.latest_step) is None:
                self._state = self._program.first_state()
                self._step = self._tokens = 0
            else:
                several = jax.process_count() > 1
                shardings = state_shardings(self._program.template, self._program.mesh) if several else None
                state, progress = checkpoints.restore(self._program.template, shardings)
                if progress.step > self.config.steps:
                    raise RunError(f"run {folder} is at step {progress.step}, beyond the {self.config.steps} asked for")
                self._batches.set_state(progress.data_state)
                found, wanted = self._validation_data.fingerprint, progress.data_state.get("validation")
                if wanted not in (None, found):
                    raise RunError(
                        f"the validation data is not that of run {folder}: its files have changed "
                        f"(fingerprint {found}, saved {wanted})"
                    )
                self._state = put_state(state, self._program.mesh)
                self._step, self._tokens = progress.step, progress.tokens
            self._log = self._open_log(saved)
            stack.callback(self._log.close)
            self._checkpoints = checkpoints
            self._resources = stack.pop_all()
        self.start_step = self._saved_step = self._step

    def _prepare(self, folder: Path, saved: TrainConfig, stack: contextlib.ExitStack, *, resume: bool) -> None:
        def prepare() -> None:  # one process holds the run for all
            stack.enter_context(lock_run(folder))
            if resume:
                _check_checkpoints_not_lost(folder, saved)

        broadcast_from_primary(prepare)

    def _open_log(self, saved: TrainConfig) -> RunLog | NoLog:
        log: RunLog | NoLog | None = None
        if is_primary():
            if saved != self.config:
                save_config(self.config, self.folder / CONFIG_FILE)
            log = RunLog(
                self.folder,
                last_step=self._step,
                tensorboard=self.config.logging.tensorboard,
                tell=lambda text: self._reporter.message(text),  # the reporter comes with `run`, as all rows do
            )
        evaluated = broadcast_from_primary(lambda: log.evaluated if log is not None else [])
        return NoLog(evaluated) if log is None else log

    def _remove_if_nothing_was_done(self, kind: Any, error: Any, traceback: Any) -> None:
        # An error before the first step is done (the batch does not fit in memory): no half-made run is left.
        if kind is not None and self._recorded == 0 and is_primary():
            shutil.rmtree(self.folder, ignore_errors=True)

    def run(self, reporter: ProgressReporter | None = None) -> TrainResult:
        """Trains to the last step, or until a signal asks to stop; then everything is saved. Closes the run.

        Args:
            reporter: Shows progress; by default on standard output.

        Raises:
            RuntimeError: If no run is open.
            NonFiniteLossError: If loss or gradient is not finite in more than `max_skipped_steps` steps.
            CheckpointError, OSError: If nothing more can be written, or the data cannot be read on.
        """
        if self._resources is None:
            raise RuntimeError("Trainer.run: no run is open, expected a call of Trainer.open before each of run")
        resources, self._resources = self._resources, None
        config = self.config
        if reporter is None:
            stream = None if is_primary() else io.StringIO()
            reporter = ProgressReporter(config.steps, plain_seconds=config.logging.plain_seconds, stream=stream)
        start = time.perf_counter()
        self._evaluation: Evaluation | None = None
        self._agreed_stop: signal.Signals | None = None
        self._pending: collections.deque[tuple[int, StepMetrics]] = collections.deque()
        self._speed = Speed()
        with resources, StopSignals() as self._signals, reporter:
            self._reporter = reporter
            if config.model.remat == "auto":
                self._reporter.message(self._program.remat_choice().line)
            self._evaluate_if_due()
            while self._step < config.steps and not self._asked_to_stop:
                try:
                    batch = next(self._batches)
                except Exception:
                    # Ctrl-C reaches the data's worker processes as well.
                    if self._asked_to_stop:
                        break
                    raise
                # Of several processes all stop after the same step: the first whose metrics say so.
                stop = int(self._signals.received or 0) if jax.process_count() > 1 else None
                self._state, metrics = self._program.train_step(
                    self._state, put_batch(batch, self._program.mesh, config.accumulation_steps, stop=stop)
                )
                self._step += 1
                self._pending.append((self._step, metrics))
                # One step behind, so that the device always has the next step to go on with. A CPU's cores do what the
                # host does, too: two steps begun at once take longer there than one after the other.
                self._record_pending(leave=0 if platform() == "cpu" else 1)
                self._evaluate_if_due()
                if self._step % config.checkpoint.every == 0:
                    self._save()
            self._record_pending()
            if self._asked_to_stop:
                self._reporter.message(f"{self._asked_to_stop.name}: saving and stopping")
            if self._saved_step != self._step:
                self._save()
            self._checkpoints.wait()
            if config.logging.picture and self._step > 0 and is_primary():
                plot_losses(self.folder, title=self._title())
        return TrainResult(
            folder=self.folder,
            step=self._step,
            tokens=self._tokens,
            evaluation=self._evaluation,
            stopped_by=None if self._finished else self._asked_to_stop,
            seconds=time.perf_counter() - start,
        )

    @property
    def _asked_to_stop(self) -> signal.Signals | None:
        return self._signals.received if jax.process_count() == 1 else self._agreed_stop

    def close(self) -> None:
        """Closes an open run without training it; what is saved stays."""
        resources, self._resources = self._resources, None
        if resources is not None:
            resources.close()

    def abstract_model(self) -> DecoderLM:
        """The model with shapes in place of arrays."""
        return self._program.abstract_model()

    def trained_model(self) -> DecoderLM:
        """The model as trained so far, whole on one device; all processes of a run call it.

        Raises:
            RuntimeError: If no run was opened.
        """
        self._check_opened("trained_model")
        graphdef = nnx.split(self.abstract_model())[0]
        state = self._state.parameters, self._state.other
        if jax.process_count() > 1:
            state = jax.jit(lambda x: x, out_shardings=replicated(self._program.mesh))(state)
            state = jax.tree.map(lambda x: x.addressable_data(0), state)
        state = jax.device_put(state, jax.local_devices()[0])
        return nnx.merge(graphdef, *state)

    def _title(self) -> str:
        model = self.config.model
        mixers = " + ".join(dict.fromkeys(model.layer_mixers))
        return f"{mixers}, {self.num_parameters:,} parameters, width {model.width}, {model.num_layers} layers"

    def _record_pending(self, leave: int = 0) -> None:
        while len(self._pending) > leave:
            step, metrics = self._pending.popleft()
            metrics = jax.device_get(metrics)
            if metrics.stop:
                self._agreed_stop = signal.Signals(int(metrics.stop))
            nats, tokens = float(metrics.nats), float(metrics.tokens)
            self._tokens += round(tokens)
            self._recorded += 1
            loss = nats / tokens if tokens > 0 else float("nan")
            bits = bits_per_byte(nats, float(metrics.bytes))
            tokens_per_second, step_seconds = self._speed.mark(self._tokens)
            self._log.train(
                {
                    "step": step,
                    "tokens": self._tokens,
                    "loss": loss,
                    "bits_per_byte": bits,
                    "learning_rate": float(metrics.learning_rate),
                    "gradient_norm": float(metrics.gradient_norm),
                    "skipped": int(metrics.skipped),
                    "tokens_per_second": round(tokens_per_second, 1),
                }
            )
            left = None if step_seconds is None else step_seconds * (self.config.steps - step)
            self._reporter.step(StepReport(step, self._tokens, loss, bits, tokens_per_second, left))
            if not metrics.finite:
                self._not_finite(step, loss, metrics)

    def _not_finite(self, step: int, loss: float, metrics: StepMetrics) -> None:
        what = f"step {step}: loss {loss} or gradient norm {metrics.gradient_norm} is not finite"
        if metrics.skipped <= self.config.max_skipped_steps:
            allowed = self.config.max_skipped_steps
            self._reporter.message(f"{what}; the update is left out ({metrics.skipped} of at most {allowed})")
            return
        self._checkpoints.wait()
        last = self._checkpoints.latest_step
        good = "there is no checkpoint yet" if last is None else f"last good checkpoint: {self._checkpoints.path(last)}"
        raise NonFiniteLossError(f"{what}; {good}")

    def _evaluate_if_due(self) -> None:
        due = self._step % self.config.evaluation.every == 0 or self._step == self.config.steps
        if not due or self._step == 0 or self._log.has_validation(self._step):
            return
        self._record_pending()

        def batches():
            for batch in spread_batches(self._validation_data, self.config.evaluation.batches):
                if self._asked_to_stop:
                    raise _Interrupted
                yield batch

        self._reporter.phase("evaluating")
        with self._speed.pause():
            try:
                result = evaluate_with(
                    self._program.evaluation_step,
                    self._state.parameters,
                    self._state.other,
                    batches(),
                    self._program.mesh,
                )
            except _Interrupted:
                return  # the resumed run makes up for it
        self._evaluation = result
        self._log.validation(
            {
                "step": self._step,
                "tokens": self._tokens,
                "loss": result.loss,
                "bits_per_byte": result.bits_per_byte,
                "perplexity": result.perplexity,
                "validation_tokens": result.tokens,
                "validation_bytes": result.bytes,
            }
        )
        self._reporter.evaluation(self._step, result)

    def _save(self) -> None:
        self._record_pending()
        with self._speed.pause():
            # Before the checkpoint that counts on them.
            self._log.sync()
            data = self._batches.get_state() | {"validation": self._validation_data.fingerprint}
            self._checkpoints.save(self._state, Progress(self._step, self._tokens, data))
        self._saved_step = self._step


def train(
    config: TrainConfig,
    folder: str | os.PathLike,
    *,
    resume: bool = False,
    reporter: ProgressReporter | None = None,
) -> TrainResult:
    """Trains a language model in a run folder; see `Trainer` for the parts.

    Args:
        config: What to train, on what.
        folder: The run's folder.
        resume: Continue the run in it.
        reporter: Shows progress; by default on standard output.

    Raises:
        ValueError: If the config or the folder is wrong.
        NonFiniteLossError: If loss or gradient is not finite in more than `config.max_skipped_steps` steps.
    """
    folder = Path(folder)
    tokenizer = None
    if resume:
        tokenizer = load_run_tokenizer(folder, load_run_config(folder))
    else:
        check_new_folder(folder)
    trainer = Trainer(config, tokenizer=tokenizer)
    trainer.open(folder, resume=resume)
    return trainer.run(reporter)
