"""Batches: order, finiteness, resuming, worker processes, sharing by process, the token cache."""

import dataclasses
import itertools
import json
import multiprocessing
import os
import pathlib
import pickle
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from rnnlib.data import ByteTokenizer, DataConfig, TokenCorpus, load_corpus, make_dataset

DOCUMENTS = [f"{i} " * (i % 7 + 1) for i in range(40)]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "lines.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    return DataConfig(
        source="jsonl", paths=(str(path),), validation_fraction=0.3, sequence_length=16, batch_size=4, seed=7
    )


def _dataset(config, split="train", **options):
    return make_dataset(config, split=split, process_index=0, process_count=1, **options)


def _take(iterator, count):
    return list(itertools.islice(iterator, count))


def _assert_equal(ours, theirs):
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            assert a[name].dtype == b[name].dtype
            np.testing.assert_array_equal(a[name], b[name])


def _documents(batches):
    """Texts whose inputs lie wholly in the batches' rows in order."""
    rows = np.concatenate([batch["inputs"][batch["segment_ids"] > 0] for batch in batches])
    starts = np.flatnonzero(rows == ByteTokenizer.end_of_document)
    return [ByteTokenizer().decode(part) for part in np.split(rows, starts[1:])]


def test_validation_is_finite_ordered_and_whole(config):
    dataset = _dataset(config, "validation")
    batches = list(dataset)
    assert len(batches) == len(dataset)
    assert all(batch["inputs"].shape == (4, 16) for batch in batches)
    texts = _documents(batches)
    assert texts == [text for text in DOCUMENTS if text in set(texts)]
    _assert_equal(list(dataset), batches)
    corpus = load_corpus(config, "validation", ByteTokenizer())
    assert sum(batch["loss_weights"].sum() for batch in batches) == corpus.num_tokens
    targets = np.concatenate([batch["targets"][batch["loss_weights"] > 0] for batch in batches])
    assert ByteTokenizer().token_bytes[targets].sum() == corpus.text_bytes
    train = set(_documents(_dataset(config, finite=True)))
    assert train.isdisjoint(texts) and train | set(texts) == set(DOCUMENTS)


def test_training_repeats_and_shuffles(config):
    config = dataclasses.replace(config, batch_size=1)
    dataset = _dataset(config)
    rows = len(_dataset(config, finite=True))
    epochs = np.split(np.stack([batch["inputs"][0] for batch in _take(dataset, 3 * rows)]), 3)
    counts = [np.bincount(epoch.ravel(), minlength=257)[1:] for epoch in epochs]  # 0 is padding
    np.testing.assert_array_equal(counts[0], counts[1])
    np.testing.assert_array_equal(counts[0], counts[2])
    assert not np.array_equal(epochs[0], epochs[1])
    other = _take(_dataset(dataclasses.replace(config, seed=8)), rows)
    assert not np.array_equal(epochs[0], np.stack([batch["inputs"][0] for batch in other]))


def test_resuming_continues_bit_for_bit(config):
    batches = _take(_dataset(config), 25)
    iterator = iter(_dataset(config))
    for position in (0, 1, 9, 24, 3):
        start = iter(_dataset(config))
        _take(start, position)
        state = json.loads(json.dumps(start.get_state()))
        iterator.set_state(state)
        assert iterator.get_state() == state
        _assert_equal(_take(iterator, 25 - position), batches[position:])
    _assert_equal([_dataset(config).read(11)], batches[11:12])


def test_a_position_of_other_data_is_refused(config):
    state = iter(_dataset(config)).get_state()
    for other in ({"seed": 8}, {"sequence_length": 17}, {"batch_size": 2}, {"validation_fraction": 0.4}):
        with pytest.raises(ValueError, match="not that of the saved position"):
            iter(_dataset(dataclasses.replace(config, **other))).set_state(state)


def test_worker_processes_change_nothing(config, tmp_path):
    batches = _take(_dataset(config), 12)
    workers = dataclasses.replace(config, num_workers=2, cache_folder=str(tmp_path))
    iterator = iter(_dataset(workers))
    iterator.set_state({**iterator.get_state(), "next_batch": 3})  # before the workers start
    try:
        _assert_equal(_take(iterator, 4), batches[3:7])
        state = iterator.get_state()
        assert state["next_batch"] == 7
    finally:
        iterator.close()
    with pytest.raises(ValueError, match="closed iterator"):
        next(iterator)
    # A position saved with workers goes on without, and the other way round.
    plain = iter(_dataset(config))
    plain.set_state(state)
    _assert_equal(_take(plain, 5), batches[7:])


def test_a_script_that_its_workers_would_run_again_is_refused(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "from rnnlib.data import DataConfig, make_dataset\n"
        "config = DataConfig(max_train_bytes=10_000, num_workers=1)\n"
        "next(iter(make_dataset(config, split='train', process_index=0, process_count=1)))\n"
    )
    result = subprocess.run([sys.executable, program], capture_output=True, text=True, cwd=os.getcwd(), timeout=120)
    assert result.returncode == 1
    assert f"each worker process imports {program}, expected what it runs under if __name__" in result.stderr


def test_a_killed_worker_is_an_error_of_the_system(config, tmp_path):
    iterator = iter(_dataset(dataclasses.replace(config, num_workers=1, prefetch=1, cache_folder=str(tmp_path))))
    before = set(multiprocessing.active_children())
    next(iterator)
    for worker in set(multiprocessing.active_children()) - before:
        worker.kill()
    with pytest.raises(ChildProcessError, match="a worker process of the data was killed"):
        _take(iterator, 50)


