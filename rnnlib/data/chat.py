"""Conversations as tokens to train on: a chat template's text, and which of its tokens the assistant has said.

Where the template has `{% generation %}`, what stands in it is the assistant's. Elsewhere a message of the assistant
begins behind the text of the messages before it with the generation prompt. It ends where the text of the messages up
to it ends: with whatever closes a turn, which a model is to say, too. Some templates write a turn in another way once
others follow: they leave the reasoning out at its beginning. Then what is left of it is the assistant's.
"""

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rnnlib.configuration import keyed_values
from rnnlib.data.config import DataConfig
from rnnlib.data.conversation import Conversation
from rnnlib.files import read_text, write_atomically
from rnnlib.hub.chat import as_in_templates, chat_template, without_system
from rnnlib.hub.file_names import CHAT_TEMPLATE, CHAT_TEMPLATES
from rnnlib.hub.special_tokens import special_tokens
from rnnlib.hub.template_sandbox import Rendered, TemplateError, render_templates
from rnnlib.tokenizers import FileTokenizer, Tokenizer

_GENERATION = re.compile(r"{%[-+]?\s*generation\s*[-+]?%}")
Region = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A chat template with what it may use.

    Attributes:
        text: its source, Jinja.
        with_tools: the template for conversations with tools.
        special_tokens: the texts of named special tokens, such as `{"bos_token": "<s>"}`.
        options: further variables, such as `{"enable_thinking": False}`.
    """

    text: str
    with_tools: str
    special_tokens: Mapping[str, str]
    options: Mapping[str, Any]

    @classmethod
    def of_folder(
        cls, folder: Path, *, file: str | os.PathLike[str] | None = None, options: Mapping[str, Any] | None = None
    ) -> "ChatTemplate":
        """The template of a tokenizer's folder.

        Args:
            folder: the tokenizer's folder.
            file: a Jinja file in place of the folder's template.
            options: further variables.

        Raises:
            ValueError: there is no template, or no such file.
        """
        if file is not None:
            if not os.path.isfile(file):
                raise ValueError(f"chat_template is {os.fspath(file)!r}, expected a file with a template (Jinja)")
            text = with_tools = read_text(file)
        else:
            found = chat_template(folder), chat_template(folder, has_tools=True)
            if found[0] is None or found[1] is None:
                raise ValueError(
                    f"{folder}: there is no chat template beside the tokenizer, expected one for format 'chat', or a "
                    "file that is named by chat_template (--data.chat-template)"
                )
            text, with_tools = found[0], found[1]
        return cls(text, with_tools, special_tokens(folder), dict(options or {}))

    def save(self, folder: Path) -> None:
        """Writes the template into a folder, where it counts before any other."""
        write_atomically(folder / CHAT_TEMPLATE, self.text.encode())
        if self.with_tools != self.text:
            (folder / CHAT_TEMPLATES).mkdir(exist_ok=True)
            write_atomically(folder / CHAT_TEMPLATES / "tool_use.jinja", self.with_tools.encode())


class ChatEncoder:
    """Encodes conversations with a tokenizer and a chat template.

    Attributes:
        template: the template.
        fingerprint: equal for encoders that give equal tokens and weights.
    """

    def __init__(self, tokenizer: FileTokenizer, template: ChatTemplate):
        self._tokenizer = tokenizer
        self.template = template
        parts = (tokenizer.fingerprint, dataclasses.astuple(template))
        self.fingerprint = hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()

    def encode(self, conversations: Sequence[Conversation]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Of each conversation its tokens and their weights, 1 for those that are the assistant's, else 0.

        Names of special tokens in the text stand for these tokens. A token counts as the assistant's if one of its
        characters is; where the assistant's first words and what stands before them are one token, that is this one.

        Raises:
            ValueError: the template does not take a conversation, or it cannot be told what the assistant says in it.
        """
        rendered = self.render(conversations)
        encoded = self._tokenizer.encode_marked_batch([text for text, _ in rendered])
        return [
            (ids, _weights(spans, len(text), regions))
            for (ids, spans), (text, regions) in zip(encoded, rendered, strict=True)
        ]

    def render(self, conversations: Sequence[Conversation]) -> list[Rendered]:
        """Of each conversation its text and the places in it of what the assistant says; errors as in `encode`."""
        records = [json.loads(conversation) for conversation in conversations]
        given = [[as_in_templates(message) for message in record["messages"]] for record in records]
        texts = self._render(list(zip(given, records, [False] * len(given), strict=True)))
        refused = {i: found for i, found in enumerate(texts) if isinstance(found, TemplateError)}
        # A template may refuse a system's message, whose text is then put before the user's.
        folded = {i: messages for i in refused if (messages := without_system(given[i])) is not None}
        again = self._render([(messages, records[i], False) for i, messages in folded.items()])
        for (i, messages), found in zip(folded.items(), again, strict=True):
            if isinstance(found, Rendered):
                given[i], texts[i] = messages, found
        whole: list[Rendered] = []
        for conversation, found in zip(conversations, texts, strict=True):
            if isinstance(found, TemplateError):
                raise ValueError(f"{conversation.where}: the chat template does not take the messages: {found}")
            whole.append(found)
        # Of two templates both or none have the marks, or else prefixes serve.
        if not all(_GENERATION.search(text) for text in (self.template.text, self.template.with_tools)):
            whole = self._regions_of_prefixes(conversations, records, given, whole)
        for conversation, found in zip(conversations, whole, strict=True):
            if not found.regions:
                raise ValueError(
                    f"{conversation.where}: the chat template's text has nothing of the assistant's within "
                    "{% generation %}, expected its messages there"
                )
        return whole

    def _regions_of_prefixes(
        self,
        conversations: Sequence[Conversation],
        records: Sequence[Mapping[str, Any]],
        given: Sequence[Sequence[dict[str, Any]]],
        whole: Sequence[Rendered],
    ) -> list[Rendered]:
        """The texts with the places of the assistant's messages, by the texts of the messages before and up to each."""
        said = [
            (number, i)
            for number, messages in enumerate(given)
            for i, message in enumerate(messages)
            if message["role"] == "assistant"
        ]
        asked = self._render(
            [
                (given[number][: i + more], records[number], not more)
                for number, i in said
                for more in ((0, 1) if i else (1,))
            ]
        )
        answers = iter(asked)
        regions: list[list[Region]] = [[] for _ in given]
        for number, i in said:
            before = next(answers) if i else Rendered("", ())
            up_to = next(answers)
            where = f"{conversations[number].where}: messages[{i}]"
            for found in (before, up_to):
                if isinstance(found, TemplateError):
                    raise ValueError(
                        f"{where}: the chat template does not take the messages up to this one alone: {found}; mark in "
                        "the template what the assistant says with {% generation %}"
                    )
            assert isinstance(before, Rendered) and isinstance(up_to, Rendered)
            region = _region(whole[number].text, before.text, up_to.text, _said(given[number][i]))
            if region is None or (regions[number] and region[0] < regions[number][-1][1]):
                raise ValueError(
                    f"{where}: the chat template writes it in another way when messages follow, so that its place is "
                    "not known; mark in the template what the assistant says with {% generation %}"
                )
            regions[number].append(region)
        return [Rendered(found.text, tuple(own)) for found, own in zip(whole, regions, strict=True)]

    def _render(
        self, wanted: Sequence[tuple[Sequence[dict[str, Any]], Mapping[str, Any], bool]]
    ) -> list[Rendered | TemplateError]:
        """Texts of messages, their conversation's other keys, and whether the generation prompt follows."""
        found: dict[int, Rendered | TemplateError] = {}
        for template in dict.fromkeys((self.template.text, self.template.with_tools)):
            numbers = [
                number
                for number, (_, record, _) in enumerate(wanted)
                if template == (self.template.with_tools if record.get("tools") else self.template.text)
            ]
            values = [self._values(*wanted[number]) for number in numbers]
            found |= dict(zip(numbers, render_templates(template, values, regions=True), strict=True))
        return [found[number] for number in range(len(wanted))]

    def _values(self, messages: Sequence[dict[str, Any]], record: Mapping[str, Any], is_prompt: bool) -> dict[str, Any]:
        return {
            "messages": list(messages),
            "tools": record.get("tools"),
            "documents": record.get("documents"),
            "add_generation_prompt": is_prompt,
            **self.template.special_tokens,
            **self.template.options,
            **(record.get("chat_template_kwargs") or {}),
        }


