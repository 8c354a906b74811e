"""Chat templates of folders that nobody vouches for, rendered with limits on time, memory and output.

Within Python nothing can end `'x' * 10**9` or a loop of loops, so templates run in a process of their own
(`template_process`, in a `LimitedProcess`). It is started once, for all templates.
"""

import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rnnlib.extras import from_extra
from rnnlib.hub.template_process import MAX_CHARACTERS, MEMORY_BYTES
from rnnlib.sandbox import LimitedProcess, LimitError

with from_extra("hub", "rnnlib.hub"):
    import jinja2  # noqa: F401 (the process needs it)

SECONDS = 10.0
MAX_TEMPLATE_CHARACTERS = 2**20
_PROCESS = LimitedProcess(
    pathlib.Path(__file__).with_name("template_process.py"),
    ("jinja2", "markupsafe"),
    memory_bytes=MEMORY_BYTES,
    max_answer=12 * MAX_CHARACTERS + 1000,  # the longest spelling in JSON
)


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
        sizes = [len(json.dumps(dict(each))) for each in values]
    except (TypeError, ValueError, RecursionError) as error:
        raise TemplateError(f"it is given what JSON cannot hold: {error}") from None
    answers: list[dict[str, Any]] = []
    for portion in _portions(values, sizes):
        request = {"template": template, "regions": regions, "values": portion}
        try:
            found = _PROCESS.ask(request, seconds=seconds)["answers"]
        except LimitError as error:
            raise TemplateError(str(error)) from None
        # After a text that is too long for all there is no other.
        answers += found + found[-1:] * (len(portion) - len(found))
    return [
        TemplateError(answer["error"])
        if "error" in answer
        else Rendered(answer["text"], tuple((begin, end) for begin, end in answer["regions"]))
        for answer in answers
    ]


def _portions(values: Sequence[Mapping[str, Any]], sizes: Sequence[int]) -> Iterator[list[dict[str, Any]]]:
    portion: list[dict[str, Any]] = []
    total = 0
    for each, size in zip(values, sizes, strict=True):
        if portion and total + size > _PORTION:
            yield portion
            portion, total = [], 0
        portion.append(dict(each))
        total += size
    if portion:
        yield portion
