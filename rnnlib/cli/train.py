"""`rnnlib train`: trains a language model in a run folder."""

import contextlib
import dataclasses
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro
import yaml

from rnnlib.cli.arguments import parse, take_option
from rnnlib.cli.errors import CommandError, input_errors
from rnnlib.models import model_preset
from rnnlib.training import (
    CheckpointError,
    NonFiniteLossError,
    TrainConfig,
    Trainer,
    check_new_folder,
    load_config,
    load_run_config,
    load_run_tokenizer,
    next_run_folder,
)
from rnnlib.training.config_file import read_yaml

_OVERRIDES = "--model.mixer-overrides"


@dataclasses.dataclass(frozen=True)
class TrainArguments:
    """Trains a language model; without any argument a small one, in minutes on two CPU cores.

    Settings come from --config FILE (or the run that --resume continues, or the defaults), then from --preset NAME,
    then from the flags. --model.mixer-overrides takes YAML, e.g. '{gated_deltanet: {output_gate: false}}',
    or '{kla: {keys: {ApplyToKey: {bound: 1.2}}}}' for another choice on an axis.
    """

    train: Annotated[TrainConfig, tyro.conf.arg(name="")]
    """What to train, on what."""
    run: Path | None = None
    """Folder to train in, which must not exist; left out, the next of runs/001, runs/002, ..."""
    resume: bool = False
    """Continue the run in the --run folder, with its settings; --steps and such may be given anew."""
    config: Path | None = None
    """YAML file of settings (every run folder has one); flags override it."""
    preset: str | None = None
    """Model size by name, e.g. 340m (a wrong one lists all), with the tokenizer's vocabulary; flags override it."""
    prompt: str = "def "
    """What the sample that is printed at the end continues; empty for no sample."""


def _starting_point(argv: Sequence[str]) -> TrainConfig:
    """The settings that flags override: a config file's, those of the run to continue, or the defaults."""
    path = take_option(argv, "--config")[0]
    run = take_option(argv, "--run")[0]
    config = TrainConfig()
    if "--resume" in argv and run is not None:
        config = load_run_config(Path(run))
    if path is not None:
        config = load_config(TrainConfig, path, default=config)
    preset = take_option(argv, "--preset")[0]
    if preset is None:
        return config
    # The papers' vocabularies would be tens of thousands of rows that bytes never use.
    return dataclasses.replace(config, model=model_preset(preset, vocabulary_size=config.model.vocabulary_size))


def _mixer_overrides(text: str) -> Any:
    try:
        overrides = read_yaml(text)
    except yaml.YAMLError as error:
        raise CommandError(f"{_OVERRIDES} is not YAML: {error}") from error
    if not isinstance(overrides, dict):
        raise CommandError(f"{_OVERRIDES}: expected a mapping such as '{{kda: {{output_gate: false}}}}', got {text!r}")
    return overrides


def _parse(argv: Sequence[str]) -> TrainArguments:
    overrides, argv = take_option(argv, _OVERRIDES)
    if take_option(argv, "--run")[0] == "":
        raise CommandError("--run is empty, expected the name of a folder")
    with input_errors():
        start = _starting_point([] if {"-h", "--help"} & set(argv) else argv)
        held = start.model.mixer_overrides if overrides is None else _mixer_overrides(overrides)
        # Flags cannot spell a nested mapping: it is taken out before them and put back after.
        plain = dataclasses.replace(start, model=dataclasses.replace(start.model, mixer_overrides=()))
        arguments = parse(TrainArguments, argv, command="train", default=TrainArguments(train=plain))
        model = dataclasses.replace(arguments.train.model, mixer_overrides=held)
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
    arguments = _parse(argv)
    if arguments.resume and arguments.run is None:
        raise CommandError("--resume needs --run FOLDER, the run to continue")
    folder = arguments.run if arguments.run is not None else next_run_folder(Path("runs"))
    with input_errors():
        tokenizer = None
        if arguments.resume:
            tokenizer = load_run_tokenizer(folder, load_run_config(folder))
        else:
            check_new_folder(folder)
        print(f"reading data: {_data_description(arguments.train)}", flush=True)
        with _lasting_interrupts(), _moved_text(arguments.resume):
            trainer = Trainer(arguments.train, tokenizer=tokenizer)
        if arguments.run is None:
            folder = next_run_folder(Path("runs"))  # again: a run that was started beside this one may have taken it
        trainer.open(folder, resume=arguments.resume)
    config = trainer.config
    print(
        f"run {folder}: {' + '.join(dict.fromkeys(config.model.layer_mixers))}, {trainer.num_parameters:,} parameters, "
        f"{config.data.batch_size} x {config.data.sequence_length} tokens a step, on {trainer.device_description}"
    )
    if arguments.resume:
        print(f"continuing after step {trainer.start_step}")
    print("compiling; the first step takes a while", flush=True)
    try:
        result = trainer.run()
    except NonFiniteLossError as error:
        raise CommandError(str(error), exit_code=1) from error
    except (CheckpointError, OSError) as error:
        hint = f"; continue with rnnlib train --run {folder} --resume" if folder.exists() else ""
        raise CommandError(f"stopped at step {trainer.step}: {error}{hint}", exit_code=1) from error
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        tokens = f"{config.data.batch_size} x {config.data.sequence_length} tokens a step"
        raise CommandError(
            f"{trainer.device_description}: out of memory with {tokens}; raise --accumulation-steps, "
            "lower --data.batch-size or set --model.remat"
        ) from error
    if result.stopped_by is not None:
        with contextlib.suppress(OSError):  # what has stopped it may be that the terminal is gone
            print(f"{result.stopped_by.name}: saved at step {result.step}; continue with")
            print(f"  rnnlib train --run {folder} --resume", flush=True)
        return 128 + result.stopped_by
    print(f"trained on {result.tokens:,} tokens in {result.seconds:.0f} s; everything is in {folder}/")
    if config.logging.picture:
        print(f"losses drawn in {folder / 'loss.png'}")
    if config.logging.tensorboard:
        print(f"curves: tensorboard --logdir {folder.parent}    (after pip install tensorboard)")
    if arguments.prompt:
        from rnnlib.cli.generate import print_continuation

        print("sample:", flush=True)
        print_continuation(trainer.trained_model(), trainer.tokenizer, arguments.prompt)
    print(f"more of them: rnnlib generate {folder} --prompt {arguments.prompt or 'def '!r}")
    return 0


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
    source = "the installed Python sources" if data.source == "python" else " ".join(data.paths)
    return f"{source}, {'bytes' if data.tokenizer == 'byte' else data.tokenizer} as tokens"