def chat_encoder(config: DataConfig, tokenizer: Tokenizer, folder: str | os.PathLike[str] | None = None) -> ChatEncoder:
    """The encoder of a configuration whose format is "chat".

    Args:
        config: names the template, if it is not the folder's, and the tokenizer.
        tokenizer: the tokenizer.
        folder: has the template; None for the folder of the tokenizer's file.

    Raises:
        ValueError: there is no template, or the tokenizer is the bytes.
    """
    if not isinstance(tokenizer, FileTokenizer):
        raise ValueError(
            "format is 'chat' and the tokenizer 'byte', expected a tokenizers JSON file (--data.tokenizer, --init)"
        )
    where = Path(config.tokenizer).parent if folder is None else Path(folder)
    options = keyed_values("chat_options", config.chat_options)
    return ChatEncoder(tokenizer, ChatTemplate.of_folder(where, file=config.chat_template, options=options))


def _said(message: Mapping[str, Any]) -> str:
    """The text of a message's content, without reasoning before it."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    texts: list[str] = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    return texts[-1].rpartition("</think>")[2].strip() if texts else ""


def _region(whole: str, before: str, up_to: str, said: str) -> Region | None:
    """The place of a message in the text of the whole conversation; None if it cannot be told.

    Args:
        whole: the text of all messages.
        before: that of the messages before this one, with the generation prompt.
        up_to: that of the messages up to this one.
        said: a text that stands in the message.
    """
    # A generation prompt may begin a reasoning that is not there in the message.
    begin = _common(before, whole)
    for start in range(_common(before, up_to), len(up_to)):
        turn = up_to[start:]
        if said in turn and whole.startswith(turn, begin):
            return begin, begin + len(turn)
    return None


def _common(one: str, other: str) -> int:
    """How many characters two texts have in common at their beginning."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low


def _weights(spans: Sequence[tuple[int, int]], length: int, regions: Sequence[Region]) -> np.ndarray:
    """uint8, 1 for each token, by its place in a text of `length` characters, that has characters in a region."""
    inside = np.zeros(length + 1, np.int64)
    for begin, end in regions:
        inside[begin:end] = 1
    counts = np.concatenate([np.zeros(1, np.int64), np.cumsum(inside)])
    begins, ends = np.asarray(spans, np.int64).reshape(-1, 2).T
    # A token without characters counts with the one that follows it.
    return (counts[np.maximum(ends, begins + 1)] > counts[begins]).astype(np.uint8)
