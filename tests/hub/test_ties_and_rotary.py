"""Arrays that a file has once or twice, and the two spellings of rotary positions, as transformers 5.24 takes them."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from rnnlib.hub import load_pretrained, pretrained_config, save_pretrained
from rnnlib.models import DecoderLM
from tests.hub.test_golden import GOLDEN

TOKENS = jnp.array([[5, 17, 3]])
ROTARY = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}


def altered(folder, name, arrays=None, without=(), **keys):
    """A copy of a golden folder with other arrays and keys."""
    shutil.copytree(GOLDEN / name, folder)
    values = json.loads((folder / "config.json").read_text()) | keys
    values = {key: value for key, value in values.items() if key not in without}
    (folder / "config.json").write_text(json.dumps(values))
    if arrays is not None:
        found = safetensors.numpy.load_file(folder / "model.safetensors")
        safetensors.numpy.save_file(arrays(found), folder / "model.safetensors")
    return folder


def arrays_of(folder):
    return safetensors.numpy.load_file(folder / "model.safetensors")


def test_a_head_that_differs_from_the_tied_embedding_is_kept(tmp_path):
    folder = altered(tmp_path / "model", "qwen3_5/text", tie_word_embeddings=True)
    loaded, plain = load_pretrained(folder), load_pretrained(GOLDEN / "qwen3_5/text")
    assert not loaded.model.config.tie_embeddings and not pretrained_config(folder).tie_embeddings
    np.testing.assert_array_equal(loaded.model(TOKENS), plain.model(TOKENS))
    save_pretrained(loaded, tmp_path / "back")
    before, after = arrays_of(folder), arrays_of(tmp_path / "back")
    assert before.keys() == after.keys() and all(before[key].tobytes() == after[key].tobytes() for key in before)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["tie_word_embeddings"] is True
    np.testing.assert_array_equal(load_pretrained(tmp_path / "back").model(TOKENS), plain.model(TOKENS))


def test_a_head_that_equals_the_embedding_is_tied_and_written_twice(tmp_path):
    head = {"lm_head.weight": arrays_of(GOLDEN / "mamba2/tied")["backbone.embeddings.weight"].astype(np.float64)}
    folder = altered(tmp_path / "model", "mamba2/tied", lambda arrays: arrays | head)
    loaded = load_pretrained(folder)
    assert loaded.model.config.tie_embeddings
    loaded.model.embedding.set_value(loaded.model.embedding.get_value() * 2)
    save_pretrained(loaded, tmp_path / "back")
    np.testing.assert_array_equal(arrays_of(tmp_path / "back")["lm_head.weight"], 2 * head["lm_head.weight"])


def test_a_tied_file_with_the_head_alone(tmp_path):
    def renamed(arrays):
        return {name.replace("backbone.embeddings", "lm_head"): array for name, array in arrays.items()}

    folder = altered(tmp_path / "model", "mamba2/tied", renamed)
    loaded = load_pretrained(folder)
    np.testing.assert_array_equal(loaded.model(TOKENS), load_pretrained(GOLDEN / "mamba2/tied").model(TOKENS))
    save_pretrained(loaded, tmp_path / "back")
    before, after = arrays_of(folder), arrays_of(tmp_path / "back")
    assert before.keys() == after.keys() and all(before[key].tobytes() == after[key].tobytes() for key in before)
    # In a file that is not tied, the head is no embedding.
    folder = altered(tmp_path / "untied", "mamba2/tied", renamed, tie_word_embeddings=False)
    with pytest.raises(ValueError, match=r"backbone.embeddings.weight is missing, expected an array that gives"):
        load_pretrained(folder)


def test_a_feature_map_that_is_stored_twice_must_be_one(tmp_path):
    plain = pretrained_config(GOLDEN / "linear_attn/elu")
    shared = {"feature_map": "hedgehog", "tie_feature_map_qk": True}
    folder = altered(tmp_path / "shape", "linear_attn/elu", **shared)
    model = DecoderLM(pretrained_config(folder), rngs=nnx.Rngs(0))
    assert plain.layer_mixers == model.config.layer_mixers
    save_pretrained(model, tmp_path / "model", family="linear_attn")
    arrays = arrays_of(tmp_path / "model")
    queries = [name for name in arrays if "feature_map_q" in name]
    assert queries and not any("feature_map_k" in name for name in arrays)
    copies = {name.replace("map_q", "map_k"): arrays[name] for name in queries}
    safetensors.numpy.save_file(arrays | copies, tmp_path / "model" / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, nnx.state(load_pretrained(tmp_path / "model").model), nnx.state(model))
    name = next(iter(copies))
    safetensors.numpy.save_file(arrays | copies | {name: copies[name] + 1}, tmp_path / "model" / "model.safetensors")
    with pytest.raises(ValueError, match=rf"{name} differs from .*feature_map_q.*, expected equal arrays") as error:
        load_pretrained(tmp_path / "model")
    assert "\n" not in str(error.value)
    # Files that have the map as that of keys alone.
    rest = {name: array for name, array in arrays.items() if name not in queries}
    safetensors.numpy.save_file(rest | copies, tmp_path / "model" / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, nnx.state(load_pretrained(tmp_path / "model").model), nnx.state(model))


def rotary(tmp_path, name, **keys):
    config = pretrained_config(altered(tmp_path / name, "qwen3_5/text", without=("rope_parameters",), **keys))
    options = dict(dict(config.mixer_overrides)["attention"])
    return options["rope_base"], options["rope_channels"] / options["head_dim"]


def test_rotary_keys_in_either_object(tmp_path):
    assert rotary(tmp_path, "old", rope_scaling=ROTARY) == (1e6, 0.5)
    assert rotary(tmp_path, "mixed", rope_scaling={"type": "default"}, rope_theta=500.0) == (500.0, 0.25)
    assert rotary(tmp_path, "top", rope_theta=500.0, partial_rotary_factor=1.0) == (500.0, 1.0)
    # `rope_scaling` wins as a whole: what it lacks is not taken from `rope_parameters`.
    both = {"rope_parameters": ROTARY, "rope_scaling": {"rope_type": "default", "rope_theta": 7.0}}
    folder = altered(tmp_path / "both", "qwen3_5/text", **both)
    options = dict(dict(pretrained_config(folder).mixer_overrides)["attention"])
    assert (options["rope_base"], options["rope_channels"]) == (7.0, options["head_dim"] // 4)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rope_scaling": ROTARY | {"factor": 4.0}}, r"rope_scaling: factor is 4.0, expected no such key"),
        ({"rope_parameters": ROTARY | {"rope_type": "yarn"}}, r'rope_parameters: rope_type is "yarn", expected "def'),
        ({"rope_scaling": {"type": "linear"}}, r'rope_scaling: type is "linear", expected "default"'),
        ({"rope_parameters": {"full_attention": ROTARY}}, r"rope_parameters: full_attention is .*, expected no such"),
    ],
)
def test_rotary_keys_that_are_not_served_are_named(keys, message, tmp_path):
    with pytest.raises(ValueError, match=message) as error:
        pretrained_config(altered(tmp_path / "model", "qwen3_5/text", **keys))
    assert "\n" not in str(error.value)


def test_a_key_beside_the_language_models_keys_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"config.json: mystery is 3, expected no such key"):
        pretrained_config(altered(tmp_path / "model", "qwen3_5_multimodal/untied", mystery=3))
