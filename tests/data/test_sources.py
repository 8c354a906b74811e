"""Sources: what they read, how they split, and what they say when something is wrong."""

import dataclasses
import gzip
import json
import os

import pyarrow
import pyarrow.parquet
import pytest

from rnnlib.data import DataConfig, iterate_documents

DOCUMENTS = [f"document {i}: {'words ' * (i % 5)}and é" for i in range(60)]


def _write(folder, source, documents):
    """Writes documents in a source's form and returns their paths."""
    if source == "text":
        for i, text in enumerate(documents):
            (folder / f"{i:03}.txt").write_text(text, encoding="utf-8")
        return (str(folder / "*.txt"),)
    if source == "parquet":
        path = folder / "rows.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"text": documents}), path, row_group_size=7)
        return (str(path),)
    lines = "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(documents))
    if source == "jsonl.gz":
        path = folder / "lines.jsonl.gz"
        path.write_bytes(gzip.compress(lines.encode()))
    else:
        path = folder / "lines.jsonl"
        path.write_text(lines + "\n", encoding="utf-8")
    return (str(path),)


def _config(source, paths, **changes):
    defaults = {"validation_fraction": 0.3, "split_by": "document"}
    return DataConfig(source=source.removesuffix(".gz"), paths=paths, **defaults | changes)


@pytest.mark.parametrize("source", ["text", "jsonl", "jsonl.gz", "parquet"])
def test_documents_of_each_source(tmp_path, source):
    config = _config(source, _write(tmp_path, source, [*DOCUMENTS, DOCUMENTS[3], "", "  \n"]))
    train, validation = (list(iterate_documents(config, split)) for split in ("train", "validation"))
    # Each once, in order, in one split; the hash of the content decides, so every source splits alike.
    assert train == [text for text in DOCUMENTS if text in set(train)]
    assert validation == [text for text in DOCUMENTS if text in set(validation)]
    assert set(train).isdisjoint(validation) and set(train) | set(validation) == set(DOCUMENTS)
    assert 8 <= len(validation) <= 30
    (tmp_path / "fewer").mkdir()
    fewer = _config(source, _write(tmp_path / "fewer", source, DOCUMENTS[:30]))
    few = list(iterate_documents(fewer, "validation"))
    assert few == [text for text in DOCUMENTS[:30] if text in set(validation)]


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "x.txt").write_bytes("\ufeffwords and \ufeff".encode())
    config = _config("text", (str(tmp_path / "x.txt"),), validation_fraction=1e-9)
    assert list(iterate_documents(config, "train")) == ["words and \ufeff"]


