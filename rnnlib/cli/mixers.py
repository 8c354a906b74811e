"""`rnnlib mixers`: lists the token mixers."""

import dataclasses
import sys
from collections.abc import Sequence

from rnnlib.cli.arguments import parse


@dataclasses.dataclass(frozen=True)
class MixersArguments:
    """Lists the token mixers: decay, gain, keys and solve of each, and its paper."""


def run(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code."""
    parse(MixersArguments, argv, command="mixers")
    from rnnlib.layers import mixer_rows, mixer_table

    if not sys.stdout.isatty():
        print(mixer_table(), end="")
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table("mixer", "decay", "gain", "keys", "solve", "paper", show_lines=True)
    for row in mixer_rows():
        table.add_row(*row)
    Console(markup=False, highlight=False).print(table)
    return 0
