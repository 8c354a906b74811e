"""The training loop: compiled steps, and what hooks do beside them; a clean stop at any moment."""

import collections
import contextlib
import dataclasses
import io
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from flax import nnx

from pallas_kernels.common.platform import platform
from rnnlib.configuration import from_plain, to_plain
from rnnlib.data import Tokenizer, load_tokenizer
from rnnlib.data.chat import ChatEncoder, chat_encoder
from rnnlib.models import DecoderLM
from rnnlib.models.variables import count_values, fuse_columns
from rnnlib.training.batches import put_batch
from rnnlib.training.checkpoint import Checkpoints, Progress
from rnnlib.training.compiled_steps import CompiledSteps
from rnnlib.training.config import TrainConfig
from rnnlib.training.config_file import save_config
from rnnlib.training.distributed import await_shared, broadcast_from_primary, is_primary
from rnnlib.training.evaluation import Evaluation, evaluate_with, spread_batches
from rnnlib.training.hooks import Hook, Periodically, configured_hooks
from rnnlib.training.loggers import CsvLogger, check_loggers, open_loggers
from rnnlib.training.mesh import process_rows, replicated
from rnnlib.training.packed import packed, unpacked
from rnnlib.training.progress import ProgressReporter
from rnnlib.training.reports import EvaluationReport, Speed, StepReport, TrainResult
from rnnlib.training.resume import checkpointed, starting_point
from rnnlib.training.run import (
    CHECKPOINTS,
    CONFIG_FILE,
    RunError,
    check_checkpoints_not_lost,
    check_continues,
    check_new_folder,
    check_own_files,
    create_run,
    load_run_chat,
    load_run_config,
    load_run_tokenizer,
    lock_run,
)
from rnnlib.training.signals import StopSignals
from rnnlib.training.step import StepMetrics, TrainState, split_model

if TYPE_CHECKING:
    from rnnlib.data import BatchDataset


class _Interrupted(Exception):
    """A signal asked to stop in the middle of an evaluation."""


