"""The sweep runner: lanes, resuming, choice of the learning rate, reports."""

import dataclasses
import itertools
import pathlib
import re
import signal
import sys
import threading
import time

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from rich.console import Console

from experiments.__main__ import STUDIES
from experiments.harness.command import errors_as_lines
from experiments.harness.page import marks
from experiments.harness.study import SETTINGS
from experiments.harness.tables import add_rows, read_table
from experiments.sweep import Cell, Mixer, Study
from experiments.sweep.autoencoder import AutoEncoder
from experiments.sweep.command import SweepOptions, load_study, places
from experiments.sweep.data import DataFactory, batched, epoch_orders, gather_answers
from experiments.sweep.outcomes import choose
from experiments.sweep.report import table, write_report
from experiments.sweep.results import read_runs, write_runs
from experiments.sweep.runner import missing_groups, run_studies
from experiments.sweep.saved import Saved
from experiments.sweep.study import Axis, Group, Lane, fingerprint
from experiments.sweep.training import CompiledGroup, DeviceData, compile_group, train_group
from rnnlib.data.tasks import MQAR, Compression, InContextRecall, Mixture, RegBench
from rnnlib.layers import SoftplusDecay
from rnnlib.models import DecoderLM
from rnnlib.training import loss_sums, make_optimizer

MIXER = Mixer.of("linear", "linear_attention", implementation="scan")
CELL = Cell(
    "recall",
    MQAR(sequence_length=8, num_pairs=2, vocabulary_size=16),
    lengths=(8, 12),
    width=8,
    num_layers=1,
    num_heads=1,
    steps=4,
    chunks=2,
    batch_size=4,
    train_examples=10,
    validation_examples=6,
    test_examples=5,
    evaluation_tokens=32,
)
STUDY = Study("toy", "Toy", (MIXER,), (CELL,), (1e-3, 1e-1), (0, 1))
ENVIRONMENT = {
    "device": "test",
    "packages": {"jax": "0", "flax": "0"},
    "commit": "0000000",
    "command": "pytest",
    "date": "2026-01-01T00:00:00+00:00",
}


def run(study, folder, **options):
    return run_studies([(study, folder)], environment=ENVIRONMENT, console=Console(quiet=True), **options)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The toy study, run."""
    path = tmp_path_factory.mktemp("studies") / "toy" / "results" / "real.jsonl"
    assert run(STUDY, path)
    return path


def test_gathered_answers_are_the_tasks_answers():
    task = RegBench(sequence_length=20, num_symbols=6, max_states=5)
    examples = [task.example(i) for i in range(5)]
    arrays = {name: np.stack([e[name] for e in examples]) for name in examples[0]}
    gathered = gather_answers(arrays, arrays["loss_weights"])
    for i in range(5):
        asked = np.flatnonzero(arrays["loss_weights"][i])
        kept = gathered["weights"][i] > 0
        np.testing.assert_array_equal(gathered["where"][i][kept], asked)
        for name in ("targets", "query_ids", "allowed_targets"):
            np.testing.assert_array_equal(gathered[name][i][kept], arrays[name][i][asked])
    assert gathered["weights"].sum() == arrays["loss_weights"].sum()


def test_answers_can_weigh_more_than_other_tokens():
    """In training only, and only where all tokens are trained on does it change anything but the loss's scale."""
    cell = dataclasses.replace(CELL, task=InContextRecall(sequence_length=12, vocabulary_size=8), lengths=())
    plain, heavy = (DataFactory().get(dataclasses.replace(cell, answer_weight=w)) for w in (1.0, 5.0))
    answers = plain.train["query_ids"] > 0
    assert answers.any() and (plain.train["weights"] > 0)[~answers].any()
    np.testing.assert_array_equal(heavy.train["weights"], plain.train["weights"] * np.where(answers, 5, 1))
    np.testing.assert_array_equal(heavy.validation["weights"], plain.validation["weights"])


def test_batches_are_filled_with_rows_that_ask_nothing():
    arrays = batched({"weights": np.ones((5, 3)), "inputs": np.arange(15).reshape(5, 3)}, 4)
    assert arrays["inputs"].shape == (2, 4, 3)
    np.testing.assert_array_equal(arrays["inputs"].reshape(8, 3)[:5].ravel(), np.arange(15))
    assert arrays["weights"].sum() == 15


