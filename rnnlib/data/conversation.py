"""Conversations, rows of `messages`: what a row must hold, in one line of error each."""

import json
from collections.abc import Collection, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np

ROW_KEYS = ("tools", "documents", "chat_template_kwargs")
"""Keys of a row beside its messages that templates read."""

SHAREGPT_FIELD = "conversations"
"""Where rows of ShareGPT's kind have their messages; they may have a key `system` beside it."""

# Its words for who says a message.
_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}


class Conversation(str):
    """A conversation as JSON: `messages`, and, where the row has them, `tools`, `documents`, `chat_template_kwargs`.

    Attributes:
        where: the file and the line that it is from, for messages.
    """

    where: str

    def __new__(cls, record: Mapping[str, Any], where: str) -> "Conversation":
        """The conversation of a row that was checked."""
        self = super().__new__(cls, json.dumps(record, ensure_ascii=False))
        self.where = where
        return self


@runtime_checkable
class ConversationEncoder(Protocol):
    """What turns conversations into tokens, such as `rnnlib.hub.conversations.ChatEncoder`."""

    @property
    def fingerprint(self) -> str:
        """Equal for encoders that give equal tokens and weights."""

    def encode(self, conversations: Any) -> list[tuple[np.ndarray, np.ndarray]]:
        """Of each conversation its tokens, and as uint8 1 for each token that is to be learned, else 0."""


def field_of_messages(names: Collection[str], messages_field: str) -> str | None:
    """The field of a row that has its messages: the one that is asked for, else ShareGPT's; None without either."""
    return next((name for name in (messages_field, SHAREGPT_FIELD) if name in names), None)


def conversation(record: Mapping[str, Any], messages_field: str, where: str) -> Conversation:
    """The conversation of a row.

    A message is `{"role": ..., "content": ...}`, or ShareGPT's `{"from": "human", "value": ...}`.

    Args:
        record: the row.
        messages_field: the key of its messages.
        where: the file and the line.

    Raises:
        ValueError: its messages are none of a chat; the message names the key, its value and what was expected.
    """
    messages = record.get(messages_field)
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{where}: {messages_field} is {_short(messages)}, expected a list of messages")
    messages = [_of_sharegpt(message, f"{where}: {messages_field}[{i}]") for i, message in enumerate(messages)]
    for i, message in enumerate(messages):
        _check_message(message, f"{where}: {messages_field}[{i}]")
    said = record.get("system") if messages_field == SHAREGPT_FIELD else None
    if said and messages[0]["role"] != "system":
        if not isinstance(said, str):
            raise ValueError(f"{where}: system is {_short(said)}, expected a text")
        messages = [{"role": "system", "content": said}, *messages]
    if not any(message["role"] == "assistant" for message in messages):
        roles = ", ".join(message["role"] for message in messages)
        raise ValueError(f"{where}: {messages_field} has the roles {roles}, expected an assistant's to learn from")
    kept = {key: record[key] for key in ROW_KEYS if record.get(key) is not None}
    if isinstance(kept.get("tools"), str):  # as some tables hold them
        try:
            kept["tools"] = json.loads(kept["tools"])
        except ValueError:
            raise ValueError(f"{where}: tools is {_short(kept['tools'])}, expected a list of schemas") from None
    for key, kind, name in (("tools", list, "a list of schemas"), ("chat_template_kwargs", dict, "an object")):
        if key in kept and not isinstance(kept[key], kind):
            raise ValueError(f"{where}: {key} is {_short(kept[key])}, expected {name}")
    return Conversation({"messages": messages, **kept}, where)


def _of_sharegpt(message: Any, where: str) -> Any:
    """A message of ShareGPT's kind with role and content; any other as it is."""
    if not isinstance(message, dict) or "from" not in message or message.get("role") is not None:
        return message
    speaker, rest = message["from"], {key: message[key] for key in message if key not in ("from", "value", "role")}
    if not isinstance(speaker, str) or speaker not in _SHAREGPT_ROLES:
        raise ValueError(f"{where}.from is {_short(speaker)}, expected one of {', '.join(_SHAREGPT_ROLES)}")
    return {**rest, "role": _SHAREGPT_ROLES[speaker], "content": message.get("value")}


def _check_message(message: Any, where: str) -> None:
    if not isinstance(message, dict):
        raise ValueError(f"{where} is {_short(message)}, expected an object with role and content")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        has = f"; it has the keys {', '.join(message)}" if role is None else ""
        raise ValueError(f"{where}.role is {_short(role)}, expected a text such as 'user' or 'assistant'{has}")
    if not isinstance(content, str | list | None):
        raise ValueError(f"{where}.content is {_short(content)}, expected a text")
    if content is None and role != "tool" and not any(message.get(key) for key in message if key != "role"):
        raise ValueError(f"{where}.content is missing, expected a text")


def _short(value: Any) -> str:
    text = "missing" if value is None else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."
