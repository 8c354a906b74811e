"""Options of families that their golden file does not have: read, written anew and read again, with every array."""

import jax
import numpy as np
import pytest
from flax import nnx

from rnnlib.hub import load_pretrained, save_pretrained
from rnnlib.hub.config_equivalence import difference
from rnnlib.hub.config_reader import ConfigKeys, read_json
from rnnlib.hub.families import family_of
from rnnlib.hub.pretrained import read_config
from rnnlib.models import DecoderLM
from tests.hub.test_golden import GOLDEN

VARIANTS = {
    "bamba/plain": [
        {"mamba_n_groups": 3, "mamba_proj_bias": True, "attention_bias": True, "mlp_bias": True},
        {"time_step_limit": [0.01, 0.5], "mamba_conv_bias": False, "tie_word_embeddings": True, "mamba_d_head": "auto"},
        {"attn_layer_indices": None},
    ],
    "granitemoehybrid/plain": [
        {"num_local_experts": 0, "position_embedding_type": "rope", "attention_bias": True},
        {"mamba_n_groups": 2, "mamba_proj_bias": True, "tie_word_embeddings": False, "layer_types": None},
    ],
    "nemotron_h/plain": [
        {"layers_block_type": ["mlp", "moe", "mamba", "attention"], "moe_latent_size": 14, "mlp_bias": True},
        {"layers_block_type": None, "hybrid_override_pattern": "M*-ME", "use_conv_bias": False, "n_groups": 1},
        {"use_bias": True, "time_step_min": 0.2, "norm_topk_prob": False, "n_group": 1, "topk_group": 1},
    ],
    "forgetting_transformer/plain": [
        {"qk_norm": True, "qkv_bias": True, "use_output_gate": True, "num_kv_heads": 2, "tie_word_embeddings": True},
    ],
    "falcon_h1/plain": [
        {"mamba_rms_norm": True, "mamba_n_groups": 2, "mlp_bias": True, "attention_bias": True},
        {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_proj_bias": True, "tie_word_embeddings": True},
        {"mamba_d_ssm": 24, "mamba_d_head": "auto", "projectors_bias": True, "ssm_multipliers": None},
    ],
    "gsa/plain": [
        {"use_short_conv": True, "num_kv_heads": 2, "num_slots": None, "feature_map": "relu", "expand_v": 2},
    ],
    "rwkv7/plain": [
        {"norm_first": False, "norm_bias": False, "fuse_norm": False, "head_dim": 16, "value_dim": 32},
        {"intermediate_size": 50, "hidden_act": "relu", "tie_word_embeddings": True, "v_low_rank_dim": 3},
    ],
    "zamba2/plain": [
        {"num_mem_blocks": 1, "use_shared_attention_adapter": True, "use_mem_rope": True, "mamba_ngroups": 2},
        {"tie_word_embeddings": False, "add_bias_linear": True, "hidden_act": "silu", "time_step_min": 0.0},
        {"num_key_value_heads": 2, "intermediate_size": None, "layers_block_type": ["hybrid", "mamba"] * 2},
    ],
    "hgrn2/plain": [
        {"use_lower_bound": False, "use_short_conv": True, "conv_size": 3, "expand_ratio": 16, "num_heads": 2},
        {"attn": {"layers": [0], "num_heads": 2}, "tie_word_embeddings": True},
    ],
    "lara_mini/plain": [
        {"attention_bias": True, "tie_word_embeddings": False, "norm_topk_prob": False, "sliding_window": 3},
        {"layer_types": None, "num_hidden_layers": 6},
    ],
    "bailing_hybrid/plain": [
        {"q_lora_rank": 6, "attention_bias": True, "kda_safe_gate": False},
        {"num_expert_group": 1, "topk_group": 1, "mlp_layer_types": ["dense"] * 3, "kda_lower_bound": -3.0},
        {"layer_types": None, "mlp_layer_types": None, "num_experts_per_token": None, "num_experts_per_tok": 3},
        {"layer_types": ["full_attention"] * 3},
    ],
    "gated_deltaproduct/plain": [
        {"num_householder": 3, "use_forget_gate": False, "allow_neg_eigval": False, "use_output_gate": False},
        {"num_householder": 1, "use_short_conv": False, "attn": {"layers": [1], "num_heads": 2}},
    ],
}


@pytest.mark.parametrize(("name", "keys"), [(name, keys) for name, all_ in VARIANTS.items() for keys in all_])
def test_what_is_written_anew_is_read_as_it_was(name, keys, tmp_path):
    values = read_json(GOLDEN / name / "config.json") | keys
    values = {key: value for key, value in values.items() if key not in keys or value is not None}
    family = family_of(values, "config.json")
    model = DecoderLM(read_config(family, values, "config.json"), rngs=nnx.Rngs(0))
    save_pretrained(model, tmp_path / "model", family=family.name)
    again = load_pretrained(tmp_path / "model").model
    assert difference(again.config, model.config) is None  # options of mixers that no layer has are not written
    jax.tree.map(np.testing.assert_array_equal, nnx.state(again), nnx.state(model))


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("bamba/plain", {"mamba_n_heads": 5}, "mamba_n_heads is 5, expected a divisor of mamba_expand"),
        ("bamba/plain", {"mamba_d_head": 4}, "mamba_d_head is 4, expected 8"),
        ("bamba/plain", {"attn_layer_indices": [7]}, "attn_layer_indices has 7, expected layers from 0 to 2"),
        ("bailing_hybrid/plain", {"num_key_value_heads": 2}, "num_key_value_heads is 2, expected num_attention_heads"),
        ("bailing_hybrid/plain", {"rope_parameters": {"rope_type": "yarn"}}, 'rope_type is "yarn", expected "default"'),
        ("bailing_hybrid/plain", {"mlp_layer_types": ["x"] * 3}, "mlp_layer_types has 'x', expected dense or sparse"),
        ("granitemoehybrid/plain", {"residual_multiplier": 0}, "residual_multiplier is 0, expected"),
        ("granitemoehybrid/plain", {"mystery": 1}, "mystery is 1, expected no such key"),
        ("nemotron_h/plain", {"layers_block_type": ["mlp", "x"]}, "layers_block_type is .*, expected words of"),
        ("falcon_h1/plain", {"ssm_multipliers": [1.0]}, "ssm_multipliers is .*, expected 5 numbers above 0"),
        ("rwkv7/plain", {"value_dim": [64, 64]}, "value_dim is .*, expected hidden_size = 32 in each layer"),
        ("zamba2/plain", {"n_mamba_heads": 5}, "n_mamba_heads is 5, expected a divisor of 48 channels"),
        (
            "zamba2/plain",
            {"num_key_value_heads": 2, "use_shared_attention_adapter": True},
            "num_key_value_heads is 2, expected num_attention_heads = 4",
        ),
        (
            "zamba2/plain",
            {"layers_block_type": ["full"] * 4},
            "layers_block_type has 'full', expected linear_attention",
        ),
        ("nemotron_h/plain", {"mlp_hidden_act": "gelu"}, 'mlp_hidden_act is "gelu", expected "relu2"'),
        ("nemotron_h/plain", {"num_key_value_heads": 3}, "num_key_value_heads is 3, expected a divisor"),
        ("lara_mini/plain", {"layer_types": ["recurrent"] * 3}, "layer_types has 'recurrent', expected"),
        ("gated_deltaproduct/plain", {"num_householder": 0}, "num_householder is 0, expected an integer of at least 1"),
    ],
)
def test_what_is_not_served_is_named(name, keys, message):
    values = read_json(GOLDEN / name / "config.json") | keys
    family = family_of(values, "config.json")
    with pytest.raises(ValueError, match=message) as error:
        read_config(family, values, "config.json")
    assert str(error.value).startswith("config.json: ") and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "key", "other"),
    [
        ("kimi_linear/moe", "num_experts", "num_local_experts"),
        ("kimi_linear/moe", "num_experts_per_token", "num_experts_per_tok"),
        ("kimi_linear/moe", "num_expert_group", "n_group"),
        ("kimi_linear/moe", "moe_renormalize", "norm_topk_prob"),
        ("kimi_linear/moe", "num_shared_experts", "n_shared_experts"),
        ("bailing_hybrid/plain", "num_experts", "num_local_experts"),
        ("bailing_hybrid/plain", "moe_renormalize", "norm_topk_prob"),
        ("granitemoehybrid/plain", "layer_types", "layers_block_type"),
        ("nemotron_h/plain", "layers_block_type", "layer_types"),
        ("nemotron_h/plain", "n_routed_experts", "num_local_experts"),
        ("nemotron_h/plain", "conv_kernel", "mamba_d_conv"),
    ],
)
def test_a_key_has_all_names_that_its_published_class_reads(name, key, other):
    values = read_json(GOLDEN / name / "config.json")
    family = family_of(values, "config.json")
    given = values.pop(key, values.pop(other, None))
    if isinstance(given, bool):
        given = not given  # not the default
    assert given is not None
    canonical, renamed = (read_config(family, values | {spelled: given}, "config.json") for spelled in (key, other))
    assert renamed == canonical