def test_epochs_are_permutations_and_depend_on_the_seed_alone():
    orders = epoch_orders(10, 7, 4, [3, 5])
    assert orders.shape == (7, 2, 4)
    for epoch in range(3):  # two steps of four fit in an epoch of ten
        taken = orders[2 * epoch : 2 * epoch + 2, 0].ravel()
        assert len(set(taken.tolist())) == 8
    assert (orders[:, 0] != orders[:, 1]).any()
    np.testing.assert_array_equal(epoch_orders(10, 7, 4, [5])[:, 0], orders[:, 1])
    np.testing.assert_array_equal(epoch_orders(10, 4, 4, [3])[:, 0], orders[:4, 0])


def test_a_lane_is_a_plain_training_run(finished):
    """What a vmapped lane with a scaled update gives is what a loop with that learning rate gives."""
    lane = Lane(1e-1, 1)
    data = DataFactory().get(CELL)
    config = dataclasses.replace(CELL.optimizer_config(), learning_rate=lane.learning_rate)
    optimizer = make_optimizer(config, CELL.steps)
    model = DecoderLM(CELL.model_config(MIXER), rngs=nnx.Rngs(jax.random.key(lane.seed)))
    graphdef, parameters = nnx.split(model)
    moments = optimizer.init(parameters)
    examples = [CELL.task.example(i) for i in range(CELL.train_examples)]
    no_bytes = jax.numpy.zeros(CELL.task.vocabulary_size, int)

    def loss(parameters, inputs, targets, weights):
        logits = nnx.merge(graphdef, parameters)(inputs)
        sums = loss_sums(logits, targets, weights, no_bytes)
        return sums.nats / sums.tokens

    step = jax.jit(jax.value_and_grad(loss))
    losses = []
    for order in epoch_orders(CELL.train_examples, CELL.steps, CELL.batch_size, [lane.seed])[:, 0]:
        batch = [np.stack([examples[i][name] for i in order]) for name in ("inputs", "targets", "loss_weights")]
        value, gradients = step(parameters, *batch)
        changes, moments = optimizer.update(gradients, moments, parameters)
        parameters = optax.apply_updates(parameters, changes)
        losses.append(float(value))
    per_chunk = np.reshape(losses, (CELL.chunks, -1)).mean(1)
    recorded = read_runs(finished, MIXER, CELL)[lane]
    np.testing.assert_allclose(recorded["train_loss"], per_chunk, rtol=2e-4)
    assert np.ptp(per_chunk) > 1e-2  # something was learned at all

    # Accuracy in the record is that of the whole test set.
    for length in CELL.test_lengths:
        task = CELL.task.at_length(length)
        tests = [task.example(i, split="test") for i in range(CELL.test_examples)]
        right = asked = 0
        for example in tests:
            predicted = np.argmax(nnx.merge(graphdef, parameters)(jax.numpy.asarray(example["inputs"][None]))[0], -1)
            asked += (example["query_ids"] > 0).sum()
            right += ((predicted == example["targets"]) & (example["query_ids"] > 0)).sum()
        assert recorded["test"][str(length)]["token_accuracy"] == pytest.approx(right / asked)
    assert data.train["where"].shape == (CELL.train_examples, 2)


def test_finished_runs_are_skipped_and_missing_ones_are_added(finished, tmp_path):
    path = tmp_path / "toy" / "results" / "real.jsonl"
    add_rows(path, read_table(finished))
    assert missing_groups(STUDY, path) == []
    before = path.stat().st_mtime_ns
    assert run(STUDY, path)
    assert path.stat().st_mtime_ns == before

    path.unlink()
    add_rows(path, [row for row in read_table(finished) if row["seed"] != 1])
    (group,) = missing_groups(STUDY, path)
    assert group.lanes == (Lane(1e-3, 1), Lane(1e-1, 1))


