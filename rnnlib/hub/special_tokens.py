"""Special tokens of a published tokenizer's folder: which files name them, and which of these files counts.

The order is that of transformers. A named token (`eos_token`) is in tokenizer_config.json; special_tokens_map.json, of
older folders, counts where the former has no `added_tokens_decoder`. Tokens that end generation are in
generation_config.json, or else in config.json.
"""

import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from rnnlib.extras import from_extra
from rnnlib.files import MAX_JSON_BYTES, expect_within, read_bytes, write_atomically
from rnnlib.hub.config_reader import read_json, write_json
from rnnlib.hub.file_names import (
    ADDED_TOKENS,
    CHAT_TEMPLATE,
    CHAT_TEMPLATE_JSON,
    CHAT_TEMPLATES,
    CONFIG,
    GENERATION_CONFIG,
    SPECIAL_TOKENS_MAP,
    TOKENIZER,
    TOKENIZER_CONFIG,
)
from rnnlib.tokenizer_bounds import MAX_TOKENS
from rnnlib.tokenizers import Backend, FileTokenizer, read_backend

with from_extra("hub", "rnnlib.hub"):
    import tokenizers

_BESIDE = (CHAT_TEMPLATE, CHAT_TEMPLATE_JSON, GENERATION_CONFIG, SPECIAL_TOKENS_MAP, ADDED_TOKENS)
_DECODER = "added_tokens_decoder"
# Objects of config.json that may name the end in its place.
_TEXT_PARTS = ("decoder", "generator", "text_config")


def special_tokens(folder: pathlib.Path) -> dict[str, str]:
    """The texts of a folder's named special tokens, such as `{"bos_token": "<s>"}`, without those that are null."""
    return {name: str(token.content) for name, token in _named_tokens(folder).items()}


def end_tokens(folder: pathlib.Path) -> tuple[int, ...]:
    """The ids of the tokens that end generation, from the first file that names any; empty if there is none."""
    keys = _read(folder / CONFIG)
    parts = [part for part in map(keys.get, _TEXT_PARTS) if isinstance(part, Mapping)]
    for source in (_read(folder / GENERATION_CONFIG), keys, *parts[:1]):
        given = source.get("eos_token_id")
        tokens = given if isinstance(given, list) else [given]
        found = tuple(token for token in tokens if isinstance(token, int) and not isinstance(token, bool))
        if found:
            return found
    return ()


def folder_tokenizer(folder: pathlib.Path) -> FileTokenizer | None:
    """The tokenizer of a published folder; None if it has no tokenizer.json.

    Tokens that only other files name are added to it. Its end of a document is the folder's `eos_token`, or else the
    first token that ends generation.

    Raises:
        ValueError: a file is damaged, or names a token in another form than transformers writes.
    """
    path = folder / TOKENIZER
    if not path.exists():
        return None
    expect_within(folder, path)
    backend = read_backend(path)
    named = _named_tokens(folder)
    backend.add_tokens(_added_tokens(folder, named, backend))
    return FileTokenizer(backend, end_token=end_token(folder, backend))


def end_token(folder: pathlib.Path, backend: Backend) -> str | None:
    """The text of the token that ends a document: `eos_token`, or else the first token that ends generation."""
    named = special_tokens(folder).get("eos_token")
    numbers = (number for number in end_tokens(folder) if number >= 0)
    return named or next(filter(None, map(backend.id_to_token, numbers)), None)


def copy_tokenizer_files(folder: pathlib.Path, target: pathlib.Path) -> None:
    """Copies what says how to use a folder's tokenizer into another folder, which may have another config.json.

    What has these names in the other folder is replaced, and not written through where it is a link.

    Raises:
        ValueError: a file is a link that leads out of its folder, or is too large.
    """
    _copy([folder / name for name in (TOKENIZER_CONFIG, *_BESIDE)], folder, target)
    copy_templates(folder, target)
    ends = end_tokens(folder)
    if ends and end_tokens(target) != ends:  # they are in config.json
        values = _read(folder / GENERATION_CONFIG) | {"eos_token_id": list(ends)}
        write_json(target / GENERATION_CONFIG, values)


def copy_templates(folder: pathlib.Path, target: pathlib.Path) -> None:
    """Copies a folder's additional chat templates into another folder; errors as in `copy_tokenizer_files`."""
    _copy(sorted((folder / CHAT_TEMPLATES).glob("*.jinja")), folder, target)


