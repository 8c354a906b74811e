"""Typed arguments through tyro, with wrong ones as one line."""

import contextlib
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from rnnlib.cli.errors import CommandError
from rnnlib.cli.suggestions import flags_of, similar_flags, switch_with_value

Folder = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
"""An argument without a flag: the folder of a run or of a published model."""

_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def parse[Arguments](
    cls: type[Arguments], argv: Sequence[str], *, command: str, default: Arguments | None = None
) -> Arguments:
    """Parses a command's arguments into a frozen dataclass; `--help` prints and exits.

    Args:
        cls: The dataclass; docstrings of its fields are the help.
        argv: The command's arguments.
        command: The command's name.
        default: Values of what is left out, in place of the dataclass's defaults.

    Raises:
        CommandError: With what is wrong, in one line.
    """
    captured = io.StringIO()
    try:
        with contextlib.redirect_stderr(captured):
            parsed: Any = tyro.cli(cls, args=list(argv), prog=f"rnnlib {command}", default=default)
            return parsed
    except SystemExit as error:
        if error.code in (0, None):
            raise
        message = _one_line(captured.getvalue()) or "wrong arguments"
        if unknown := re.match(r"Unrecognized options?: (\S+?)(?=,|\s|$)", message):
            known = flags_of(lambda: tyro.cli(cls, args=["--help"], prog=f"rnnlib {command}", default=default))
            if switch := switch_with_value(unknown[1], argv, known):
                message = f"{message.partition(' (perhaps ')[0]} ({switch})"
            elif unknown[1].startswith("--") and (meant := similar_flags(unknown[1], known)):
                message = f"{message.partition(' (perhaps ')[0]} (perhaps {' or '.join(meant)}?)"
        raise CommandError(message) from None


def _one_line(box: str) -> str:
    """What tyro says in a box of several lines, as one.

    A box has its title in the upper border or, where the terminal is not UTF-8, as a first section; then the message,
    then hints, with rules between them.
    """
    lines = [line.strip().strip("│").strip() for line in _ANSI.sub("", box).splitlines()]
    lines = [line for line in lines if line and not line.startswith(("╭", "╰"))]
    sections: list[list[str]] = [[]]
    for line in lines:
        if set(line) in ({"─"}, {"-"}):
            sections.append([])
        else:
            sections[-1].append(line)
    if "╭" not in box and len(sections) > 1:
        del sections[0]
    message = " ".join(sections[0])
    # What a config says of itself already names the setting.
    message = re.sub(r"^Error parsing (?!--)[\w.]+: ", "", message)
    message = re.sub(r"invalid literal for int\(\) with base 10: (.*)", r"expected an integer, got \1", message)
    message = re.sub(r"could not convert string to float: (.*)", r"expected a number, got \1", message)
    hints = [line.split()[0] for section in sections[1:] if section[:1] == ["Perhaps you meant:"] for line in section]
    options = [hint for hint in hints if hint.startswith("--")]
    return f"{message} (perhaps {options[0]}?)" if options else message


def chat_options(given: Sequence[str]) -> dict[str, Any]:
    """Variables of a chat template from `--chat-option KEY=VALUE`; a value that is no JSON is a text.

    Raises:
        CommandError: If one has no key.
    """
    from rnnlib.configuration import keyed_values  # imports numpy, which `--help` does without

    try:
        return keyed_values("--chat-option", given)
    except ValueError as error:
        raise CommandError(str(error)) from None


def take_option(argv: Sequence[str], name: str) -> tuple[str | None, list[str]]:
    """Takes `name VALUE` or `name=VALUE` out of the arguments: the last value, and the arguments without it.

    Raises:
        CommandError: If the value is missing.
    """
    value, rest = None, []
    arguments = iter(argv)
    for argument in arguments:
        if argument == name:
            value = next(arguments, None)
            if value is None:
                raise CommandError(f"{name} needs a value")
        elif argument.startswith(f"{name}="):
            value = argument.removeprefix(f"{name}=")
        else:
            rest.append(argument)
    return value, rest
