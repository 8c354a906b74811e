import jax
import pytest
from flax import nnx

from rnnlib.models import (
    ModelConfig,
    abstract_model,
    cache_bytes,
    count_parameters,
    model_preset,
    preset_details,
    preset_names,
    summary,
)
from rnnlib.models.presets import GPT2_VOCABULARY, PAPER_VOCABULARY
from rnnlib.models.variables import count_values
from tests.selection import mostly_slow

# Sizes that this library names itself: the name is the claim.
OWN_SIZES = {"tiny": 0.9e6, "30m": 30e6, "150m": 150e6, "340m": 340e6, "760m": 760e6, "1.3b": 1.3e9}


# One of each kind; the others are the same kinds, deeper and wider.
KINDS = (
    "tiny",
    "340m",
    "transformer_340m",
    "kda_340m",
    "pgdn_340m",
    "gated_kalmanet_440m",
    "gated_deltanet2_hybrid_1.3b",
)


@pytest.mark.parametrize("name", mostly_slow(preset_names(), KINDS))
def test_parameter_count_is_within_five_percent_of_the_stated_one(name):
    details = preset_details(name)
    stated = details.stated_parameters or OWN_SIZES[name]
    vocabulary = GPT2_VOCABULARY if name.startswith("gated_kalmanet") else PAPER_VOCABULARY
    assert details.config.vocabulary_size == (256 if name == "tiny" else vocabulary)
    assert count_parameters(details.config).total == pytest.approx(stated, rel=0.05)


def test_parts_add_up_to_the_state():
    config = ModelConfig(num_layers=3, width=32, num_heads=2, mixers=("deltanet", "attention"))
    count = count_parameters(config)
    state = nnx.state(abstract_model(config), nnx.Param)
    stored = sum(leaf.size for leaf in jax.tree.leaves(state))
    assert count.total == count_values(state) < stored  # kernels of input projections are filled up
    assert set(count.mixers) == {"deltanet", "attention"}
    assert count.head == count.embedding == 256 * 32
    tied = count_parameters(config.replace(tie_embeddings=True))
    assert tied.head == 0
    assert tied.total == count.total - count.head
    # A head's own maps: queries, keys, values, output; SwiGLU has three maps of width 256.
    assert count.feed_forward == 3 * 3 * 32 * 256
    assert count.norms == (2 * 3 + 1) * 32
    sharing = config.replace(num_layers=4, mixers=("mamba2", "zamba2"))  # what two layers share counts once
    count = count_parameters(sharing)
    assert count.total == count_values(nnx.state(abstract_model(sharing), nnx.Param))
    assert count.total < count_parameters(sharing, each_use=True).total


def _state(config):
    from flax import nnx

    return nnx.to_pure_dict(nnx.state(abstract_model(config), nnx.Param))


def test_recurrent_cache_does_not_grow_with_length_and_attention_does():
    recurrent = ModelConfig(num_layers=2, width=32, num_heads=2, mixers=("deltanet",))
    assert cache_bytes(recurrent, 1, 64) == cache_bytes(recurrent, 1, 65536)
    windowed = recurrent.replace(mixers=("deltanet", "sliding_window_attention"), window=16)
    assert cache_bytes(windowed, 1, 64) == cache_bytes(windowed, 1, 65536)
    full = recurrent.replace(mixers=("deltanet", "attention"))
    assert cache_bytes(full, 1, 65536) > 500 * cache_bytes(recurrent, 1, 65536)


def test_summary_shows_the_total():
    config = model_preset("tiny")
    table = summary(config)
    cells = [cell for column in table.columns for cell in column.cells]
    assert f"{count_parameters(config).total:,}" in cells
    assert "gated_deltanet" in cells


def test_a_preset_takes_changes_and_names_what_is_wrong():
    config = model_preset("tiny", mixers=("kda",), vocabulary_size=300)
    assert config.layer_mixers == ("kda",) * config.num_layers
    assert config.vocabulary_size == 300
    with pytest.raises(ValueError, match="'tinny' is no model preset; expected one of tiny, "):
        model_preset("tinny")
    with pytest.raises(ValueError, match="no option widht"):
        model_preset("tiny", widht=3)
