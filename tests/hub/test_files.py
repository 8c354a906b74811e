"""Files that are damaged, or say what is not served; options that the golden files do not have; writing."""

import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from rnnlib.data import train_tokenizer
from rnnlib.hub import Pretrained, load_pretrained, pretrained_config, save_pretrained
from rnnlib.hub.config_equivalence import difference
from rnnlib.hub.families import family_of
from rnnlib.hub.pretrained import read_config
from rnnlib.hub.weight_layouts import FILTER, EqualParts
from rnnlib.models import DecoderLM, ModelConfig
from tests.hub.test_golden import GOLDEN
from tests.processes import result_of

NAMES = ("gate", "up", "down")
SMALL = ModelConfig(vocabulary_size=300, width=16, num_layers=2, num_heads=2, mixers=("gated_deltanet",), mlp_width=24)


@pytest.fixture
def folder(tmp_path):
    save_pretrained(DecoderLM(SMALL, rngs=nnx.Rngs(0)), tmp_path / "model")
    return tmp_path / "model"


def with_arrays(folder, change):
    path = folder / "model.safetensors"
    arrays = safetensors.numpy.load_file(path)
    change(arrays)
    safetensors.numpy.save_file(arrays, path)


def with_keys(folder, **keys):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.pop("model.layers.1.attn.A_log"), r"model.layers.1.attn.A_log is missing, expected an array that"),
        (
            lambda a: a.pop("model.layers.1.mlp.up_proj.weight"),
            r"model.layers.1.mlp.up_proj.weight is missing, expected an array that gives blocks.1.feed_forward.up",
        ),
        (lambda a: a.update(extra=np.zeros(3)), r"model.safetensors: extra \[3\] is surplus"),
        (
            lambda a: a.update({"lm_head.weight": np.zeros((16, 300), np.float32)}),
            r"model.safetensors: lm_head.weight has shape \[16, 300\], expected \[300, 16\]$",
        ),
        (
            lambda a: a.update({"lm_head.weight": np.zeros((300, 16), np.int8)}),
            r"model.safetensors: lm_head.weight has dtype I8, expected one of F64, .*quantised",
        ),
    ],
)
def test_arrays_that_do_not_fit_are_named(folder, change, message):
    with_arrays(folder, change)
    with pytest.raises(ValueError, match=message) as error:
        load_pretrained(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model_type": "gpt2"}, r'config.json: model_type is "gpt2", expected one of '),
        ({"hidden_size": None}, r"config.json: hidden_size is None, expected an integer of at least 1$"),
        ({"hidden_act": "gelu"}, r'config.json: hidden_act is "gelu", expected "swish" or "silu"$'),
        ({"attnres_block_size": 4}, r"config.json: attnres_block_size is 4, expected null$"),
        ({"output_gate_activation": "tanh"}, r'output_gate_activation is "tanh", expected "swish", "silu", "sigmoid"$'),
        ({"mystery": 3}, r"config.json: mystery is 3, expected no such key"),
        ({"quantization_config": {"bits": 4}}, r"config.json: quantization_config is there"),
        ({"num_heads": 3, "num_v_heads": 4}, r"num_v_heads is 4, expected a multiple of num_heads = 3$"),
        ({"expand_v": 0.001}, r"expand_v gives 0 channels of 8, expected a multiple of 1 heads$"),
        ({"attn": {"layers": [2], "num_heads": 2}}, r"attn.layers has 2, expected layers from 0 to 1$"),
        ({"attn": {"layers": [1], "num_heads": 2, "sinks": 4}}, r"attn: sinks is 4, expected no such key"),
        ({"attn": [{"layers": [1], "num_heads": 2}] * 2}, r"attn.layers has 1 twice, expected each layer once$"),
    ],
)
def test_keys_that_change_the_computation_and_are_not_served_are_named(folder, keys, message):
    with_keys(folder, **keys)
    with pytest.raises(ValueError, match=message) as error:
        load_pretrained(folder)
    assert "\n" not in str(error.value)


