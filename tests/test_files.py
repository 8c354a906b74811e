"""Reading of files that may be anyone's: regular files only, in bounds, of the folder that they are said to be in."""

import json
import os
import socket

import pytest

from rnnlib.files import (
    expect_shallow,
    expect_within,
    file_within,
    new_folder,
    open_regular,
    parse_json,
    read_bytes,
    read_json,
)


def test_regular_files_are_read_up_to_their_bound(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b'{"a": [1, 2]}')
    assert open_regular(path).read() == b'{"a": [1, 2]}'
    assert read_bytes(path, at_most=13) == b'{"a": [1, 2]}'
    assert read_json(path) == {"a": [1, 2]}
    with pytest.raises(ValueError, match=r"file: expected at most 12 bytes$"):
        read_bytes(path, at_most=12)
    path.write_bytes(b"")
    assert read_bytes(path, at_most=1) == b""
    path.write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"file: expected UTF-8"):
        read_json(path)
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "nothing", at_most=1)


@pytest.mark.timeout(20)
def test_what_is_no_regular_file_is_refused_and_never_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        for name, kind in (
            (tmp_path / "pipe", "a named pipe"),
            (tmp_path / "link", "a named pipe"),
            (tmp_path / "socket", "a socket"),
            (tmp_path, "a folder"),
            ("/dev/zero", "a device"),
            ("/proc/self/environ", "one that the system makes up"),
        ):
            with pytest.raises(ValueError, match=rf"expected a regular file, not {kind}$"):
                open_regular(name)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000 + "1" + "}" * 100_000, "[" * 70 + "]" * 70])
def test_nested_json_is_one_line(text):
    with pytest.raises(ValueError, match=r"^file: expected .*nested too deeply\)?$"):
        parse_json(text, "file")
    assert parse_json("[" * 60 + "]" * 60, "file")


def test_lists_that_hold_themselves_or_grow_are_refused():
    cycle = []
    cycle.append(cycle)
    with pytest.raises(ValueError, match=r"nested too deeply"):
        expect_shallow(cycle, "file")
    laughs = ["ha"]
    for _ in range(40):
        laughs = [laughs] * 10
    with pytest.raises(ValueError, match=r"file: expected at most 1,000 entries"):
        expect_shallow(laughs, "file", max_entries=1000)
    expect_shallow({"a": [1, {"b": (2, 3)}]}, "file", max_entries=6)


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "a/b", "a\\b", "c:x", "..", ".", "", "a\0b", "a\nb", "../" * 20 + "x"]
)
def test_names_out_of_files_are_plain(tmp_path, name):
    with pytest.raises(ValueError, match=r"^index.json: .*expected the name of a file in"):
        file_within(tmp_path, name, "index.json")
    assert file_within(tmp_path, "model-00001-of-00002.safetensors", "index.json").parent == tmp_path


def test_links_that_lead_out_of_a_folder_are_refused(tmp_path):
    (tmp_path / "secret").write_text("x")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "within").symlink_to("file")
    (folder / "file").write_text("x")
    (folder / "out").symlink_to("../secret")
    (folder / "again").symlink_to("out")
    expect_within(folder, folder / "within")
    expect_within(folder, folder / "file")
    for name in ("out", "again"):
        with pytest.raises(ValueError, match=rf"{name}: expected a file of the folder, not a link to .*secret$"):
            expect_within(folder, folder / name)
        with pytest.raises(ValueError, match=r"not a link"):
            file_within(folder, name, "index.json")


def test_the_links_of_the_hubs_cache_are_followed(tmp_path):
    repository = tmp_path / "models--a--b"
    revision = repository / "snapshots" / "main"
    revision.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "blobs" / "abc").write_text(json.dumps({"a": 1}))
    (revision / "config.json").symlink_to("../../blobs/abc")
    expect_within(revision, revision / "config.json")
    (tmp_path / "secret").write_text("x")
    (repository / "blobs" / "out").symlink_to(tmp_path / "secret")
    (revision / "other").symlink_to("../../blobs/out")
    with pytest.raises(ValueError, match=r"not a link"):
        expect_within(revision, revision / "other")


def test_a_new_folder_is_there_whole_or_not_at_all(tmp_path):
    path = tmp_path / "above" / "made"
    with pytest.raises(RuntimeError), new_folder(path) as staged:
        (staged / "half").touch()
        raise RuntimeError
    assert list(path.parent.iterdir()) == []
    with new_folder(path) as staged:
        (staged / "whole").touch()
        assert not path.exists()
    assert [entry.name for entry in path.iterdir()] == ["whole"]
    with pytest.raises(OSError, match="not empty"), new_folder(path) as staged:
        (staged / "other").touch()
    with new_folder(path, or_other=True) as staged:
        (staged / "other").touch()
    assert [entry.name for entry in path.iterdir()] == ["whole"] and list(path.parent.iterdir()) == [path]
