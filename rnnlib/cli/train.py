"""`rnnlib train`: trains a language model in a run folder."""

import contextlib
import dataclasses
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro
import yaml

from rnnlib.cli.arguments import parse, take_option
from rnnlib.cli.compilation_cache import CompilationCache, keep_compiled_programs
from rnnlib.cli.errors import CommandError, input_errors
from rnnlib.cli.program import command_line
from rnnlib.cli.start import kept_objects, rare_collections
from rnnlib.data import DamagedTokensError
from rnnlib.hub.names import local_folder
from rnnlib.models import ModelConfig, model_preset
from rnnlib.models.variables import array_that_is_not_finite
from rnnlib.training import (
    CheckpointError,
    DistributedConfig,
    LoadedModel,
    NonFiniteLossError,
    TrainConfig,
    Trainer,
    broadcast_from_primary,
    check_new_folder,
    check_own_files,
    ending_together,
    folder_model_config,
    is_primary,
    is_run,
    join_processes,
    keep_freed_memory,
    learning_rate_schedule,
    load_config,
    load_model,
    load_run_chat,
    load_run_config,
    load_run_tokenizer,
    next_run_folder,
    split_step,
)
from rnnlib.training.config_file import read_yaml

# Flags cannot spell nested values: these are YAML.
_OVERRIDES = "--model.mixer-overrides"
_FEED_FORWARDS = "--model.feed-forwards"


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a command takes that goes by a training config."""

    train: Annotated[TrainConfig, tyro.conf.arg(name="")]
    """What to train, on what."""
    config: Path | None = None
    """YAML file of settings (every run folder has one); flags override it."""
    preset: str | None = None
    """Model size by name, e.g. 340m (a wrong one lists all), with the tokenizer's vocabulary; flags override it."""


@dataclasses.dataclass(frozen=True)
class TrainArguments(Settings):
    """Trains a language model; without any argument a small one, in minutes on two CPU cores.

    Settings come from --config FILE (or the run that --resume continues, or the defaults), then from --preset NAME,
    then from the flags. --model.mixer-overrides takes YAML, e.g. '{gated_deltanet: {output_gate: false}}',
    or '{kla: {keys: {ApplyToKey: {bound: 1.2}}}}' for another choice on an axis; --model.feed-forwards likewise,
    e.g. '[dense, {Experts: {num_experts: 16, width: 64}}]'.
    """

    run: Path | None = None
    """Folder to train in, which must not exist; left out, the next of runs/001, runs/002, ..."""
    resume: bool = False
    """Continue the run in the --run folder, with its settings; --steps and such may be given anew."""
    init: Path | None = None
    """Fine-tune: begin with the model of this folder, of a run (also FOLDER@STEP, FOLDER@best) or published, and with
    its tokenizer."""
    prompt: str = "def "
    """What the sample that is printed at the end continues; empty for no sample."""
    distributed: DistributedConfig = dataclasses.field(default_factory=DistributedConfig)
    """Which of several processes this is; SLURM, Open MPI and Kubernetes say so themselves."""
    compilation_cache: CompilationCache = None
    keep_step: bool = True
    """Keep the compiled training step in the folder of the compilation cache (1 GB of steps at most): the same command
    then neither traces nor lowers it."""


def _starting_point(argv: Sequence[str]) -> TrainConfig:
    """The settings that flags override: a config file's, those of the run to continue, or the defaults."""
    path = take_option(argv, "--config")[0]
    run = take_option(argv, "--run")[0]
    config = TrainConfig()
    if "--resume" in argv and run is not None:
        config = load_run_config(Path(run))
    if path is not None:
        config = load_config(TrainConfig, path, default=config)
    preset, init = take_option(argv, "--preset")[0], take_option(argv, "--init")[0]
    if init is not None:
        refused = [name for name in ("--resume", "--preset") if any(a.split("=")[0] == name for a in argv)]
        if refused:
            raise CommandError(f"--init begins with the model of {init}, expected no {refused[0]} beside it")
        return _like(config, local_folder(init), has_tokenizer=take_option(argv, "--data.tokenizer")[0] is not None)
    if preset is None:
        return config
    # The papers' vocabularies would be tens of thousands of rows that bytes never use.
    return dataclasses.replace(config, model=model_preset(preset, vocabulary_size=config.model.vocabulary_size))


