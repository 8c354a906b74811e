"""Frozen parameters and low-rank adapters: what is trained, what is kept for it, and what it comes to."""

import json
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
from flax import nnx

from rnnlib.cli.main import main
from rnnlib.hub import load_pretrained, save_pretrained
from rnnlib.hub.adapter_folders import save_adapter
from rnnlib.models import DecoderLM, ModelConfig
from rnnlib.models.variables import values_by_column
from rnnlib.training import init_train_state, load_model, load_run, make_train_step
from rnnlib.training.adaptation import Frozen, Lora, LoraConfig, make_adaptation, matching, parts_of
from rnnlib.training.checkpoint import to_host
from rnnlib.training.step import split_model
from tests.hub.test_golden import GOLDEN

pytestmark = pytest.mark.usefixtures("compilation_cache")

CONFIG = ModelConfig(257, width=16, num_layers=2, num_heads=2, mixers=("gated_deltanet",), mlp_width=24)
RANDOM = np.random.default_rng(0)
BATCH = {
    "inputs": RANDOM.integers(0, 257, (1, 2, 16)),
    "targets": RANDOM.integers(0, 257, (1, 2, 16)),
    "segment_ids": np.ones((1, 2, 16), np.int32),
    "positions": np.broadcast_to(np.arange(16, dtype=np.int32), (1, 2, 16)),
    "loss_weights": np.ones((1, 2, 16), np.float32),
}


def model():
    return DecoderLM(CONFIG, rngs=nnx.Rngs(0))


def step_with(adaptation, rate=0.1):
    """One step of gradient descent: the state before and after it, as NumPy arrays by path."""
    optimizer = optax.chain(optax.trace(0.9), optax.scale(-rate))
    graph, state = init_train_state(model(), optimizer, None, adaptation)
    before = state, to_host(state)
    step = make_train_step(graph, optimizer, lambda _: rate, np.ones(257, np.int32), adaptation=adaptation)
    after, metrics = step(state, {name: jnp.asarray(x) for name, x in BATCH.items()})
    assert bool(metrics.finite)
    return before, (after, to_host(after))


def names(state):
    return {".".join(map(str, path)) for path, _ in nnx.to_flat_state(state)}


@pytest.fixture(scope="module")
def whole():
    return step_with(None)


def test_what_is_frozen_stays_and_the_rest_is_trained_as_without_it(whole):
    parameters = split_model(model())[1]
    adaptation = Frozen(("blocks.*.feed_forward", "embedding", "*_norm"), parameters)
    after, arrays = step_with(adaptation)[1]
    assert not any(
        "feed_forward" in name or ("norm.scale" in name and "mixer_norm" in name) for name in names(after.parameters)
    )
    assert names(after.parameters) | names(after.frozen) == names(parameters)
    # State of what is trained alone.
    assert len(jax.tree.leaves(after.optimizer)) == len(jax.tree.leaves(after.parameters))
    expected = whole[1][1]
    for name, array in arrays.items():
        if name.startswith("parameters"):
            np.testing.assert_allclose(array, expected[name], rtol=1e-5, atol=1e-7, err_msg=name)
    for path, leaf in nnx.to_flat_state(after.frozen):
        np.testing.assert_array_equal(leaf.get_raw_value(), dict(nnx.to_flat_state(parameters))[path].get_raw_value())
    merged = adaptation.parameters(after.parameters, after.frozen)
    assert jax.tree.structure(merged) == jax.tree.structure(parameters)
    trained, frozen = adaptation.restored(merged, None)
    assert jax.tree.structure(trained) == jax.tree.structure(after.parameters)
    assert jax.tree.structure(frozen) == jax.tree.structure(after.frozen)


