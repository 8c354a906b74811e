"""Reading and writing checkpoints where files or disks fail: one clear reason, and no traces of background threads."""

import contextlib
import functools
import logging
import os
import re
import sys
from collections.abc import Iterator
from typing import Any


@functools.cache
def quiet_background_threads() -> None:
    """From now on threads of orbax's and tensorstore's do not print errors that are raised to their caller as well.

    Orbax reads and writes arrays side by side in event loops. Where one fails, its thread logs the error with a
    traceback, and raises it again where the save is awaited. The first error also ends the loop: what is done after it
    prints "Event loop is closed" with a traceback, and what failed is logged as a task whose exception nobody
    retrieved, when its memory is freed.
    """
    logging.getLogger("absl").addFilter(_not_raised_by_orbax)
    logging.getLogger("asyncio").addFilter(_not_of_tensorstore)

    def without_closed_loops(hook: Any) -> Any:
        def show(*arguments: Any) -> None:
            error = arguments[0].exc_value if len(arguments) == 1 else arguments[1]
            if not (isinstance(error, RuntimeError) and "Event loop is closed" in str(error)):
                hook(*arguments)

        return show

    sys.unraisablehook, sys.excepthook = map(without_closed_loops, (sys.unraisablehook, sys.excepthook))


def _not_raised_by_orbax(record: logging.LogRecord) -> bool:
    return not (record.exc_info and "orbax" in record.pathname)


def _not_of_tensorstore(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    texts = "Error reading", "RESOURCE_EXHAUSTED", "No space left"
    return not ("never retrieved" in record.getMessage() and any(text in str(error) for text in texts))


@contextlib.contextmanager
def reasons_of_damage() -> Iterator[dict[str, str]]:
    """Within it, what orbax says of a checkpoint's parts whose metadata it cannot read.

    It logs a warning and goes on with None in the part's place. Here the warning is not shown.

    Yields:
        Why the metadata of a part could not be read, by the part's name; filled as orbax reads.
    """
    orbax_log, reasons = logging.getLogger("absl"), {}

    def keep_reason(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        found = re.match(r"Failed to get metadata for checkpointable: (\w+)", text)
        if found:
            reasons[found[1]] = text.partition("Error details: ")[2] or text
        return found is None

    orbax_log.addFilter(keep_reason)
    try:
        yield reasons
    finally:
        orbax_log.removeFilter(keep_reason)


def reason_in_one_line(error: BaseException) -> str:
    """Why something could not be read or written: the first cause in at most about 300 characters.

    Orbax raises errors of many kinds, and the texts of the file formats below it run over pages. Where the operating
    system refused, its words are the reason.
    """
    cause = first_cause(error)
    text = " ".join(str(cause).split())
    if refused := re.search(r"os_error_code='(\d+)'", text):
        return os.strerror(int(refused[1]))
    if not isinstance(cause, OSError):
        text = f"{type(cause).__name__}: {text}".partition(" [tensorstore_spec")[0]
    return text if len(text) <= 300 else f"{text[:150]} ... {text[-150:]}"


def first_cause(error: BaseException) -> BaseException:
    """The error that began a chain of errors: orbax's last one names its own handlers and not the file.

    A chain may lead back into itself (`raise B from a`, and `raise a` again while B is handled, as orbax does where a
    disk is full). In such a circle the first error without a `__cause__` began it: the others name one.
    """
    chain: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and not any(following is seen for seen in chain):
        chain.append(following)
        following = following.__cause__ or following.__context__
    if following is None:
        return chain[-1]
    return next((error for error in chain if error.__cause__ is None), chain[-1])
