"""Mixtures of paths with weights, and training on text that is still being tokenized."""

import dataclasses
import itertools
import json
import subprocess
import sys
import threading

import numpy as np
import pytest

from rnnlib.data import ByteTokenizer, DataConfig, make_dataset
from rnnlib.data import streaming as streaming_module
from rnnlib.data.mixture import split_weight
from rnnlib.data.streaming import StreamedRows


def write(path, letter, count):
    """A file of documents of one letter, and a few of others, so that it can be told where a row is from."""
    path.write_text("".join(json.dumps({"text": letter * (i % 23 + 9) + str(i)}) + "\n" for i in range(count)))
    return str(path)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture")
    return write(folder / "a.jsonl", "a", 300), write(folder / "b.jsonl", "b", 40)


def config(*paths, **changes):
    return DataConfig(
        source="jsonl", paths=paths, validation_fraction=0.2, sequence_length=16, batch_size=4, seed=3, **changes
    )


def batches(settings, count, split="train", state=None):
    iterator = iter(make_dataset(settings, split=split, process_index=0, process_count=1))
    if state is not None:
        iterator.set_state(state)
    found = list(itertools.islice(iterator, count))
    state = iterator.get_state()
    iterator.close()
    return found, state


def letters(found):
    """How many rows hold more of one letter than of the other."""
    rows = np.concatenate([batch["inputs"] for batch in found])
    counts = [(rows == ord(letter)).sum(axis=1) for letter in "ab"]
    return int((counts[0] > counts[1]).sum()), int((counts[1] > counts[0]).sum())


def assert_equal(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])


def test_rows_are_mixed_by_weight(files):
    a, b = files
    mixed = config(f"{a}:1", f"{b}:3")
    found, _ = batches(mixed, 100)
    from_a, from_b = letters(found)
    # The small file, which has an eighth of the text, repeats.
    assert from_a + from_b > 380 and abs(from_b / (from_a + from_b) - 0.75) < 0.02
    first, state = batches(mixed, 30)
    rest, _ = batches(mixed, 70, state=state)
    assert_equal(first + rest, found)
    with pytest.raises(ValueError, match="the data is not that of the saved position"):
        batches(config(f"{a}:1", f"{b}:2"), 1, state=state)
    # A path without a weight counts 1.
    assert_equal(batches(config(a, f"{b}:3"), 5)[0], found[:5])


def test_a_mixture_is_validated_on_the_held_out_text_of_all_parts(files):
    a, b = files
    dataset = make_dataset(config(f"{a}:1", f"{b}:3"), split="validation", process_index=0, process_count=1)
    plain = make_dataset(config(a, b), split="validation", process_index=0, process_count=1)
    assert_equal(list(dataset), list(plain))


def test_each_part_of_a_mixture_has_its_own_kind(files, tmp_path):
    a, _ = files
    (tmp_path / "b.txt").write_text("b" * 4000)
    settings = DataConfig(paths=(f"{a}:1", f"{tmp_path}/b.txt:1"), sequence_length=16, batch_size=4, seed=3)
    from_a, from_b = letters(batches(settings, 50)[0])
    assert from_b > 90 and from_a > 90
    cached = dataclasses.replace(settings, cache_folder=str(tmp_path / "cache"))
    assert_equal(batches(cached, 5)[0], batches(settings, 5)[0])
    held_out = np.concatenate([batch["inputs"].ravel() for batch in make_dataset(cached, split="validation")])
    assert {ord("a"), ord("b")} <= set(held_out.tolist())
    with pytest.raises(ValueError, match=r"paths are of several kinds"):
        DataConfig(paths=(a, f"{tmp_path}/b.txt"))


def test_weights(tmp_path):
    assert split_weight("corpus/*.txt:2.5") == ("corpus/*.txt", 2.5)
    assert split_weight("corpus/*.txt") == ("corpus/*.txt", None)
    (tmp_path / "odd:7").write_text("text")
    assert split_weight(str(tmp_path / "odd:7")) == (str(tmp_path / "odd:7"), None)
    with pytest.raises(ValueError, match=r"paths: the weight of 'a.txt:0' is 0, expected a number above 0"):
        split_weight("a.txt:0")


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(streaming_module, "BLOCK_CHARACTERS", 1000)


