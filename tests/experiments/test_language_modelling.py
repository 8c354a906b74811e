"""The language-modelling study: bits per byte, halves of the held-out text, one command end to end."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.harness.page import marks
from experiments.harness.tables import EXPERIMENTS, add_rows, read_table
from experiments.language_modelling.command import load_study, main, missing_runs
from experiments.language_modelling.lengths import BitsPerByte, hold_out
from experiments.language_modelling.report import (
    at_every_width,
    chosen,
    lacking_rates,
    rates_table,
    tables,
    widths_figure,
)
from experiments.language_modelling.runs import fingerprint, read_run
from experiments.language_modelling.study import model_config, study
from rnnlib.data import DataConfig, TokenCorpus, load_tokenizer
from rnnlib.models import DecoderLM, ModelConfig
from rnnlib.models.mixers import mixer_config

FOLDER = EXPERIMENTS / "language_modelling"


def test_the_page_shows_what_the_results_say():
    page = (FOLDER / "README.md").read_text()
    for setting in ("short", "real", "large_short", "large"):
        plan, results = study(setting), FOLDER / "results" / f"{setting}.jsonl"
        begin, end = marks(setting)
        assert chosen(plan, results)
        assert page.split(begin, 1)[1].split(end, 1)[0].lstrip("\n") == tables(plan, results)


def test_a_mixer_stands_at_the_better_of_the_rates_that_were_run(tmp_path):
    plan, path = study("short"), tmp_path / "short.jsonl"
    rows = {
        (row["mixer"]["label"], row["learning_rate"]): row for row in read_table(FOLDER / "results" / "short.jsonl")
    }
    add_rows(path, [rows["Transformer++", 4e-3], rows["Comba", 2e-3]])
    assert {label: runs[0]["learning_rate"] for label, runs in chosen(plan, path).items()} == {
        "Transformer++": 0.004,
        "Comba": 0.002,
    }
    # Best first, 1.4786 and 1.7206 in the page's table of rates.
    assert rates_table(plan, path).splitlines()[3:] == [
        "| Comba | 1.4786 | not run |",
        "| Transformer++ | not run | 1.7206 |",
    ]
    assert lacking_rates(plan, path) == {"Comba", "Transformer++"}
    assert "| 0.002* |" in tables(plan, path)
    path.unlink()
    add_rows(path, [rows["Comba", 2e-3]])
    assert not lacking_rates(plan, path)  # one rate, all have it
    assert rates_table(plan, path) == ""
    add_rows(path, [rows["Comba", 4e-3]])
    assert chosen(plan, path)["Comba"][0]["learning_rate"] == 0.004  # 1.3774


def test_seeds_that_report_come_when_the_others_have_chosen(tmp_path):
    plan = dataclasses.replace(study("real"), mixers=study("real").mixers[:1], report_seeds=(1, 2))
    (mixer,), path = plan.mixers, tmp_path / "real.jsonl"
    row = read_run(plan, FOLDER / "results" / "real.jsonl", mixer, 2e-3, 0)

    def put(rate, seed, bits):
        own = {"learning_rate": rate, "seed": seed, "id": f"{rate} {seed}"}
        own |= {"fingerprint": fingerprint(plan, mixer, rate, seed), "validation": {"bits_per_byte": bits}}
        add_rows(path, [row | own])

    assert missing_runs(plan, path) == [(mixer, 2e-3, 0), (mixer, 4e-3, 0)]
    put(2e-3, 0, 0.9)
    assert missing_runs(plan, path) == [(mixer, 4e-3, 0)] and not chosen(plan, path)
    put(4e-3, 0, math.nan)  # diverged
    assert missing_runs(plan, path) == [(mixer, 2e-3, 1), (mixer, 2e-3, 2)]
    put(2e-3, 1, 0.95), put(2e-3, 2, 0.85)
    assert not missing_runs(plan, path)
    assert [run["seed"] for run in chosen(plan, path)[mixer.label]] == [1, 2]


@pytest.mark.parametrize("name", ["axes", "rates", "long_context"])
def test_studies_of_language_models_can_be_configured(name):
    for setting in ("small", "real"):
        plan = load_study(name, setting)
        for mixer in plan.mixers:
            config = model_config(plan.train.model, mixer)
            for layer in config.layer_mixers:
                mixer_config(config, layer)
            # Layers repeat after as many as there are names of mixers.
            config = config.replace(num_layers=min(config.num_layers, len(config.mixers)))
            nnx.eval_shape(lambda config=config: DecoderLM(config, rngs=nnx.Rngs(0)))
        assert (EXPERIMENTS / name / "PLAN.md").exists()


def test_both_widths_are_drawn_once_they_have_results(tmp_path):
    widths_figure(tmp_path)
    assert not any(tmp_path.iterdir())
    (tmp_path / "results").symlink_to(FOLDER / "results")
    widths_figure(tmp_path)
    assert (tmp_path / "figures" / "widths.png").stat().st_size > 10_000


def test_widths_are_compared_at_rates_that_a_mixer_was_run_at_with_both(tmp_path):
    def put(setting, rate, bits, label="Comba"):
        plan = study(setting)
        mixer = next(mixer for mixer in plan.mixers if mixer.label == label)
        run = read_run(plan, FOLDER / "results" / f"{setting}.jsonl", mixer, plan.learning_rates[0], 0)
        own = {"learning_rate": rate, "fingerprint": fingerprint(plan, mixer, rate, 0), "id": f"{label} {rate}"}
        own["validation"] = run["validation"] | {"bits_per_byte": bits}
        add_rows(tmp_path / "results" / f"{setting}.jsonl", [run | own])

    def rates():
        return {
            label: [runs[0]["learning_rate"] for runs in of_widths]
            for label, of_widths in at_every_width(tmp_path).items()
        }

    put("real", 2e-3, 0.8), put("real", 4e-3, 0.7), put("large", 1e-3, 0.6)
    assert rates() == {"Comba": [2e-3, 1e-3]}, "4e-3 has no partner"
    put("large", 2e-3, 0.65)
    assert rates() == {"Comba": [4e-3, 1e-3]}, "each width's better one"
    put("real", 4e-3, 0.8, "KLA"), put("large", 1e-3, 0.6, "KLA")
    assert rates() == {"Comba": [4e-3, 1e-3]}
    put("real", 2e-3, 0.9, "KLA")
    assert rates() == {"Comba": [4e-3, 1e-3], "KLA": [2e-3, 1e-3]}


@pytest.mark.parametrize("setting", ["real", "large"])
def test_every_mixer_can_be_configured(setting):
    plan = study(setting)
    assert plan.train.steps * plan.train.data.batch_size * plan.train.data.sequence_length >= 100e6
    for mixer in plan.mixers:
        config = model_config(plan.train.model, mixer)
        assert len({type(mixer_config(config, layer)) for layer in config.layer_mixers}) == len(set(mixer.preset))


def test_large_models_differ_in_their_mixer_alone():
    plan = study("large")
    assert plan.train.data.max_train_bytes == study("real").train.data.max_train_bytes, "the same text"
    sizes = []
    for mixer in plan.mixers[:3]:
        config = model_config(plan.train.model, mixer)
        model = nnx.eval_shape(lambda config=config: DecoderLM(config, rngs=nnx.Rngs(0)))
        sizes.append(sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))))
    assert min(sizes) > 120e6 and max(sizes) < 150e6


def test_bits_per_byte_are_those_of_every_document_read_alone():
    tokenizer = load_tokenizer("byte")
    texts = ["one two three", "a longer text than the first", "short"]
    corpus = TokenCorpus.from_documents(texts, tokenizer)
    config = ModelConfig(vocabulary_size=257, width=8, num_layers=1, num_heads=1, mixers=("linear_attention",))
    model = DecoderLM(config, rngs=nnx.Rngs(0))
    result = BitsPerByte(model, 64, 128, tokenizer)(model, corpus)
    nats, num_bytes = 0.0, 0
    for text in texts:
        # The end of each document is predicted too, and stands for no byte.
        end = tokenizer.end_of_document
        tokens = jnp.asarray([[end, *tokenizer.encode(text), end]], jnp.int32)
        logits = np.asarray(model(tokens[:, :-1])[0], np.float64)
        logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
        nats -= logits[np.arange(len(text) + 1), np.asarray(tokens[0, 1:])].sum()
        num_bytes += len(text)
    assert result["bits_per_byte"] == pytest.approx(nats / np.log(2) / num_bytes, rel=1e-4)
    assert result["tokens"] == num_bytes + len(texts)
    assert [position for position, _ in result["by_position"]] == [1, 2, 4, 8, 16, 32]


def test_held_out_halves_share_no_document():
    data = DataConfig(max_train_bytes=100_000, max_validation_bytes=60_000)
    held_out = hold_out(data, load_tokenizer("byte"))

    def documents(corpus):
        return {corpus.tokens[a:b].tobytes() for a, b in zip(corpus.starts[:-1], corpus.starts[1:])}

    first, second = documents(held_out.validation), documents(held_out.test)
    assert first and second and not first & second


def test_one_command_trains_and_reports(tmp_path, capsys):
    arguments = ["--mixers", "Transformer", "--steps", "1", "--output", str(tmp_path), "--work", str(tmp_path / "work")]
    assert main("language_modelling", arguments) == 0
    file = tmp_path / "language_modelling" / "results" / "small.jsonl"
    (content,) = read_table(file)
    assert content["steps"] == 1 and content["train_tokens"] > 0
    assert content["test"]["256"]["bits_per_byte"] == pytest.approx(8, abs=1)  # untrained: a byte costs eight bits
    assert (tmp_path / "language_modelling" / "figures" / "small.png").exists()
    written = file.stat().st_mtime_ns
    capsys.readouterr()
    assert main("language_modelling", arguments) == 0
    assert file.stat().st_mtime_ns == written, "a finished run is skipped"
    assert "| Transformer++ |" in capsys.readouterr().out
    longer = ["2" if part == "1" else part for part in arguments]
    assert main("language_modelling", [*longer, "--report-only"]) == 0
    assert "No results yet" in capsys.readouterr().out, "another budget is another run"
    assert file.stat().st_mtime_ns == written
