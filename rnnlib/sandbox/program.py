"""The other side of a limited process: it limits itself, then answers requests, one line of JSON each.

`rnnlib.sandbox.process` starts this file as a program of its own, with the file of the functions that answer:

- `MEMORY_BYTES`, the address space that it may take;
- `prepare()`, called before the limits hold, which returns the function from a request to an answer, both of them
  objects of JSON. That function may raise MemoryError; any other error is to be an answer.
"""

import contextlib
import importlib.util
import json
import os
import signal
import sys

OUT_OF_MEMORY = 3  # exit code
READY = b"ready\n"


def _limit_process(memory_bytes: int) -> None:
    """Bounds what the process may take, whatever it runs; systems without such limits have the time limit only."""
    with contextlib.suppress(ImportError):
        import resource

        for name, value in (
            ("RLIMIT_AS", memory_bytes),
            ("RLIMIT_CORE", 0),
            ("RLIMIT_FSIZE", 0),
            ("RLIMIT_NPROC", 0),
        ):
            with contextlib.suppress(AttributeError, ValueError, OSError):
                resource.setrlimit(getattr(resource, name), (value, value))


def _set_alarm(seconds: float) -> None:
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds)


def main(program: str, folders: list[str]) -> None:
    """Answers requests until there are no more.

    Args:
        program: file of the functions that answer.
        folders: where the packages that it needs are installed.
    """
    sys.path += folders
    spec = importlib.util.spec_from_file_location("limited_program", program)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    answer = module.prepare()
    _limit_process(module.MEMORY_BYTES)
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    for line in sys.stdin.buffer:
        try:
            message = json.loads(line)
            # The process that asked ends this one when its time is over. If that one is gone, the alarm does.
            _set_alarm(2 * message["seconds"])
            reply = json.dumps(answer(message["request"])).encode()
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        sys.stdout.buffer.write(reply + b"\n")
        sys.stdout.buffer.flush()
        _set_alarm(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