def test_a_key_that_its_user_knows_to_change_nothing_is_kept(folder, tmp_path):
    with_keys(folder, mystery=3, note=None)
    pretrained = load_pretrained(folder, ignore_keys=("mystery",))
    save_pretrained(pretrained, tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["mystery"] == 3


def test_a_key_within_the_language_models_keys_can_be_ignored_too(tmp_path):
    shutil.copytree(GOLDEN / "qwen3_5_multimodal/untied", tmp_path / "model")
    text = json.loads((tmp_path / "model" / "config.json").read_text())["text_config"]
    with_keys(tmp_path / "model", text_config=text | {"mystery": 3})
    with pytest.raises(ValueError, match=r"config.json: text_config: mystery is 3, expected no such key"):
        pretrained_config(tmp_path / "model")
    pretrained_config(tmp_path / "model", ignore_keys=("mystery",))


def test_files_that_are_damaged_or_missing_are_named(folder, tmp_path):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    with pytest.raises(ValueError, match=r"model.safetensors: expected a whole safetensors file"):
        load_pretrained(folder)
    path.rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"expected model.safetensors, or shards and .*, and not pytorch_model.bin$"):
        load_pretrained(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json: expected JSON"):
        load_pretrained(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config.json: there is no such file$"):
        load_pretrained(folder)
    with pytest.raises(ValueError, match=r"there is no such folder"):
        load_pretrained(tmp_path / "nowhere")


def test_an_index_and_its_shards_must_agree(folder):
    arrays = safetensors.numpy.load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(arrays)
    files = {name: f"model-0000{1 + (i > 9)}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        safetensors.numpy.save_file({name: arrays[name] for name in names if files[name] == file}, folder / file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    load_pretrained(folder)
    index.write_text(json.dumps({"weight_map": files | {names[0]: files[names[-1]]}}))
    with pytest.raises(ValueError, match=rf"index.json: {names[0]} is in model-00001.*, expected it in model-00002"):
        load_pretrained(folder)
    index.write_text(json.dumps({"weight_map": files}))
    (folder / files[names[-1]]).unlink()
    with pytest.raises(ValueError, match=r"model-00002-of-00002.safetensors: there is no such file$"):
        load_pretrained(folder)


slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "changes",
    [
        slow({"mixers": ("gated_deltanet", "attention"), "tie_embeddings": True}),
        {
            "mixers": ("gated_deltanet", "attention/a", "gated_deltanet", "attention/b"),
            "num_layers": 4,
            "mixer_overrides": {"attention/a": {"window": 5}, "attention/b": {"rope_base": 500.0, "use_bias": True}},
        },
        slow({"mixer_overrides": {"gated_deltanet": {"key_heads": 2, "value_heads": 4, "negative_eigenvalues": True}}}),
        slow({"mixers": ("deltanet",), "mixer_overrides": {"deltanet": {"convolution": None, "output_gate": True}}}),
        {"mixers": ("kda", "kda", "sliding_window_attention"), "num_layers": 3, "window": 4},
        slow({"mixers": ("gla",)}),
        slow({"mixers": ("retnet",)}),
        slow({"mixers": ("retnet",), "mixer_overrides": {"retnet": {"output_projection.gate": "none"}}}),
        {
            "mixers": ("mesanet",),
            "mixer_overrides": {"mesanet": {"solve.epsilon": 1e-5, "output_projection.eps": 1e-6}},
        },
        slow({"mixers": ("attention",), "attention_heads": 4}),
    ],
)
def test_a_model_made_here_is_written_and_read_as_it_is(changes, tmp_path):
    model = DecoderLM(SMALL.replace(**changes), rngs=nnx.Rngs(1))
    save_pretrained(model, tmp_path / "model")
    again = load_pretrained(tmp_path / "model").model
    tokens = jnp.arange(14).reshape(2, 7)
    np.testing.assert_array_equal(model(tokens), again(tokens))


def test_a_model_of_no_family_or_another_is_refused(tmp_path):
    own = DecoderLM(SMALL.replace(mixers=("efla",)), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"save_pretrained: no family has the mixers efla, expected .*gated_deltanet"):
        save_pretrained(own, tmp_path / "model")
    scaled = DecoderLM(SMALL.replace(mixer_overrides={"gated_deltanet": {"scale": 1.0}}), rngs=nnx.Rngs(0))
    message = r"the model is not of family 'gated_deltanet': layers 0, 1: scale is 1.0, expected 0.353\S*$"
    with pytest.raises(ValueError, match=message):
        save_pretrained(scaled, tmp_path / "model", family="gated_deltanet")
    mixed = SMALL.replace(mixers=("gated_deltanet", "attention"), norm_positions=("input", "output"), norm_eps=1e-5)
    message = (
        "norm_eps is 1e-05, expected 1e-06; layer 1: norm position is 'output', expected 'input'; "
        "layer 1: kind is 'AttentionConfig', expected 'RecurrentMixerConfig'"
    )
    assert difference(mixed, SMALL) == message
    with pytest.raises(ValueError, match=r"family is 'gpt2', expected one of "):
        save_pretrained(scaled, tmp_path / "model", family="gpt2")
    assert not list(tmp_path.iterdir())


def test_a_new_model_of_a_published_architecture(tmp_path):
    """From a config.json alone, with other sizes: its family describes it."""
    published = GOLDEN / "qwen3_next" / "moe" / "config.json"
    (tmp_path / "architecture").mkdir()
    shutil.copyfile(published, tmp_path / "architecture" / "config.json")
    with pytest.raises(ValueError, match=r"architecture: expected model.safetensors"):
        load_pretrained(tmp_path / "architecture")
    config = pretrained_config(tmp_path / "architecture").replace(vocabulary_size=97, num_layers=4)
    save_pretrained(DecoderLM(config, rngs=nnx.Rngs(0)), tmp_path / "new", family="qwen3_next")
    assert difference(pretrained_config(tmp_path / "new"), config) is None


def test_a_write_that_fails_leaves_the_folder_as_it_was(folder, tmp_path, monkeypatch):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    monkeypatch.setattr("rnnlib.hub.pretrained.write_json", lambda *_: (_ for _ in ()).throw(OSError("disk is full")))
    with pytest.raises(OSError, match="disk is full"):
        save_pretrained(DecoderLM(SMALL, rngs=nnx.Rngs(7)), folder)
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_folder_that_exists_keeps_its_other_files_and_loses_old_shards(folder):
    (folder / "NOTES.md").write_text("mine")
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"old")
    pretrained = load_pretrained(folder)
    save_pretrained(pretrained, folder)
    names = {path.name for path in folder.iterdir()}
    assert names == {"NOTES.md", "config.json", "model.safetensors"}


def test_a_fine_tuned_model_is_written_in_the_files_dtypes(folder, tmp_path):
    def halve(arrays):
        arrays |= {name: x.astype(jnp.bfloat16) for name, x in arrays.items() if "A_log" not in name}

    with_arrays(folder, halve)
    with_keys(folder, dtype="bfloat16")
    stored = load_pretrained(folder).model
    assert stored.config.dtype == stored.config.param_dtype == "bfloat16"
    assert stored.embedding.dtype == jnp.bfloat16 and stored.blocks[0].mixer.decay.A_log.dtype == jnp.float32
    wide = load_pretrained(folder, dtype="float32", param_dtype="float32")
    assert wide.model.embedding.dtype == jnp.float32
    wide.model.embedding[...] = wide.model.embedding[...] + 1
    save_pretrained(wide, tmp_path / "tuned")
    arrays = safetensors.numpy.load_file(tmp_path / "tuned" / "model.safetensors")
    before = safetensors.numpy.load_file(folder / "model.safetensors")
    for name, array in before.items():
        assert array.dtype == arrays[name].dtype
        assert (array.tobytes() == arrays[name].tobytes()) == (name != "model.embeddings.weight")


def test_a_model_whose_configuration_was_changed_is_not_written_as_its_source(folder, tmp_path):
    pretrained = load_pretrained(folder)
    other = DecoderLM(pretrained.model.config.replace(norm_eps=1e-3), rngs=nnx.Rngs(0))
    with pytest.raises(
        ValueError, match=r"the model is not what .*config.json says: norm_eps is 0.001, expected 1e-06"
    ):
        save_pretrained(pretrained._replace(model=other), tmp_path / "model")


def test_older_files_have_gate_and_up_in_one_array_and_an_unused_one(folder, tmp_path):
    wanted = load_pretrained(folder).model

    def join(arrays):
        for i in range(2):
            up = arrays.pop(f"model.layers.{i}.mlp.up_proj.weight")
            name = f"model.layers.{i}.mlp.gate_proj.weight"
            arrays[name] = np.concatenate([arrays[name], up])
            arrays[f"model.layers.{i}.attn.D"] = np.arange(2, dtype=np.float32)

    with_arrays(folder, join)
    pretrained = load_pretrained(folder)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(pretrained.model), nnx.state(wanted))
    save_pretrained(pretrained, tmp_path / "again")
    before, after = (safetensors.numpy.load_file(f / "model.safetensors") for f in (folder, tmp_path / "again"))
    assert before.keys() == after.keys()
    assert all(before[name].tobytes() == after[name].tobytes() for name in before)


