"""Processes with limits, for what files of others make this library compute: chat templates, unknown tokenizers.

`process` is this side: it starts a process, asks it and ends it when its time is over. `program` is the other side,
which imports nothing of rnnlib.
"""

from rnnlib.sandbox.process import LimitedProcess, LimitError

__all__ = ["LimitError", "LimitedProcess"]
