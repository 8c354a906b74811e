"""Data that is not what it says: bombs, pipes, nesting, damaged caches. Memory is bounded and each is one line."""

import contextlib
import gzip
import io
import os
import resource

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from rnnlib.data import (
    ByteTokenizer,
    DamagedTokensError,
    DataConfig,
    iterate_documents,
    load_corpus,
    make_dataset,
    sources,
)

MIB = 2**20


def documents(path, source, **options):
    config = DataConfig(source=source, paths=(str(path),), split_by="tail", **options)
    return list(iterate_documents(config, "train"))


@contextlib.contextmanager
def bounded_memory(mebibytes):
    """Within it, the process has so much more address space than it had before."""
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + mebibytes * MIB, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_a_line_that_unpacks_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_MAX_LINE_BYTES", 4 * MIB)
    path = tmp_path / "bomb.jsonl.gz"
    block = gzip.compress(b"x" * MIB)
    path.write_bytes(gzip.compress(b'{"text": "a"}\n{"text": "') + block * 1024)
    refused = pytest.raises(ValueError, match=r"bomb.jsonl.gz, line 2: expected at most 4,194,304 bytes a line$")
    with refused, bounded_memory(512):
        documents(path, "jsonl")


def test_what_lies_behind_the_limit_is_not_read(tmp_path):
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "some text"}\n' * 2) + b"damaged")
    with pytest.raises(ValueError, match=r"not readable as jsonl"):
        documents(path, "jsonl", deduplicate=False)
    assert documents(path, "jsonl", deduplicate=False, max_train_bytes=12) == ["some tex", "some"]


@pytest.mark.parametrize("options", [{"dictionary_pagesize_limit": 2 * MIB}, {"use_dictionary": False}])
def test_rows_that_are_equal_are_not_unpacked_at_once(tmp_path, options):
    path = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x" * MIB] * 256}), path, compression="zstd", **options)
    assert path.stat().st_size < 2 * MIB
    config = DataConfig(source="parquet", paths=(str(path),), split_by="tail", deduplicate=False)
    with bounded_memory(192):
        assert sum(1 for _ in sources._read_parquet(config, str(path))) == 256
    assert len(documents(path, "parquet", max_train_bytes=3 * MIB, deduplicate=False)) == 4


def test_texts_and_missing_ones_of_parquet_come_as_written(tmp_path):
    path = tmp_path / "x.parquet"
    texts = ["one", None, "two", "one", "é", ""]
    for kind in (pyarrow.string(), pyarrow.large_string(), pyarrow.dictionary(pyarrow.int32(), pyarrow.string())):
        array = pyarrow.array(texts, pyarrow.string()).cast(kind)
        pyarrow.parquet.write_table(pyarrow.table({"text": array}), path, row_group_size=2)
        read = list(sources._read_parquet(DataConfig(source="parquet", paths=(str(path),)), str(path)))
        assert read == ["one", "", "two", "one", "é", ""]


@pytest.mark.timeout(30)
@pytest.mark.parametrize("source", ["text", "jsonl", "parquet"])
def test_pipes_devices_and_files_of_the_system_are_no_data(tmp_path, source):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(ValueError, match=r"paths: .* is no regular file$"):
            documents(path, source)
    with pytest.raises(ValueError, match=r"/proc/self/environ: expected a regular file, not one that the system makes"):
        documents("/proc/self/environ", source)


def test_nested_lines_are_one_line(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a"}\n' + "[" * 100_000 + "\n")
    with pytest.raises(ValueError, match=r"x.jsonl, line 2: not JSON \(it is nested too deeply\)$"):
        documents(path, "jsonl")
    path.write_text('{"text": ' + "9" * 5000 + "}\n")
    with pytest.raises(ValueError, match=r"x.jsonl, line 1: not JSON \(Exceeds the limit"):
        documents(path, "jsonl")


def test_text_files_have_a_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_MAX_FILE_BYTES", 10)
    (tmp_path / "x.txt").write_text("eleven byte")
    with pytest.raises(ValueError, match=r"x.txt: expected at most 10 bytes$"):
        documents(tmp_path / "x.txt", "text")


@pytest.fixture
def cached(tmp_path):
    (tmp_path / "x.txt").write_text("some text " * 100)
    config = DataConfig(
        source="text",
        paths=(str(tmp_path / "x.txt"),),
        split_by="tail",
        sequence_length=16,
        batch_size=4,
        cache_folder=str(tmp_path / "cache"),
    )
    load_corpus(config, "train", ByteTokenizer())
    (folder,) = (tmp_path / "cache").iterdir()
    return config, folder


def test_tokens_beyond_the_vocabulary_are_named(cached):
    config, folder = cached
    tokens = np.fromfile(folder / "tokens.bin", np.uint16)
    tokens[100] = 60_000
    tokens.tofile(folder / "tokens.bin")
    dataset = make_dataset(config, split="train", process_index=0, process_count=1)
    with pytest.raises(DamagedTokensError, match=rf"{folder}: damaged tokens, from .* to 60000 .*expected 0 to 256"):
        for index in range(20):
            dataset.read(index)
    with pytest.raises(DamagedTokensError, match=r"to 60000"):  # as training reads them, ahead in a thread
        batches = iter(dataset)
        for _ in range(20):
            next(batches)


def _npy(array):
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def _lying_npy():
    whole = _npy(np.arange(2))
    return whole.replace(b"(2,), }" + b" " * 12, b"(%d,), }" % 10**12)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("starts.npy", _npy(np.array([{}], object))),
        ("starts.npy", _npy(np.zeros(3))),
        ("starts.npy", _npy(np.array([0, 900, 400]))),
        ("starts.npy", _npy(np.array([], np.int64))),
        ("starts.npy", _lying_npy()),
        ("corpus.json", b'{"dtype": "object", "end_of_document": 1, "text_bytes": 1, "fingerprint": ""}'),
        ("corpus.json", b"[" * 100_000),
        ("corpus.json", b"[]"),
    ],
)
def test_caches_of_another_kind_are_refused(cached, name, content):
    config, folder = cached
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=r"damaged tokens .*delete the folder"):
        load_corpus(config, "train", ByteTokenizer())


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", ["starts.npy", "tokens.bin", "corpus.json"])
def test_pipes_in_a_cache_are_not_waited_for(cached, name):
    config, folder = cached
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(ValueError, match=r"damaged tokens .*named pipe.*delete the folder"):
        load_corpus(config, "train", ByteTokenizer())