def test_older_words_for_types_of_layers_are_read_in_every_family():
    values = read_json(GOLDEN / "qwen3_next/moe/config.json")
    words = {"linear_attention": "mamba", "full_attention": "attention"}
    family = family_of(values, "config.json")
    older = values | {"layer_types": [words[kind] for kind in values["layer_types"]]}
    assert read_config(family, older, "config.json") == read_config(family, values, "config.json")


# What a config.json that names only its type has in transformers 5.24 and flash-linear-attention 0.6.0.
@pytest.mark.parametrize(
    ("kind", "vocabulary", "width", "layers", "heads"),
    [
        ("qwen3_next", 151936, 2048, 48, 2),
        ("qwen3_5_text", 248320, 4096, 32, 4),
        ("qwen3_5_moe_text", 248320, 2048, 40, 2),
        ("olmo_hybrid", 100352, 3840, 32, 30),
        ("lara_mini", 151936, 1024, 34, 4),
        ("bamba", 128000, 4096, 32, 8),
        ("granitemoehybrid", 32000, 4096, 32, 32),
        ("falcon_h1", 128000, 4096, 32, 8),
        ("kimi_linear", 163840, 2304, 27, 32),
        ("bailing_hybrid", 157184, 2560, 42, 32),
        ("transformer", 32000, 2048, 24, 32),
    ],
)
def test_missing_sizes_are_those_of_the_published_class(kind, vocabulary, width, layers, heads):
    family = family_of({"model_type": kind}, "config.json")
    config = family.read(ConfigKeys({"model_type": kind}, "config.json", defaults=family.defaults))
    assert (config.vocabulary_size, config.width, config.num_layers) == (vocabulary, width, layers)
    options = [entry for name, entry in config.mixer_overrides if name.endswith("attention")]
    given = dict(options[0])
    assert given.get("key_heads", given["num_heads"]) == heads