def test_the_tokenizer_comes_along(tmp_path):
    tokenizer = train_tokenizer(["to be or not to be"] * 3, vocabulary_size=270)
    model = DecoderLM(SMALL.replace(vocabulary_size=tokenizer.vocabulary_size), rngs=nnx.Rngs(0))
    save_pretrained(Pretrained(model, tokenizer), tmp_path / "model")
    again = load_pretrained(tmp_path / "model")
    assert again.tokenizer.encode("not to be") == tokenizer.encode("not to be")
    assert again.tokenizer.end_of_document == tokenizer.end_of_document
    # The classes' own defaults are of the published vocabularies.
    keys = json.loads((tmp_path / "model" / "config.json").read_text())
    assert keys["eos_token_id"] == tokenizer.end_of_document
    assert keys["pad_token_id"] is keys["bos_token_id"] is None
    save_pretrained(again, tmp_path / "copy")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "copy" / name).read_bytes() == (tmp_path / "model" / name).read_bytes()


def test_the_source_must_still_be_there(folder, tmp_path):
    pretrained = load_pretrained(folder)
    shutil.rmtree(folder)
    with pytest.raises(ValueError, match=r"is gone, expected the folder that the model is from$"):
        save_pretrained(pretrained, tmp_path / "again")
    save_pretrained(pretrained.model, tmp_path / "again")


