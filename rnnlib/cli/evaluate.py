"""`rnnlib eval`: evaluates a run or a published model on held-out text."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

from rnnlib.cli.arguments import parse
from rnnlib.cli.compilation_cache import CompilationCache, keep_compiled_programs
from rnnlib.cli.errors import CommandError, input_errors
from rnnlib.data import DataConfig, make_dataset
from rnnlib.training import evaluate, load_model, spread_batches


@dataclasses.dataclass(frozen=True)
class EvalArguments:
    """Evaluates the model of a run's latest checkpoint on the run's validation text, or on other text.

    A published model is evaluated on the text of --paths, or on Python sources that are installed here.
    """

    folder: Annotated[Path, tyro.conf.Positional]
    """The folder of a run (FOLDER@STEP and FOLDER@best name a checkpoint), or of a published model."""
    batches: int | None = None
    """Batches to evaluate on, spread over the text; left out, all of it."""
    batch_size: int | None = None
    """Rows a batch; left out, as in training, or 16."""
    sequence_length: int | None = None
    """Tokens a row; left out, as in training, or 256."""
    source: Literal["text", "jsonl", "parquet"] | None = None
    """What --paths are: "text" (a document a file), "jsonl" or "parquet"; left out, as in training ("text" where that
    took the installed Python sources)."""
    paths: tuple[str, ...] = ()
    """Files or glob patterns of other text to evaluate on, all of it."""
    text_field: str | None = None
    """The field (JSON lines) or column (Parquet) that holds the text; left out, as in training."""
    encoding: str | None = None
    """Of --paths; left out, as in training."""
    tokenizer: str | None = None
    """"byte" or a tokenizers JSON file, for a folder that has none."""
    undecodable: Literal["error", "skip"] | None = None
    """What becomes of files of --paths that are not in the encoding; left out, as in training."""
    json: bool = False
    """Print one line of JSON."""
    compilation_cache: CompilationCache = None


_OF_PATHS = ("source", "text_field", "encoding", "undecodable")
"""Arguments that say how --paths are read."""


def _data(arguments: EvalArguments, trained_on: DataConfig) -> DataConfig:
    names = ("batch_size", "sequence_length", *_OF_PATHS)
    changes = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    if arguments.paths:
        other_text = {
            "source": "text" if trained_on.source == "python" else trained_on.source,
            "paths": arguments.paths,
            "validation_paths": arguments.paths,
            "deduplicate": False,
            "max_validation_bytes": None,
        }
        changes = other_text | changes
    return dataclasses.replace(trained_on, **changes)


def run(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code."""
    arguments = parse(EvalArguments, argv, command="eval")
    keep_compiled_programs(arguments.compilation_cache)
    if arguments.batches is not None and arguments.batches < 1:
        raise CommandError(f"--batches must be at least 1, got {arguments.batches}")
    for name in _OF_PATHS:
        if (value := getattr(arguments, name)) is not None and not arguments.paths:
            raise CommandError(f"--{name.replace('_', '-')} {value} needs --paths, the files to evaluate on")
    with input_errors():
        loaded = load_model(arguments.folder, tokenizer=arguments.tokenizer)
        trained_on = DataConfig() if loaded.run is None else loaded.run.config.data
        dataset = make_dataset(_data(arguments, trained_on), split="validation", tokenizer=loaded.tokenizer)
    result = evaluate(
        loaded.model, spread_batches(dataset, arguments.batches), token_bytes=loaded.tokenizer.token_bytes
    )
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