def test_half_of_an_emoji_in_json_is_no_error(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text": "cut here \\ud83d"}\n{"text": "whole \\ud83d\\ude00"}\n')
    config = _config("jsonl", (str(tmp_path / "x.jsonl"),), validation_fraction=1e-9, max_train_bytes=100)
    assert list(iterate_documents(config, "train")) == ["cut here \ufffd", "whole 😀"]


def test_duplicates_are_kept_when_asked(tmp_path):
    paths = _write(tmp_path, "jsonl", [*DOCUMENTS, *DOCUMENTS])
    for split in ("train", "validation"):
        once = list(iterate_documents(_config("jsonl", paths), split))
        assert list(iterate_documents(_config("jsonl", paths, deduplicate=False), split)) == once + once


def test_validation_paths_are_held_out(tmp_path):
    (tmp_path / "held").mkdir()
    paths = _write(tmp_path, "jsonl", DOCUMENTS)
    held = _write(tmp_path / "held", "jsonl", [*DOCUMENTS[:5], "another"])
    config = _config("jsonl", paths, validation_paths=held)
    assert list(iterate_documents(config, "validation")) == [*DOCUMENTS[:5], "another"]
    assert list(iterate_documents(config, "train")) == DOCUMENTS[5:]
    same = dataclasses.replace(config, paths=held)
    with pytest.raises(ValueError, match=r"the train split is empty.*not in the other split"):
        list(iterate_documents(same, "train"))


def test_one_document_splits_by_its_tail(tmp_path):
    (tmp_path / "book.txt").write_text("0123456789" * 10)
    paths = (str(tmp_path / "book.txt"),)
    config = _config("text", paths, split_by="tail", validation_fraction=0.25)
    assert "".join(iterate_documents(config, "train")) == ("0123456789" * 10)[:75]
    assert "".join(iterate_documents(config, "validation")) == ("0123456789" * 10)[75:]
    left_out = DataConfig(paths=paths, validation_fraction=0.25)
    for split in ("train", "validation"):
        assert list(iterate_documents(left_out, split)) == list(iterate_documents(config, split))
    by_document = _config("text", paths, split_by="document", validation_fraction=1e-9)
    with pytest.raises(ValueError, match=r"validation split is empty.*book\.txt.*--data.split-by tail"):
        list(iterate_documents(by_document, "validation"))


def test_many_text_files_are_split_by_document_and_few_by_tail(tmp_path):
    for number in range(100):
        (tmp_path / f"{number:03}.txt").write_text(f"document {number} of many")
    many = DataConfig(paths=(f"{tmp_path}/*.txt",), validation_fraction=0.3)
    train, validation = (list(iterate_documents(many, split)) for split in ("train", "validation"))
    assert len(train) + len(validation) == 100 and validation and all("of many" in text for text in train)
    (tmp_path / "000.txt").unlink()
    assert len(list(iterate_documents(many, "train"))) == len(list(iterate_documents(many, "validation"))) == 99


@pytest.mark.parametrize(
    "name, kind",
    [("a.txt", "text"), ("a.py", "text"), ("A.JSONL", "jsonl"), ("a.ndjson.gz", "jsonl"), ("a*.parquet", "parquet")],
)
def test_the_source_goes_by_the_files_names(name, kind):
    assert DataConfig(paths=(name,)).kind == kind and DataConfig(source="text", paths=(name,)).kind == "text"


def test_files_of_several_kinds_are_refused():
    with pytest.raises(ValueError, match=r"several kinds \('b.jsonl' and 'a.txt'\).*--data.source"):
        DataConfig(paths=("b.jsonl", "a.txt"))
    assert DataConfig().kind == "python"


def test_only_the_embedded_source_is_limited_by_default():
    for split, limit in (("train", 16_000_000), ("validation", 262_144)):
        assert DataConfig().max_bytes(split) == limit
        assert DataConfig(max_train_bytes=7, max_validation_bytes=7).max_bytes(split) == 7
        assert DataConfig(source="text", paths=("x",)).max_bytes(split) is None


@pytest.mark.parametrize("limit", [1, 10, 33, 500])
def test_byte_limits_cut_the_last_document(tmp_path, limit):
    paths = _write(tmp_path, "jsonl", ["é" * 20 + str(i) for i in range(40)])
    config = _config("jsonl", paths, max_train_bytes=limit, validation_fraction=0.01)
    if limit == 1:  # half a character is none
        with pytest.raises(ValueError, match="train split is empty"):
            list(iterate_documents(config, "train"))
        return
    read = "".join(iterate_documents(config, "train"))
    everything = "".join(iterate_documents(dataclasses.replace(config, max_train_bytes=None), "train"))
    assert everything.startswith(read) and limit - 1 <= len(read.encode()) <= limit


def test_python_source():
    config = DataConfig(max_train_bytes=1_000_000, max_validation_bytes=100_000)
    splits = {}
    for split, limit in (("train", 1_000_000), ("validation", 100_000)):
        documents = splits[split] = list(iterate_documents(config, split))
        assert sum(len(text.encode()) for text in documents) == limit
        assert documents == list(iterate_documents(config, split))
    assert len(splits["train"]) > 20 and len(splits["validation"]) > 3
    assert len(set(splits["train"])) == len(splits["train"])
    assert set(splits["train"]).isdisjoint(splits["validation"])
    assert sum("import " in text for text in splits["train"]) > 10


def _cut_gzip(folder):
    content = gzip.compress(b"".join(b'{"text": "%d"}\n' % i for i in range(1000)))
    (folder / "x.jsonl.gz").write_bytes(content[: len(content) // 2])
    return _config("jsonl", (str(folder / "x.jsonl.gz"),)), r"x\.jsonl\.gz: not readable as jsonl \("


def _broken_parquet(folder):
    pyarrow.parquet.write_table(pyarrow.table({"text": ["some text"] * 99}), folder / "x.parquet")
    content = (folder / "x.parquet").read_bytes()
    (folder / "x.parquet").write_bytes(content[:4] + b"?" * 60 + content[64:])
    return _config("parquet", (str(folder / "x.parquet"),)), r"x\.parquet: not readable as parquet \("


def _missing_column(folder):
    pyarrow.parquet.write_table(pyarrow.table({"body": ["a"]}), folder / "x.parquet")
    return _config("parquet", (str(folder / "x.parquet"),)), r"no column 'text'.*\['body'\]"


def _wrong_column_type(folder):
    pyarrow.parquet.write_table(pyarrow.table({"text": [1]}), folder / "x.parquet")
    return _config("parquet", (str(folder / "x.parquet"),)), "column 'text' holds int64, not text"


def _empty_glob(folder):
    return _config("text", (str(folder / "*.nothing"),)), r"paths: no file matches '.*\*\.nothing'"


def _no_file(folder):
    return _config("text", (str(folder / "nothing.txt"),)), r"paths: there is no file '.*nothing\.txt'"


def _folder(folder):
    return _config("text", (str(folder),)), r"is a folder; name its files, as in '.*/\*\*/\*\.txt'"


def _unknown_encoding(folder):
    (folder / "x.txt").write_text("a")
    return _config("text", (str(folder / "x.txt"),), encoding="utf-99"), "encoding 'utf-99' is not known"


def _blank(folder):
    (folder / "x.txt").write_text(" \n")
    return _config("text", (str(folder / "x.txt"),), split_by="tail"), "the train split is empty"


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("x.txt", b"caf\xe9", r"x\.txt: not valid utf-8 at byte 3"),
        ("x.jsonl", b'{"text": "a"}\n{"text": \n', r"x\.jsonl, line 2: not JSON"),
        ("x.jsonl", b'{"body": "a"}\n', r"x\.jsonl, line 1: no field 'text'.*\['body'\]"),
        ("x.jsonl", b'"a"\n', r"line 1: no field 'text'.*is a str"),
        ("x.jsonl", b'{"text": 3}\n', "holds int, not text"),
        ("x.jsonl", b'{"text": "caf\xe9"}\n', "line 1: not valid utf-8"),
        ("x.jsonl.gz", b'{"text": "a"}\n', r"x\.jsonl\.gz: not readable as jsonl \(Not a gzip"),
        ("x.parquet", b"PAR", r"x\.parquet: not readable as parquet \("),
    ],
)
def test_one_clear_error_for_a_file(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    source = name.split(".")[1].replace("txt", "text")
    check_one_clear_error(_config(source, (str(tmp_path / name),)), message)


@pytest.mark.parametrize(
    "case",
    [
        _cut_gzip,
        _broken_parquet,
        _missing_column,
        _wrong_column_type,
        _empty_glob,
        _no_file,
        _folder,
        _unknown_encoding,
        _blank,
    ],
)
def test_one_clear_error(tmp_path, case):
    check_one_clear_error(*case(tmp_path))


def check_one_clear_error(config, message):
    with pytest.raises(ValueError, match=message) as caught:
        list(iterate_documents(config, "train"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"source": "web"}, "source is 'web', expected 'python', 'text', 'jsonl'"),
        ({"source": "text"}, "source 'text' needs paths"),
        ({"source": "python", "paths": ("x",)}, "source 'python' takes no paths"),
        (
            {"source": "text", "paths": "x/*.txt"},
            r"paths must be a tuple of files or patterns, such as \('x/\*.txt',\)",
        ),
        ({"sequence_length": 0}, "DataConfig: sequence_length is 0, expected an integer of at least 1$"),
        ({"batch_size": 0}, "batch_size is 0, expected an integer of at least 1"),
        ({"prefetch": 0}, "prefetch is 0, expected an integer of at least 1"),
        ({"num_workers": -1}, "num_workers is -1, expected an integer of at least 0"),
        ({"seed": 2**32}, "seed is 4294967296, expected an integer of at least 0 and below 4294967296"),
        ({"split_by": "day"}, "split_by is 'day', expected 'document'"),
        ({"validation_fraction": 1.0}, "validation_fraction is 1.0, expected a number above 0 and below 1"),
        ({"max_train_bytes": 0}, "max_train_bytes is 0, expected an integer of at least 1 or None"),
        ({"paths": 3}, "paths is 3, expected"),
        ({"text_field": None}, "text_field is None, expected a string"),
    ],
)
def test_configuration_errors(unchecked_shapes, changes, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**changes)


