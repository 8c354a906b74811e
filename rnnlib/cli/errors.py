"""Wrong input as one clear line."""

import contextlib
from collections.abc import Iterator

_LONGEST = 2000


class CommandError(Exception):
    """Ends the command with one line on standard error.

    Attributes:
        exit_code: The process's exit code: 2 for wrong input, 1 for a failure while running.
    """

    def __init__(self, message: str, exit_code: int = 2):
        # One line of a size to read, whatever the message held: a value out of someone else's file may be megabytes.
        line = " ".join(message.split())
        super().__init__(line if len(line) <= _LONGEST else f"{line[: _LONGEST // 2]} ... {line[-_LONGEST // 2 :]}")
        self.exit_code = exit_code


@contextlib.contextmanager
def input_errors() -> Iterator[None]:
    """Within it, errors about what the user named (paths, sizes, names) become a CommandError.

    It goes around reading and checking, not around computing: there an error is the library's, and keeps its traceback.
    """
    try:
        yield
    except BrokenPipeError:
        raise  # nobody reads the output any more (`--help | head`): no fault of the input
    except OSError as error:
        named = f"{error.filename}: " if error.filename is not None else ""
        raise CommandError(f"{named}{error.strerror or error}") from error
    except (ValueError, NotImplementedError, OverflowError) as error:
        raise CommandError(str(error) or type(error).__name__) from error
