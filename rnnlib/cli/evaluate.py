"""`rnnlib eval`: evaluates a run or a published model on held-out text."""

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rnnlib.cli.arguments import Folder, parse
from rnnlib.cli.compilation_cache import CompilationCache, keep_compiled_programs
from rnnlib.cli.errors import CommandError, input_errors
from rnnlib.cli.text_arguments import TextArguments

if TYPE_CHECKING:  # `--help` does without jax
    from rnnlib.data import DataConfig


@dataclasses.dataclass(frozen=True)
class EvaluatedText(TextArguments):
    """Which text is read, as in `rnnlib train`, and in which batches."""

    batch_size: int | None = None
    """Sequences a batch; left out, as in training, or 16."""
    sequence_length: int | None = None
    """Tokens a sequence; left out, as in training, or 256."""


@dataclasses.dataclass(frozen=True)
class EvalArguments:
    """Evaluates the model of a run's latest checkpoint on the run's validation text, or on other text.

    A published model is evaluated on the text of --data.paths, or on Python sources that are installed here.
    """

    folder: Folder
    """The folder of a run (FOLDER@STEP and FOLDER@best name a checkpoint), or of a published model."""
    batches: int | None = None
    """Batches to evaluate on, spread over the text; left out, all of it."""
    data: EvaluatedText = dataclasses.field(default_factory=EvaluatedText)
    """The text."""
    tokenizer: str | None = None
    """"byte" or a tokenizers JSON file, for a folder that has none."""
    json: bool = False
    """Print one line of JSON."""
    compilation_cache: CompilationCache = None


def _data(given: dict[str, Any], trained_on: "DataConfig") -> "DataConfig":
    if "paths" in given:
        other_text = {
            "source": None if trained_on.kind == "python" else trained_on.source,
            "validation_paths": given["paths"],
            "deduplicate": False,
            "max_validation_bytes": None,
        }
        given = other_text | given
    return dataclasses.replace(trained_on, **given)


def run(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code."""
    arguments = parse(EvalArguments, argv, command="eval")
    keep_compiled_programs(arguments.compilation_cache)
    if arguments.batches is not None and arguments.batches < 1:
        raise CommandError(f"--batches must be at least 1, got {arguments.batches}")
    given = arguments.data.given()
    for name in given.keys() - {"batch_size", "sequence_length"}:
        if "paths" not in given:
            flag = f"--data.{name.replace('_', '-')} {given[name]}"
            raise CommandError(f"{flag} needs --data.paths, the files to evaluate on")
    from rnnlib.data import DamagedTokensError, DataConfig, make_dataset
    from rnnlib.data.chat import chat_encoder
    from rnnlib.models.variables import array_that_is_not_finite
    from rnnlib.training import evaluate, load_model, spread_batches

    with input_errors():
        loaded = load_model(arguments.folder, tokenizer=arguments.tokenizer)
        trained_on = DataConfig() if loaded.run is None else loaded.run.config.data
        data = _data(given, trained_on)
        # A run's own copy of the template, or that of the folder.
        own = dataclasses.replace(data, chat_template=None)
        chat = chat_encoder(own, loaded.tokenizer, loaded.folder) if data.format == "chat" else None
        dataset = make_dataset(data, split="validation", tokenizer=loaded.tokenizer, chat=chat)
    try:
        result = evaluate(
            loaded.model, spread_batches(dataset, arguments.batches), token_bytes=loaded.tokenizer.token_bytes
        )
    except DamagedTokensError as error:
        raise CommandError(str(error), exit_code=1) from error
    if not math.isfinite(result.loss) and (path := array_that_is_not_finite(loaded.model)) is not None:
        raise CommandError(f"{arguments.folder}: the loss is {result.loss}, for {path} is not finite", exit_code=1)
    if arguments.json:
        trained = {} if loaded.run is None else {"step": loaded.run.step, "trained_tokens": loaded.run.tokens}
        print(json.dumps(trained | dataclasses.asdict(result)))
        return 0
    if loaded.run is None:
        print(f"published model {arguments.folder}")
    else:
        print(f"run {arguments.folder}, step {loaded.run.step}, trained on {loaded.run.tokens:,} tokens")
    print(f"evaluated on {result.tokens:,} tokens, {result.bytes:,} bytes")
    print(f"loss           {result.loss:.4f} nats/token")
    print(f"bits per byte  {result.bits_per_byte:.4f}")
    print(f"perplexity     {result.perplexity:.4f} per token")
    return 0
