"""The study of decoding: it times what it says, and its report holds to its records."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from flax import nnx

from experiments.decoding import __main__ as command
from experiments.decoding import kernels, waiting
from experiments.decoding.measure import bytes_of_a_token
from experiments.decoding.report import answers, read_results, table, write_report
from experiments.decoding.study import BASELINE, KLA, study
from experiments.harness.page import marks
from experiments.harness.tables import EXPERIMENTS, add_row, read_table
from experiments.harness.verdicts import Verdict
from rnnlib.models import DecoderLM, ModelConfig, count_parameters

TINY = ModelConfig(
    vocabulary_size=11, width=8, num_layers=2, num_heads=2, mlp_width=8, mixers=("linear_attention", "attention")
)


def test_a_token_reads_weights_and_keys_and_moves_states_twice():
    model = DecoderLM(TINY, rngs=nnx.Rngs(0))
    moved = bytes_of_a_token(model, 3, 16)
    assert moved["weights"] == 4 * count_parameters(TINY).without_embedding, "the head, and not the embedding"
    state = 3 * 2 * 4 * 4 * 4  # of three texts, two heads, float32
    counted = sum(x.nbytes for x in jax.tree.leaves(model.blocks[0].mixer.init_cache(3, 16)))
    assert counted >= state
    keys_and_values = 2 * 3 * 16 * 8 * 4
    assert 2 * counted + keys_and_values <= moved["caches"] < 2 * counted + keys_and_values + 3 * 4 * 20


@pytest.fixture
def small(monkeypatch):
    sizes = {"batches": (1, 2), "prompt": 3, "block": 2, "blocks": 3, "readings": 2}
    plan = dataclasses.replace(study("small"), models=(("Tiny", TINY),), **sizes)
    monkeypatch.setattr(command, "study", lambda setting: plan)
    return plan


def test_finished_results_are_kept_and_reported(small, tmp_path, capsys):
    assert command.main(["--output", str(tmp_path)]) == 0
    path = tmp_path / "results" / "small.jsonl"
    assert [row["id"] for row in read_table(path)] == ["tiny--1", "tiny--2"]
    record = read_table(path)[1]
    assert len(record["token_seconds"]) == 2 and len(record["reading_seconds"]) == 2
    assert record["tokens_per_second"] == pytest.approx(2 / np.median(record["token_seconds"]), rel=1e-3)
    assert record["of_limit"] is None and record["environment"]["platform"] == "cpu"
    assert (tmp_path / "figures" / "small.png").stat().st_size > 1000
    before = path.read_text()
    assert command.main(["--output", str(tmp_path)]) == 0
    assert path.read_text() == before
    shown = capsys.readouterr().out
    assert "| Tiny | 2 |" in shown and "prompt read, ms |" in shown


def test_kla_s_time_behind_long_prompts_is_judged():
    assert [len(study(setting).models) for setting in ("long_32k", "long_131k")] == [3, 3]

    def record(label, reading, token):
        return {"model": label, "batch": 1, "reading_seconds": [reading, 1.01 * reading], "token_seconds": [token] * 3}

    records = [record(KLA, 0.500, 1.1e-3), record(BASELINE, 0.501, 1.0e-3)]
    assert [verdict for *_, verdict in answers(records)] == [Verdict.AGREES, Verdict.DISAGREES]
    assert not answers(records[:1])


def test_the_table_sets_the_peer_beside_ours(small, tmp_path):
    where = {"device": "a card", "packages": {"jax": "1"}, "commit": "abcdefgh", "date": "2026-11-28T22:00"}
    ours = {"model": "Tiny", "batch": 1, "tokens_per_second": 3000.0, "token_seconds": [1 / 3000], "environment": where}
    theirs = ours | {"tokens_per_second": 1000.0, "peer": "FLA", "versions": {"torch": "2"}}
    text = table(small, [ours | {"of_limit": 0.5, "bytes": {"weights": 2e9, "caches": 1e9}}, theirs])
    assert "| Tiny | 1 | 0.33 | 3,000 | 2.00 + 1.00 | 50% | 1,000 (FLA) | 3.00 |" in text and "torch 2" in text
    assert table(small, []) == "No results yet.\n"
    assert write_report(small, [], tmp_path, "small") == "No results yet.\n" and not (tmp_path / "figures").exists()


def test_wrong_options_are_one_line(small, capsys):
    for arguments, said in (
        (["--models", "nothing"], "'nothing' is part of none"),
        (["--batches", "5"], "5 is not timed"),
    ):
        with pytest.raises(SystemExit, match=said):
            command.main(arguments)


def test_results_of_another_device_are_not_mixed_in(small, tmp_path):
    where = {"device": "a card", "packages": {"jax": "1"}, "commit": "abcdefgh", "date": "2026-11-28T22:00"}
    add_row(
        tmp_path / "results" / "small.jsonl", "decoding", "tiny--1", {"model": "Tiny", "batch": 1, "environment": where}
    )
    with pytest.raises(SystemExit, match="card: the results 'small' are of a card"):
        command.main(["--output", str(tmp_path), "--batches", "2"])
    assert command.main(["--output", str(tmp_path), "--batches", "2", "--card", "here"]) == 0
    assert [row["id"] for row in read_table(tmp_path / "results" / "small_here.jsonl")] == ["tiny--2"]


@pytest.mark.parametrize(("name", "setting"), [("small", "small"), ("real", "real"), ("real_h100", "real")])
def test_the_page_shows_what_the_results_say(name, setting):
    folder = EXPERIMENTS / "decoding"
    begin, end = marks(name)
    shown = (folder / "README.md").read_text().split(begin, 1)[1].split(end, 1)[0].lstrip("\n")
    assert shown == table(study(setting), read_results(folder / "results" / f"{name}.jsonl"))


def test_steps_whose_writes_wait_are_timed_beside_those_that_store(tmp_path):
    path = tmp_path / "waiting.json"
    options = ["--output", str(path), "--texts", "2", "--heads", "1", "--channels", "16"]
    waiting.main([*options, "--tokens", "5", "--gigabytes", "0", "--blocks", "16", "--warps", "1"])
    found = json.loads(path.read_text())
    assert [(x["decay"], x["texts"], x["layers"]) for x in found["kernels"]] == [
        ("none", 2, 2),
        ("scalar", 2, 2),
        ("channel", 2, 2),
    ]
    for record in found["kernels"]:
        names = ("stored_each_time_us", "waiting_us", "waiting_16_channels_1_warps_us")
        assert all(record[name] > 0 for name in names) and record["same_bits"]


def test_a_token_is_profiled_kernel_by_kernel(small, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(kernels, "study", lambda setting: small)
    path = tmp_path / "kernels.json"
    kernels.main(["--output", str(path), "--models", "Tiny", "--texts", "1", "2", "--shown", "2"])
    found = json.loads(path.read_text())
    assert [(x["model"], x["texts"]) for x in found["tokens"]] == [("Tiny", 1), ("Tiny", 2)]
    for record in found["tokens"]:
        times = [kernel["token_us"] for kernel in record["kernels"]]
        assert len(times) > 2 and times == sorted(times, reverse=True) and times[0] > 0
        assert record["kernels_us"] == pytest.approx(sum(times), abs=0.1)
        for kernel in record["kernels"]:
            assert kernel["launches"] * kernel["launch_us"] == pytest.approx(kernel["token_us"], rel=0.05, abs=0.05)
    shown = capsys.readouterr().out
    assert "Tiny, 2 texts" in shown and f"{len(found['tokens'][1]['kernels']) - 2} others" in shown
    with pytest.raises(SystemExit, match=r"models: \['Other'\] are not in the study"):
        kernels.main(["--output", str(path), "--models", "Other"])
