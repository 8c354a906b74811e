"""Tokenizers of files that nobody vouches for: their time is bounded, and known ones run in this process."""

import copy
import json
import pickle
import time

import numpy as np
import pytest
import tokenizers
from tokenizers import Regex, pre_tokenizers

from rnnlib import tokenizer_bounds
from rnnlib.data import load_tokenizer
from rnnlib.sandbox import tokenizer as limited
from rnnlib.tokenizers import FileTokenizer

SPLIT = r"(a+)+$"
TEXT = "two words, 12 numbers\n\n  and é 漢字"


def write(path, pattern=SPLIT, **parts):
    """A byte-level tokenizer that splits by a regular expression, with some parts of its file replaced."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<|endoftext|>": 0} | {sign: index + 1 for index, sign in enumerate(alphabet)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary | {"an": len(vocabulary)}, merges=[("a", "n")]))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>"])
    path.write_text(json.dumps(json.loads(made.to_str()) | parts))
    return path


def runs_elsewhere(tokenizer):
    return isinstance(tokenizer._tokenizer, limited.LimitedTokenizer)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write(tmp_path_factory.mktemp("files") / "tokenizer.json")


@pytest.fixture(scope="module")
def tokenizer(path):
    return load_tokenizer(path)


def test_tokens_are_those_of_the_package(path, tokenizer):
    here = FileTokenizer(tokenizers.Tokenizer.from_file(str(path)))
    assert runs_elsewhere(tokenizer) and not runs_elsewhere(here)
    ids = here.encode(TEXT)
    assert tokenizer.encode(TEXT) == ids and tokenizer.decode(ids) == here.decode(ids) == TEXT
    assert [x.tolist() for x in tokenizer.encode_batch([TEXT, "", "an"])] == [ids, [], here.encode("an")]
    marked = "<|endoftext|>" + TEXT
    assert tokenizer.encode_marked(marked) == here.encode_marked(marked) == [0, *ids]
    for (got, places), (wanted, known) in zip(
        tokenizer.encode_marked_batch([marked]), here.encode_marked_batch([marked])
    ):
        assert got.tolist() == wanted.tolist() and places == known
    assert tokenizer.encode(marked) == here.encode(marked) and tokenizer.encode(marked)[0] != 0
    assert tokenizer.decode_marked([0, *ids]) == marked
    for name in ("vocabulary_size", "end_of_document", "fingerprint", "end_token"):
        assert getattr(tokenizer, name) == getattr(here, name)
    np.testing.assert_array_equal(tokenizer.token_bytes, here.token_bytes)


def test_it_is_copied_saved_and_made_smaller(tmp_path, tokenizer):
    ids = tokenizer.encode(TEXT)
    tokenizer.save(tmp_path / "copy.json")
    for other in (
        load_tokenizer(tmp_path / "copy.json"),
        pickle.loads(pickle.dumps(tokenizer)),
        copy.deepcopy(tokenizer),
    ):
        assert other.encode(TEXT) == ids and runs_elsewhere(other)
        assert other.fingerprint == tokenizer.fingerprint
    added = write(tmp_path / "added.json")
    definition = json.loads(added.read_text())
    definition["added_tokens"] += [definition["added_tokens"][0] | {"id": 300, "content": "<more>"}]
    added.write_text(json.dumps(definition))
    smaller = load_tokenizer(added).within(tokenizer.vocabulary_size)
    assert smaller.encode(TEXT) == ids and runs_elsewhere(smaller)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("pattern", [SPLIT, r"a*a*b|a*\s\s", r"(a|a)*b", r"^(\w+\s?)*$"])
def test_time_is_bounded_and_a_panic_is_one_line(tmp_path, monkeypatch, capfd, pattern):
    monkeypatch.setattr(limited, "CALL_SECONDS", 1.0)
    tokenizer = load_tokenizer(write(tmp_path / "tokenizer.json", pattern))
    began = time.monotonic()
    for text in ("a" * 4000 + " ", "a b " * 1000 + "!"):
        for encode in (tokenizer.encode, lambda text: tokenizer.encode_batch([text, text])):
            try:
                encode(text)
            except ValueError as error:
                message = str(error)
                assert "cannot encode this text (" in message and "\n" not in message and len(message) < 400
                assert "retry-limit" in message or "takes more than 1." in message
    assert time.monotonic() - began < 60
    assert tokenizer.encode("an") == tokenizer.encode_batch(["an"])[0].tolist()  # it is started again
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "b"}},
        {"decoder": {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "b"}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "FixedLength", "length": 3}]}},
        {"model": {"type": "WordPiece", "vocab": {"[UNK]": 0}, "max_input_chars_per_word": 10**9}},
        {"model": {"type": "Unigram", "vocab": [["a" * 5000, 0.0]]}},
        {"model": {"type": "BPE", "vocab": {}, "merges": [], "dropout": 0.5}},
        {"model": {"type": "Unigram", "vocab": [3]}},
        {"model": {"type": "something"}},
    ],
)
def test_what_is_not_known_to_be_linear_runs_elsewhere(path, parts):
    definition = json.loads(path.read_text())
    plain = definition | {"pre_tokenizer": {"type": "ByteLevel"}}
    assert not tokenizer_bounds.is_linear(definition) and tokenizer_bounds.is_linear(plain)
    assert not tokenizer_bounds.is_linear(plain | parts)


def test_damaged_files_are_one_line_and_nothing_of_rust_is_shown(tmp_path, capfd):
    for number, parts in enumerate(
        [
            {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
            {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a"}, "behavior": "Isolated", "invert": False}},
            {"model": {"type": "Unigram", "vocab": [3]}},
            {"normalizer": {"type": "unknown"}},
        ]
    ):
        file = write(tmp_path / f"{number}.json", **parts)
        with pytest.raises(ValueError) as error:
            load_tokenizer(file).encode(TEXT)
        assert "\n" not in str(error.value) and len(str(error.value)) < 500
    assert capfd.readouterr().err == ""


def test_known_patterns_take_time_in_proportion_to_the_text():
    """A pattern whose time grows with the square of the length takes seconds for 2^14 characters; these take little."""
    pieces = [
        *" \n\taA1'!é漢゠\u0301ǅʰ/(",
        "\r\n",
        " \n",
        "aA",
        "Aa",
        "'s",
        "a'",
        "! ",
        " a",
        "a1",
        "漢a",
        "\u0301a",
        " !\n",
    ]
    texts = [piece * (2**14 // len(piece)) + end for piece in pieces for end in ("", "a", "!", " ")]

    def seconds(pattern, text):
        splits = tokenizers.normalizers.Replace(Regex(pattern), "")
        began = time.monotonic()
        splits.normalize_str(text)
        return time.monotonic() - began

    assert seconds(r"\w*\s\s", "a" * 2**14 + " ") > 1
    slow = [
        (pattern, text[-3:])
        for pattern in tokenizer_bounds.LINEAR_PATTERNS
        for text in texts
        if seconds(pattern, text) > 1
    ]
    assert not slow