def test_some_columns_of_a_kernel_may_be_frozen():
    kernel = nnx.Param(jnp.arange(24.0).reshape(2, 12), columns=(("query", 0, 4), ("decay.down", 4, 3)))
    state = nnx.from_flat_state(
        [(("mixer", "input_projection", "kernel"), kernel), (("norm", "scale"), nnx.Param(jnp.ones(3)))]
    )
    assert [part.name for part in parts_of(state)] == [
        "mixer.input_projection.query.kernel",
        "mixer.input_projection.decay.down.kernel",
        "norm.scale",
    ]
    adaptation = Frozen(("query", "norm"), state)
    trained, frozen = adaptation.split(state)
    assert names(trained) == {"mixer.input_projection.decay.down.kernel"}
    changed = adaptation.parameters(jax.tree.map(lambda x: -x, trained), frozen)
    found = dict(nnx.to_flat_state(changed))["mixer", "input_projection", "kernel"].get_raw_value()
    np.testing.assert_array_equal(found, np.array(kernel.get_raw_value()) * np.r_[[1] * 4, [-1] * 3, [1] * 5])
    lora = Lora(LoraConfig(rank=1, targets=("decay",)), state)
    factors, _ = lora.split(state)
    factors = jax.tree.map(lambda x: x + 1, factors)
    changed = dict(nnx.to_flat_state(lora.parameters(factors, state)))["mixer", "input_projection", "kernel"]
    difference = np.array(changed.get_raw_value() - kernel.get_raw_value())
    [(a, b)] = lora.factors(factors).values()
    np.testing.assert_allclose(difference[:, 4:7], a @ b, rtol=1e-5)
    assert not difference[:, :4].any() and not difference[:, 7:].any()


def test_the_gradient_of_an_adapter_is_that_of_the_matrix(whole):
    lora = LoraConfig(rank=3, alpha=6.0, targets=("query", "blocks.1.feed_forward.down"))
    adaptation = make_adaptation((), lora, split_model(model())[1])
    assert set(adaptation.targets) == {
        "blocks.0.mixer.input_projection.query.kernel",
        "blocks.1.mixer.input_projection.query.kernel",
        "blocks.1.feed_forward.down.kernel",
    }
    (_, before), (after, arrays) = step_with(adaptation)
    assert len(jax.tree.leaves(after.optimizer)) == len(jax.tree.leaves(after.parameters)) == 6
    # The first step is as without adapters, for B is 0: dB = scale A^T dW, dA = 0.
    name = "blocks/1/feed_forward/down"
    gradient = (whole[0][1][f"parameters/{name}/kernel"] - whole[1][1][f"parameters/{name}/kernel"]) / 0.1
    expected = -0.1 * 2 * before[f"parameters/{name}/lora_a"].T @ gradient
    np.testing.assert_allclose(arrays[f"parameters/{name}/lora_b"], expected, rtol=1e-3, atol=1e-7)
    np.testing.assert_array_equal(arrays[f"parameters/{name}/lora_a"], before[f"parameters/{name}/lora_a"])
    np.testing.assert_array_equal(arrays[f"frozen/{name}/kernel"], before[f"frozen/{name}/kernel"])


def test_matrices_are_named_as_in_published_files():
    parameters = split_model(model())[1]

    def chosen(*targets):
        return set(Lora(LoraConfig(rank=2, targets=targets), parameters, model=model()).targets)

    assert chosen("q_proj", "model.layers.1.mlp") == chosen("query", "blocks.1.feed_forward")
    assert chosen("o_proj") == {f"blocks.{i}.mixer.output_projection.output.kernel" for i in range(2)}
    with pytest.raises(ValueError, match=r"lora.targets has 'x_proj', .*; near ones are .*_proj"):
        chosen("x_proj")


def test_dropout_leaves_inputs_of_adapters_out_for_a_step():
    state = nnx.from_flat_state([(("mixer", "query", "kernel"), nnx.Param(jnp.zeros((40, 5))))])
    lora = Lora(LoraConfig(rank=2, targets=("query",), dropout=0.25), state)
    factors = jax.tree.map(lambda x: x + 1, lora.split(state)[0])
    [(a, b)] = lora.factors(factors).values()

    def change(step):
        return np.asarray(jax.tree.leaves(lora.changed_variables(factors, state, step))[0])

    np.testing.assert_allclose(change(None), a @ b, rtol=1e-6)
    first, second = change(jnp.int32(0)), change(jnp.int32(1))
    for found in (first, second):
        kept = np.any(found != 0, axis=1)
        assert 0 < kept.sum() < 40
        np.testing.assert_allclose(found, np.where(kept[:, None], a @ b / 0.75, 0), rtol=1e-6)
    assert np.any((first == 0) != (second == 0))
    np.testing.assert_array_equal(first, change(jnp.int32(0)))


def test_an_adapter_of_what_layers_share_is_not_written_as_one_of_the_first(tmp_path):
    base = str(GOLDEN / "zamba2/plain")
    loaded = load_pretrained(base).model
    parameters = split_model(loaded)[1]
    for target, is_shared in (("q_proj", True), ("in_proj", False)):
        lora = Lora(LoraConfig(rank=2, targets=(target,), base=base), parameters, model=loaded)
        factors = lora.factors(lora.split(parameters)[0])
        if is_shared:
            with pytest.raises(ValueError, match=r"save_adapter: .*query.kernel is shared by several layers"):
                save_adapter(tmp_path / target, loaded, factors, rank=2, alpha=2.0, base=base)
        else:
            save_adapter(tmp_path / target, loaded, factors, rank=2, alpha=2.0, base=base)
    assert [path.name for path in tmp_path.iterdir()] == ["in_proj"]


