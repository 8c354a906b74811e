"""Entry point: finds the command; everything heavy is imported by the command that needs it."""

import importlib
import io
import os
import sys
from collections.abc import Sequence

import rnnlib
from rnnlib.cli.errors import CommandError
from rnnlib.cli.start import open_early, rare_collections
from rnnlib.extras import MissingExtraError, from_extra

# Name: (module with `run(argv) -> exit code`, summary).
COMMANDS = {
    "train": ("rnnlib.cli.train", "train a language model (without arguments: a small one, in minutes on a CPU)"),
    "eval": ("rnnlib.cli.evaluate", "evaluate a run, or a published model, on held-out text"),
    "lm-eval": ("rnnlib.cli.lm_eval", "run standard tasks of lm-evaluation-harness"),
    "generate": ("rnnlib.cli.generate", "continue a prompt with a run's model, or a published one"),
    "export": ("rnnlib.cli.export", "write a run's model as a folder that FLA or transformers reads"),
    "mesh": ("rnnlib.cli.mesh", "plan a training step on a mesh of devices: memory and communication, without them"),
    "mixers": ("rnnlib.cli.mixers", "list the token mixers and where each stands on the axes"),
    "tokenizer": ("rnnlib.cli.tokenizer", "train a byte-pair tokenizer on text"),
}

_ON_DEVICES = ("train", "eval", "lm-eval", "generate")
"""Commands that compute."""


def help_text() -> str:
    """What `rnnlib --help` prints."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {summary}" for name, (_, summary) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: rnnlib COMMAND [OPTIONS]",
            "",
            "Delta-rule recurrent sequence models in JAX.",
            "",
            "commands:",
            *lines,
            "",
            "`rnnlib COMMAND --help` explains a command's options.",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: Arguments without the program's name; those of the process by default.

    Returns:
        Exit code: 0 done, 1 failed while running, 2 wrong input or an extra that
        is not installed (one line on standard error), 129, 130 and 143 stopped
        by SIGHUP, Ctrl-C and SIGTERM.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments[0] if arguments else None
    if command in (None, "-h", "--help", "help"):
        print(help_text(), file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    if command == "--version":
        print(rnnlib.__version__)
        return 0
    if command not in COMMANDS:
        print(f"rnnlib: error: there is no command {command!r}; expected one of {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    # What a terminal or file cannot hold is shown as a question mark: it is no reason to fail after hours of training.
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")
    try:
        with from_extra("train", f"rnnlib {command}"), rare_collections():
            if command in _ON_DEVICES:
                open_early(arguments[1:])
            module = importlib.import_module(COMMANDS[command][0])
        code = module.run(arguments[1:])
    except MissingExtraError as error:
        if {"-h", "--help"} & set(arguments):
            print(f"usage: rnnlib {command} [OPTIONS]\n\n{COMMANDS[command][1]}\n\nTo list its options, {error}")
            return 0
        print(f"rnnlib {command}: error: {error}", file=sys.stderr)
        return 2
    except CommandError as error:
        print(f"rnnlib {command}: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"rnnlib {command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        code = 0  # the reader (`| head`) has what it wanted
    try:
        sys.stdout.flush()
    except OSError:
        # Nobody reads any more; Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


if __name__ == "__main__":
    sys.exit(main())
