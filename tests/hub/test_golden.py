"""Published checkpoints of every family, written by the real modeling code: logits, gradients, tokens, and back.

`golden/FAMILY/VARIANT/` holds tiny random models with `golden.npz`: tokens, logits, gradients of the mean loss by array
of the file (of newer ones a few, and the norms of all), and greedy continuations after all tokens and after 3.
"""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from rnnlib.hub import FAMILIES, load_pretrained, save_pretrained
from rnnlib.hub.weight_mapping import SAVED, match_rows
from rnnlib.inference import generate
from rnnlib.models.variables import values_by_column, values_by_path
from tests.selection import mostly_slow

GOLDEN = pathlib.Path(__file__).parent / "golden"
FOLDERS = [
    "bailing_hybrid/plain",
    "bamba/plain",
    "comba/plain",
    "delta_net/plain",
    "falcon_h1/plain",
    "forgetting_transformer/plain",
    "gated_deltanet/gate",
    "gated_deltaproduct/plain",
    "gla/plain",
    "granitemoehybrid/plain",
    "gsa/plain",
    "hgrn2/plain",
    "kda/plain",
    "kimi_linear/moe",
    "lara_mini/plain",
    "linear_attn/elu",
    "mamba2/tied",
    "mamba2_fla/plain",
    "mesa_net/plain",
    "nemotron_h/plain",
    "olmo_hybrid/nope",
    "precond_gated_deltanet/gate",
    "precond_kda/plain",
    "qwen3_5/text",
    "qwen3_5_moe/text",
    "qwen3_5_multimodal/untied",
    "qwen3_next/moe",
    "retnet/plain",
    "rwkv7/plain",
    "transformer/plain",
    "zamba2/plain",
]


# Their mixers and blocks are those of other families' models; their files are read and written below.
REPEATED = {"gated_deltanet/gate", "kda/plain", "mamba2_fla/plain", "precond_kda/plain", "qwen3_5/text"}
REPEATED |= {"bamba/plain", "delta_net/plain", "lara_mini/plain", "qwen3_5_moe/text"}


@pytest.mark.parametrize("name", mostly_slow(FOLDERS, [name for name in FOLDERS if name not in REPEATED]))
def test_logits_gradients_and_greedy_tokens_are_the_published_codes(name):
    pretrained = load_pretrained(GOLDEN / name)
    golden = np.load(GOLDEN / name / "golden.npz")
    tokens = jnp.asarray(golden["input_ids"])

    def loss_and_logits(model):
        logits = model(tokens)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], axis=-1)
        return -chosen.mean(), logits

    differentiate = nnx.jit(nnx.value_and_grad(loss_and_logits, has_aux=True, argnums=nnx.DiffState(0, nnx.Param)))
    (loss, logits), gradients = differentiate(pretrained.model)
    np.testing.assert_allclose(logits, golden["logits"], rtol=0, atol=1e-4)
    np.testing.assert_allclose(loss, golden["loss"], rtol=1e-5)

    given = values_by_column(gradients, nnx.Param)
    arrays = {}
    for match in match_rows(FAMILIES[pretrained.source.family], pretrained.model, pretrained.source.shapes):
        if not match.copy and all(path in given for path in match.ours):
            arrays |= dict(zip(match.theirs, match.write(given)))
    wanted = [key for key in golden if key.startswith("grad:")]
    assert wanted
    for key in wanted:
        largest = np.abs(golden[key]).max()
        found = arrays[key.removeprefix("grad:")]
        np.testing.assert_allclose(found, golden[key], rtol=0, atol=2e-4 * largest, err_msg=key)

    names = golden["grad_names"].tolist() if "grad_names" in golden else []
    norms = [float(np.linalg.norm(arrays[name])) for name in names]
    if names:
        np.testing.assert_allclose(norms, golden["grad_norms"], rtol=1e-3, atol=2e-4 * golden["grad_norms"].max())

    prompts = [row[:length] for length in (tokens.shape[1], 3) for row in tokens.tolist()]
    wanted_tokens = np.concatenate([golden["generated"], golden["generated_short"]])
    np.testing.assert_array_equal(generate(pretrained.model, prompts, max_new_tokens=8, temperature=0.0), wanted_tokens)


@pytest.mark.parametrize("name", FOLDERS)
def test_what_is_read_and_written_unchanged_is_bit_identical(name, tmp_path):
    folder = GOLDEN / name
    save_pretrained(load_pretrained(folder), tmp_path / "written")
    files = sorted(path.name for path in folder.glob("*.safetensors*"))
    assert files == sorted(path.name for path in (tmp_path / "written").glob("*.safetensors*"))
    for file in (path for path in files if path.endswith(".safetensors")):
        before = safetensors.numpy.load_file(folder / file)
        after = safetensors.numpy.load_file(tmp_path / "written" / file)
        assert before.keys() == after.keys()
        for key, array in before.items():
            assert (array.dtype, array.shape) == (after[key].dtype, after[key].shape), key
            assert array.tobytes() == after[key].tobytes(), key
    for path in folder.glob("*.json"):
        assert json.loads(path.read_text()) == json.loads((tmp_path / "written" / path.name).read_text())


# Convolutions with a bias, tied embeddings, one model within another, experts, a norm behind, a solve.
WRITTEN_ANEW = (
    "gated_deltanet/gate",
    "kimi_linear/moe",
    "mamba2/tied",
    "mesa_net/plain",
    "olmo_hybrid/nope",
    "qwen3_5_multimodal/untied",
)


@pytest.mark.parametrize("name", mostly_slow(FOLDERS, WRITTEN_ANEW))
def test_a_model_without_its_source_is_written_anew_and_computes_the_same(name, tmp_path):
    pretrained = load_pretrained(GOLDEN / name)
    save_pretrained(pretrained.model, tmp_path / "new", family=pretrained.source.family)
    again = load_pretrained(tmp_path / "new")
    assert again.source.family == pretrained.source.family
    before, after = values_by_path(pretrained.model, SAVED), values_by_path(again.model, SAVED)
    assert before.keys() == after.keys()
    for path, value in before.items():
        np.testing.assert_array_equal(value, after[path], err_msg=path)
    assert nnx.graphdef(again.model) == nnx.graphdef(pretrained.model), "the same program of the same numbers"