def _like(config: TrainConfig, folder: Path, *, has_tokenizer: bool) -> TrainConfig:
    """Settings whose model and tokenizer are a folder's."""
    model = _trained_config(folder)
    folder = split_step(folder)[0]
    tokenizer = str(folder / "tokenizer.json")
    if not Path(tokenizer).is_file():
        if not has_tokenizer and not is_run(folder):
            raise CommandError(f"--init {folder}: it has no tokenizer.json, expected one, or --data.tokenizer")
        tokenizer = "byte"
    return dataclasses.replace(config, model=model, data=dataclasses.replace(config.data, tokenizer=tokenizer))


def _trained_config(folder: Path) -> ModelConfig:
    """The configuration of a folder's model; a published one's parameters are trained in float32."""
    config = folder_model_config(folder)
    return config if is_run(folder) else config.replace(param_dtype="float32")


def _initial(arguments: TrainArguments) -> LoadedModel | None:
    """The model to begin with.

    Raises:
        CommandError: A flag asks for another model.
    """
    if arguments.init is None:
        return None
    asked = arguments.train.model
    computed = {name: getattr(asked, name) for name in ("dtype", "matmul_dtype", "remat", "remat_keeps", "scan_layers")}
    wanted = dataclasses.replace(_trained_config(arguments.init), **computed)
    for entry in dataclasses.fields(asked):
        if getattr(wanted, entry.name) != getattr(asked, entry.name):
            flag = f"--model.{entry.name.replace('_', '-')}"
            raise CommandError(f"{flag} is not that of --init {arguments.init}, expected it to be left out")
    named = arguments.train.data.tokenizer
    is_own = named == str(split_step(arguments.init)[0] / "tokenizer.json") or (
        named == "byte" and is_run(arguments.init)
    )
    loaded = load_model(arguments.init, param_dtype="float32", tokenizer=None if is_own else named)
    if (path := array_that_is_not_finite(loaded.model)) is not None:
        raise CommandError(f"--init {arguments.init}: {path} is not finite, expected weights that can be trained")
    return loaded


def _yaml(name: str, text: str) -> Any:
    try:
        return read_yaml(text)
    except yaml.YAMLError as error:
        raise CommandError(f"{name} is not YAML: {error}") from error


def _mixer_overrides(text: str) -> Any:
    overrides = _yaml(_OVERRIDES, text)
    if not isinstance(overrides, dict):
        raise CommandError(f"{_OVERRIDES}: expected a mapping such as '{{kda: {{output_gate: false}}}}', got {text!r}")
    return overrides


def _with_remat_value(argv: Sequence[str]) -> list[str]:
    """Arguments in which `--model.remat` and `--model.no-remat`, which may stand alone, have their value."""
    values = ["--model.remat", "False"]
    rest = [part for argument in argv for part in (values if argument == "--model.no-remat" else [argument])]
    for i in reversed(range(len(rest))):
        if rest[i] == "--model.remat" and (i + 1 == len(rest) or rest[i + 1].startswith("-")):
            rest.insert(i + 1, "True")
    return rest


def parse_settings[Arguments: Settings](cls: type[Arguments], argv: Sequence[str], *, command: str) -> Arguments:
    """Arguments of a command whose field `train` is a `TrainConfig`, from --config, --preset and flags.

    Raises:
        CommandError: With what is wrong, in one line.
    """
    argv = _with_remat_value(argv)
    overrides, argv = take_option(argv, _OVERRIDES)
    feed_forwards, argv = take_option(argv, _FEED_FORWARDS)
    if take_option(argv, "--run")[0] == "":
        raise CommandError("--run is empty, expected the name of a folder")
    with input_errors():
        start = _starting_point([] if {"-h", "--help"} & set(argv) else argv)
        held = start.model.mixer_overrides if overrides is None else _mixer_overrides(overrides)
        kinds = start.model.feed_forwards if feed_forwards is None else _yaml(_FEED_FORWARDS, feed_forwards)
        # What is nested is taken out before the flags are read and put back after.
        model = dataclasses.replace(start.model, mixer_overrides=(), feed_forwards=("dense",))
        plain = dataclasses.replace(start, model=model)
        arguments = parse(cls, argv, command=command, default=cls(train=plain))
        model = dataclasses.replace(arguments.train.model, mixer_overrides=held, feed_forwards=kinds)
        # A preset's overrides may be for a mixer that a flag has replaced; those of the flag itself are meant.
        unused = set() if overrides is None else set(held) - {"*"} - set(model.layer_mixers)
        if unused:
            raise CommandError(
                f"{_OVERRIDES} is for {', '.join(sorted(unused))}, expected the model's mixers "
                f"({', '.join(dict.fromkeys(model.layer_mixers))}) or '*'; --model.mixers chooses them"
            )
        return dataclasses.replace(arguments, train=dataclasses.replace(arguments.train, model=model))