def test_runs_of_another_budget_stand_beside(finished, tmp_path):
    path = tmp_path / "toy" / "results" / "real.jsonl"
    add_rows(path, read_table(finished))
    longer = dataclasses.replace(STUDY, cells=(dataclasses.replace(CELL, steps=8),))
    (group,) = missing_groups(longer, path)
    assert len(group.lanes) == 4, "another budget is another run"
    assert "No results yet" in table(longer, path)
    write_runs(path, longer, MIXER, longer.cells[0], [_record(1e-3, 0, validation=1, test=1)], num_parameters=1)
    assert len(read_table(path)) == 5 and len(read_runs(path, MIXER, CELL)) == 4


def test_lanes_do_not_depend_on_each_other(finished):
    data = DataFactory().get(CELL)
    group = Group(MIXER, CELL, (Lane(1e-1, 1),))
    steps = []
    (alone,) = train_group(compile_group(group, data), DeviceData().put(CELL, data), steps.append)
    together = read_runs(finished, MIXER, CELL)[Lane(1e-1, 1)]
    np.testing.assert_allclose(alone["train_loss"], together["train_loss"], rtol=2e-4)
    assert sum(steps) == CELL.steps


def test_a_group_that_was_stopped_goes_on_from_its_last_chunk(finished, tmp_path, monkeypatch):
    monkeypatch.setattr("experiments.sweep.saved.EVERY", 0.0)
    data, group = DataFactory().get(CELL), Group(MIXER, CELL, STUDY.lanes(CELL))
    compiled, on_device = compile_group(group, data), DeviceData().put(CELL, data)

    class StopError(Exception):
        pass

    def stop(steps):
        done_steps.append(steps)
        if len(done_steps) == 2:
            raise StopError

    done_steps: list[int] = []
    with pytest.raises(StopError):
        train_group(compiled, on_device, stop, Saved.of(tmp_path, group))
    (file,) = tmp_path.rglob("*.npz")
    steps: list[int] = []
    runs = train_group(compiled, on_device, steps.append, Saved.of(tmp_path, group))
    assert steps == [2, 2] and not file.exists(), "the first chunk was not trained again"
    for run in runs:
        recorded = read_runs(finished, MIXER, CELL)[Lane(run["learning_rate"], run["seed"])]
        np.testing.assert_allclose(run["train_loss"], recorded["train_loss"], rtol=1e-6)
        assert run["test"] == recorded["test"]


def test_a_run_that_ends_early_says_so_and_leaves_no_half_files(tmp_path):
    assert not run(STUDY, tmp_path / "toy" / "results" / "real.jsonl", seconds=-1.0)
    assert not list(tmp_path.rglob("*.json*"))


def test_ctrl_c_waits_for_no_thread(tmp_path, monkeypatch, capsys):
    done = threading.Event()
    training = threading.Event()

    def compile_group(group, data):
        if group.mixer.label == "another":  # the group after the one that trains
            done.wait(30)
        return CompiledGroup(group, 1, None, None, {}, 0.0)

    def train_group(*_):
        training.set()
        done.wait(30)

    def interrupt():
        training.wait(30)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    monkeypatch.setattr("experiments.sweep.runner.compile_group", compile_group)
    monkeypatch.setattr("experiments.sweep.runner.train_group", train_group)
    monkeypatch.setattr("experiments.harness.command.os._exit", sys.exit)
    study = dataclasses.replace(STUDY, mixers=(MIXER, dataclasses.replace(MIXER, label="another")))
    threading.Thread(target=interrupt).start()
    begin = time.monotonic()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(SystemExit) as end, errors_as_lines():
            run(study, tmp_path / "toy" / "results" / "real.jsonl")
    finally:
        signal.signal(signal.SIGINT, before)
        done.set()
    assert end.value.code == 130 and time.monotonic() - begin < 15
    assert capsys.readouterr().err == "interrupted: what is done is kept, the same command goes on\n"


def test_another_studys_equal_runs_are_adopted(finished):
    path = finished.parents[2] / "other" / "results" / "real.jsonl"
    other = dataclasses.replace(
        STUDY,
        name="other",
        mixers=(dataclasses.replace(MIXER, label="another name"),),
        cells=(dataclasses.replace(CELL, name="another cell"),),
    )
    assert run(other, path, seconds=-1.0), "nothing was left to train"
    original, adopted = read_runs(finished, MIXER, CELL), read_runs(path, other.mixers[0], other.cells[0])
    assert adopted.keys() == original.keys()
    assert all(
        adopted[lane]["test"] == row["test"] and adopted[lane]["study"] == "other" for lane, row in original.items()
    )


