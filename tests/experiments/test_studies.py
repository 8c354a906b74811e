"""Every study: its real setting can be built, its small one runs end to end."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

from experiments.__main__ import STUDIES
from experiments.ablations.gains import AveragedChannelGain, ScalarKaczmarzGain, SingleKaczmarzGain
from experiments.harness.tables import read_table
from experiments.language_modelling.command import main as language_modelling
from experiments.sweep import Mixer, command
from experiments.sweep.command import SweepOptions, check_names, load_study
from experiments.sweep.runner import run_studies
from experiments.throughput.__main__ import main as throughput
from rnnlib.layers import mixer_preset
from rnnlib.models.mixers import mixer_config
from tests.selection import mostly_slow


@pytest.mark.parametrize("name", STUDIES)
@pytest.mark.parametrize("setting", ["small", "real"])
def test_every_cell_and_mixer_can_be_configured(name, setting):
    study = load_study(name, SweepOptions(setting=setting))
    assert len({*study.seeds, *study.report_seeds}) >= 3, "spread over at least three seeds"
    for cell in study.cells:
        task = cell.task.at_length(max(cell.test_lengths))
        assert task.example(0, split="test")["inputs"].shape == (max(cell.test_lengths),)
        for mixer in study.mixers:
            config = cell.model_config(mixer)
            for layer in config.layer_mixers:
                mixer_config(config, layer)


# Mixers are tested elsewhere: this one compiles fast. The study of MQAR runs through its command below, and with it the
# task of the one over sizes.
MIXER = Mixer.of("linear", "linear_attention", implementation="chunked")


TRAINED = [name for name in STUDIES if name not in ("mqar", "mqar_sizes")]
ALWAYS = ("state_tracking", "ablations", "axis_combinations")


@pytest.mark.parametrize("name", mostly_slow(TRAINED, ALWAYS))
def test_small_tasks_are_trained(name, tmp_path):
    """One run of one step on each of a study's small tasks."""
    study = load_study(name, SweepOptions(steps=1, seeds=(0,)))
    cells = tuple(
        dataclasses.replace(
            cell,
            width=8,
            num_layers=1,
            batch_size=4,
            train_examples=8,
            validation_examples=4,
            test_examples=4,
            lengths=cell.test_lengths[:1],
        )
        for cell in study.cells
    )
    study = dataclasses.replace(study, mixers=(MIXER,), cells=cells, learning_rates=(1e-3,))
    path = tmp_path / name / "results" / "small.jsonl"
    environment = {"device": "test"}
    assert run_studies([(study, path)], environment=environment, console=Console(quiet=True))
    assert len(read_table(path)) == len(cells)
    for record in read_table(path):
        assert record["train_loss"][0] > 0
        assert 0 <= record["validation"]["token_accuracy"] <= 1


def test_averaged_gates_are_constant_over_channels():
    """Gated DeltaNet-2's ablation changes one gate and leaves the other and the parameters as they are."""
    x = jax.random.normal(jax.random.key(0), (1, 3, 8))

    def gates(**averaged):
        gain = AveragedChannelGain(**averaged)
        mixer = mixer_preset("gated_deltanet2", gain=gain).build(8, 2, rngs=nnx.Rngs(0))
        columns = mixer.input_projection(x)
        return mixer.gain(columns, mixer.decay(columns))

    plain, erased, written = gates(), gates(erase=True), gates(write=True)
    assert jnp.ptp(plain.erase, axis=-1).min() > 0 and jnp.ptp(plain.write, axis=-1).min() > 0
    np.testing.assert_allclose(erased.erase, jnp.broadcast_to(plain.erase.mean(-1, keepdims=True), plain.erase.shape))
    np.testing.assert_allclose(written.write, jnp.broadcast_to(plain.write.mean(-1, keepdims=True), plain.write.shape))
    np.testing.assert_array_equal(erased.write, plain.write)
    np.testing.assert_array_equal(written.erase, plain.erase)


def test_klas_learned_scalar_and_single_gate_are_kaczmarz_steps_of_another_eta():
    """eta / (k.k + eps), with eta a number per head, and what the decay leaves."""
    x = jax.random.normal(jax.random.key(0), (1, 3, 8))
    key = jax.random.normal(jax.random.key(1), (1, 3, 2, 4))
    energy = jnp.sum(key**2, axis=-1) + 1e-6
    for gain, eta in (
        (ScalarKaczmarzGain(initial=0.3), lambda decay: jnp.full((1, 3, 2), 0.3)),
        (SingleKaczmarzGain(), lambda decay: 1 - jnp.exp(decay.log_decay)),
    ):
        mixer = mixer_preset("kla", gain=gain).build(8, 2, rngs=nnx.Rngs(0))
        columns = mixer.input_projection(x)
        decay = mixer.decay(columns)
        gates = mixer.gain.normalize(mixer.gain(columns, decay), key)
        np.testing.assert_allclose(gates.beta * energy, eta(decay), rtol=1e-5)


def test_one_command_trains_resumes_and_reports(tmp_path, capsys, monkeypatch):
    arguments = ["--mixers", "attention", "--steps", "1", "--seeds", "0", "--output", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["experiments.mqar", *arguments])
    for part in range(2):
        with pytest.raises(SystemExit) as end:
            command.main("mqar", [*arguments, *(["--report-only"] * part)])
        assert end.value.code == 0
        assert "| attention | " in capsys.readouterr().out
    assert (tmp_path / "mqar" / "figures" / "small.png").exists()
    row, *_ = read_table(tmp_path / "mqar" / "results" / "small.jsonl")
    environment = row["environment"]
    assert environment["device"] and environment["packages"]["jax"] and environment["date"]
    assert "experiments.mqar --mixers attention" in environment["command"]


def test_wrong_names_are_named():
    options = SweepOptions(mixers=("DeltaNet", "Foo"), cells=("parity", "bar"), skip=("baz",))
    message = r"mixers 'Foo', skip 'baz', cells 'bar' match nothing in state_tracking; expected .*DeltaNet.*parity"
    with pytest.raises(ValueError, match=message):
        check_names(["state_tracking"], options, ["small"])
    with pytest.raises(SystemExit, match="error: mixers 'Foo' match nothing in mqar"):
        command.main("mqar", ["--mixers", "attention", "Foo"])
    with pytest.raises(ValueError, match="mixers, skip and cells leave nothing in mqar"):
        check_names(["mqar"], SweepOptions(mixers=("attention",), skip=("att",)), ["small"])
    for main in (lambda arguments: language_modelling("language_modelling", arguments), throughput):
        with pytest.raises(SystemExit, match=r"error: mixers 'Foo' match nothing; expected parts of .*Gated DeltaNet"):
            main(["--mixers", "Gated", "Foo"])
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        SweepOptions(steps=0)
    with pytest.raises(SystemExit, match="error: setting is 'huge'; expected one of small, short"):
        language_modelling("language_modelling", ["--setting", "huge"])


def test_names_of_several_studies_need_not_be_in_each(tmp_path, capsys):
    """A study of which nothing is left is left out."""
    options = SweepOptions(setting="real", cells=("parity",), mixers=("DeltaNet",), output=tmp_path, report_only=True)
    check_names(["state_tracking", "mqar"], options, ["real"])
    assert load_study("mqar", options) is None
    command.run(["state_tracking", "mqar"], options, Console(), module="experiments")
    assert capsys.readouterr().out.count("No results yet") == 1
    with pytest.raises(ValueError, match="cells 'parity' match nothing in mqar"):
        check_names(["mqar"], options, ["real"])
