"""Chat templates and special tokens of a published tokenizer's folder."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from rnnlib.hub.keys import read_json
from rnnlib.hub.template_sandbox import TemplateError, render_template

# Files beside tokenizer.json that say how to use it. A folder may have any of them.
TOKENIZER_FILES = (
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "special_tokens_map.json",
)


def special_token(folder: pathlib.Path, name: str) -> str | None:
    """The text of a special token, such as "bos_token", from tokenizer_config.json; None if it has no such token."""
    path = folder / TOKENIZER_FILES[0]
    token = read_json(path).get(name) if path.is_file() else None
    token = token.get("content") if isinstance(token, Mapping) else token
    return token if isinstance(token, str) else None


def end_tokens(folder: pathlib.Path) -> tuple[int, ...]:
    """The ids of the tokens that end generation, from generation_config.json; empty if the file names none."""
    path = folder / "generation_config.json"
    tokens = read_json(path).get("eos_token_id") if path.is_file() else None
    tokens = tokens if isinstance(tokens, list) else [tokens]
    return tuple(token for token in tokens if isinstance(token, int) and not isinstance(token, bool))


def chat_template(folder: pathlib.Path) -> str | None:
    """The folder's chat template (Jinja), from a file of its own or from tokenizer_config.json; None if it has none.

    Of several named templates, the one called "default" is returned.
    """
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        template = read_json(folder / name).get("chat_template") if (folder / name).is_file() else None
        if isinstance(template, list):
            named = (entry for entry in template if isinstance(entry, Mapping) and entry.get("name") == "default")
            template = next(named, {}).get("template")
        if isinstance(template, str):
            return template
    return None


def render_chat(
    folder: pathlib.Path, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
) -> str:
    """Renders messages with the folder's chat template, as the text that a chat model continues.

    Args:
        folder: the tokenizer's folder.
        messages: mappings with the keys "role" ("system", "user" or "assistant") and "content".
        add_generation_prompt: whether the text ends with the beginning of the assistant's answer.

    Returns:
        The text. The name of a special token in it stands for that token.

    Raises:
        ValueError: the folder has no template, or the template rejects these messages.
    """
    template = chat_template(folder)
    if template is None:
        raise ValueError(f"{folder}: there is no chat template, expected one in tokenizer_config.json")
    tokens = {name: special_token(folder, name) or "" for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    values = {"messages": list(messages), "add_generation_prompt": add_generation_prompt, **tokens}
    try:
        return render_template(template, values)
    except TemplateError as error:
        raise ValueError(f"{folder}: its chat template does not take the messages: {error}") from error
