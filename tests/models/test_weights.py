import jax
import numpy as np
import pytest
from flax import nnx

from rnnlib.models import DecoderLM, ModelConfig
from rnnlib.models.weights import load_weights, save_weights

CONFIG = ModelConfig(
    vocabulary_size=29,
    width=32,
    num_layers=2,
    num_heads=2,
    mixers=("gated_deltanet", "attention"),
    mlp_width=32,
    param_dtype="bfloat16",
)


def test_weights_come_back_bit_for_bit_with_their_configuration(tmp_path):
    model = DecoderLM(CONFIG, rngs=nnx.Rngs(0))
    path = tmp_path / "model.safetensors"
    save_weights(model, path)
    loaded = load_weights(path)
    assert loaded.config == CONFIG
    before, after = nnx.to_pure_dict(nnx.state(model)), nnx.to_pure_dict(nnx.state(loaded))
    jax.tree.map(np.testing.assert_array_equal, before, after)
    assert jax.tree.map(lambda leaf: leaf.dtype.name, before) == jax.tree.map(lambda leaf: leaf.dtype.name, after)
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_file_that_is_not_whole_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    save_weights(DecoderLM(CONFIG.replace(num_layers=1, mixers=("attention",)), rngs=nnx.Rngs(0)), path)
    whole = path.read_bytes()
    for content, message in (
        (whole[:-10], "it was cut off or added to"),
        (whole + b"more", "it was cut off or added to"),
        (whole.replace(b"[0, 2048]", b"[8, 2056]"), "is at bytes 8 to 2056, expected 0 to 2048"),
        (whole.replace(b'"data_offsets"', b'"data-offsets"'), "expected a safetensors file that save_weights wrote"),
        (whole[:100], "expected a safetensors file that save_weights wrote"),
        (b"", "expected a safetensors file that save_weights wrote"),
    ):
        assert content != whole
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            load_weights(path)


def test_a_file_of_something_else_is_refused(tmp_path):
    path = tmp_path / "other.safetensors"
    path.write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    with pytest.raises(ValueError, match="expected a safetensors file that save_weights wrote"):
        load_weights(path)
    path.write_bytes(b"text, not a model")
    with pytest.raises(ValueError, match="expected a safetensors file that save_weights wrote"):
        load_weights(path)