def test_workers_end_with_a_killed_process(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import multiprocessing, os, signal\n"
        "from rnnlib.data import DataConfig, make_dataset\n"
        "if __name__ == '__main__':\n"
        "    config = DataConfig(max_train_bytes=10_000, num_workers=1)\n"
        "    batches = iter(make_dataset(config, split='train', process_index=0, process_count=1))\n"
        "    next(batches)\n"
        "    print(multiprocessing.active_children()[0].pid, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    # A pipe that the worker holds too would keep the reader waiting, hence a file.
    with open(tmp_path / "output", "w") as output:
        result = subprocess.run([sys.executable, program], stdout=output, stderr=subprocess.DEVNULL, cwd=os.getcwd())
    assert result.returncode == -signal.SIGKILL
    worker = int((tmp_path / "output").read_text())
    for _ in range(100):
        try:
            os.kill(worker, 0)
        except ProcessLookupError:
            return
        # Where nothing reaps orphans the ended process stays in the table.
        status = pathlib.Path(f"/proc/{worker}/stat")
        if status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.1)
    os.kill(worker, signal.SIGKILL)
    pytest.fail("the worker outlived its process by 10 seconds")


def test_processes_share_each_batch(config):
    whole = _take(_dataset(config), 5)
    parts = [_take(make_dataset(config, split="train", process_index=i, process_count=2), 5) for i in range(2)]
    for batch, first, second in zip(whole, *parts, strict=True):
        for name, values in batch.items():
            np.testing.assert_array_equal(values, np.stack([first[name], second[name]], 1).reshape(values.shape))
    sizes = {len(make_dataset(config, split="validation", process_index=i, process_count=2)) for i in range(2)}
    assert len(sizes) == 1
    with pytest.raises(ValueError, match="batch_size must be a multiple of the number of processes, 3; got 4"):
        make_dataset(config, split="train", process_index=0, process_count=3)
    with pytest.raises(ValueError, match="process_index must be in"):
        make_dataset(config, split="train", process_index=2, process_count=2)
    assert make_dataset(config, split="train").read(0)["inputs"].shape == (4, 16)  # JAX's one process


def test_cache_folder(config, tmp_path):
    cached = dataclasses.replace(config, cache_folder=str(tmp_path / "cache"))
    _assert_equal(_take(_dataset(cached), 3), _take(_dataset(config), 3))
    (folder,) = os.listdir(tmp_path / "cache")
    corpus = load_corpus(cached, "train", ByteTokenizer())
    assert os.listdir(tmp_path / "cache") == [folder]
    assert isinstance(corpus.tokens, np.memmap)
    copy = pickle.loads(pickle.dumps(corpus))
    assert isinstance(copy.tokens, np.memmap) and len(pickle.dumps(corpus)) < corpus.tokens.nbytes + 2000
    np.testing.assert_array_equal(copy.tokens, load_corpus(config, "train", ByteTokenizer()).tokens)
    # Other limits and other files are other entries.
    load_corpus(dataclasses.replace(cached, max_train_bytes=50), "train", ByteTokenizer())
    os.utime(config.paths[0], (1, 1))
    load_corpus(cached, "train", ByteTokenizer())
    assert len(os.listdir(tmp_path / "cache")) == 3
    with pytest.raises(ValueError, match="is not a folder"):
        load_corpus(dataclasses.replace(config, cache_folder=config.paths[0]), "train", ByteTokenizer())


def test_a_damaged_cache_is_refused(config, tmp_path):
    cached = dataclasses.replace(config, cache_folder=str(tmp_path))
    load_corpus(cached, "train", ByteTokenizer())
    (folder,) = tmp_path.iterdir()
    for name, message in (
        ("tokens.bin", r"damaged tokens, .* expected .* as written"),
        ("corpus.json", "damaged tokens"),
    ):
        whole = (folder / name).read_bytes()
        for content in (whole[: len(whole) // 4 * 2], b""):
            (folder / name).write_bytes(content)
            with pytest.raises(ValueError, match=re.escape(f"{folder}: ") + (message if content else "damaged")):
                load_corpus(cached, "train", ByteTokenizer())
        (folder / name).unlink()
        with pytest.raises(ValueError, match="delete the folder"):
            load_corpus(cached, "train", ByteTokenizer())
        (folder / name).write_bytes(whole)
    load_corpus(cached, "train", ByteTokenizer())


def test_an_interrupted_cache_leaves_nothing(config, tmp_path):
    class Failing(ByteTokenizer):
        def encode_batch(self, texts):
            raise KeyboardInterrupt

    cached = dataclasses.replace(config, cache_folder=str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        load_corpus(cached, "train", Failing())
    assert os.listdir(tmp_path) == []


def test_corpora_of_many_batches_equal_those_of_one(monkeypatch, tmp_path):
    one = TokenCorpus.from_documents(DOCUMENTS, ByteTokenizer())
    monkeypatch.setattr("rnnlib.data.corpus._BATCH_CHARACTERS", 10)
    for folder in (None, str(tmp_path)):
        many = TokenCorpus.from_documents(iter(DOCUMENTS), ByteTokenizer(), folder)
        np.testing.assert_array_equal(many.tokens, one.tokens)
        np.testing.assert_array_equal(many.starts, one.starts)
        assert many.text_bytes == one.text_bytes == sum(map(len, DOCUMENTS))
        assert many.fingerprint == one.fingerprint and many.num_documents == len(DOCUMENTS)


def test_unknown_split(config, unchecked_shapes):
    with pytest.raises(ValueError, match="split must be 'train' or 'validation'; got 'test'"):
        make_dataset(config, split="test")
