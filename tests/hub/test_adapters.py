"""PEFT's adapters beside a model: added to its matrices, and never left half in a folder that is written."""

import json
import math
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from rnnlib.hub import load_pretrained, save_pretrained
from rnnlib.models import DecoderLM, ModelConfig
from tests.hub.test_golden import GOLDEN

CONFIG = ModelConfig(20, width=16, num_layers=1, num_heads=2, mixers=("gated_deltanet",), mlp_width=8)
QUERY, HEAD, EMBEDDING = "model.layers.0.attn.q_proj", "lm_head", "model.embeddings"
RANDOM = np.random.default_rng(0)
FACTORS = {
    f"base_model.model.{QUERY}.lora_A.weight": RANDOM.normal(size=(2, 16)).astype(np.float32),
    f"base_model.model.{QUERY}.lora_B.weight": RANDOM.normal(size=(16, 2)).astype(np.float32),
}
SETTINGS = {"peft_type": "LORA", "r": 2, "lora_alpha": 3, "target_modules": ["q_proj"], "lora_dropout": 0.1}


def folder_with(folder, factors=FACTORS, **settings):
    save_pretrained(DecoderLM(CONFIG, rngs=nnx.Rngs(0)), folder, family="gated_deltanet")
    (folder / "adapter_config.json").write_text(json.dumps(SETTINGS | settings))
    safetensors.numpy.save_file(factors, folder / "adapter_model.safetensors")
    return folder


def written(folder, tmp_path):
    """The arrays that a folder's model is written with, and those of its file."""
    save_pretrained(load_pretrained(folder), tmp_path / "written")
    after = safetensors.numpy.load_file(tmp_path / "written" / "model.safetensors")
    path = folder / "model.safetensors"
    return after, safetensors.numpy.load_file(path) if path.exists() else {}


def changed(after, before):
    return {name for name in before if not np.array_equal(after[name], before[name])}


@pytest.mark.parametrize(
    ("settings", "scale"),
    [({}, 3 / 2), ({"use_rslora": True}, 3 / math.sqrt(2)), ({"alpha_pattern": {"attn.q_proj": 8}}, 4.0)],
)
def test_an_adapter_is_added_and_written_in_the_matrices(settings, scale, tmp_path):
    folder = folder_with(tmp_path / "model", **settings)
    after, before = written(folder, tmp_path)
    a, b = FACTORS.values()
    assert changed(after, before) == {f"{QUERY}.weight"}
    np.testing.assert_allclose(
        after[f"{QUERY}.weight"], before[f"{QUERY}.weight"] + scale * b @ a, rtol=1e-6, atol=1e-6
    )
    names = {path.name for path in (tmp_path / "written").iterdir()}
    assert not any(name.startswith("adapter") for name in names)
    tokens = jnp.array([[1, 2, 3]])
    logits = [load_pretrained(path).model(tokens) for path in (folder, tmp_path / "written")]
    np.testing.assert_array_equal(*logits)
    # A folder that is replaced keeps nothing of its old model's adapter.
    save_pretrained(load_pretrained(tmp_path / "written"), folder)
    assert not (folder / "adapter_config.json").exists() and not (folder / "adapter_model.safetensors").exists()


