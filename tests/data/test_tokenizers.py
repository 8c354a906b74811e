"""Tokenizers: text comes back, bytes are counted, files are whole or absent."""

import base64
import json
import re
import struct

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st

from rnnlib import tokenizer_bounds
from rnnlib.data import ByteTokenizer, Tokenizer, load_tokenizer, train_tokenizer
from rnnlib.tokenizers import END_OF_DOCUMENT

TEXTS = ["def decay(state, gate):\n    return state * gate\n" * 3, "the state decays, the gate écrit → 漢字"] * 4


@pytest.fixture(scope="module")
def trained():
    return train_tokenizer(TEXTS, vocabulary_size=290)


@given(text=st.text(max_size=60))
@example(text=f"a text about {END_OF_DOCUMENT} and é")
def test_text_comes_back(trained, text):
    text = re.sub("[\ud800-\udfff]", "\ufffd", text)  # a lone surrogate has no bytes
    for tokenizer in (ByteTokenizer(), trained):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.token_bytes[ids].sum() == len(text.encode())
        assert all(0 <= i < tokenizer.vocabulary_size for i in ids)
        (batch,) = tokenizer.encode_batch([text])
        assert batch.tolist() == ids
        assert tokenizer.decode([*ids, tokenizer.end_of_document]) == text


def test_protocol(trained):
    for tokenizer in (ByteTokenizer(), trained):
        assert isinstance(tokenizer, Tokenizer)
        assert tokenizer.token_bytes.shape == (tokenizer.vocabulary_size,)
        assert tokenizer.token_bytes.dtype == np.int32
        assert tokenizer.token_bytes[tokenizer.end_of_document] == 0
    assert trained.vocabulary_size == 290
    assert len(trained.encode(TEXTS[0])) < 0.5 * len(TEXTS[0])


def test_training_writes_the_file_whole(tmp_path, trained):
    path = tmp_path / "new" / "tokenizer.json"
    again = train_tokenizer(TEXTS, vocabulary_size=290, path=path)
    assert again.fingerprint == trained.fingerprint
    assert [entry.name for entry in path.parent.iterdir()] == ["tokenizer.json"]
    loaded = load_tokenizer(path)
    assert loaded.fingerprint == trained.fingerprint
    assert loaded.encode(TEXTS[1]) == trained.encode(TEXTS[1])

    def interrupted():
        yield TEXTS[0]
        raise KeyboardInterrupt

    before = path.read_bytes()
    with pytest.raises(KeyboardInterrupt):
        train_tokenizer(interrupted(), vocabulary_size=300, path=path)
    assert path.read_bytes() == before and len(list(path.parent.iterdir())) == 1


def test_partial_characters_do_not_fail():
    ids = ByteTokenizer().encode("é")
    assert ByteTokenizer().decode(ids[:1]) == "�"


def test_lone_surrogates_become_replacement_characters(trained):
    for tokenizer in (ByteTokenizer(), trained):
        ids = tokenizer.encode("a\ud83d b")
        assert tokenizer.decode(ids) == "a� b" and tokenizer.encode_batch(["a\ud83d b"])[0].tolist() == ids


def _word_tokenizer(special=()):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "▁a": 1, "<0xC3>": 2, "é": 3}, "[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    tokenizer.enable_truncation(2)
    tokenizer.add_special_tokens(list(special))
    return tokenizer


def test_other_tokenizers_files(tmp_path):
    path = tmp_path / "words.json"
    _word_tokenizer().save(str(path))
    tokenizer = load_tokenizer(path)
    assert tokenizer.end_of_document == 4 and tokenizer.vocabulary_size == 5  # added
    assert tokenizer.encode("a a a") == [1, 1, 1]  # not truncated
    assert tokenizer.token_bytes.tolist() == [5, 2, 1, 2, 0]
    _word_tokenizer(["</s>"]).save(str(path))
    tokenizer = load_tokenizer(path)
    assert tokenizer.end_of_document == 4 and tokenizer.vocabulary_size == 5  # the file's own


