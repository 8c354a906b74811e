"""What a run computes: its mesh, its first state, and the steps of training and evaluation that are compiled for it."""

import concurrent.futures
import contextlib
import functools
import math
import pathlib
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh

from rnnlib.configuration import to_plain
from rnnlib.layers import preset_details
from rnnlib.models import DecoderLM, abstract_model
from rnnlib.training.adaptation import Adaptation, make_adaptation
from rnnlib.training.auto_remat import RematChoice, choose_remat
from rnnlib.training.batches import abstract_batch, check_batch_size, check_length
from rnnlib.training.config import TrainConfig
from rnnlib.training.distributed import broadcast_from_primary
from rnnlib.training.eager import evaluate
from rnnlib.training.evaluation import evaluation_view
from rnnlib.training.flops import PEAK, step_flops
from rnnlib.training.kernels_ahead import compile_kernels_ahead
from rnnlib.training.loss import LossSums
from rnnlib.training.memory import bytes_of_each_device, check_fits, device_bytes
from rnnlib.training.mesh import make_mesh, mesh_sizes, param_shardings, tp_size
from rnnlib.training.optimizer import learning_rate_schedule, make_optimizer
from rnnlib.training.packed import packed
from rnnlib.training.separate_step import SeparateStep, without_optimizer, zeros_like
from rnnlib.training.step import (
    StepGradients,
    StepMetrics,
    TrainState,
    abstract_state,
    init_train_state,
    make_evaluation_step,
    make_train_step,
    put_state,
    split_for_mesh,
    state_shardings,
)
from rnnlib.training.stored_steps import StoredStep, compiled_and_whether_new

COMPILING = "rnnlib-compiling"
"""How the names of threads begin that compile, read or store a step."""
# Of a config, what no program depends on but by shapes and by the tokenizer's bytes.
_NOT_COMPUTED = ("checkpoint", "data", "evaluation", "logging")
_PART_OF_MEMORY = 1 / 32
"""Of a GPU's memory, what gradients may take for the step to be made of two programs."""
_SECONDS_OF_STEP = 0.0019
"""Of the model's operations at the GPU's peak, what such a step has at least; the least that was timed is 1.98 ms."""