def _copy(paths: Iterable[pathlib.Path], folder: pathlib.Path, target: pathlib.Path) -> None:
    for path in paths:
        if path.is_file():
            expect_within(folder, path)
            copy = target / path.relative_to(folder)
            copy.parent.mkdir(exist_ok=True)
            expect_within(target, copy.parent)
            write_atomically(copy, read_bytes(path, at_most=MAX_JSON_BYTES))


def _named_tokens(folder: pathlib.Path) -> dict[str, tokenizers.AddedToken]:
    keys = _read(folder / TOKENIZER_CONFIG)
    where = dict.fromkeys(keys, TOKENIZER_CONFIG)
    if _DECODER not in keys:
        older = _read(folder / SPECIAL_TOKENS_MAP)
        keys = {**keys, **older}
        where |= dict.fromkeys(older, SPECIAL_TOKENS_MAP)
    return {
        name: _token(folder / where[name], name, value)
        for name, value in keys.items()
        if name.endswith("_token") and isinstance(value, str | Mapping)
    }


def _added_tokens(
    folder: pathlib.Path, named: Mapping[str, tokenizers.AddedToken], backend: Backend
) -> list[tokenizers.AddedToken]:
    """Tokens that tokenizer.json may lack, in the order in which transformers adds them."""
    keys = _read(folder / TOKENIZER_CONFIG)
    older = {} if _DECODER in keys else _read(folder / SPECIAL_TOKENS_MAP)
    path = folder / TOKENIZER_CONFIG
    numbered = keys.get(_DECODER) or {}
    if not isinstance(numbered, Mapping) or not all(str(number).isdecimal() for number in numbered):
        raise ValueError(f"{path}: {_DECODER} is {str(numbered)[:80]}, expected an object of tokens by their ids")
    found = [
        (int(number), _token(path, f"{_DECODER}: {number}", token, special=False)) for number, token in numbered.items()
    ]
    names = {str(token.content) for token in named.values()}
    if _DECODER not in keys:
        for name, number in _read(folder / ADDED_TOKENS).items():
            if isinstance(number, bool) or not isinstance(number, int):
                raise ValueError(f"{folder / ADDED_TOKENS}: {name} is {number!r}, expected the token's id")
            found.append((number, tokenizers.AddedToken(name, normalized=name not in names, special=name in names)))
    tokens = [token for _, token in sorted(found, key=lambda pair: pair[0])]
    for token in tokens:
        token.special = token.special or str(token.content) in names
    given = {str(token.content) for token in (*tokens, *backend.get_added_tokens_decoder().values())}
    rest = [*named.values(), *_more(path, keys), *_more(folder / SPECIAL_TOKENS_MAP, older)]
    for token in rest:
        if str(token.content) not in given:
            given.add(str(token.content))
            tokens.append(token)
    if len(tokens) > MAX_TOKENS:
        raise ValueError(f"{folder}: its files name {len(tokens):,} tokens, expected at most {MAX_TOKENS:,}")
    return tokens


def _more(path: pathlib.Path, keys: Mapping[str, Any]) -> Iterable[tokenizers.AddedToken]:
    """Special tokens without a role of their own."""
    for key in ("additional_special_tokens", "extra_special_tokens"):
        entries = keys.get(key) or []
        if not isinstance(entries, list | Mapping):
            raise ValueError(f"{path}: {key} is {str(entries)[:80]}, expected a list of tokens")
        yield from (
            _token(path, key, entry) for entry in (entries.values() if isinstance(entries, Mapping) else entries)
        )


def _token(path: pathlib.Path, key: str, value: Any, *, special: bool = True) -> tokenizers.AddedToken:
    """A token that is written as its text, or as an object with its text and flags."""
    flags = {"content": value} if isinstance(value, str) else value
    content = flags.get("content") if isinstance(flags, Mapping) else None
    if not isinstance(content, str) or not content:
        raise ValueError(f"{path}: {key} is {str(value)[:80]}, expected a token: its text, or an object with `content`")
    said = {name: flags[name] for name in ("single_word", "lstrip", "rstrip", "normalized", "special") if name in flags}
    for name, flag in said.items():
        if not isinstance(flag, bool):
            raise ValueError(f"{path}: {key}: {name} is {flag!r}, expected true or false")
    return tokenizers.AddedToken(content, **{"special": special, **said})


def _read(path: pathlib.Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