def test_errors(tmp_path):
    with pytest.raises(ValueError, match=r"there is no file 'nowhere\.json'"):
        load_tokenizer("nowhere.json")
    (tmp_path / "x.json").write_text('{"a": 1}')
    with pytest.raises(ValueError, match=r"x\.json: not a tokenizers JSON file"):
        load_tokenizer(tmp_path / "x.json")
    with pytest.raises(ValueError, match=r"vocabulary_size must be at least 257.*got 10"):
        train_tokenizer(TEXTS, vocabulary_size=10)


def _nested(growths):
    return {
        "type": "Sequence",
        "normalizers": [{"type": "Replace", "pattern": {"Regex": "a"}, "content": "a" * count} for count in growths],
    }


def _charsmap(longest):
    return base64.b64encode(struct.pack("<I", 4) + b"trie" + b"x\0" + b"a" * longest + b"\0").decode()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model": {"type": "WordLevel", "vocab": {"a": 4 * 10**9}}},
            r"token 'a' is 4000000000, expected below 64",
        ),
        ({"added_tokens": [{"content": "x", "id": 2**31}]}, r"token 'x' is 2147483648, expected below"),
        ({"model": {"vocab": dict.fromkeys(map(str, range(65)), 1)}}, r"vocab has 65 entries, expected"),
        ({"model": {"vocab": [["a", 0.0]] * (65)}}, r"vocab has 65 entries, expected"),
        ({"model": {"vocab": {}, "merges": ["a b"] * (65)}}, r"merges has 65 entries, expected"),
        ({"normalizer": _nested([100, 100])}, r"its normalizer may make a text more than 1024 times as long"),
        ({"decoder": {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 2000}}, r"its decoder may make"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": _charsmap(5000)}}, r"its normalizer may make"),
        ({"model": []}, r"not a tokenizers JSON file"),
    ],
)
def test_files_that_would_cost_far_more_than_published_ones_are_refused(tmp_path, monkeypatch, change, message):
    monkeypatch.setattr(tokenizer_bounds, "MAX_TOKENS", 64)
    path = tmp_path / "words.json"
    _word_tokenizer().save(str(path))
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=rf"words\.json: .*{message}") as error:
        load_tokenizer(path)
    assert len(str(error.value)) < 500 and "\n" not in str(error.value)


def test_replacements_of_published_tokenizers_are_served(tmp_path):
    path = tmp_path / "words.json"
    _word_tokenizer().save(str(path))
    steps = [
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"},
        {"type": "Replace", "pattern": {"Regex": "x"}, "content": ""},
        {"type": "Prepend", "prepend": "▁"},
    ]
    changed = json.loads(path.read_text()) | {"normalizer": {"type": "Sequence", "normalizers": steps}}
    path.write_text(json.dumps(changed))
    assert load_tokenizer(path).encode("a") == [1]


@pytest.mark.timeout(60)
def test_what_the_package_raises_while_it_encodes_is_one_line(tmp_path):
    path = tmp_path / "words.json"
    _word_tokenizer().save(str(path))
    whole = json.loads(path.read_text())
    path.write_text(json.dumps(whole | {"model": whole["model"] | {"unk_token": "missing"}}))
    tokenizer = load_tokenizer(path)
    for encode in (tokenizer.encode, tokenizer.encode_marked, lambda text: tokenizer.encode_batch([text])):
        with pytest.raises(ValueError, match=r"the tokenizer cannot encode this text \(.*UNK"):
            encode("unknown")
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    path.write_text(json.dumps(whole | {"pre_tokenizer": split}))
    tokenizer = load_tokenizer(path)
    with pytest.raises(ValueError, match=r"the tokenizer cannot encode this text \(.*retry-limit"):
        tokenizer.encode("a" * 40 + "b")
    assert tokenizer.encode("b") == [0]