def test_a_stream_has_each_token_once_an_epoch(files, small_blocks, tmp_path):
    a, _ = files
    rows = StreamedRows(config(a), ByteTokenizer())
    rows._wait_for(10**9)
    assert len(rows._blocks) > 3
    length = sum(map(len, rows._blocks))
    epochs = [[rows[epoch * length + i]["targets"] for i in range(length)] for epoch in range(3)]
    whole = make_dataset(config(a), split="train", finite=True, process_index=0, process_count=1)
    wanted = np.bincount(np.concatenate([batch["targets"].ravel() for batch in whole]), minlength=257)[1:]
    for epoch in epochs:
        np.testing.assert_array_equal(np.bincount(np.concatenate(epoch), minlength=257)[1:], wanted)
    assert not np.array_equal(epochs[0], epochs[1]) and not np.array_equal(epochs[1], epochs[2])


def test_a_stream_repeats_itself_and_goes_on_where_it_was(files, small_blocks, tmp_path):
    a, b = files
    settings = config(a, streaming=True)
    found, _ = batches(settings, 400)  # more than an epoch
    cached = dataclasses.replace(settings, cache_folder=str(tmp_path / "cache"))
    first, state = batches(cached, 150)
    assert any((tmp_path / "cache").iterdir())
    rest, _ = batches(cached, 250, state=state)
    assert_equal(first + rest, found)
    mixed = config(f"{a}:1", f"{b}:1", streaming=True)
    assert letters(batches(mixed, 50)[0])[1] > 80


def test_training_begins_before_all_text_is_read(files, small_blocks, monkeypatch):
    a, _ = files
    go_on, read = threading.Event(), streaming_module.iterate_documents

    def slow(settings, split):
        for number, text in enumerate(read(settings, split)):
            if number == 100:
                go_on.wait(60)
            yield text

    monkeypatch.setattr(streaming_module, "iterate_documents", slow)
    iterator = iter(make_dataset(config(a, streaming=True), split="train", process_index=0, process_count=1))
    first = [next(iterator) for _ in range(5)]
    assert not go_on.is_set()
    go_on.set()
    rest = [next(iterator) for _ in range(395)]
    iterator.close()
    monkeypatch.setattr(streaming_module, "iterate_documents", read)
    assert_equal(first + rest, batches(config(a, streaming=True), 400)[0])


def test_what_is_wrong_further_on_is_an_error_there(tmp_path, small_blocks):
    path = tmp_path / "broken.jsonl"
    path.write_text("".join(json.dumps({"text": f"document {i} " * 20}) + "\n" for i in range(200)) + "no json\n")
    iterator = iter(make_dataset(config(str(path), streaming=True), split="train", process_index=0, process_count=1))
    next(iterator)
    with pytest.raises(ValueError, match=r"broken.jsonl, line 201: not JSON"):
        for _ in range(10_000):
            next(iterator)
    path.write_text("no json\n")
    with pytest.raises(ValueError, match=r"broken.jsonl, line 1: not JSON"):
        make_dataset(config(str(path), streaming=True), split="train", process_index=0, process_count=1)
    with pytest.raises(ValueError, match=r"num_workers is 2, expected 0 with streaming"):
        config(str(path), streaming=True, num_workers=2)


LARGE = """
import json, resource, sys
from rnnlib.data import ByteTokenizer, DataConfig, load_corpus, make_dataset

folder, form, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
texts = (f"document {i} " * 2000 for i in range(count))
if form == "jsonl":
    with open(f"{folder}/text.jsonl", "w") as file:
        for text in texts:
            file.write(json.dumps({"text": text}) + "\\n")
else:
    import pyarrow, pyarrow.parquet
    with pyarrow.parquet.ParquetWriter(f"{folder}/text.parquet", pyarrow.schema({"text": pyarrow.string()})) as file:
        for _ in range(count // 100):
            file.write_table(pyarrow.table({"text": [next(texts) for _ in range(100)]}))
config = DataConfig(source=form, paths=(f"{folder}/text.{form}",), cache_folder=f"{folder}/tokens", streaming=True)
load_corpus(DataConfig(max_train_bytes=1000), "train", ByteTokenizer())
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
rows = make_dataset(config, split="train", process_index=0, process_count=1)._batches
corpus = load_corpus(config, "train", ByteTokenizer())
print(corpus.text_bytes, 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
"""


@pytest.mark.slow
@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_memory_does_not_grow_with_the_text(tmp_path, form):
    def measured(count):
        command = [sys.executable, "-c", LARGE, str(tmp_path), form, str(count)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stderr[-2000:]
        return map(int, done.stdout.split())

    (few, small), (many, large) = measured(2500), measured(7500)
    # Kept in memory, the tokens would be twice the text.
    assert many - few > 120e6 and large - small < 0.5 * (many - few)
