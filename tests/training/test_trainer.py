"""The training loop in this process: learning, errors, self-contained runs, several devices."""

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest

from rnnlib.data import make_dataset, train_tokenizer
from rnnlib.training import (
    NonFiniteLossError,
    RunError,
    Trainer,
    evaluate,
    load_run,
    read_csv,
    spread_batches,
    train,
)

pytestmark = pytest.mark.usefixtures("compilation_cache")


def replace(config, section, **changes):
    return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **changes)})


def test_training_learns_and_the_run_can_be_read_back(tmp_path, corpus, tiny_config):
    tokenizer = train_tokenizer((path.read_text() for path in sorted(corpus.iterdir())), vocabulary_size=300)
    tokenizer.save(tmp_path / "tokenizer.json")
    config = replace(tiny_config, "data", tokenizer=str(tmp_path / "tokenizer.json"))
    config = dataclasses.replace(config, steps=120, accumulation_steps=2)
    result = train(config, tmp_path / "run")
    (tmp_path / "tokenizer.json").unlink()  # the run holds a copy
    loaded = load_run(tmp_path / "run")
    assert loaded.config.model.vocabulary_size == tokenizer.vocabulary_size
    assert loaded.tokenizer.fingerprint == tokenizer.fingerprint
    rows = read_csv(tmp_path / "run" / "metrics.csv")
    assert rows[-1]["tokens"] == result.tokens == loaded.tokens
    assert rows[0]["loss"] == pytest.approx(np.log(300), rel=0.05)
    assert np.mean([row["loss"] for row in rows[-10:]]) < 0.6 * rows[0]["loss"]
    validation = read_csv(tmp_path / "run" / "validation.csv")
    assert [row["step"] for row in validation] == [50, 100, 120]
    assert validation[-1]["loss"] < validation[0]["loss"]
    # What was recorded is what the saved model gives.
    dataset = make_dataset(config.data, split="validation", tokenizer=loaded.tokenizer)
    batches = spread_batches(dataset, config.evaluation.batches)
    again = evaluate(loaded.model, batches, token_bytes=loaded.tokenizer.token_bytes)
    assert again.loss == pytest.approx(validation[-1]["loss"], rel=1e-6)
    assert again == result.evaluation
    (tmp_path / "run" / "tokenizer.json").unlink()  # where it was copied from may hold another one by now
    with pytest.raises(RunError, match=r"run .* has no tokenizer.json, expected its copy of .*tokenizer.json"):
        load_run(tmp_path / "run")