def test_many_lanes_are_split_evenly():
    cell = dataclasses.replace(CELL, max_lanes=3)
    groups = missing_groups(dataclasses.replace(STUDY, cells=(cell,)), pathlib.Path("does-not-exist"))
    assert [len(group.lanes) for group in groups] == [2, 2]
    assert {lane for group in groups for lane in group.lanes} == set(STUDY.lanes(cell))


def _record(rate, seed, validation, test, loss=1.0):
    def entry(accuracy):
        return {"loss": loss, "token_accuracy": accuracy, "query_accuracy": accuracy}

    return {
        "learning_rate": rate,
        "seed": seed,
        "train_loss": [1.0],
        "validation": entry(validation),
        "test": {"8": entry(test), "12": entry(test / 2)},
        "environment": ENVIRONMENT,
    }


def test_the_learning_rate_is_chosen_on_validation_only(tmp_path):
    path = tmp_path / "results" / "real.jsonl"
    runs = [
        _record(1e-3, 0, validation=0.9, test=0.2),
        _record(1e-3, 1, validation=0.7, test=0.4),
        _record(1e-1, 0, validation=0.1, test=1.0),
        _record(1e-1, 1, validation=1.0, test=1.0),
    ]
    write_runs(path, STUDY, MIXER, CELL, runs[:3], num_parameters=1)
    assert choose(STUDY, path, MIXER, CELL) is None, "a seed is missing"
    write_runs(path, STUDY, MIXER, CELL, runs[3:], num_parameters=1)
    outcome = choose(STUDY, path, MIXER, CELL)
    assert outcome.learning_rate == 1e-3
    assert outcome.at_edge
    # Seed 0 stands at the rate that seed 1 chooses, and the other way around.
    assert outcome.values("token_accuracy", "8") == pytest.approx([100.0, 40.0])
    assert outcome.solved == (1, 2) and outcome.tried == (2, 4)
    assert "| linear | 40 · 100 | 20 · 50 | 1/2; 2/4 |" in table(STUDY, path)


def test_seeds_that_report_choose_nothing_and_come_after_those_that_choose(tmp_path):
    path = tmp_path / "real.jsonl"
    study = dataclasses.replace(STUDY, report_seeds=(2, 3))
    assert {lane.seed for group in missing_groups(study, path) for lane in group.lanes} == {0, 1}
    chosen_by = [_record(rate, seed, validation=rate, test=0.0) for rate in (1e-3, 1e-1) for seed in (0, 1)]
    write_runs(path, study, MIXER, CELL, chosen_by, num_parameters=1)
    (group,) = missing_groups(study, path)
    assert group.lanes == (Lane(1e-1, 2), Lane(1e-1, 3)) and choose(study, path, MIXER, CELL) is None
    reported = [_record(1e-1, 2, validation=0.0, test=0.91), _record(1e-1, 3, validation=1.0, test=0.95)]
    write_runs(path, study, MIXER, CELL, reported, num_parameters=1)
    outcome = choose(study, path, MIXER, CELL)
    assert outcome.values("token_accuracy", "8") == pytest.approx([91.0, 95.0]) and outcome.solved == (2, 2)
    assert "| linear | 93.0 ± 2.8 | 46.5 ± 1.4 | 2/2; 0/4 |" in table(study, path)
    with pytest.raises(ValueError, match="none of them may be in report_seeds"):
        dataclasses.replace(STUDY, report_seeds=(1, 2))


def test_one_seed_has_no_spread(tmp_path):
    study = dataclasses.replace(STUDY, learning_rates=(1e-3,), seeds=(0,))
    write_runs(
        tmp_path / "real.jsonl", study, MIXER, CELL, [_record(1e-3, 0, validation=0.9, test=0.2)], num_parameters=1
    )
    text = table(study, tmp_path / "real.jsonl")
    assert "| linear | 20.0 | 10.0 | 0/1; 1/1 |" in text and "percent: one seed; a seed's learning rate" in text
    assert "±" not in text


