"""`rnnlib generate`: continues a prompt with a run's model."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from rnnlib.cli.arguments import parse
from rnnlib.cli.errors import CommandError, input_errors
from rnnlib.data import Tokenizer
from rnnlib.models import DecoderLM, NaNLogitsError, stream


@dataclasses.dataclass(frozen=True)
class GenerateArguments:
    """Continues a prompt with the model of a run's latest checkpoint."""

    run: Annotated[Path, tyro.conf.Positional]
    """The run's folder."""
    prompt: str = "def "
    """Text to continue; - reads it from standard input."""
    max_new_tokens: int = 256
    """Tokens to add."""
    temperature: float = 0.8
    """Divides the logits; 0 always takes the likeliest token."""
    top_k: int | None = None
    """Draw among so many likeliest tokens only."""
    top_p: float | None = None
    """Draw among the fewest likeliest tokens whose probabilities sum to this."""
    seed: int = 0
    """Seed of the draws."""
    stop: bool = True
    """Stop where the model ends the document."""


def print_continuation(
    model: DecoderLM,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop: bool = True,
) -> None:
    """Prints a prompt and its continuation while it is made; options as in `rnnlib.models.generate`."""
    ids = list(tokenizer.encode(prompt))
    with input_errors():
        blocks = stream(
            model,
            [ids],
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            end_token=tokenizer.end_of_document if stop else None,
        )
    sys.stdout.write(prompt)
    # Decoded together with the prompt: some tokenizers drop a space, or join words, only at a text's beginning.
    shown = len(tokenizer.decode(ids).rstrip("\ufffd"))
    try:
        for block in blocks:
            ids += np.asarray(block)[0].tolist()
            text = tokenizer.decode(ids)
            # The last character may be cut in the middle; it is shown when the rest of it is there.
            whole = text.rstrip("\ufffd")
            sys.stdout.write(whole[shown:])
            sys.stdout.flush()
            shown = max(shown, len(whole))
    except NaNLogitsError as error:
        raise CommandError(str(error), exit_code=1) from error
    sys.stdout.write(tokenizer.decode(ids)[shown:] + "\n")
    sys.stdout.flush()


def run(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code."""
    arguments = parse(GenerateArguments, argv, command="generate")
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    if not prompt:
        raise CommandError("--prompt is empty: expected at least one character to continue")
    from rnnlib.training import load_run

    with input_errors():
        loaded = load_run(arguments.run)
    print_continuation(
        loaded.model,
        loaded.tokenizer,
        prompt,
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
        stop=arguments.stop,
    )
    return 0
