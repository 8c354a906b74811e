"""Chat templates of folders that nobody vouches for, rendered with limits on time, memory and output.

Within Python nothing can end `'x' * 10**9` or a loop of loops, so templates run in a process of their own
(`template_process`), which the operating system limits and this module ends. It is started once, for all templates.
"""

import atexit
import contextlib
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rnnlib.extras import from_extra
from rnnlib.hub.template_process import MAX_CHARACTERS, MEMORY_BYTES, OUT_OF_MEMORY, READY

with from_extra("hub", "rnnlib.hub"):
    import jinja2  # noqa: F401 (the process needs it)

SECONDS = 10.0
MAX_TEMPLATE_CHARACTERS = 2**20
_START_SECONDS = 120.0
_PROGRAM = pathlib.Path(__file__).with_name("template_process.py")


# Values are sent in portions of about so many characters, each with the time limit for itself.
_PORTION = 500_000


class TemplateError(ValueError):
    """A template that cannot be rendered; the message is one line."""


class Rendered(NamedTuple):
    """What a template makes of its values.

    Attributes:
        text: the text.
        regions: places `(begin, end)` in it of what stands in `{% generation %}`; empty unless asked for.
    """

    text: str
    regions: tuple[tuple[int, int], ...]


class _TemplateProcess:
    """The process, and one request after the other."""

    def __init__(self) -> None:
        found = [importlib.util.find_spec(name) for name in ("jinja2", "markupsafe")]
        folders = {os.path.dirname(os.path.dirname(spec.origin)) for spec in found if spec and spec.origin}
        self.owner = os.getpid()
        # -I: neither the working directory, nor the user's folders or variables, give it code. It gets no secrets.
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(_PROGRAM), *sorted(folders)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in ("TZ", "SYSTEMROOT") if name in os.environ},
            start_new_session=True,
        )
        if self._exchange(b"", _START_SECONDS) != READY:
            self.end()
            raise RuntimeError(f"the process of chat templates did not start: {sys.executable} {_PROGRAM}")

    def render(self, request: bytes, seconds: float) -> list[dict[str, Any]]:
        try:
            line = self._exchange(request, seconds)
        except BaseException:  # an interrupt may leave half of a request or an answer in the pipes
            self.end()
            raise
        if not line.endswith(b"\n"):
            if self.end() == OUT_OF_MEMORY:
                raise TemplateError(f"it takes more than {MEMORY_BYTES // 2**20} MiB of memory")
            raise TemplateError(f"it takes more than {seconds:g} s, or more memory than there is")
        return json.loads(line)

    def _exchange(self, request: bytes, seconds: float) -> bytes:
        """The line that answers a request; empty or without its end if the process ended, or had to be ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        timer = threading.Timer(seconds, self._process.kill)
        timer.daemon = True
        timer.start()
        try:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(request)
                self._process.stdin.flush()
            return self._process.stdout.readline(12 * MAX_CHARACTERS + 1000)  # the longest spelling in JSON
        finally:
            timer.cancel()

    def end(self) -> int:
        """Ends the process; its exit code."""
        self._process.kill()
        with contextlib.suppress(BrokenPipeError), self._process:
            pass
        return self._process.wait()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None


_lock = threading.Lock()
_running: list[_TemplateProcess] = []


def render_template(template: str, values: Mapping[str, Any], *, seconds: float = SECONDS) -> str:
    """The text of a template.

    Args:
        template: the source, Jinja.
        values: what the template may use, by name: text, numbers, lists and mappings, as in JSON.
        seconds: the time it may take.

    Raises:
        TemplateError: it is no template, rejects the values, or takes more time, memory or characters than allowed.
    """
    [found] = render_templates(template, [values], seconds=seconds)
    if isinstance(found, TemplateError):
        raise found
    return found.text


def render_templates(
    template: str, values: Sequence[Mapping[str, Any]], *, regions: bool = False, seconds: float = SECONDS
) -> list[Rendered | TemplateError]:
    """What a template makes of each of many values, in a few exchanges with the process.

    Args:
        template: the source, Jinja.
        values: of each text what the template may use, as in `render_template`.
        regions: ask for the places of what stands in `{% generation %}`.
        seconds: the time that a portion of the values may take.

    Returns:
        A text for each of the values, or what is wrong with it.

    Raises:
        TemplateError: the template is too long, or a portion takes more time or memory than allowed.
    """
    if len(template) > MAX_TEMPLATE_CHARACTERS:
        raise TemplateError(f"it has {len(template):,} characters, expected at most {MAX_TEMPLATE_CHARACTERS:,}")
    try:
        head = json.dumps({"template": template, "regions": regions, "seconds": seconds})[:-1]
        texts = [json.dumps(dict(each)) for each in values]
    except (TypeError, ValueError, RecursionError) as error:
        raise TemplateError(f"it is given what JSON cannot hold: {error}") from None
    answers: list[dict[str, Any]] = []
    for portion in _portions(texts):
        request = f'{head}, "values": [{", ".join(portion)}]}}\n'.encode()
        with _lock:
            if _running and (_running[0].owner != os.getpid() or not _running[0].is_alive):
                _running.clear()  # its process ended, or is that of the process that this one was forked from
            if not _running:
                _running.append(_TemplateProcess())
            found = _running[0].render(request, seconds)
        # After a text that is too long for all there is no other.
        answers += found + found[-1:] * (len(portion) - len(found))
    return [
        TemplateError(answer["error"])
        if "error" in answer
        else Rendered(answer["text"], tuple((begin, end) for begin, end in answer["regions"]))
        for answer in answers
    ]


def _portions(texts: Sequence[str]) -> Iterator[list[str]]:
    portion: list[str] = []
    size = 0
    for text in texts:
        if portion and size + len(text) > _PORTION:
            yield portion
            portion, size = [], 0
        portion.append(text)
        size += len(text)
    if portion:
        yield portion


@atexit.register
def _end() -> None:
    if _running and _running[0].owner == os.getpid():
        _running.pop().end()