def test_globs_cross_folders_and_names_with_brackets(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "one.txt").write_text("one")
    (tmp_path / "[two].txt").write_text("two")
    paths = (os.path.join(tmp_path, "**", "*.txt"), str(tmp_path / "[two].txt"))
    config = _config("text", paths, validation_fraction=1e-9)
    assert sorted(iterate_documents(config, "train")) == ["one", "two"]


def test_paths_may_be_path_objects(tmp_path, unchecked_shapes):
    (tmp_path / "one.txt").write_text("one")
    config = _config("text", [tmp_path / "*.txt"], validation_fraction=1e-9)
    assert config.paths == (f"{tmp_path}/*.txt",) and list(iterate_documents(config, "train")) == ["one"]


def test_what_is_not_in_the_encoding_can_be_left_out(tmp_path):
    (tmp_path / "a.txt").write_text("first é")
    (tmp_path / "b.txt").write_bytes("second é".encode("latin-1"))
    (tmp_path / "c.txt").write_text("third é")
    config = _config("text", (f"{tmp_path}/*.txt",), split_by="tail")
    with pytest.raises(ValueError, match=r"b.txt: not valid utf-8 at byte 7; .* undecodable to 'skip' to leave it out"):
        list(iterate_documents(config, "train"))
    config = dataclasses.replace(config, undecodable="skip")
    with pytest.warns(UserWarning, match=r"left out as undecodable: 1, the first of them .*b.txt: not valid"):
        documents = list(iterate_documents(config, "train"))
    assert len(documents) == 2 and documents[0].startswith("fir") and documents[1].startswith("thi")


def test_lines_that_are_not_in_the_encoding_can_be_left_out(tmp_path):
    lines = [json.dumps({"text": f"line {i}"}).encode() for i in range(6)]
    lines[2] = b'{"text": "\xff"}'
    lines[4] = b'{"text": "\xfe"}'
    (tmp_path / "lines.jsonl").write_bytes(b"\n".join(lines))
    config = _config("jsonl", (f"{tmp_path}/lines.jsonl",), split_by="tail", undecodable="skip")
    with pytest.warns(UserWarning, match=r"left out as undecodable: 2, the first of them .*lines.jsonl, line 3: not "):
        assert len(list(iterate_documents(config, "train"))) == 4