def test_a_diverged_run_counts_against_its_learning_rate(tmp_path):
    runs = [
        _record(1e-3, 0, validation=0.5, test=0.5, loss=3.0),
        _record(1e-3, 1, validation=0.5, test=0.5, loss=3.0),
        _record(1e-1, 0, validation=1.0, test=1.0, loss=0.1),
        _record(1e-1, 1, validation=0.0, test=0.0, loss=None),
    ]
    write_runs(tmp_path / "real.jsonl", STUDY, MIXER, CELL, runs, num_parameters=1)
    assert choose(STUDY, tmp_path / "real.jsonl", MIXER, CELL).learning_rate == 1e-3
    runs[3] = _record(1e-1, 1, validation=1.0, test=1.0, loss=None)  # however right its answers
    write_runs(tmp_path / "real.jsonl", STUDY, MIXER, CELL, runs, num_parameters=1)
    assert choose(STUDY, tmp_path / "real.jsonl", MIXER, CELL).learning_rate == 1e-3
    runs[:2] = [_record(1e-3, seed, validation=0.5, test=0.5, loss=None) for seed in (0, 1)]
    write_runs(tmp_path / "real.jsonl", STUDY, MIXER, CELL, runs, num_parameters=1)
    assert choose(STUDY, tmp_path / "real.jsonl", MIXER, CELL).learning_rate == 1e-1, "all diverged"


@pytest.mark.parametrize("kind", ["lengths", "axes", "bars"])
def test_reports_are_rebuilt_from_results_alone(finished, tmp_path, kind):
    axes = (Axis("width", ((8, "recall"), (16, "not run"))),) if kind == "axes" else ()
    study = dataclasses.replace(STUDY, figure=kind, axes=axes, paper=(("a paper", "recall", 12, 73.84),))
    begin, end = marks("real")
    (tmp_path / "README.md").write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    text = write_report(study, tmp_path, finished, readme=True)
    page = (tmp_path / "README.md").read_text()
    assert page == f"before\n{begin}\n{text}{end}\nafter\n"
    assert "*73.84*" in page
    picture = (tmp_path / "figures" / "real.png").read_bytes()
    write_report(study, tmp_path, finished, readme=True)
    assert (tmp_path / "figures" / "real.png").read_bytes() == picture
    assert (tmp_path / "README.md").read_text() == page


def test_a_cell_may_be_tested_on_other_tasks_than_it_is_trained_on(tmp_path, monkeypatch):
    easy = MQAR(sequence_length=16, num_pairs=2, vocabulary_size=32)
    hard = dataclasses.replace(easy, num_pairs=3)
    mixed = dataclasses.replace(
        CELL,
        name="mixed",
        task=Mixture(sequence_length=16, tasks=(easy, hard)),
        lengths=(16, 24),
        tests=(("easy", easy), ("hard", hard)),
    )
    assert fingerprint(MIXER, mixed) != fingerprint(MIXER, dataclasses.replace(mixed, tests=()))
    study = dataclasses.replace(STUDY, cells=(mixed,), paper=(("theirs", "hard", 24, 12.5),))
    path = tmp_path / "toy" / "results" / "real.jsonl"
    assert run(study, path)
    row = read_table(path)[0]
    assert row["cell"]["tests"]["hard"]["num_pairs"] == 3
    tested = row["test"]
    assert list(tested) == ["easy 16", "easy 24", "hard 16", "hard 24"]
    data = DataFactory().get(mixed)
    np.testing.assert_array_equal(
        data.test["hard 24"]["inputs"].reshape(-1, 24)[0], hard.at_length(24).example(0, split="test")["inputs"]
    )
    text = write_report(study, tmp_path / "toy", path, readme=False)
    head, _, row, paper = text.splitlines()[:4]
    columns = ["mixed, easy, T=16", "mixed, easy, T=24", "mixed, hard, T=16", "mixed, hard, T=24"]
    assert head == f"| mixer | {' | '.join(columns)} | solved; at all rates |"
    assert re.fullmatch(r"\| linear \|( [\d.± ·]+ \|){4} \d/2; \d/4 \|", row)
    assert paper == "| *theirs* |  |  |  | *12.5* |  |"
    assert (tmp_path / "toy" / "figures" / "real.png").exists()
    monkeypatch.setattr("experiments.sweep.report.MOST_COLUMNS", 4)  # a table of its own for each test
    parts = table(study, path).split("\n\n")
    assert parts[0].splitlines()[0] == "| mixer | mixed, easy, T=16 | mixed, easy, T=24 |"
    assert parts[1].splitlines()[0] == "| mixer | mixed, hard, T=16 | mixed, hard, T=24 | solved; at all rates |"
    assert parts[1].splitlines()[3] == "| *theirs* |  | *12.5* |  |"


