"""`rnnlib generate`: continues a prompt with the model of a run, or a published one."""

import dataclasses
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import tyro

from rnnlib.cli.arguments import Folder, chat_options, parse
from rnnlib.cli.compilation_cache import CompilationCache, keep_compiled_programs
from rnnlib.cli.errors import CommandError, input_errors

if TYPE_CHECKING:  # `--help` does without jax
    from rnnlib.data import Tokenizer
    from rnnlib.models import DecoderLM


@dataclasses.dataclass(frozen=True)
class GenerateArguments:
    """Continues a prompt with the model of a run's latest checkpoint, or with a published model."""

    folder: Folder
    """The folder of a run (FOLDER@STEP and FOLDER@best name a checkpoint), or of a published model."""
    prompt: str = "def "
    """Text to continue; - reads it from standard input."""
    chat: bool = False
    """Take the prompt for a user's message, put into the folder's chat template; print the answer alone."""
    system: str | None = None
    """With --chat: the system's message before it."""
    answer_prefix: str | None = None
    """With --chat: the beginning of the answer, which the model continues."""
    chat_option: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """With --chat: KEY=VALUE, a variable of the chat template such as enable_thinking=false; may be given again."""
    tokenizer: str | None = None
    """"byte" or a tokenizers JSON file, for a folder that has none."""
    dtype: str | None = None
    """What the model computes in, e.g. bfloat16; left out, as in training or as the folder says."""
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
    """Stop where the model ends the document, or its answer."""
    compilation_cache: CompilationCache = None


def print_continuation(
    model: "DecoderLM",
    tokenizer: "Tokenizer",
    prompt: str,
    *,
    prompt_tokens: Sequence[int] | None = None,
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop_tokens: Sequence[int] = (),
) -> None:
    """Prints a prompt and its continuation while it is made; options as in `rnnlib.inference.Engine.add`.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        prompt: The text to print before the continuation.
        prompt_tokens: The tokens to continue; None for those that the tokenizer gives the prompt.
        max_new_tokens: Tokens to add.
        temperature: See `Sampling`.
        top_k: See `Sampling`.
        top_p: See `Sampling`.
        seed: Of the draws.
        stop_tokens: The text ends before any of them.
    """
    from rnnlib.fields import PositiveInteger, check_value
    from rnnlib.inference import Engine, NaNLogitsError
    from rnnlib.models.variables import array_that_is_not_finite

    ids = list(tokenizer.encode(prompt)) if prompt_tokens is None else list(prompt_tokens)
    with input_errors():
        check_value("generate", "max_new_tokens", max_new_tokens, PositiveInteger)
        engine = Engine(model, slots=1, max_length=len(ids) + max_new_tokens)
        text = engine.add(
            ids,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop_tokens=stop_tokens,
        )
    sys.stdout.write(prompt)
    # Decoded together with the prompt: some tokenizers drop a space, or join words, only at a text's beginning.
    shown = len(tokenizer.decode(ids).rstrip("\ufffd"))
    try:
        while text.finish_reason is None:
            engine.step()
            new = text.tokens[:-1] if text.finish_reason == "stop" else text.tokens
            with input_errors():  # the tokenizer is the folder's
                whole = tokenizer.decode([*ids, *new])
            # The last character may be cut in the middle; it is shown when the rest of it is there.
            if text.finish_reason is None:
                whole = whole.rstrip("\ufffd")
            sys.stdout.write(whole[shown:])
            sys.stdout.flush()
            shown = max(shown, len(whole))
    except NaNLogitsError as error:
        path = array_that_is_not_finite(model)
        where = "" if path is None else f" ({path} is not)"
        raise CommandError(f"{error}{where}", exit_code=1) from error
    sys.stdout.write("\n")
    sys.stdout.flush()


def run(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code."""
    arguments = parse(GenerateArguments, argv, command="generate")
    keep_compiled_programs(arguments.compilation_cache)
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    if not prompt:
        raise CommandError("--prompt is empty: expected at least one character to continue")
    for flag, value in (
        ("--system", arguments.system),
        ("--answer-prefix", arguments.answer_prefix),
        ("--chat-option", arguments.chat_option or None),
    ):
        if value is not None and not arguments.chat:
            raise CommandError(f"{flag} needs --chat, in whose template it stands")
    options = chat_options(arguments.chat_option)
    from rnnlib.training import load_model

    with input_errors():
        loaded = load_model(arguments.folder, dtype=arguments.dtype, tokenizer=arguments.tokenizer)
        if arguments.chat:
            said = [("system", arguments.system), ("user", prompt), ("assistant", arguments.answer_prefix)]
            tokens = loaded.encode_chat(
                [{"role": role, "content": text} for role, text in said if text is not None],
                add_generation_prompt=arguments.answer_prefix is None,
                continue_final_message=arguments.answer_prefix is not None,
                options=options,
            )
        else:
            tokens = loaded.encode_prompt(prompt)
        stop_tokens = loaded.stop_tokens if arguments.stop else ()
    print_continuation(
        loaded.model,
        loaded.tokenizer,
        (arguments.answer_prefix or "") if arguments.chat else prompt,
        prompt_tokens=tokens,
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
        stop_tokens=stop_tokens,
    )
    return 0