def test_olmo_hybrid_derives_missing_sizes_as_its_class_does():
    values = read_json(GOLDEN / "olmo_hybrid/nope/config.json")
    for key in ("layer_types", "linear_key_head_dim", "linear_value_head_dim"):
        values.pop(key)
    values |= {"num_hidden_layers": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    config = read_config(family_of(values, "config.json"), values, "config.json")
    assert config.layer_mixers == ("gated_deltanet", "attention")
    delta = dict(dict(config.mixer_overrides)["gated_deltanet"])
    size = int(0.75 * values["hidden_size"] / 2)
    assert (delta["key_head_dim"], delta["value_head_dim"]) == (size, 2 * size)
    with pytest.raises(ValueError, match="full_attention_interval is 2, expected no such key"):
        read_config(family_of(values, "config.json"), values | {"full_attention_interval": 2}, "config.json")


@pytest.mark.parametrize(
    "name", ["falcon_h1/plain", "granitemoehybrid/plain", "lara_mini/plain", "olmo_hybrid/nope", "bailing_hybrid/plain"]
)
def test_a_fraction_of_rotated_channels_counts_only_where_the_class_reads_it(name):
    values = read_json(GOLDEN / name / "config.json") | {"position_embedding_type": "rope"}
    values = {key: value for key, value in values.items() if key != "position_embedding_type" or "granite" in name}
    family = family_of(values, "config.json")
    rope = {"rope_type": "default", "rope_theta": 500.0}
    whole = read_config(family, values | {"rope_parameters": rope}, "config.json")
    rope = rope | {"partial_rotary_factor": 0.5}
    assert read_config(family, values | {"rope_parameters": rope}, "config.json") == whole


@pytest.mark.parametrize(("name", "mixer"), [("falcon_h1/plain", "attention"), ("olmo_hybrid/nope", "attention")])
def test_a_head_size_that_does_not_follow_from_the_width_is_read(name, mixer, tmp_path):
    values = read_json(GOLDEN / name / "config.json") | {"head_dim": 10}
    family = family_of(values, "config.json")
    config = read_config(family, values, "config.json")
    assert dict(dict(config.mixer_overrides)[mixer])["head_dim"] == 10
    save_pretrained(DecoderLM(config, rngs=nnx.Rngs(0)), tmp_path / "model", family=family.name)
    assert difference(load_pretrained(tmp_path / "model").model.config, config) is None


def test_keys_of_published_files_that_the_class_does_not_read():
    for name, keys in {
        "falcon_h1/plain": {"mamba_use_mlp": True, "mlp_expansion_factor": 8, "attn_layer_indices": None},
        "nemotron_h/plain": {"rms_norm_eps": 1e-2, "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        "zamba2/plain": {"use_shared_mlp_adapter": True, "time_step_limit": [0.0, 1.0]},
    }.items():
        values = read_json(GOLDEN / name / "config.json")
        family = family_of(values, "config.json")
        assert read_config(family, values | keys, "config.json") == read_config(family, values, "config.json")
    values = read_json(GOLDEN / "nemotron_h/plain/config.json")
    for key, value in {"mamba_hidden_act": "gelu", "attention_head_dim": 3}.items():
        with pytest.raises(ValueError, match=f"{key} is .*, expected"):
            read_config(family_of(values, "config.json"), values | {key: value}, "config.json")
