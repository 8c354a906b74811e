import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rnnlib.models import DecoderLM
from rnnlib.models.weights import load_weights, save_weights
from tests.tiny_models import tiny_config

CONFIG = tiny_config("gated_deltanet", "attention", param_dtype="bfloat16")


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


def test_a_model_that_is_not_its_configuration_is_not_written(tmp_path):
    model = DecoderLM(CONFIG.replace(param_dtype="float32"), rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(model)
    cast = nnx.merge(graphdef, jax.tree.map(lambda x: x.astype(jnp.bfloat16), state))
    message = (
        r"save_weights: the model's arrays do not fit the configuration: blocks.0.feed_forward.down.kernel is "
        r"bfloat16 \[32, 32\], expected float32 \[32, 32\]; .*; and \d+ more$"
    )
    with pytest.raises(ValueError, match=message):
        save_weights(cast, tmp_path / "model.safetensors")
    model.norm = nnx.RMSNorm(31, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"configuration: norm.scale is float32 \[31\], expected float32 \[32\]$"):
        save_weights(model, tmp_path / "model.safetensors")
    assert not list(tmp_path.iterdir())


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    def full(*paths):
        raise OSError("disk is full")

    path = tmp_path / "model.safetensors"
    path.write_bytes(b"before")
    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="disk is full"):
        save_weights(DecoderLM(CONFIG, rngs=nnx.Rngs(0)), path)
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [b"before"]


def test_another_dtype_is_another_configuration(tmp_path):
    """As save_weights says: values cast to what the configuration's model has, some of which stays wide."""
    model = DecoderLM(CONFIG.replace(param_dtype="float32"), rngs=nnx.Rngs(0))
    half = DecoderLM(model.config.replace(dtype="bfloat16", param_dtype="bfloat16"), rngs=nnx.Rngs(1))
    to, given = nnx.state(half, nnx.Param), nnx.state(model, nnx.Param)
    nnx.update(half, jax.tree.map(lambda x, y: y.astype(x.dtype), to, given))
    save_weights(half, tmp_path / "half")
    assert half.embedding.dtype == jnp.bfloat16 and half.blocks[0].mixer.decay.A_log.dtype == jnp.float32
    tokens = jnp.arange(12)[None]
    np.testing.assert_array_equal(load_weights(tmp_path / "half")(tokens), half(tokens))
    np.testing.assert_allclose(half(tokens), model(tokens), atol=0.02)


def test_a_file_that_is_not_whole_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    save_weights(DecoderLM(CONFIG.replace(num_layers=1, mixers=("attention",)), rngs=nnx.Rngs(0)), path)
    whole = path.read_bytes()
    whole_file = "expected a whole safetensors file that save_weights wrote"
    for content, message in (
        (whole[:-10], whole_file),
        (whole + b"more", whole_file),
        (whole.replace(b'"data_offsets"', b'"data-offsets"'), whole_file),
        (
            whole.replace(b'"BF16","shape":[29,32]', b'"U16" ,"shape":[29,32]'),
            r"do not fit the configuration: embedding is U16 \[29, 32\], expected bfloat16 \[29, 32\]",
        ),
        (whole.replace(b'"embedding"', b'"embeddinG"'), r"embeddinG is bfloat16 \[29, 32\], expected no such array"),
        (whole[:100], whole_file),
        (b"", whole_file),
    ):
        assert content != whole
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            load_weights(path)


def test_a_file_of_something_else_is_refused(tmp_path):
    path = tmp_path / "other.safetensors"
    path.write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    with pytest.raises(ValueError, match="expected a whole safetensors file that save_weights wrote"):
        load_weights(path)
    path.write_bytes(b"text, not a model")
    with pytest.raises(ValueError, match="expected a whole safetensors file that save_weights wrote"):
        load_weights(path)