def test_parameters_go_where_they_are_told():
    device = jax.devices()[-1]
    sharding = jax.sharding.SingleDeviceSharding(device)
    model = load_pretrained(GOLDEN / "gla/plain", sharding=lambda like: sharding).model
    assert all(leaf.sharding == sharding for leaf in jax.tree.leaves(nnx.state(model)))


def test_a_sharded_model_is_never_whole_on_the_host_or_on_a_device():
    """Of four devices each gets a quarter; beside that it holds an array of the file or two while they are read."""
    found = result_of("tests.hub.on_devices", str(GOLDEN / "qwen3_5/text"))
    assert found["sharded"] == found["matrices"] > 30
    assert found["share of a device"] < 0.3 * found["model"]
    allowed = 4 * found["largest array"]
    assert allowed < 0.4 * found["model"]  # so that a whole model would be more
    assert found["most on the host"] <= allowed
    assert found["most on a device"] <= found["share of a device"] + allowed


def test_experts_may_stand_in_two_arrays(tmp_path):
    folder = GOLDEN / "qwen3_next/moe"
    wanted = load_pretrained(folder).model
    shutil.copytree(folder, tmp_path / "joined")
    arrays = {}
    for path in sorted((tmp_path / "joined").glob("*.safetensors*")):
        arrays |= safetensors.numpy.load_file(path) if path.suffix == ".safetensors" else {}
        path.unlink()
    for i in range(2):
        experts = f"model.layers.{i}.mlp.experts"
        parts = {name: [arrays.pop(f"{experts}.{e}.{name}_proj.weight") for e in range(6)] for name in NAMES}
        both = [np.concatenate(pair) for pair in zip(parts["gate"], parts["up"])]
        arrays |= {f"{experts}.gate_up_proj": np.stack(both), f"{experts}.down_proj": np.stack(parts["down"])}
    safetensors.numpy.save_file(arrays, tmp_path / "joined" / "model.safetensors")
    pretrained = load_pretrained(tmp_path / "joined")
    jax.tree.map(np.testing.assert_array_equal, nnx.state(pretrained.model), nnx.state(wanted))
    save_pretrained(pretrained, tmp_path / "again")
    after = safetensors.numpy.load_file(tmp_path / "again" / "model.safetensors")
    assert arrays.keys() == after.keys() and all(arrays[name].tobytes() == after[name].tobytes() for name in arrays)


def test_published_names_and_filters_of_olmo_hybrid(tmp_path):
    """Written anew, the norms have the published names and each stream its own filter: another file, the same model."""
    pretrained = load_pretrained(GOLDEN / "olmo_hybrid/nope")
    save_pretrained(pretrained.model, tmp_path / "published", family="olmo_hybrid")
    arrays = safetensors.numpy.load_file(tmp_path / "published" / "model.safetensors")
    assert arrays["model.layers.3.post_attention_layernorm.weight"].shape == (32,)
    assert arrays["model.layers.0.linear_attn.v_conv1d.weight"].shape == (48, 1, 4)
    again = load_pretrained(tmp_path / "published")
    jax.tree.map(np.testing.assert_array_equal, nnx.state(again.model), nnx.state(pretrained.model))


def test_filters_of_unequal_streams_are_cut_as_transformers_cuts_them():
    """Into parts of one size, rounded up; the last is what is left (`torch.chunk`)."""
    filters = [jnp.arange(4.0 * channels).reshape(4, channels) + channels for channels in (12, 12, 40)]
    parts = EqualParts(FILTER).write(filters, None)
    assert [part.shape for part in parts] == [(22, 1, 4), (22, 1, 4), (20, 1, 4)]
    back = EqualParts(FILTER).read(parts, filters, None)
    jax.tree.map(np.testing.assert_array_equal, back, filters)