class Trainer:
    """A training run in three parts: all that can be wrong with a config, then the folder, then the steps.

    Making a `Trainer` reads the data and traces the training step, so that a wrong path, size or name is an error
    before there is a folder; `open` makes or restores the run folder; `run` trains. With `read_data=False` the data
    is read by `read_data`, which another thread may do while `compile` compiles, or else by `open`.

    What happens beside the steps is done by hooks (`rnnlib.training.hooks`): those that the config names, and those of
    `add_hook`.

    Attributes:
        config: the config, its vocabulary size made that of the tokenizer.
        tokenizer: the tokenizer.
        folder: the run's folder, once open.
        start_step: the step that training goes on from, once open.
        saved_step: the step of the last checkpoint, 0 before there is one.
        tokens: tokens trained on, of the steps that were reported.
        evaluated_steps: steps after which the model was evaluated.
        checkpoints: the run's checkpoints, once open.
        reporter: shows progress, in `run`.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        tokenizer: Tokenizer | None = None,
        read_data: bool = True,
        initial: DecoderLM | None = None,
        origin: Path | None = None,
        chat: ChatEncoder | None = None,
        programs: Path | None = None,
    ):
        """Prepares a run and checks it; writes nothing.

        Args:
            config: what to train, on what.
            tokenizer: in place of the one that `config.data.tokenizer` names.
            read_data: read the data now.
            initial: the model to begin a new run with, of `config.model` but for what computes it; its arrays are the
                first step's to reuse. None for fresh weights.
            origin: the folder that `initial` is from; what says how to use its tokenizer is copied into the run's.
            chat: encodes conversations, in place of the chat template that `config.data` or `origin` names.
            programs: folder that keeps compiled training steps for later processes, which then need not trace them;
                None keeps none. A step is known by the files of this library and of imported modules, by packages,
                settings and devices; not by what a process changes in modules while it runs. None is kept of mixers
                of the user's own.

        Raises:
            ValueError: if a path, size or name in the config is wrong, or `initial` is another model; the message
                names it.
            MissingExtraError: A logger's package is not installed.
        """
        # As the run folder will hold it: lists are tuples, NumPy's numbers Python's.
        config = from_plain(TrainConfig, to_plain(config))
        check_loggers(config)
        self.tokenizer = tokenizer if tokenizer is not None else load_tokenizer(config.data.tokenizer)
        vocabulary = max(config.model.vocabulary_size, self.tokenizer.vocabulary_size)
        model_config = dataclasses.replace(config.model, vocabulary_size=vocabulary)
        self.config = config = dataclasses.replace(config, model=model_config)
        self._steps = CompiledSteps(config, self.tokenizer.token_bytes, initial, programs)
        if config.data.format == "chat":
            chat = chat_encoder(config.data, self.tokenizer, origin) if chat is None else chat
            # A template may be anywhere; what else says how to use the tokenizer is beside it.
            origin = Path(config.data.tokenizer).parent if origin is None else origin
        self._chat = chat
        self._origin = origin
        self._data: tuple[BatchDataset, BatchDataset] | None = None
        self._resources: contextlib.ExitStack | None = None
        self._added_hooks: list[Hook] = []
        if read_data:
            self.read_data()
        self._steps.check_step()

    def add_hook(self, hook: Hook | Callable[["Trainer"], None], *, every: int | None = None) -> None:
        """Adds a hook, to be called after those of the config and those added before.

            trainer.add_hook(lambda trainer: print(trainer.step, trainer.tokens), every=100)

        Args:
            hook: A `Hook`, or a function that is called with this trainer.
            every: steps between two calls of the function, or of the hook's `on_step`; one more follows the last step.
                None for each step, or the hook's own number.

        Raises:
            ValueError: `every` is not at least 1.
        """
        if every is not None and every < 1:
            raise ValueError(f"Trainer.add_hook: every is {every}, expected at least 1")
        if not isinstance(hook, Hook):
            hook = Periodically(hook, 1 if every is None else every)
        elif every is not None:
            hook.every = every
        self._added_hooks.append(hook)

    def read_data(self) -> "tuple[BatchDataset, BatchDataset]":
        """Training and validation data, read when first asked for.

        Raises:
            ValueError: if a path or name in the config is wrong, or a split is empty.
        """
        from rnnlib.data import make_dataset  # grain is imported here, on a GPU while XLA compiles

        if self._data is None:
            data, parts = self.config.data, self.config.accumulation_steps
            rows = process_rows(self._steps.mesh, data.batch_size, parts)
            encoders: dict[str, Any] = {"tokenizer": self.tokenizer, "chat": self._chat}
            train = make_dataset(data, split="train", own_rows=rows, **encoders)
            rows = process_rows(self._steps.mesh, data.batch_size)
            self._data = train, make_dataset(data, split="validation", own_rows=rows, **encoders)
        return self._data

    @property
    def step(self) -> int:
        """Steps done.

        Raises:
            RuntimeError: if no run was opened.
        """
        self._check_opened("step")
        return self._step

    @property
    def _state(self) -> TrainState:
        return unpacked(self._packed)

    @_state.setter
    def _state(self, state: TrainState) -> None:
        self._packed = packed(state)

    def _check_opened(self, asked: str) -> None:
        if not hasattr(self, "_packed"):
            raise RuntimeError(f"Trainer.{asked}: no run was opened, expected a call of Trainer.open before")

    @property
    def num_parameters(self) -> int:
        """Numbers in the model's parameters."""
        return count_values(split_model(self.abstract_model())[1])

    @property
    def num_trained(self) -> int:
        """Numbers that are trained: all of the model's, those that are not frozen, or those of its adapters."""
        return count_values(self._steps.template.parameters)

    @property
    def size_description(self) -> str:
        """How many parameters there are and are trained, for people."""
        rest = "" if self._steps.adaptation is None else f", {self.num_trained:,} of them trained"
        if self.config.lora.rank is not None:
            rest = f", trained by {self.num_trained:,} of adapters"
        return f"{self.num_parameters:,} parameters{rest}"

    @property
    def reads_stored_step(self) -> bool:
        """Whether the training step is one that an earlier process has stored in the folder `programs`."""
        return self._steps.reads_stored_step

    @property
    def title(self) -> str:
        """The model in a line."""
        model = self.config.model
        mixers = " + ".join(dict.fromkeys(model.layer_mixers))
        return f"{mixers}, {self.size_description}, width {model.width}, {model.num_layers} layers"

    @property
    def device_description(self) -> str:
        """What trains, for people."""
        return self._steps.device_description

    @property
    def stop_signal(self) -> signal.Signals | None:
        """The signal that asked this run to stop; the same in all of its processes."""
        return self._signals.received if jax.process_count() == 1 else self._agreed_stop

    def is_due(self, every: int) -> bool:
        """Whether what is done after every so many steps, and after the last one, is due now."""
        return self._step % every == 0 or self._step == self.config.steps

    def begin_compiling(self) -> None:
        """Has the training step compiled in other threads, beside what follows; `open` begins it where nothing has."""
        self._steps.begin_compiling()

    def compile(self) -> None:
        """Compiles both steps now and not when each is first used; on several devices it does nothing."""
        self._steps.compile()

    def open(self, folder: str | os.PathLike, *, resume: bool = False) -> None:
        """Makes the run folder, or restores what is in it; nothing is changed in a folder that does not fit.

        Args:
            folder: the run's folder.
            resume: continue the run in it, from its latest checkpoint (or from the start, if it has none yet).

        Raises:
            ValueError: if the folder exists (new run), is no run, is one of another model or other data, has lost its
                checkpoints or has links that lead out of it (resume).
        """
        folder = Path(folder)
        if self.config.lora.rank is not None and not resume and not self._steps.has_initial:
            raise RunError(
                f"lora.rank is {self.config.lora.rank}, expected a model to adapt: --init, or the Trainer's initial"
            )
        train_data, self._validation_data = self.read_data()
        if not resume:
            template = None if self._chat is None else self._chat.template
            broadcast_from_primary(
                lambda: create_run(folder, self.config, self.tokenizer, origin=self._origin, template=template)
            )
            await_shared(folder / CONFIG_FILE)
        saved = load_run_config(folder)
        check_continues(self.config, saved)
        self.folder = folder
        self._num_reported = 0
        with contextlib.ExitStack() as stack:
            if not resume:
                stack.push(self._remove_if_nothing_was_done)
            self._lock(folder, saved, stack, resume=resume)
            kept = self.config.checkpoint
            self.checkpoints = stack.enter_context(
                Checkpoints(folder / CHECKPOINTS, keep=kept.keep, keep_every=kept.keep_every, keep_best=kept.keep_best)
            )
            self._batches = iter(train_data)
            stack.callback(self._batches.close)
            self._steps.begin_compiling()  # while the first state is made or read
            self._state, self._step, self.tokens = starting_point(
                folder,
                self.config,
                self._steps,
                self.checkpoints,
                self._batches,
                resume=resume,
                validation_fingerprint=self._validation_data.fingerprint,
            )
            if is_primary() and saved != self.config:
                save_config(self.config, folder / CONFIG_FILE)
            self._hooks = self._open_hooks(stack)
            self._resources = stack.pop_all()
        self.start_step = self.saved_step = self._step

    def _lock(self, folder: Path, saved: TrainConfig, stack: contextlib.ExitStack, *, resume: bool) -> None:
        def lock() -> None:  # one process holds the run for all
            if resume:
                check_own_files(folder)
            stack.enter_context(lock_run(folder))
            if resume:
                check_checkpoints_not_lost(folder, saved)

        broadcast_from_primary(lock)

    def _open_hooks(self, stack: contextlib.ExitStack) -> list[Hook]:
        """The run's hooks, in the order in which they are called."""
        config = self.config
        loggers: list[Hook] = []
        evaluated: list[int] = []
        if is_primary():
            csv = CsvLogger(self.folder, last_step=self._step)
            stack.callback(csv.close)
            evaluated = csv.evaluated_steps
            # The reporter that shows messages comes with `run`, as all that is logged does.
            others = open_loggers(
                config, self.folder, last_step=self._step, tell=lambda text: self.reporter.message(text)
            )
            loggers = [csv, *others]
        self.evaluated_steps = set(broadcast_from_primary(lambda: evaluated))
        hooks = [*loggers, *configured_hooks(config), *self._added_hooks]
        for hook in hooks:
            stack.callback(hook.close)
        return hooks

    def _remove_if_nothing_was_done(self, kind: Any, error: Any, traceback: Any) -> None:
        # An error before the first step is done (the batch does not fit in memory): no half-made run is left.
        if kind is not None and self._num_reported == 0 and is_primary():
            shutil.rmtree(self.folder, ignore_errors=True)

    def run(self, reporter: ProgressReporter | None = None) -> TrainResult:
        """Trains to the last step, or until a signal asks to stop; then everything is saved. Closes the run.

        Args:
            reporter: shows progress; by default on standard output.

        Raises:
            RuntimeError: if no run is open.
            NonFiniteLossError: if loss or gradient is not finite in more than `max_skipped_steps` steps.
            CheckpointError, OSError: if nothing more can be written, or the data cannot be read on.
        """
        if self._resources is None:
            raise RuntimeError("Trainer.run: no run is open, expected a call of Trainer.open before each of run")
        resources, self._resources = self._resources, None
        config = self.config
        if reporter is None:
            stream = None if is_primary() else io.StringIO()
            reporter = ProgressReporter(config.steps, plain_seconds=config.logging.plain_seconds, stream=stream)
        start = time.perf_counter()
        self._evaluated: EvaluationReport | None = None
        self._agreed_stop: signal.Signals | None = None
        self._unreported: collections.deque[tuple[int, StepMetrics]] = collections.deque()
        self._speed = Speed()
        # One step behind, so that the device always has the next step to go on with. A CPU's cores do what the
        # host does, too: two steps begun at once take longer there than one after the other.
        behind = 0 if platform() == "cpu" else 1
        with resources, StopSignals() as self._signals, reporter:
            self.reporter = reporter
            if config.model.remat == "auto":
                reporter.message(self._steps.remat_choice().line)
            self._steps.finish_compiling()
            for hook in self._hooks:
                hook.on_start(self)
            while self._step < config.steps and self.stop_signal is None:
                batch = self._next_batch()
                if batch is None:
                    break
                self._packed, metrics = self._steps.train_step(self._packed, batch)
                self._step += 1
                self._unreported.append((self._step, metrics))
                self.report_steps(leave=behind)
                for hook in self._hooks:
                    if self.is_due(hook.every):
                        hook.on_step(self)
            self.report_steps()
            for hook in self._hooks:
                hook.on_end(self)
        is_finished = self._step == config.steps and self._step in self.evaluated_steps
        return TrainResult(
            folder=self.folder,
            step=self._step,
            tokens=self.tokens,
            evaluation=None if self._evaluated is None else self._evaluated.evaluation,
            stopped_by=None if is_finished else self.stop_signal,
            seconds=time.perf_counter() - start,
        )

    def _next_batch(self) -> dict[str, jax.Array] | None:
        """The next batch on the devices; None where a signal has ended the data."""
        try:
            batch = next(self._batches)
        except Exception:
            # Ctrl-C reaches the data's worker processes as well.
            if self.stop_signal is not None:
                return None
            raise
        # Of several processes all stop after the same step: the first whose metrics say so.
        stop = int(self._signals.received or 0) if jax.process_count() > 1 else None
        return put_batch(batch, self._steps.mesh, self.config.accumulation_steps, stop=stop)

    def report_steps(self, leave: int = 0) -> None:
        """Waits for the metrics of the steps that were begun, and hands them to the hooks.

        Args:
            leave: how many of the last steps are left for later.
        """
        while len(self._unreported) > leave:
            step, metrics = self._unreported.popleft()
            report = self._report(step, jax.device_get(metrics))
            for hook in self._hooks:
                hook.on_report(self, report)

    def _report(self, step: int, metrics: StepMetrics) -> StepReport:
        if metrics.stop:
            self._agreed_stop = signal.Signals(int(metrics.stop))
        self.tokens += round(float(metrics.tokens))
        self._num_reported += 1
        tokens_per_second, step_seconds = self._speed.mark(self.tokens)
        return StepReport.of(
            metrics,
            step=step,
            tokens=self.tokens,
            tokens_per_second=tokens_per_second,
            seconds_left=None if step_seconds is None else step_seconds * (self.config.steps - step),
            utilization=self._steps.utilization(tokens_per_second),
        )

    def evaluate(self) -> Evaluation | None:
        """Evaluates the model as it is and tells the hooks; None where a signal interrupts it. For hooks."""
        self.report_steps()

        def batches() -> Iterator[Any]:
            for batch in spread_batches(self._validation_data, self.config.evaluation.batches):
                if self.stop_signal is not None:
                    raise _Interrupted
                yield batch

        self.reporter.phase("evaluating")
        parameters, other = self._steps.model_parameters(self._state), self._state.other
        with self._speed.pause():
            try:
                found = evaluate_with(self._steps.evaluation_step, parameters, other, batches(), self._steps.mesh)
            except _Interrupted:
                return None  # the resumed run makes up for it
        self._evaluated = EvaluationReport(self._step, self.tokens, found)
        self.evaluated_steps.add(self._step)
        for hook in self._hooks:
            hook.on_evaluation(self, self._evaluated)
        return found

    def save(self) -> None:
        """Begins to write a checkpoint of the run as it is; steps may go on meanwhile. For hooks."""
        self.report_steps()
        with self._speed.pause():
            for hook in self._hooks:
                hook.on_save(self)
            data = self._batches.get_state() | {"validation": self._validation_data.fingerprint}
            progress = Progress(self._step, self.tokens, data)
            evaluated = self._evaluated
            loss = None if evaluated is None or evaluated.step != self._step else evaluated.loss
            self.checkpoints.save(checkpointed(self._steps, self._state), progress, validation_loss=loss)
        self.saved_step = self._step

    def close(self) -> None:
        """Closes an open run without training it; what is saved stays."""
        resources, self._resources = self._resources, None
        if resources is not None:
            resources.close()

    def abstract_model(self) -> DecoderLM:
        """The model with shapes in place of arrays."""
        return self._steps.abstract_model()

    def trained_model(self) -> DecoderLM:
        """The model as trained so far, whole on one device; all processes of a run call it.

        Raises:
            RuntimeError: if no run was opened.
        """
        self._check_opened("trained_model")
        graphdef, parameters, _ = split_model(self.abstract_model())
        state = self._steps.model_parameters(self._state), self._state.other
        if jax.process_count() > 1:
            state = jax.jit(lambda x: x, out_shardings=replicated(self._steps.mesh))(state)
            state = jax.tree.map(lambda x: x.addressable_data(0), state)
        state = jax.device_put(state, jax.local_devices()[0])
        return nnx.merge(graphdef, fuse_columns(state[0], parameters), state[1])


def train(
    config: TrainConfig,
    folder: str | os.PathLike,
    *,
    resume: bool = False,
    reporter: ProgressReporter | None = None,
) -> TrainResult:
    """Trains a language model in a run folder; see `Trainer` for the parts.

    Args:
        config: what to train, on what.
        folder: the run's folder.
        resume: continue the run in it.
        reporter: shows progress; by default on standard output.

    Raises:
        ValueError: if the config or the folder is wrong.
        NonFiniteLossError: if loss or gradient is not finite in more than `config.max_skipped_steps` steps.
    """
    folder = Path(folder)
    tokenizer = chat = None
    if resume:
        saved = load_run_config(folder)
        tokenizer = load_run_tokenizer(folder, saved)
        chat = load_run_chat(folder, saved, tokenizer)
    else:
        check_new_folder(folder)
    trainer = Trainer(config, tokenizer=tokenizer, chat=chat)
    trainer.open(folder, resume=resume)
    return trainer.run(reporter)