def run(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code."""
    arguments = parse_settings(TrainArguments, argv, command="train")
    if arguments.init is not None:
        with input_errors():
            arguments = dataclasses.replace(arguments, init=local_folder(arguments.init))
    if arguments.resume and arguments.run is None:
        raise CommandError("--resume needs --run FOLDER, the run to continue")
    keep_freed_memory()
    programs = keep_compiled_programs(arguments.compilation_cache)
    with input_errors():
        join_processes(arguments.distributed)
    with ending_together(_report):
        return _train(arguments, programs if arguments.keep_step else None)


def _report(error: BaseException) -> int:
    """Says in one line what ended this one of several processes; an error of the library keeps its traceback."""
    if not isinstance(error, CommandError | KeyboardInterrupt | SystemExit):
        traceback.print_exception(error)
    what = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error) or type(error).__name__
    who = f"process {jax.process_index()} of {jax.process_count()}"
    print(f"rnnlib train: {who}: error: {what}", file=sys.stderr, flush=True)
    return error.exit_code if isinstance(error, CommandError) else 130 if isinstance(error, KeyboardInterrupt) else 1


def _say(text: str) -> None:
    """Prints a line, in one of the processes."""
    if is_primary():
        print(text, flush=True)


def _next_folder() -> Path:
    return Path(broadcast_from_primary(lambda: str(next_run_folder(Path("runs")))))


def _train(arguments: TrainArguments, programs: Path | None) -> int:
    folder = arguments.run if arguments.run is not None else _next_folder()
    with input_errors(), rare_collections():
        tokenizer, chat, saved = None, None, arguments.train
        lora = arguments.train.lora
        if lora.rank is not None and arguments.init is None and not arguments.resume:
            raise CommandError(f"--lora.rank {lora.rank} needs --init FOLDER, the model to adapt")
        if lora.rank is not None and lora.base is None and arguments.init is not None:
            lora = dataclasses.replace(lora, base=str(arguments.init))
            arguments = dataclasses.replace(arguments, train=dataclasses.replace(arguments.train, lora=lora))
            saved = arguments.train
        initial = _initial(arguments)
        if initial is not None:
            tokenizer = initial.tokenizer
        if arguments.resume:
            check_own_files(folder)
            saved = load_run_config(folder)
            tokenizer = load_run_tokenizer(folder, saved)
            chat = load_run_chat(folder, saved, tokenizer)
        else:
            broadcast_from_primary(lambda: check_new_folder(folder))
        _say(f"reading data: {_data_description(arguments.train)}")
        with _lasting_interrupts(), _moved_text(arguments.resume):
            trainer = Trainer(
                arguments.train,
                tokenizer=tokenizer,
                read_data=False,
                initial=None if initial is None else initial.model,
                origin=None if arguments.init is None else split_step(arguments.init)[0],
                chat=chat,
                programs=programs,
            )
            if jax.default_backend() == "gpu":  # on CPUs an error of the data would wait for XLA, which takes longer
                trainer.begin_compiling()
            trainer.read_data()
        if arguments.run is None:
            folder = _next_folder()  # again: a run that was started beside this one may have taken it
        trainer.open(folder, resume=arguments.resume)
    config = trainer.config
    _say(
        f"run {folder}: {' + '.join(dict.fromkeys(config.model.layer_mixers))}, {trainer.size_description}, "
        f"{config.data.batch_size} x {config.data.sequence_length} tokens a step, on {trainer.device_description}"
    )
    if arguments.resume:
        _say(f"continuing after step {trainer.start_step}")
        if change := _learning_rate_from_here(saved, config, trainer.start_step):
            _say(change)
    if trainer.reads_stored_step:
        _say("the training step was compiled by an earlier run (--no-keep-step makes it anew)")
    else:
        _say("compiling; the first step takes a while")
    try:
        with kept_objects():
            result = trainer.run()
    except NonFiniteLossError as error:
        raise CommandError(str(error), exit_code=1) from error
    except (CheckpointError, DamagedTokensError, OSError) as error:
        hint = f"; continue with {command_line('train', '--run', folder, '--resume')}" if folder.exists() else ""
        raise CommandError(f"stopped at step {trainer.step}: {error}{hint}", exit_code=1) from error
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        tokens = f"{config.data.batch_size} x {config.data.sequence_length} tokens a step"
        raise CommandError(
            f"{trainer.device_description}: out of memory with {tokens}; raise --accumulation-steps, "
            "lower --data.batch-size or set --model.remat auto (JAX takes three quarters of a GPU: "
            "XLA_PYTHON_CLIENT_MEM_FRACTION=0.93 gives it more)"
        ) from error
    if result.stopped_by is not None:
        with contextlib.suppress(OSError):  # what has stopped it may be that the terminal is gone
            if jax.process_count() > 1:  # each process says so itself: any of them may be the one that is looked at
                print(f"process {jax.process_index()} of {jax.process_count()}: ", end="")
            print(f"{result.stopped_by.name}: saved at step {result.step}; continue with")
            print(f"  {command_line('train', '--run', folder, '--resume')}", flush=True)
        return 128 + result.stopped_by
    if not is_primary():
        return 0
    print(f"trained on {result.tokens:,} tokens in {result.seconds:.0f} s; everything is in {folder}/")
    if config.logging.picture:
        print(f"losses drawn in {folder / 'loss.png'}")
    if config.logging.tensorboard:
        print(f"curves: {command_line('--logdir', folder.parent, program='tensorboard')}")
    if arguments.prompt and jax.process_count() == 1:
        from rnnlib.cli.generate import print_continuation

        print("sample:", flush=True)
        tokenizer = trainer.tokenizer
        stop_tokens = [tokenizer.end_of_document]
        print_continuation(trainer.trained_model(), tokenizer, arguments.prompt, stop_tokens=stop_tokens)
    print(f"more of them: {command_line('generate', folder, '--prompt', arguments.prompt or 'TEXT')}")
    return 0


def _learning_rate_from_here(saved: TrainConfig, config: TrainConfig, step: int) -> str | None:
    """What the learning rate does where a run goes on after a step with other settings; None if nothing new."""
    old, new = (float(learning_rate_schedule(each.optimizer, each.steps)(step)) for each in (saved, config))
    length = config.optimizer.schedule_steps or config.steps
    before = saved.optimizer.schedule_steps or saved.steps
    if abs(new - old) > 1e-6 * old:
        keep = f"; --optimizer.schedule-steps {before} keeps the schedule as it was" if length != before else ""
        made = f"the schedule is made for {length} steps now, {before} before: " if length != before else ""
        return f"{made}the learning rate goes from {old:.3g} to {new:.3g} here{keep}"
    if config.steps != saved.steps and config.steps > length:
        end = float(learning_rate_schedule(config.optimizer, config.steps)(length))
        return f"the schedule is made for {length} steps: the learning rate stays at {end:.3g} from there on"
    return None


@contextlib.contextmanager
def _lasting_interrupts() -> Iterator[None]:
    """A Ctrl-C that a callback swallows, as jax's at garbage collections do, interrupts at the end at the latest."""
    received = []

    def receive(number: int, frame: Any) -> None:
        received.append(number)
        raise KeyboardInterrupt

    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        yield
        return
    previous = signal.signal(signal.SIGINT, receive)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if received:
        raise KeyboardInterrupt


@contextlib.contextmanager
def _moved_text(resume: bool) -> Iterator[None]:
    """Says how a run goes on whose text files are elsewhere by now."""
    try:
        yield
    except ValueError as error:
        if resume and str(error).startswith("paths: "):
            raise ValueError(f"{error}; if the text was moved, say where to with --data.paths") from error
        raise


def _data_description(config: TrainConfig) -> str:
    data = config.data
    source = "the installed Python sources" if data.kind == "python" else " ".join(data.paths)
    return f"{source}, {'bytes' if data.tokenizer == 'byte' else data.tokenizer} as tokens"