def test_an_embedding_and_a_module_that_is_stored_whole(tmp_path):
    factors = {
        f"base_model.model.{EMBEDDING}.lora_embedding_A": RANDOM.normal(size=(2, 20)).astype(np.float32),
        f"base_model.model.{EMBEDDING}.lora_embedding_B": RANDOM.normal(size=(16, 2)).astype(np.float32),
        f"base_model.model.{HEAD}.weight": RANDOM.normal(size=(20, 16)).astype(np.float32),
    }
    after, before = written(folder_with(tmp_path / "model", factors, modules_to_save=["lm_head"]), tmp_path)
    a, b, head = factors.values()
    assert changed(after, before) == {f"{EMBEDDING}.weight", f"{HEAD}.weight"}
    change = after[f"{EMBEDDING}.weight"] - before[f"{EMBEDDING}.weight"]
    np.testing.assert_allclose(change, 1.5 * (b @ a).T, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(after[f"{HEAD}.weight"], head)


@pytest.mark.parametrize(
    ("factors", "settings", "message"),
    [
        (FACTORS, {"peft_type": "IA3"}, 'adapter_config.json: peft_type is "IA3", expected "LORA"'),
        (FACTORS, {"use_dora": True}, "adapter_config.json: use_dora is true, expected no such key"),
        (FACTORS, {"init_lora_weights": "pissa"}, 'init_lora_weights is "pissa", expected true or'),
        (FACTORS, {"r": 4}, "q_proj has rank 2, expected 4 as adapter_config.json says"),
        (FACTORS, {"alpha_pattern": {"(a+)+": 1}}, r"alpha_pattern has '\(a\+\)\+': 1, expected positive numbers"),
        (
            {"base_model.model.x.lora_A.weight": np.ones((2, 3))},
            {},
            r"x.weight has .*lora_A.weight alone, expected two",
        ),
        ({"model.x.weight": np.ones(3)}, {}, "model.x.weight is there, expected names that begin with base_model.m"),
        ({"base_model.model.x.weight": np.ones(3)}, {}, "it changes x.weight, expected names of the model's arrays"),
        (
            FACTORS | {f"base_model.model.{QUERY}.lora_B.weight": np.ones((8, 2), np.float32)},
            {},
            r"q_proj.weight has shape \[8, 16\], expected \[16, 16\]",
        ),
    ],
)
def test_what_is_not_served_is_named(factors, settings, message, tmp_path):
    folder = folder_with(tmp_path / "model", factors, **settings)
    with pytest.raises(ValueError, match=message) as error:
        load_pretrained(folder)
    assert "\n" not in str(error.value)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"adapter_(model.safetensors: there is no such file|config.json: )"):
        load_pretrained(folder)


def test_an_adapter_alone_names_its_model(tmp_path):
    both, alone = folder_with(tmp_path / "both"), tmp_path / "alone"
    alone.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (both / name).replace(alone / name)
    settings = json.loads((alone / "adapter_config.json").read_text())
    for name in (str(both), "../both"):
        (alone / "adapter_config.json").write_text(json.dumps(settings | {"base_model_name_or_path": name}))
        after, before = written(alone, tmp_path)[0], safetensors.numpy.load_file(both / "model.safetensors")
        assert changed(after, before) == {f"{QUERY}.weight"}
    for name, message in (
        (None, "base_model_name_or_path is None, expected the adapter's model, a folder or owner/name"),
        ("nowhere", "base_model_name_or_path is nowhere, where no model is found"),
    ):
        (alone / "adapter_config.json").write_text(json.dumps(settings | {"base_model_name_or_path": name}))
        with pytest.raises(ValueError, match=message):
            load_pretrained(alone)


WHOLE = RANDOM.normal(size=(20, 16)).astype(np.float32)
OF_EMBEDDING = {
    f"base_model.model.{EMBEDDING}.lora_embedding_A": RANDOM.normal(size=(2, 20)).astype(np.float32),
    f"base_model.model.{EMBEDDING}.lora_embedding_B": RANDOM.normal(size=(16, 2)).astype(np.float32),
    f"base_model.model.{EMBEDDING}.base_layer.weight": WHOLE,  # PEFT stores it beside the factors
}