class CompiledSteps:
    """The programs of a run, and the state that they begin with; no data and no folder.

    Attributes:
        mesh: the devices that train; None for one device.
        template: shapes, dtypes and shardings of the state.
        adaptation: what of the model is trained; None for all of it.
        train_step: `(state, batch) -> (state, metrics)`, of `packed` states; compiled after `finish_compiling`.
        evaluation_step: the step of `evaluate_with`.
    """

    def __init__(
        self,
        config: TrainConfig,
        token_bytes: np.ndarray,
        initial: DecoderLM | None,
        programs: pathlib.Path | None = None,
    ):
        """Checks what a config computes, and compiles nothing. A stored step begins to be read.

        Args:
            config: what to train, its vocabulary size that of the tokenizer.
            token_bytes: `[vocabulary_size]`, bytes of each token.
            initial: the model to begin with, whose arrays the first step takes; None for fresh weights.
            programs: folder that keeps compiled training steps for later processes; None keeps none.

        Raises:
            ValueError: if a size in the config is wrong, or `initial` is another model; the message names it.
        """
        self.config = config
        self._token_bytes = token_bytes
        check_fits(config.model)
        self._optimizer = make_optimizer(config.optimizer, config.steps)
        # Shapes alone: a model that does not fit its own sizes fails here, and in seconds.
        self._making_model, parts = jax.make_jaxpr(lambda: nnx.split(self._new_model()), return_shape=True)()
        self._abstract_model = model = nnx.merge(*parts)
        self.mesh: Mesh | None = None
        self.adaptation = self._adaptation(model)
        self._making_state, self.template = self._traced_state_of(model)
        self._initial = initial
        if initial is not None:
            _check_same_arrays(model, initial)
        self.mesh = self._fitting_mesh()
        if tp_size(self.mesh) > 1:  # parameters then say how they are sharded
            self.adaptation = self._adaptation(model)
            self._making_state, self.template = self._traced_state_of(model)
        check_batch_size(config.data.batch_size, config.accumulation_steps, self.mesh)
        check_length(config.data.sequence_length, self.mesh)
        self._has_separate_update = config.model.remat != "auto" and self._has_small_update()
        self.train_step: Any = self._make_train_step(
            split_for_mesh(model, self.mesh)[0], separate_update=self._has_separate_update
        )
        evaluation_graphdef = split_for_mesh(evaluation_view(model), self.mesh)[0]
        self.evaluation_step = make_evaluation_step(
            evaluation_graphdef, token_bytes, self.mesh, deterministic=config.deterministic
        )
        self._remat: RematChoice | None = None  # what `remat="auto"` came to
        self._compiling: concurrent.futures.Future[Any] | None = None
        self._reading: concurrent.futures.Future[Any] | None = None
        self._lock = threading.Lock()  # one thread may compile while another opens the run
        self._stored: StoredStep | None = None
        # Several processes must agree on what they do, and with "auto" several steps are tried.
        if programs is not None and config.model.remat != "auto" and jax.process_count() == 1 and _is_own(config):
            self._stored = self._stored_step(programs)
            if self._stored.path.exists():
                self._compiling = self._reading = _in_thread(self._load)

    @property
    def reads_stored_step(self) -> bool:
        """Whether the training step is one that another process has stored; it is compiled if it cannot be read."""
        return self._reading is not None and self._compiling is self._reading

    @property
    def has_initial(self) -> bool:
        """Whether training begins with a model that was given."""
        return self._initial is not None

    def check_step(self) -> None:
        """Traces the training step, so that what does not fit together is an error now; one that is stored fits."""
        if self._compiling is None:
            with warnings.catch_warnings(record=True) as found:
                for program, arguments in self._programs():
                    jax.eval_shape(program, *arguments)
            for each in found:
                warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
            if found:  # a step that is not traced would not warn
                self._stored = None

    def _stored_step(self, folder: pathlib.Path) -> StoredStep:
        config = {name: value for name, value in to_plain(self.config).items() if name not in _NOT_COMPUTED}
        about = {"config": config, "token bytes": self._token_bytes.tolist()}
        plain, batch = abstract_state(self.template, self.mesh), self._abstract_batch()
        state = packed(plain)
        result = state, StepMetrics(*[0] * 7)  # in one process
        calls: list[tuple[tuple[Any, ...], Any]] = [((state, batch), result)]
        if self._has_separate_update:
            sums = LossSums(plain.updates, plain.updates, plain.updates)  # scalars, too
            found = packed(StepGradients(plain.parameters, sums, plain.other, None))
            calls = [((without_optimizer(state), batch, found.gradients), found), ((state, found), result)]
        return StoredStep(folder, about, (plain, batch), calls)

    def _load(self) -> Any:
        assert self._stored is not None
        devices = jax.local_devices()[:1] if self.mesh is None else list(self.mesh.devices.flat)
        programs = self._stored.load(devices)
        if programs is None or not self._has_separate_update:
            return programs and programs[0]
        gradients, update = programs
        return SeparateStep(gradients, update, last=[zeros_like(gradients.args_info[0][2])])

    def _programs(self) -> list[tuple[Any, tuple[Any, ...]]]:
        """The step's programs, with the arguments that they are lowered for; in the order of a `StoredStep`."""
        state, batch = self._abstract_arguments()
        if not isinstance(self.train_step, SeparateStep):
            return [(self.train_step, (state, batch))]
        read = without_optimizer(state), batch
        found = jax.eval_shape(self.train_step.found, *read)
        # XLA takes as long for either, lowering longer for the gradients.
        return [(self.train_step.gradients, (*read, found.gradients)), (self.train_step.update, (state, found))]

    def abstract_model(self) -> DecoderLM:
        """The model with shapes in place of arrays; the caller's own."""
        return nnx.merge(*nnx.split(self._abstract_model))  # building a deep one again would take seconds

    def remat_choice(self) -> RematChoice:
        """What `remat="auto"` chose; compiles the training step where that has not been done."""
        if self._remat is None:
            state, batch = self._abstract_arguments()
            self._remat = choose_remat(
                self.config.model,
                lambda model: (
                    self._make_train_step(split_for_mesh(abstract_model(model), self.mesh)[0])
                    .lower(state, batch)
                    .compile()
                ),
                bytes_of_each_device(),
                broadcast=broadcast_from_primary,
            )
            self.train_step = self._remat.step
        return self._remat

    def utilization(self, tokens_per_second: float) -> float:
        """Part of the devices' peak that the model's own operations take ("MFU"); NaN where the peak is not known."""
        if math.isnan(self._peak_flops):
            return math.nan
        devices = 1 if self.mesh is None else self.mesh.size
        return tokens_per_second * self._token_flops / (devices * self._peak_flops)

    @functools.cached_property
    def _peak_flops(self) -> float:
        """Operations a second of a device; NaN where that is not known."""
        kind, is_bfloat16 = jax.local_devices()[0].device_kind, self.config.model.compute_dtype == jnp.bfloat16
        return PEAK.get(kind, math.nan) if is_bfloat16 else math.nan

    @functools.cached_property
    def _token_flops(self) -> float:
        """Operations of the model for a token; NaN where its mixer is one of the user's own."""
        try:
            return step_flops(self._abstract_model, self.config.data.sequence_length).total
        except TypeError:
            return math.nan

    @property
    def device_description(self) -> str:
        """What trains, for people."""
        device = jax.local_devices()[0]
        if device.platform == "cpu":
            return "CPU" if jax.process_count() == 1 else f"CPUs of {jax.process_count()} processes"
        count, available = 1 if self.mesh is None else self.mesh.size, len(jax.devices())
        sizes = {} if self.mesh is None else self.mesh.shape
        axes = "".join(f", {axis} {sizes[axis]}" for axis in ("fsdp", "context", "tensor") if sizes.get(axis, 1) > 1)
        over = f" in {jax.process_count()} processes" if jax.process_count() > 1 else ""
        return f"{count}{f' of {available}' if count < available else ''} x {device.device_kind}{over}{axes}"

    def _has_small_update(self) -> bool:
        """Whether two programs in place of one cost a step little: the gradients', and the optimizer's update.

        A run of two programs starts sooner, since XLA compiles them side by side. Beside its work one GPU then holds
        all gradients. Where the step is one program, the gradients of matrices take the memory that activations have
        left.
        """
        if jax.default_backend() != "gpu" or self.mesh is not None or jax.process_count() > 1:
            return False
        data, parameters = self.config.data, jax.tree.leaves(self.template.parameters)
        size = sum(x.size * x.dtype.itemsize for x in parameters)
        # Not known of all devices and mixers, and then no number is larger.
        seconds = data.batch_size * data.sequence_length * self._token_flops / self._peak_flops
        return size <= _PART_OF_MEMORY * bytes_of_each_device() and seconds >= _SECONDS_OF_STEP

    def _make_train_step(self, graphdef: Any, *, separate_update: bool = False) -> Any:
        config = self.config
        schedule = learning_rate_schedule(config.optimizer, config.steps)
        return make_train_step(
            graphdef,
            self._optimizer,
            schedule,
            self._token_bytes,
            self.mesh,
            deterministic=config.deterministic,
            adaptation=self.adaptation,
            separate_update=separate_update,
        )

    def _fitting_mesh(self) -> Mesh | None:
        config, state = self.config, self.template
        kept: tuple[Any, ...] = (state.parameters, state.optimizer, state.parameters)  # gradients are as large
        if self.adaptation is not None:  # what the model computes with, and its gradients
            changed = jax.eval_shape(self.adaptation.changed_variables, state.parameters, state.frozen)
            kept += (state.frozen, changed, changed)
        sizes = mesh_sizes(
            config.mesh,
            jax.device_count(),
            # Several processes leave none of their devices out.
            devices=jax.device_count() if config.devices is None and jax.process_count() > 1 else config.devices,
            rows=config.data.batch_size // config.accumulation_steps,
            state_bytes=sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(kept)),
            device_bytes=device_bytes(),
        )
        return make_mesh(config=sizes)

    def _adaptation(self, model: DecoderLM) -> Adaptation | None:
        config, parameters = self.config, split_for_mesh(model, self.mesh)[1]
        return make_adaptation(config.freeze, config.lora, parameters, seed=config.seed, model=model)

    def _new_model(self) -> DecoderLM:
        return DecoderLM(self.config.model, rngs=nnx.Rngs(self.config.seed))

    def _state_of(self, variables: Any) -> TrainState:
        """The state that begins with a model's variables."""
        model = nnx.merge(nnx.graphdef(self._abstract_model), variables)
        return init_train_state(model, self._optimizer, self.mesh, self.adaptation)[1]

    def _traced_state_of(self, model: DecoderLM) -> tuple[ClosedJaxpr, TrainState]:
        """What makes the state of a model's variables, and the state's shapes."""
        return jax.make_jaxpr(self._state_of, return_shape=True)(nnx.state(model))

    def _new_state(self) -> TrainState:
        return self._state_of(nnx.state(self._new_model()))

    def first_state(self) -> TrainState:
        """The state before the first step, placed on the devices; it takes the arrays of `initial`."""
        if self._initial is not None:
            state = init_train_state(self._initial, self._optimizer, self.mesh, self.adaptation)[1]
            self._initial = None  # the first step takes its arrays
            return put_state(state, self.mesh)
        if self.mesh is None or self.mesh.shape["fsdp"] * tp_size(self.mesh) == 1:
            arrays = evaluate(self._making_state, *evaluate(self._making_model))
            return put_state(jax.tree.unflatten(jax.tree.structure(self.template), arrays), self.mesh)
        # Made in shards: no device ever holds the whole. A compiled start differs from the other in the last bits.
        return jax.jit(self._new_state, out_shardings=state_shardings(self.template, self.mesh))()

    def model_parameters(self, state: TrainState) -> Any:
        """All parameters of the model, of a training state."""
        return state.parameters if self.adaptation is None else self._joined(state.parameters, state.frozen)

    @functools.cached_property
    def _joined(self) -> Any:
        assert self.adaptation is not None
        found = jax.eval_shape(self.adaptation.parameters, self.template.parameters, self.template.frozen)
        return jax.jit(self.adaptation.parameters, out_shardings=param_shardings(found, self.mesh))

    def _abstract_parameters(self) -> Any:
        state = abstract_state(self.template, self.mesh)
        return jax.eval_shape(self.model_parameters, state) if self.adaptation is not None else state.parameters

    def _abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        data = self.config.data
        return abstract_batch(data.batch_size, data.sequence_length, self.mesh, self.config.accumulation_steps)

    def _abstract_arguments(self) -> tuple[TrainState, dict[str, jax.ShapeDtypeStruct]]:
        """What `train_step` is traced and lowered for."""
        return packed(abstract_state(self.template, self.mesh)), self._abstract_batch()

    def begin_compiling(self) -> None:
        """Lowers the training step and has it compiled in a thread of its own: XLA leaves Python to others meanwhile.

        With `remat="auto"` nothing is begun, since which step it is takes several to find out; nor in several
        processes, where compilers wait for each other.
        """
        with self._lock:
            if self._compiling is None and self.config.model.remat != "auto" and jax.process_count() == 1:
                made, programs, last = [], self._programs(), None
                for program, arguments in programs:
                    lowered = program.lower(*arguments)
                    if self.mesh is None and jax.default_backend() == "gpu":
                        compile_kernels_ahead(lowered, COMPILING)
                    made.append(_in_thread(functools.partial(compiled_and_whether_new, lowered)))
                if len(programs) > 1:
                    (_, (_, _, gradients)), _ = programs
                    last = _in_thread(functools.partial(zeros_like, gradients))
                self._compiling = concurrent.futures.Future()
                _in_thread(functools.partial(self._finish, self._compiling, made, last))

    def _finish(
        self,
        result: "concurrent.futures.Future[Any]",
        made: "Sequence[concurrent.futures.Future[tuple[Any, bool]]]",
        last: "concurrent.futures.Future[Any] | None",
    ) -> None:
        """Gives the compiled step to whoever waits for it, and stores it while training begins."""
        try:
            programs, are_new = zip(*(each.result() for each in made), strict=True)
            if last is None:
                (step,) = programs
            else:
                gradients, update = programs
                step = SeparateStep(gradients, update, last=[last.result()])
        except BaseException as error:
            result.set_exception(error)
            return
        result.set_result(step)
        if self._stored is not None and all(are_new):
            self._stored.save(programs)

    def finish_compiling(self) -> None:
        """Waits for what `begin_compiling` has begun; from then on `train_step` is the compiled one."""
        if self._compiling is not None and self._compiling.result() is None:  # what was stored could not be read
            self._compiling = None
            self.begin_compiling()
        if self._compiling is not None:
            step = self._compiling.result()
            self.train_step = functools.partial(self._first_call, step) if self.reads_stored_step else step

    def _first_call(self, step: Any, state: TrainState, batch: Any) -> Any:
        """Of a step that was stored: what ends the process here shall end one start alone."""
        assert self._stored is not None
        with contextlib.suppress(OSError):  # the disk has become full
            self._stored.begin_trial()
        result = jax.block_until_ready(step(state, batch))
        self._stored.end_trial()
        self.train_step = step
        return result

    def compile(self) -> None:
        """Compiles both steps now and not when each is first used; on several devices it does nothing."""
        if self.mesh is not None:
            return
        data = self.config.data
        self.begin_compiling()
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            choosing = pool.submit(self.remat_choice) if self.config.model.remat == "auto" else None
            evaluation = cast(Any, self.evaluation_step).lower(
                self._abstract_parameters(),
                self.template.other,
                abstract_batch(data.batch_size, data.sequence_length, None),
            )
            self.evaluation_step = evaluation.compile()
            if choosing is not None:
                choosing.result()
        self.finish_compiling()


def _in_thread[Result](function: Callable[[], Result]) -> "concurrent.futures.Future[Result]":
    """The function's result, computed in a thread that ends with it."""
    pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=COMPILING)
    future = pool.submit(function)
    pool.shutdown(wait=False)
    return future


def _is_own(config: TrainConfig) -> bool:
    """Whether all mixers are this library's: what makes a user's own is not known here."""
    return all(preset_details(name).module.startswith("rnnlib.") for name in set(config.model.layer_mixers))


def _check_same_arrays(expected: DecoderLM, found: DecoderLM) -> None:
    """ValueError, naming the first array, unless two models have parameters of the same names, shapes and dtypes."""

    def arrays(model: DecoderLM) -> dict[str, str]:
        state = nnx.to_flat_state(nnx.state(model, nnx.Param))
        return {".".join(map(str, path)): f"{leaf.dtype} {tuple(leaf.shape)}" for path, leaf in state}

    wanted, given = arrays(expected), arrays(found)
    for name in wanted | given:
        if wanted.get(name) != given.get(name):
            raise ValueError(
                f"initial: {name} is {given.get(name, 'absent')}, expected {wanted.get(name, 'no such array')} as in "
                "a model of the config"
            )
