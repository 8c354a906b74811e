"""`python -m tests.notebooks.run_cells`: runs cells as a notebook does, and says what each of them shows.

Reads a JSON list of sources, writes for each a JSON list of what it shows: MIME types, with the text of what is text
alone. This is IPython's shell without a kernel behind sockets, whose client missed an answer once in a few runs and
waited for minutes.
"""

import json
import sys

from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output


class Shell(InteractiveShell):
    """Has no window whose events it would have to handle."""

    def enable_gui(self, gui=None):
        assert gui in (None, "inline")


def alone(kind, data):
    """The text of an output that is nothing else, as of an error in a picture's place."""
    return data[kind] if kind == "text/plain" and len(data) == 1 else None


if __name__ == "__main__":
    shell = Shell.instance(colors="nocolor")
    shown = []
    for source in json.load(sys.stdin):
        with capture_output() as captured:
            result = shell.run_cell(source, store_history=True)
        if not result.success:
            print(captured.stdout, captured.stderr, file=sys.stderr)
            result.raise_error()
        shown.append([{kind: alone(kind, output.data) for kind in output.data} for output in captured.outputs])
    json.dump(shown, sys.stdout)
