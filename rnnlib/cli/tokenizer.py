"""`rnnlib tokenizer`: trains a byte-pair tokenizer."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

from rnnlib.cli.arguments import parse
from rnnlib.cli.errors import CommandError, input_errors
from rnnlib.cli.text_arguments import TextArguments


@dataclasses.dataclass(frozen=True)
class LearnedText(TextArguments):
    """Which text is read, as in `rnnlib train`."""

    max_train_bytes: int | None = 16_000_000
    """At most so many bytes of text are read; None reads all that --data.paths are."""
    split_by: Literal["document", "tail"] | None = None
    """What stays unseen, as training holds it out at its default share: documents, or with "tail" the end of each; left
    out, as in training."""


@dataclasses.dataclass(frozen=True)
class TokenizerArguments:
    """Trains a byte-level byte-pair tokenizer; `rnnlib train --data.tokenizer FILE` uses it."""

    output: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUTPUT")]
    """The tokenizers JSON file to write."""
    vocabulary_size: int = 4096
    """Tokens, the 256 bytes and the end of document among them."""
    data: LearnedText = dataclasses.field(default_factory=LearnedText)
    """Which text it learns from; left out, the Python sources installed with this interpreter."""
    overwrite: bool = False
    """Replace the file if it exists."""


def run(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code."""
    arguments = parse(TokenizerArguments, argv, command="tokenizer")
    if arguments.output.exists() and not arguments.overwrite:
        raise CommandError(f"{arguments.output} exists: choose another, or replace it with --overwrite")
    if arguments.output.is_dir():
        raise CommandError(f"{arguments.output} is a folder: expected the name of a file to write")
    from rnnlib.data import DataConfig, iterate_documents, train_tokenizer

    with input_errors():
        limit = {"max_train_bytes": arguments.data.max_train_bytes}
        data = DataConfig(**arguments.data.given() | limit)
        # The validation documents stay unseen here as in training.
        tokenizer = train_tokenizer(
            iterate_documents(data, "train"), vocabulary_size=arguments.vocabulary_size, path=arguments.output
        )
    print(f"{arguments.output}: {tokenizer.vocabulary_size} tokens")
    return 0