def test_adapters_of_experts_are_written_as_modules_of_each(tmp_path):
    base = str(GOLDEN / "kimi_linear/moe")
    loaded = load_pretrained(base).model
    graph, parameters, other = split_model(loaded)
    config = LoraConfig(rank=2, alpha=3.0, targets=("experts", "q_proj"), base=base)
    lora = Lora(config, parameters, model=loaded)
    assert any("feed_forward.gate" in name for name in lora.targets)
    factors = jax.tree.map(lambda x: x + 0.1, lora.split(parameters)[0])
    changed = nnx.merge(graph, lora.parameters(factors, parameters), other)
    save_adapter(tmp_path / "adapter", loaded, lora.factors(factors), rank=2, alpha=3.0, dropout=0.1, base=base)
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["lora_dropout"] == 0.1
    again = load_pretrained(tmp_path / "adapter").model
    wanted = values_by_column(changed, nnx.Param)
    for path, value in values_by_column(again, nnx.Param).items():
        np.testing.assert_allclose(value, wanted[path], rtol=1e-5, atol=1e-6, err_msg=path)


NAMES = [f"blocks.{i}.{part}" for i in range(2) for part in ("mixer.query.kernel", "feed_forward.down.kernel")]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("blocks.*.feedforward", "near ones are blocks.*.feed_forward"),
        ("querry", "near ones are query"),
        ("zzz", "near ones are blocks, mixer, query, kernel"),
    ],
)
def test_a_pattern_that_matches_nothing_has_near_names(pattern, message):
    assert matching(("blocks.1", "down"), NAMES, "freeze") == {*NAMES[1:2], *NAMES[2:]}
    with pytest.raises(ValueError) as error:
        matching((pattern,), NAMES, "freeze")
    assert str(error.value).startswith(f"freeze has {pattern!r}, which matches no parameter; {message}")


SHORT = ["--data.source", "text", "--data.split-by", "tail", "--data.sequence-length", "32", "--data.batch-size", "2"]
PLAIN = ["--evaluation.batches", "1", "--logging.no-tensorboard", "--logging.no-picture", "--prompt", ""]


def arrays_of(folder):
    return {name: np.asarray(value) for name, value in values_by_column(load_model(folder).model, nnx.Param).items()}


@pytest.fixture
def base(tmp_path, monkeypatch, corpus, capsys):
    """The folder of a run to begin with, and the data's flags."""
    monkeypatch.chdir(tmp_path)
    data = ["--data.paths", f"{corpus}/*.txt", *SHORT, *PLAIN]
    sizes = ["--model.width", "16", "--model.num-layers", "1", "--model.mlp-width", "24", "--model.no-tie-embeddings"]
    assert main(["train", "--run", "base", "--steps", "1", *data, *sizes]) == 0
    return data


def test_a_run_of_adapters(base, tmp_path, capsys):
    assert main(["export", "base", "published", "--family", "gated_deltanet"]) == 0
    command = ["train", *base, "--optimizer.learning-rate", "1e-2", "--optimizer.schedule", "constant"]
    lora = ["--init", "published", "--lora.rank", "2", "--lora.alpha", "4", "--lora.targets", "query", "feed_forward"]
    lora += ["--data.tokenizer", "byte", "--optimizer.warmup-steps", "0"]
    assert capsys.readouterr().out.endswith("generate published --tokenizer byte\n")  # bytes have no tokenizer.json
    assert main([*command, *lora, "--run", "lora", "--steps", "4"]) == 0
    factors = load_run("lora").factors
    assert len(factors) == 4
    count = sum(a.size + b.size for a, b in factors.values())
    assert f"parameters, trained by {count:,} of adapters, 2 x 32 tokens a step" in capsys.readouterr().out
    assert main([*command, *lora, "--run", "again", "--steps", "2"]) == 0
    assert main(["train", "--run", "again", "--resume", "--steps", "4", *PLAIN[2:]]) == 0
    before, after, resumed = (arrays_of(folder) for folder in ("base", "lora", "again"))
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed == {name for name in before if "projection.query" in name or "feed_forward." in name}
    for name in before:
        np.testing.assert_array_equal(after[name], resumed[name], err_msg=name)
    # Merged on export; or the adapter alone, which is added where it is read.
    assert main(["export", "lora", "merged"]) == 0
    assert main(["export", "lora", "adapter", "--adapter"]) == 0
    merged = safetensors.numpy.load_file("merged/model.safetensors")
    save_pretrained(load_pretrained("adapter"), "from_adapter")
    for name, array in safetensors.numpy.load_file("from_adapter/model.safetensors").items():
        np.testing.assert_allclose(array, merged[name], rtol=1e-6, atol=1e-6, err_msg=name)
    said = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert said["base_model_name_or_path"] == "published" and said["r"] == 2 and said["rank_pattern"] == {}
    assert "model.layers.0.attn.q_proj" in said["target_modules"]
    # It goes on from an adapter's folder, too.
    assert main([*command, *lora[2:], "--init", "adapter", "--run", "more", "--steps", "1"]) == 0


