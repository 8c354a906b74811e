"""`rnnlib tokenizer`: trains a byte-pair tokenizer."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

from rnnlib.cli.arguments import parse
from rnnlib.cli.errors import CommandError, input_errors
from rnnlib.data import DataConfig, SourceName, iterate_documents, train_tokenizer


@dataclasses.dataclass(frozen=True)
class TokenizerArguments:
    """Trains a byte-level byte-pair tokenizer; `rnnlib train --data.tokenizer FILE` uses it."""

    output: Annotated[Path, tyro.conf.Positional]
    """The tokenizers JSON file to write."""
    vocabulary_size: int = 4096
    """Tokens, the 256 bytes and the end of document among them."""
    source: SourceName = "python"
    """The Python sources installed with this interpreter, or what --paths are: "text", "jsonl" or "parquet"."""
    paths: tuple[str, ...] = ()
    """Files or glob patterns of text to learn from."""
    text_field: str = "text"
    """The field (JSON lines) or column (Parquet) that holds the text."""
    encoding: str = "utf-8"
    """Of text and JSON lines files."""
    undecodable: Literal["error", "skip"] = "error"
    """What becomes of a file, or a line of JSON, that is not in the encoding."""
    max_bytes: int | None = 16_000_000
    """At most so many bytes of text are read; None reads all that --paths are."""
    split_by: Literal["document", "tail"] = "document"
    """What stays unseen, as training holds it out at its default share: documents, or with "tail" the end of each."""
    overwrite: bool = False
    """Replace the file if it exists."""


def run(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code."""
    arguments = parse(TokenizerArguments, argv, command="tokenizer")
    if arguments.output.exists() and not arguments.overwrite:
        raise CommandError(f"{arguments.output} exists: choose another, or replace it with --overwrite")
    if arguments.output.is_dir():
        raise CommandError(f"{arguments.output} is a folder: expected the name of a file to write")
    with input_errors():
        data = DataConfig(
            source=arguments.source,
            paths=arguments.paths,
            text_field=arguments.text_field,
            encoding=arguments.encoding,
            undecodable=arguments.undecodable,
            max_train_bytes=arguments.max_bytes,
            split_by=arguments.split_by,
        )
        # The validation documents stay unseen here as in training.
        tokenizer = train_tokenizer(
            iterate_documents(data, "train"), vocabulary_size=arguments.vocabulary_size, path=arguments.output
        )
    print(f"{arguments.output}: {tokenizer.vocabulary_size} tokens")
    return 0