def test_records_say_where_they_were_made(finished):
    for row in read_table(finished):
        assert (row["study"], row["setting"]) == ("toy", "real")
        assert row["cell"]["task"]["kind"] == "MQAR"
        assert row["mixer"] == {
            "label": "linear",
            "preset": ["linear_attention"],
            "overrides": {"implementation": "scan"},
        }
        assert row["environment"] == ENVIRONMENT


def test_fingerprints_follow_what_matters():
    same = dataclasses.replace(CELL, name="other", max_lanes=1)
    assert fingerprint(MIXER, same) == fingerprint(MIXER, CELL)
    changes = (
        {"steps": 8},
        {"width": 16},
        {"data_seed": 1},
        {"task": CELL.task.at_length(12)},
        {"weight_decay": 0.0},
        {"answer_weight": 2.0},
    )
    prints = {fingerprint(MIXER, dataclasses.replace(CELL, **change)) for change in changes}
    prints |= {fingerprint(MIXER, CELL), fingerprint(Mixer.of("linear", "linear_attention"), CELL)}
    assert len(prints) == len(changes) + 2


def test_errors_name_what_does_not_fit():
    with pytest.raises(ValueError, match=r"'recall': chunks \(2\) must divide steps \(5\)"):
        dataclasses.replace(CELL, steps=5)
    with pytest.raises(ValueError, match="batch_size is 11, more than 10 train_examples"):
        dataclasses.replace(CELL, batch_size=11)
    with pytest.raises(ValueError, match="mixers must have different names"):
        dataclasses.replace(STUDY, mixers=(MIXER, MIXER))
    with pytest.raises(ValueError, match="must not be empty"):
        dataclasses.replace(STUDY, seeds=())


def test_the_auto_encoder_reads_the_last_position_alone(monkeypatch):
    cell = dataclasses.replace(CELL, task=Compression(sequence_length=3, vocabulary_size=5), lengths=())
    model = AutoEncoder(cell.model_config(MIXER), rngs=nnx.Rngs(0))
    tokens = jax.numpy.array([[0, 1, 4], [2, 3, 4]])
    hidden = model.hidden(tokens)
    assert hidden.shape == (2, 3, cell.width) and model.logits(hidden).shape == (2, 3, 5)
    assert np.ptp(np.asarray(hidden), axis=1).min() > 0, "positions are told apart"
    encode = DecoderLM.hidden
    monkeypatch.setattr(DecoderLM, "hidden", lambda self, tokens: encode(self, tokens).at[:, :-1].set(7.0))
    np.testing.assert_array_equal(model.hidden(tokens), hidden)
    monkeypatch.setattr(DecoderLM, "hidden", lambda self, tokens: encode(self, tokens).at[:, -1].set(7.0))
    assert np.ptp(np.asarray(model.hidden(tokens)), axis=0).max() == 0, "nothing else tells examples apart"


def test_options_that_came_later_leave_the_results_valid():
    """Every result file of the studies has the fingerprint of what the study configures today."""
    found = 0
    for name, setting in itertools.product(STUDIES, SETTINGS):
        study = load_study(name, SweepOptions(setting=setting))
        _, path = places(name, SweepOptions(setting=setting))
        known = {fingerprint(mixer, cell) for mixer, cell in itertools.product(study.mixers, study.cells)}
        assert {row["fingerprint"] for row in read_table(path)} <= known, path
        found += len(read_table(path))
    assert found > 2500
    # An option that is set counts, whether it came later or not.
    prints = {
        fingerprint(Mixer.of("one", "kla", decay=decay), CELL)
        for decay in (SoftplusDecay(), SoftplusDecay(step_limits=(0.1, 1.0)), SoftplusDecay(step_floor=1e-3))
    }
    assert len(prints) == 3
