"""Chat templates of a published tokenizer's folder, as transformers applies them."""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from rnnlib.files import expect_within, read_text
from rnnlib.hub.config_reader import read_json
from rnnlib.hub.file_names import CHAT_TEMPLATE, CHAT_TEMPLATE_JSON, CHAT_TEMPLATES, TOKENIZER_CONFIG
from rnnlib.hub.special_tokens import special_tokens
from rnnlib.hub.template_sandbox import TemplateError, render_template

Message = Mapping[str, Any]
# Stands for the end of a message that is continued, while the template is rendered.
_END_OF_CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "
_REASONING = ("reasoning_content", "thinking", "reasoning")


def chat_template(folder: pathlib.Path, *, has_tools: bool = False) -> str | None:
    """The folder's chat template (Jinja), from files of its own or from tokenizer_config.json; None if it has none.

    Args:
        folder: the tokenizer's folder.
        has_tools: whether tools are given. Of several templates, the one called "tool_use" is then preferred to the
            one called "default".

    Raises:
        ValueError: there are several templates, and none is called "default".
    """
    files = {path.stem: path for path in sorted((folder / CHAT_TEMPLATES).glob("*.jinja"))}
    if (folder / CHAT_TEMPLATE).is_file():
        files["default"] = folder / CHAT_TEMPLATE
    if files:
        for path in files.values():
            expect_within(folder, path)
        return _chosen(folder, {name: read_text(path) for name, path in files.items()}, has_tools)
    for name in (TOKENIZER_CONFIG, CHAT_TEMPLATE_JSON):
        template = read_json(folder / name).get("chat_template") if (folder / name).is_file() else None
        if isinstance(template, list):
            entries = [entry for entry in template if isinstance(entry, Mapping) and isinstance(entry.get("name"), str)]
            template = {entry["name"]: entry.get("template") for entry in entries}
        if isinstance(template, Mapping):
            named = {name: text for name, text in template.items() if isinstance(text, str)}
            template = _chosen(folder, named, has_tools) if named else None
        if isinstance(template, str):
            return template
    return None


def _chosen(folder: pathlib.Path, named: Mapping[str, str], has_tools: bool) -> str:
    for name in ("tool_use", "default") if has_tools else ("default",):
        if name in named:
            return named[name]
    raise ValueError(f"{folder}: its chat templates are called {', '.join(sorted(named))}, expected one called default")


def render_chat(
    folder: pathlib.Path,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    options: Mapping[str, Any] | None = None,
) -> str:
    """Renders messages with the folder's chat template, as the text that a chat model continues.

    A key of a message whose value is None counts as absent. If the template refuses a system's message, its text is put
    before that of the user's first message.

    Args:
        folder: the tokenizer's folder.
        messages: mappings with the keys "role" ("system", "user" or "assistant") and "content".
        add_generation_prompt: whether the text ends with the beginning of the assistant's answer.
        continue_final_message: whether the last message is continued: the text ends where its content ends. Excludes
            `add_generation_prompt`.
        tools: JSON schemas of functions that the model may call.
        documents: mappings with the keys "title" and "text".
        options: further variables of the template, such as `{"enable_thinking": False}`.

    Returns:
        The text. The name of a special token in it stands for that token.

    Raises:
        ValueError: the folder has no template, or the template rejects these messages.
    """
    template = chat_template(folder, has_tools=tools is not None)
    if template is None:
        raise ValueError(f"{folder}: there is no chat template, expected one in tokenizer_config.json")
    if not messages:
        raise ValueError(f"{folder}: there are no messages, expected at least one for its chat template")
    if add_generation_prompt and continue_final_message:
        raise ValueError(f"{folder}: a last message is continued, expected no generation prompt behind it")
    values: dict[str, Any] = {
        "tools": None if tools is None else list(tools),
        "documents": None if documents is None else list(documents),
        "add_generation_prompt": add_generation_prompt,
        **special_tokens(folder),
        **(options or {}),
    }
    given = [as_in_templates(message) for message in messages]
    try:
        try:
            return _render(template, given, values, continue_final_message)
        except TemplateError:
            folded = without_system(given)
            if folded is None:
                raise
            try:
                return _render(template, folded, values, continue_final_message)
            except TemplateError:
                pass
            raise
    except TemplateError as error:
        raise ValueError(f"{folder}: its chat template does not take the messages: {error}") from error


def as_in_templates(message: Message) -> dict[str, Any]:
    """A message without keys of None, its reasoning under the names that templates read."""
    found = {key: value for key, value in message.items() if value is not None}
    reasoning = next((found[key] for key in _REASONING if key in found), None)
    return found if reasoning is None else {"thinking": reasoning, **found, "reasoning_content": reasoning}


def without_system(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """The messages with the system's text before the first user's; None if they do not begin with these two."""
    roles = [message.get("role") for message in messages[:2]]
    said = messages[0].get("content")
    if roles != ["system", "user"] or not isinstance(said, str):
        return None
    asked = messages[1].get("content", "")
    both = f"{said}\n\n{asked}" if isinstance(asked, str) else [{"type": "text", "text": f"{said}\n\n"}, *asked]
    return [{**messages[1], "content": both}, *messages[2:]]


def _render(template: str, messages: Sequence[dict[str, Any]], values: Mapping[str, Any], is_continued: bool) -> str:
    if not is_continued:
        return render_template(template, {"messages": list(messages), **values})
    if "content" not in template:
        raise TemplateError("it does not read the content of messages, so that the last one cannot be continued")
    begun, content = _marked(messages[-1])
    text = render_template(template, {"messages": [*messages[:-1], begun], **values})
    mark = _END_OF_CONTINUED.strip()
    if mark not in text or content.strip() not in text:
        raise TemplateError("the last message's content does not stand in the text, so that it cannot be continued")
    end = text.rindex(mark)
    # A template that trims contents has trimmed the mark's space, and is to have trimmed the content's own too.
    return text[:end] if text[end:].startswith(_END_OF_CONTINUED) else text[:end].rstrip()


def _marked(message: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """A message whose content ends with a mark, and the content (the last text of a content in parts)."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + _END_OF_CONTINUED}, content
    parts = list(content) if isinstance(content, list | tuple) else []
    for i in reversed(range(len(parts))):
        if isinstance(parts[i], Mapping) and isinstance(parts[i].get("text"), str):
            text = parts[i]["text"]
            parts[i] = {**parts[i], "text": text + _END_OF_CONTINUED}
            return {**message, "content": parts}, text
    raise TemplateError(f"the last message has the content {json.dumps(content)[:80]}, expected text to continue")
