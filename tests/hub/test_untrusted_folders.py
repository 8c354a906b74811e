"""Folders that someone made to do harm: nothing outside of them is read or written, nothing hangs, all is one line."""

import json
import os
import re
import struct

import pytest
import safetensors.numpy
from flax import nnx

from rnnlib.cli.main import main
from rnnlib.hub import load_pretrained, save_pretrained
from rnnlib.models import DecoderLM, ModelConfig
from rnnlib.models.weights import load_weights, save_weights
from rnnlib.training import load_model

SMALL = ModelConfig(vocabulary_size=300, width=16, num_layers=2, num_heads=2, mixers=("gated_deltanet",), mlp_width=24)


@pytest.fixture
def folder(tmp_path):
    save_pretrained(DecoderLM(SMALL, rngs=nnx.Rngs(0)), tmp_path / "model")
    return tmp_path / "model"


def in_shard(folder, name):
    arrays = safetensors.numpy.load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "weights")
    index = {"weight_map": dict.fromkeys(arrays, name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder / "weights"


def refusal(folder):
    with pytest.raises(ValueError) as error:
        load_pretrained(folder)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("name", ["../victim.safetensors", "sub/a.safetensors", "victim.txt", "/victim"])
def test_shards_are_files_of_the_folder(folder, tmp_path, capsys, name):
    weights = in_shard(folder, name)
    target = folder / name if not name.startswith("/") else tmp_path / "victim"
    target.parent.mkdir(exist_ok=True)
    if name.startswith("/"):
        in_index = folder / "model.safetensors.index.json"
        in_index.write_text(in_index.read_text().replace('"/victim"', f'"{target}.safetensors"'))
    weights.rename(target)
    before = target.read_bytes()
    assert re.search("expected the name of a file in|expected names of safetensors files", refusal(folder))
    (tmp_path / "out").mkdir()
    assert main(["export", str(folder), str(tmp_path / "out" / "copy")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert target.read_bytes() == before and not list((tmp_path / "out").iterdir())


def test_a_shard_of_the_folder_is_read_and_written_again(folder, tmp_path):
    in_shard(folder, "weights.safetensors").rename(folder / "weights.safetensors")
    save_pretrained(load_pretrained(folder), tmp_path / "copy")
    assert (tmp_path / "copy" / "weights.safetensors").read_bytes()


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "notes.txt", "tokenizer_config.json"])
def test_links_out_of_the_folder_are_neither_read_nor_copied(folder, tmp_path, name):
    pretrained = load_pretrained(folder)
    if (folder / name).exists():
        (folder / name).rename(tmp_path / "mine")
    else:
        (tmp_path / "mine").write_text('{"a": 1}')
    (folder / name).symlink_to(tmp_path / "mine")
    with pytest.raises(ValueError, match=r"expected a file of the folder, not a link to .*mine$"):
        save_pretrained(pretrained, tmp_path / "copy")
    if name in ("model.safetensors", "config.json"):
        assert "not a link to" in refusal(folder)
    assert not (tmp_path / "copy").exists()


def test_what_stands_in_the_output_folder_is_replaced_and_not_written_through(folder, tmp_path):
    (folder / "chat_template.jinja").write_text("a template")
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "chat_template.jinja").symlink_to(tmp_path / "mine")
    assert main(["export", str(folder), str(tmp_path / "out"), "--family", "gated_deltanet", "--overwrite"]) == 0
    assert (tmp_path / "mine").read_text() == "mine"
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "a template"


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"num_hidden_layers": 100_000},
            r"num_hidden_layers is 100000, expected what the weight files serve: they have",
        ),
        ({"num_hidden_layers": 10**9}, r"num_hidden_layers is 1000000000, expected"),
        ({"hidden_size": 10**12}, r"hidden_size is 1000000000000, expected"),
        ({"vocab_size": 10**12}, r"vocab_size is 1000000000000, expected"),
        ({"num_heads": 10**12}, r"num_heads is 1000000000000, expected"),
        ({"conv_size": 10**15}, r"conv_size is 1000000000000000, expected"),
        ({"expand_v": 1e300}, r"has shape .*, expected"),
        ({"hidden_ratio": 1e308, "intermediate_size": None}, r"config.json: |shape"),
        ({"attn": {"layers": [1], "num_heads": 10**12}}, r"num_heads is 1000000000000, expected"),
    ],
)
def test_sizes_that_the_files_do_not_have_are_refused_before_a_model_is_built(folder, keys, message):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
    assert re.search(message, refusal(folder))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "generation_config.json", "tokenizer.json"])
def test_pipes_and_nested_files_end_in_one_line(folder, name):
    def read():
        with pytest.raises(ValueError) as error:
            loaded = load_model(folder, tokenizer=None if name == "tokenizer.json" else "byte")
            assert loaded.stop_tokens
        assert "\n" not in str(error.value) and name in str(error.value)

    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    if name in ("config.json", "model.safetensors"):
        read()
    (folder / name).unlink()
    (folder / name).write_text('{"a":' * 100_000)
    read()


def test_a_damaged_generation_config_is_one_line(folder, capsys):
    (folder / "generation_config.json").write_text("{")
    assert main(["generate", str(folder), "--tokenizer", "byte", "--max-new-tokens", "1"]) == 2
    assert "generation_config.json: expected JSON" in capsys.readouterr().err


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 100_000}, r"num_layers is 100000, expected what the weight files serve"),
        ({"num_heads": 10**12}, r"num_heads is 1000000000000, expected what"),
        ({"mixer_overrides": {"gated_deltanet": {"key_head_dim": 10**12}}}, r"key_head_dim is 1000000000000, expected"),
    ],
)
def test_weight_files_whose_configuration_lies(tmp_path, change, message):
    path = tmp_path / "weights"
    save_weights(DecoderLM(SMALL, rngs=nnx.Rngs(0)), path)
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    config = json.loads(header["__metadata__"]["rnnlib.model_config"]) | change
    header["__metadata__"]["rnnlib.model_config"] = json.dumps(config)
    header = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + content[8 + length :])
    with pytest.raises(ValueError, match=message):
        load_weights(path)


@pytest.mark.timeout(60)
def test_weight_files_are_regular(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match=r"pipe: expected a regular file, not a named pipe"):
        load_weights(tmp_path / "pipe")