def test_evaluation_batches_are_spread_over_the_text(tiny_config):
    dataset = make_dataset(tiny_config.data, split="validation")
    every = [batch["inputs"] for batch in dataset]
    assert len(every) > 6
    assert np.array_equal([batch["inputs"] for batch in spread_batches(dataset, None)], every)
    assert np.array_equal([batch["inputs"] for batch in spread_batches(dataset, 10**6)], every)
    expected = [every[0], every[len(every) // 3], every[2 * len(every) // 3]]
    assert np.array_equal([batch["inputs"] for batch in spread_batches(dataset, 3)], expected)


def test_a_loss_that_is_not_finite_stops_and_names_step_and_checkpoint(tmp_path, tiny_config):
    # One update of this size and the next loss is not a number.
    config = replace(tiny_config, "optimizer", learning_rate=1e30, warmup_steps=0, schedule="constant")
    config = dataclasses.replace(replace(config, "checkpoint", every=1), steps=20)
    with pytest.raises(NonFiniteLossError, match=r"step 2: .* not finite; last good checkpoint: .*/checkpoints/1$"):
        train(config, tmp_path / "run")
    assert load_run(tmp_path / "run").step == 1
    assert [row["skipped"] for row in read_csv(tmp_path / "run" / "metrics.csv")] == [0, 1]


def test_steps_that_are_not_finite_are_skipped_up_to_a_count(tmp_path, tiny_config, capsys):
    config = replace(tiny_config, "optimizer", learning_rate=1e30, warmup_steps=0, schedule="constant")
    config = dataclasses.replace(replace(config, "checkpoint", every=100), steps=20, max_skipped_steps=3)
    with pytest.raises(NonFiniteLossError, match=r"step 5: .* there is no checkpoint yet"):
        train(config, tmp_path / "run")
    assert "the update is left out (3 of at most 3)" in capsys.readouterr().out
    # Stopped by hand before the limit, the count goes on from the checkpoint.
    config = dataclasses.replace(config, steps=3)
    train(config, tmp_path / "resumed")
    with pytest.raises(NonFiniteLossError, match=r"step 5: .* last good checkpoint: .*/checkpoints/3$"):
        train(dataclasses.replace(config, steps=20), tmp_path / "resumed", resume=True)


def test_a_run_that_fails_before_its_first_step_leaves_no_folder(tmp_path, tiny_config, monkeypatch):
    trainer = Trainer(tiny_config)
    trainer.close()
    with pytest.raises(RuntimeError, match=r"Trainer\.run: no run is open, expected a call of Trainer\.open"):
        trainer.run()
    with pytest.raises(RuntimeError, match=r"Trainer\.step: no run was opened, expected a call of Trainer\.open"):
        trainer.step  # noqa: B018
    with pytest.raises(RuntimeError, match=r"Trainer\.trained_model: no run was opened"):
        trainer.trained_model()
    trainer.open(tmp_path / "run")
    assert (tmp_path / "run" / "config.yaml").exists()

    def no_memory(*arguments):
        raise MemoryError

    trainer._steps.finish_compiling()
    monkeypatch.setattr(trainer._steps, "finish_compiling", lambda: None)
    monkeypatch.setattr(trainer._steps, "train_step", no_memory)
    with pytest.raises(MemoryError):
        trainer.run()
    assert not (tmp_path / "run").exists()
    with pytest.raises(RuntimeError, match="no run is open"):
        trainer.run()


def test_data_can_be_read_after_compiling(tmp_path, tiny_config):
    config = dataclasses.replace(
        tiny_config, steps=2, optimizer=dataclasses.replace(tiny_config.optimizer, warmup_steps=0)
    )
    trainer = Trainer(config, read_data=False)
    trainer.compile()
    assert trainer.read_data() is trainer.read_data()
    trainer.open(tmp_path / "later")
    later = trainer.run()
    assert later.step == 2 and later.evaluation is not None
    trainer = Trainer(config, read_data=False)
    trainer.begin_compiling()
    begun = trainer._steps._compiling
    trainer.open(tmp_path / "begun")
    assert begun is not None and trainer._steps._compiling is begun
    assert trainer.run().evaluation == later.evaluation
    missing = dataclasses.replace(config, data=dataclasses.replace(config.data, source="text", paths=("no-such-file",)))
    trainer = Trainer(missing, read_data=False)
    with pytest.raises(ValueError, match="no-such-file"):
        trainer.open(tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_vocabulary_is_at_least_the_tokenizers(tiny_config):
    assert Trainer(tiny_config).config.model.vocabulary_size == 257
    padded = replace(tiny_config, "model", vocabulary_size=320)
    assert Trainer(padded).config.model.vocabulary_size == 320


def test_a_number_of_the_wrong_type_is_refused_before_there_is_a_folder(tmp_path, tiny_config, unchecked_shapes):
    with pytest.raises(ValueError, match=r"TrainConfig: steps is 10000\.0, expected an integer of at least 1"):
        train(dataclasses.replace(tiny_config, steps=1e4), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_more_devices_than_there_are_is_refused(tiny_config):
    with pytest.raises(ValueError, match=r"devices=64: this machine has \d+ cpu device"):
        Trainer(dataclasses.replace(tiny_config, devices=64))


TWO_DEVICES = """
import dataclasses, json, sys
import jax, numpy as np
from flax import nnx
from jax.sharding import PartitionSpec
from rnnlib.data import DataConfig
from rnnlib.models import DecoderLM, ModelConfig
from rnnlib.training import *
from tests.training.stand_in import VOCABULARY, TinyModel, random_batch

config = OptimizerConfig(learning_rate=1e-2, warmup_steps=0)
optimizer = make_optimizer(config, 10)
results = []
for mesh in (make_mesh(1), make_mesh(2)):
    graphdef, state = init_train_state(TinyModel(rngs=nnx.Rngs(0)), optimizer)
    state = put_state(state, mesh)
    counts = np.ones(VOCABULARY, np.int32)
    step = make_train_step(graphdef, optimizer, learning_rate_schedule(config, 10), counts, mesh)
    rng = np.random.default_rng(0)
    losses = []
    for _ in range(3):
        batch = random_batch(rng)
        batch["loss_weights"][2:] *= 0.1  # the devices' shares weigh differently
        state, metrics = step(state, put_batch(batch, mesh, 2))
        losses.append([float(metrics.nats), float(metrics.tokens), float(metrics.gradient_norm)])
    model = nnx.merge(graphdef, state.parameters, state.other)
    evaluation = evaluate(model, [random_batch(rng)], token_bytes=counts, mesh=mesh)
    losses.append([evaluation.loss, evaluation.tokens, evaluation.perplexity])
    results.append(losses)
assert len(jax.tree.leaves(state.parameters)[0].sharding.device_set) == 2

# Weights that devices share, in a shard_map of the user's own: their gradients are summed over the devices' rows.
small = ModelConfig(vocabulary_size=16, width=32, num_layers=1, num_heads=2, mixers="kda")
graphdef, parameters = nnx.split(DecoderLM(small, rngs=nnx.Rngs(0)))
tokens = np.random.default_rng(0).integers(0, 16, (2, 20))

def loss(parameters, tokens):
    weights = np.ones(tokens.shape, np.float32)
    model = nnx.merge(graphdef, parameters)
    hidden = model.hidden(tokens)
    return head_loss_sums(hidden, model.output_embedding, tokens, weights, np.ones(16, int)).nats[None]

rows = PartitionSpec("data")
split = jax.shard_map(loss, mesh=make_mesh(2), in_specs=(PartitionSpec(), rows), out_specs=rows)
wanted, found = (jax.jit(jax.grad(lambda p: f(p, tokens).sum()))(parameters) for f in (loss, split))
jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), found, wanted)
# Unless a number is asked for, an odd batch is no error on two devices.
model = ModelConfig(width=8, num_layers=1, num_heads=1, mlp_width=8)
odd = TrainConfig(model=model, data=DataConfig(batch_size=3, sequence_length=8))
Trainer(odd, read_data=False)
try:
    Trainer(dataclasses.replace(odd, devices=2), read_data=False)
except ValueError as error:
    assert "data.batch_size=3 does not split evenly into accumulation_steps=1 parts on devices=2" in str(error)
else:
    raise AssertionError("three rows on two devices")
print(json.dumps(results))
"""


def test_two_devices_train_as_one(process_environment):
    flags = f"{process_environment.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    environment = process_environment | {"XLA_FLAGS": flags}
    process = subprocess.run(
        [sys.executable, "-c", TWO_DEVICES], env=environment, capture_output=True, text=True, timeout=300
    )
    assert process.returncode == 0, process.stderr
    one, two = json.loads(process.stdout.splitlines()[-1])
    np.testing.assert_allclose(two, one, rtol=1e-5)
