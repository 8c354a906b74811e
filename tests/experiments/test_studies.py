"""Every study: its real setting can be built, its small one runs end to end."""

import dataclasses
import json

import pytest
from rich.console import Console

from experiments.__main__ import STUDIES
from experiments.sweep import command
from experiments.sweep.command import SweepOptions, load_study
from experiments.sweep.runner import run_studies
from rnnlib.models.mixers import mixer_config


@pytest.mark.parametrize("name", STUDIES)
@pytest.mark.parametrize("setting", ["small", "real"])
def test_every_cell_and_mixer_can_be_configured(name, setting):
    study = load_study(name, SweepOptions(setting=setting))
    assert len(study.seeds) >= 3, "spread over at least three seeds"
    for cell in study.cells:
        task = cell.task.at_length(max(cell.test_lengths))
        assert task.example(0, split="test")["inputs"].shape == (max(cell.test_lengths),)
        for mixer in study.mixers:
            config = cell.model_config(mixer)
            for layer in config.layer_mixers:
                mixer_config(config, layer)


@pytest.mark.parametrize("name", STUDIES)
def test_small_setting_runs(name, tmp_path):
    """One mixer, one step, each task: token by token, which compiles fastest."""
    study = load_study(name, SweepOptions(steps=1, seeds=1))
    mixer = study.mixers[-1]
    mixer = dataclasses.replace(mixer, overrides=(*mixer.overrides, ("implementation", "scan")))
    cells = tuple(
        dataclasses.replace(
            cell, batch_size=4, train_examples=8, validation_examples=4, test_examples=4, lengths=cell.test_lengths[:1]
        )
        for cell in study.cells
    )
    study = dataclasses.replace(study, mixers=(mixer,), cells=cells, learning_rates=(1e-3,))
    folder = tmp_path / name / "results" / "small"
    environment = {"device": "test"}
    assert run_studies([(study, folder)], environment=environment, console=Console(quiet=True))
    files = sorted(folder.glob("*.json"))
    assert len(files) == len(cells)
    for file in files:
        (record,) = json.loads(file.read_text())["runs"]
        assert record["train_loss"][0] > 0
        assert 0 <= record["validation"]["token_accuracy"] <= 1


def test_one_command_trains_resumes_and_reports(tmp_path, capsys, monkeypatch):
    arguments = ["--mixers", "DeltaNet", "--steps", "1", "--seeds", "1", "--output", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["experiments.state_tracking", *arguments])
    for part in range(2):
        with pytest.raises(SystemExit) as end:
            command.main("state_tracking", [*arguments, *(["--report-only"] * part)])
        assert end.value.code == 0
        assert "| DeltaNet | " in capsys.readouterr().out
    assert (tmp_path / "state_tracking" / "figures" / "small.png").exists()
    (file, *_) = (tmp_path / "state_tracking" / "results" / "small").glob("*--deltanet.json")
    environment = json.loads(file.read_text())["runs"][0]["environment"]
    assert environment["device"] and environment["packages"]["jax"] and environment["date"]
    assert "experiments.state_tracking --mixers DeltaNet" in environment["command"]


def test_wrong_names_are_named():
    with pytest.raises(ValueError, match=r"has mixers .* and cells"):
        load_study("mqar", SweepOptions(mixers=("no such mixer",)))
    with pytest.raises(ValueError, match="seeds must be at least 1, got 0"):
        SweepOptions(seeds=0)