def test_a_run_with_frozen_parameters(base, capsys):
    command = [
        "train",
        "--init",
        "base",
        *base,
        "--freeze",
        "blocks.*.feed_forward",
        "head",
        "--optimizer.warmup-steps",
        "0",
    ]
    capsys.readouterr()
    assert main([*command, "--run", "frozen", "--steps", "4"]) == 0
    assert " of them trained, 2 x 32 tokens" in capsys.readouterr().out
    assert main([*command, "--run", "again", "--steps", "4", "--checkpoint.every", "2"]) == 0
    shutil.rmtree("again/checkpoints/4")
    assert main(["train", "--run", "again", "--resume", *PLAIN[2:]]) == 0
    before, after, resumed = (arrays_of(folder) for folder in ("base", "frozen", "again"))
    same = {name for name in before if np.array_equal(before[name], after[name])}
    assert same == {name for name in before if "feed_forward." in name or name == "head"}
    for name in before:
        np.testing.assert_array_equal(after[name], resumed[name], err_msg=name)
    assert main(["train", "--run", "again", "--resume", "--freeze", "head", *PLAIN[2:]]) == 2
    assert "freeze is " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--freeze", "blocks.*.mixr"], "which matches no parameter; near ones are blocks.*.mixer"),
        (["--freeze", "*"], "freeze has *, which is every parameter, expected some to train"),
        (["--lora.rank", "4"], "--lora.rank 4 needs --init FOLDER, the model to adapt"),
        (["--lora.alpha", "4"], "lora.rank is left out, expected the rank"),
        (["--lora.rank", "4", "--freeze", "head"], "expected none beside lora.rank"),
    ],
)
def test_wrong_settings_are_one_line(flags, message, tmp_path, monkeypatch, corpus, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--run", "run", "--data.paths", f"{corpus}/*.txt", *SHORT, *flags]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not (tmp_path / "run").exists()


def test_factors_of_matrices_that_are_one_in_the_file(tmp_path):
    """Qwen3-Next has queries, keys, values and gates in one matrix, interleaved by head."""
    from rnnlib.hub.adapter_folders import save_adapter
    from tests.hub.test_golden import GOLDEN

    source = GOLDEN / "qwen3_next" / "moe"
    published = load_pretrained(source)
    parameters = nnx.state(published.model, nnx.Param)
    targets = ("blocks.0.mixer.input_projection.key", "blocks.0.mixer.input_projection.query", "decay", "output")
    lora = Lora(LoraConfig(rank=2, alpha=3.0, targets=targets), parameters)
    factors = jax.tree.map(lambda x: jax.random.normal(jax.random.key(x.size), x.shape), lora.split(parameters)[0])
    save_adapter(tmp_path / "adapter", published.model, lora.factors(factors), rank=2, alpha=3.0, base=str(source))
    before, expected, read = (
        dict(nnx.to_flat_state(state))
        for state in (
            parameters,
            lora.parameters(factors, parameters),
            nnx.state(load_pretrained(tmp_path / "adapter").model, nnx.Param),
        )
    )
    for path, leaf in read.items():
        values = [own.get_value() for own in (leaf, expected[path], before[path])]
        np.testing.assert_allclose(*values[:2], rtol=1e-5, atol=1e-5, err_msg=str(path))
        assert np.array_equal(values[0], values[2]) == (path not in lora.changed)


@pytest.mark.slow
def test_several_devices_train_what_one_does(process_environment):
    environment = process_environment | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
    }
    command = [sys.executable, "-m", "tests.training.on_adapted_meshes"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 4 and max(found.values()) < 1e-6
