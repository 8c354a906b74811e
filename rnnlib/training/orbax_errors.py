"""Reading files that may be damaged: one clear reason, without what background threads say of it."""

import contextlib
import logging
import re
import sys
import time
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def one_report_of_damage() -> Iterator[dict[str, str]]:
    """Within it, reads by orbax that fail raise an error and print nothing, then or later.

    Orbax reads arrays side by side in an event loop. The first error ends the loop. Each read that is done after it
    prints "Event loop is closed" with a traceback, from a thread of tensorstore's, and each that failed is logged as a
    task whose exception nobody retrieved, when its memory is freed.

    Where orbax cannot read the metadata of a checkpoint's part, it logs a warning and goes on with None in its place.

    Yields:
        Why the metadata of a part could not be read, by the part's name; filled as orbax reads.
    """
    asyncio_log, orbax_log, reasons = logging.getLogger("asyncio"), logging.getLogger("absl"), {}

    def keep_reason(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        found = re.match(r"Failed to get metadata for checkpointable: (\w+)", text)
        if found:
            reasons[found[1]] = text.partition("Error details: ")[2] or text
        return found is None

    shown = sys.unraisablehook, sys.excepthook

    def without_late_reads(hook: Any) -> Any:
        def show(*arguments: Any) -> None:
            error = arguments[0].exc_value if len(arguments) == 1 else arguments[1]
            if not (isinstance(error, RuntimeError) and "Event loop is closed" in str(error)):
                hook(*arguments)

        return show

    sys.unraisablehook, sys.excepthook = map(without_late_reads, shown)
    asyncio_log.addFilter(_not_of_tensorstore)
    orbax_log.addFilter(keep_reason)
    try:
        yield reasons
    except Exception:
        time.sleep(0.3)  # for the reads that are still under way
        raise  # the filter stays: the error's traceback keeps the tasks
    else:
        asyncio_log.removeFilter(_not_of_tensorstore)
    finally:
        orbax_log.removeFilter(keep_reason)
        sys.unraisablehook, sys.excepthook = shown


def _not_of_tensorstore(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return not ("never retrieved" in record.getMessage() and "Error reading" in str(error))


def first_cause(error: BaseException) -> BaseException:
    """The error that began a chain of errors: orbax's last one names its own handlers and not the file."""
    while (earlier := error.__cause__ or error.__context__) is not None:
        error = earlier
    return error
