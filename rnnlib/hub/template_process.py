"""The process that renders chat templates: a template is code that someone else wrote.

`rnnlib.sandbox.program` runs this file, for `rnnlib.hub.template_sandbox`. It imports jinja2 and the standard library
only, has limits on its memory and time, can open no file for writing and start no process. What a template may use
(filters, globals, extensions) is all in `environment`.
"""

import datetime
import functools
import json
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

MEMORY_BYTES = 2**30
MAX_CHARACTERS = 2**24
_MAX_MESSAGE = 300
# What jinja2 offers that templates of messages have no use for, or that draws at random.
_WITHOUT_USE = ("center", "pprint", "random", "urlize", "wordwrap", "xmlattr")
# Stand around what is generated where its place is asked for. Nobody can have written them into a text before.
_NONCE = os.urandom(12).hex()
_BEGIN, _END = f"\0{_NONCE}<", f"\0{_NONCE}>"
_MARK = re.compile(f"({_BEGIN}|{_END})")


def environment() -> Any:
    """The environment of templates: the sandbox denies them Python's objects, and there is no file to include."""
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """`{% generation %}...{% endgeneration %}` around what the assistant says, which is the text within.

        Where `environment.is_marking`, it stands between marks.
        """

        tags = {"generation"}  # noqa: RUF012 (jinja2 reads it)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

        def _text(self, caller: Any) -> str:
            marking = self.environment.is_marking  # type: ignore[attr-defined]
            return f"{_BEGIN}{caller()}{_END}" if marking else caller()

    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    made.is_marking = False  # type: ignore[attr-defined]
    del made.globals["lipsum"]
    for name in _WITHOUT_USE:
        del made.filters[name]
    made.globals["raise_exception"] = _refuse
    made.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    made.filters["tojson"] = _to_json
    return made


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON as transformers' templates have it: without escapes of HTML's characters, which jinja2's filter writes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    import jinja2

    raise jinja2.TemplateError(message)


def render(made: Any, request: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The answers to a request: for each of its `values` `text` and `regions`, or `error`, what was wrong in one line.

    `regions` are the places `[begin, end]` in the text of what stands in `{% generation %}`, if the request asks for
    `regions`.

    Raises:
        MemoryError: the template takes more memory than the process has.
    """
    import jinja2

    answers: list[dict[str, Any]] = []
    length = 0
    made.is_marking = request["regions"]
    for values in request["values"]:
        try:
            pieces: list[str] = []
            for piece in _compiled(made, request["template"]).generate(**values):
                pieces.append(piece)
                length += len(piece)
                if length > MAX_CHARACTERS:
                    return [*answers, {"error": f"it writes more than {MAX_CHARACTERS:,} characters"}]
            answers.append(_without_marks("".join(pieces)))
        except MemoryError:
            raise
        except Exception as error:  # a template may raise anything
            kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
            line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            answers.append({"error": " ".join(f"{kind}{error}{line}"[:_MAX_MESSAGE].split())})
    return answers


@functools.lru_cache(maxsize=2)
def _compiled(made: Any, template: str) -> Any:
    return made.from_string(template)


def _without_marks(marked: str) -> dict[str, Any]:
    """A text without marks, and the places that were between them."""
    text, begin, depth = "", 0, 0
    regions: list[tuple[int, int]] = []
    for part in _MARK.split(marked):
        if part == _BEGIN:
            begin = len(text) if depth == 0 else begin
            depth += 1
        elif part == _END:
            depth -= 1
            if depth == 0 and begin < len(text):
                regions.append((begin, len(text)))
        else:
            text += part
    return {"text": text, "regions": regions}


def prepare() -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """The function that answers requests, as `render` says."""
    made = environment()
    return lambda request: {"answers": render(made, request)}