@pytest.mark.parametrize(
    ("factors", "embedding", "head"),
    [
        ({f"base_model.model.{EMBEDDING}.weight": WHOLE}, WHOLE, None),
        ({f"base_model.model.{HEAD}.weight": WHOLE}, None, WHOLE),
        ({f"base_model.model.{name}.weight": WHOLE for name in (EMBEDDING, HEAD)}, WHOLE, WHOLE),
        (OF_EMBEDDING, WHOLE + 1.5 * (OF_EMBEDDING[list(OF_EMBEDDING)[1]] @ next(iter(OF_EMBEDDING.values()))).T, None),
    ],
    ids=["embedding", "head", "both", "factors"],
)
@pytest.mark.parametrize("is_sharded", [False, True])
def test_an_adapter_of_a_tied_model_changes_what_it_names_alone(factors, embedding, head, is_sharded, tmp_path):
    folder = tmp_path / "model"
    model = DecoderLM(CONFIG.replace(tie_embeddings=True), rngs=nnx.Rngs(0))
    save_pretrained(model, folder, family="gated_deltanet")
    if is_sharded:
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
        arrays = safetensors.numpy.load_file(folder / "model-00001-of-00001.safetensors")
        index = {"weight_map": dict.fromkeys(arrays, "model-00001-of-00001.safetensors")}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "adapter_config.json").write_text(json.dumps(SETTINGS))
    safetensors.numpy.save_file(factors, folder / "adapter_model.safetensors")
    before = np.asarray(model.embedding[...])
    adapted = load_pretrained(folder)
    assert adapted.model.config.tie_embeddings == (embedding is head)
    save_pretrained(adapted, tmp_path / "written")
    for read in (adapted, load_pretrained(tmp_path / "written")):
        found = read.model.embedding[...]
        np.testing.assert_allclose(found, before if embedding is None else embedding, rtol=1e-5, atol=1e-5)
        found = read.model.embedding[...] if read.model.config.tie_embeddings else read.model.head[...]
        np.testing.assert_allclose(found, before if head is None else head, rtol=1e-6)


def test_biases_that_were_trained_and_biases_of_factors(tmp_path):
    attention = {"attention": {"use_bias": True}}
    config = CONFIG.replace(mixers=("gated_deltanet", "attention"), num_layers=2, mixer_overrides=attention)
    query = "base_model.model.model.layers.1.attn.q_proj"
    stored, change = RANDOM.normal(size=(2, 16)).astype(np.float32)
    a, b = FACTORS.values()
    factors = {f"{query}.lora_A.weight": a, f"{query}.lora_B.weight": b, f"{query}.lora_B.bias": change}
    factors |= {f"{query}.base_layer.bias": stored}
    save_pretrained(DecoderLM(config, rngs=nnx.Rngs(0)), tmp_path / "model", family="gated_deltanet")
    settings = SETTINGS | {"bias": "lora_only", "lora_bias": True}
    (tmp_path / "model" / "adapter_config.json").write_text(json.dumps(settings))
    safetensors.numpy.save_file(factors, tmp_path / "model" / "adapter_model.safetensors")
    after, before = written(tmp_path / "model", tmp_path)
    name = "model.layers.1.attn.q_proj"
    assert changed(after, before) == {f"{name}.weight", f"{name}.bias"}
    np.testing.assert_allclose(after[f"{name}.bias"], stored + 1.5 * change, rtol=1e-6, atol=1e-6)


def test_prefixes_of_modules_in_memory_stand_for_those_of_the_file(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(GOLDEN / "nemotron_h/plain", folder)
    names = safetensors.numpy.load_file(folder / "model.safetensors")
    name = next(name for name in names if name.endswith("mixer.out_proj.weight"))
    outputs, inputs = names[name].shape
    # transformers calls `backbone.` of the file `model.`, and PEFT's names are of its modules.
    module = "base_model.model.model." + name.removeprefix("backbone.").removesuffix(".weight")
    factors = {f"{module}.lora_A.weight": np.ones((2, inputs), np.float32)}
    factors |= {f"{module}.lora_B.weight": np.ones((outputs, 2), np.float32)}
    (folder / "adapter_config.json").write_text(json.dumps(SETTINGS))
    safetensors.numpy.save_file(factors, folder / "adapter_model.safetensors")
    after, before = written(folder, tmp_path)
    assert changed(after, before) == {name}
    np.testing.assert_allclose(after[name], before[name] + 3.0, rtol=1e-5)
