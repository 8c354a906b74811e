"""Which text a command reads, by the flags of `rnnlib train`."""

import dataclasses
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class TextArguments:
    """Which text is read, as in `rnnlib train`."""

    source: str | None = None
    """"python" (the installed Python sources), "text" (a document a file), "jsonl" or "parquet"; left out, by the names
    of --data.paths."""
    paths: tuple[str, ...] = ()
    """Files or glob patterns of text."""
    format: Literal["text", "chat"] | None = None
    """"text", or "chat" for rows of `messages`, of which what the assistant says counts; left out, as in training."""
    text_field: str | None = None
    """The field (JSON lines) or column (Parquet) that holds the text; left out, as in training, or "text"."""
    encoding: str | None = None
    """Of text and JSON lines files; left out, as in training, or utf-8."""
    undecodable: Literal["error", "skip"] | None = None
    """What becomes of a file, or a line of JSON, that is not in the encoding; left out, as in training, or "error"."""

    def given(self) -> dict[str, Any]:
        """The settings that were given, by their names in `rnnlib.data.DataConfig`."""
        values = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if value not in (None, ())}