def test_norms_without_a_gate_have_the_name_that_their_reader_expects(tmp_path):
    """Flash-linear-attention: `g_norm_swish_gate` where norm and gate are one kernel, else `g_norm`."""
    for gate, name in (("silu", "g_norm_swish_gate"), ("none", "g_norm")):
        config = SMALL.replace(mixers=("gla",), mixer_overrides={"gla": {"output_projection.gate": gate}})
        save_pretrained(DecoderLM(config, rngs=nnx.Rngs(0)), tmp_path / gate)
        assert f"model.layers.0.attn.{name}.weight" in safetensors.numpy.load_file(
            tmp_path / gate / "model.safetensors"
        )


def config_of(folder, **changes):
    """The model that a golden file's config.json gives with some keys changed, those of None left out."""
    values = json.loads((GOLDEN / folder / "config.json").read_text()) | changes
    values = {name: value for name, value in values.items() if value is not None}
    family = family_of(values, "config.json")
    return read_config(family, values, "config.json")


def test_a_key_that_the_published_code_ignores_is_ignored():
    plain = config_of("precond_gated_deltanet/gate")
    assert config_of("precond_gated_deltanet/gate", output_gate_activation="sigmoid") == plain


def test_a_model_of_attention_alone_can_be_of_a_hybrids_family(tmp_path):
    config = config_of("qwen3_5/text", layer_types=["full_attention"] * 4)
    save_pretrained(DecoderLM(config, rngs=nnx.Rngs(0)), tmp_path / "model", family="qwen3_5")
    assert pretrained_config(tmp_path / "model").layer_mixers == ("attention",) * 4


# As the published file has them, in place of what transformers writes.
KIMI = {
    "layer_types": None,
    "mlp_layer_types": None,
    "linear_num_heads": None,
    "linear_head_dim": None,
    "linear_conv_kernel_dim": None,
    "linear_attn_config": {
        "kda_layers": [1, 2],
        "full_attn_layers": [3],
        "num_heads": 2,
        "head_dim": 12,
        "short_conv_kernel_size": 4,
    },
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_router_activation_func": "sigmoid",
    "use_grouped_topk": True,
    "mla_use_nope": True,
    "num_nextn_predict_layers": 0,
    "rope_theta": 10000.0,
}


def test_both_spellings_of_kimi_linears_configuration():
    written = config_of("kimi_linear/moe")
    assert config_of("kimi_linear/moe", **KIMI) == written
    assert written.layer_mixers == ("kda", "kda", "latent_attention")
    others = {"num_expert_group": 3, "topk_group": 2, "moe_renormalize": False, "num_shared_experts": 2}
    experts = config_of("kimi_linear/moe", q_lora_rank=6, attention_bias=True, **others).layer_feed_forwards[1]
    assert (experts.router.groups, experts.router.groups_kept, experts.router.renormalize) == (3, 2, False)
    assert experts.shared_width == 24
    # Where neither list is there: every fifth layer, but the first, and one dense feed-forward.
    plain = config_of("kimi_linear/moe", layer_types=None, mlp_layer_types=None, num_hidden_layers=6)
    assert [i for i, mixer in enumerate(plain.layer_mixers) if mixer == "latent_attention"] == [4]
    assert plain.layer_feed_forwards.count("dense") == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mla_use_nope": False}, "mla_use_nope is false, expected true"),
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2, expected num_attention_heads = 4"),
        ({"moe_router_activation_func": "softmax"}, 'moe_router_activation_func is "softmax", expected "sigmoid"'),
        ({"use_grouped_topk": False, "num_expert_group": 2}, "use_grouped_topk is false, expected true"),
        ({"mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types has 2 entries, expected num_hidden_layers = 3"),
        (
            {"layer_types": ["full_attention"] * 2 + ["recurrent"]},
            "layer_types has 'recurrent', expected linear_attention or",
        ),
        (
            KIMI | {"linear_attn_config": {"kda_layers": [1, 2], "full_attn_layers": [2]}},
            r"linear_attn_config: kda_layers and full_attn_layers are \[1, 2\] and \[2\], expected each layer from",
        ),
        (KIMI | {"linear_attn_config": {"rank": 2}}, "linear_attn_config: rank is 2, expected no such key"),
        ({"num_experts": 5, "num_expert_group": 2}, "num_experts is 5, expected a multiple of router.groups=2"),
    ],
)
def test_what_kimi_linear_is_not_served_with_is_named(changes, message):
    with pytest.raises(ValueError, match=message) as error:
        config_of("kimi_linear/moe", **changes)
    assert str(error.value).startswith("config.json: ") and "\n" not in str(error.value)
