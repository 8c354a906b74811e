"""Reading files that may be damaged: one clear reason, without what background threads say of it."""

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def one_report_of_damage() -> Iterator[None]:
    """Within it, reads by orbax that fail raise an error and print nothing.

    Orbax reads arrays side by side in an event loop. The first error ends the loop, and each read that is done after it
    prints "Event loop is closed" with a traceback, from a thread of tensorstore's.
    """
    shown = sys.unraisablehook, sys.excepthook

    def without_late_reads(hook: Any) -> Any:
        def show(*arguments: Any) -> None:
            error = arguments[0].exc_value if len(arguments) == 1 else arguments[1]
            if not (isinstance(error, RuntimeError) and "Event loop is closed" in str(error)):
                hook(*arguments)

        return show

    sys.unraisablehook, sys.excepthook = map(without_late_reads, shown)
    try:
        yield
    except Exception:
        time.sleep(0.3)  # for the reads that are still under way
        raise
    finally:
        sys.unraisablehook, sys.excepthook = shown


def first_cause(error: BaseException) -> BaseException:
    """The error that began a chain of errors: orbax's last one names its own handlers and not the file."""
    while (earlier := error.__cause__ or error.__context__) is not None:
        error = earlier
    return error
