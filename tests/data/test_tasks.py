"""What all tasks share: pure functions of the index, shapes, splits, batches."""

import dataclasses
import itertools
import json
import pickle

import numpy as np
import pytest

from rnnlib.data.tasks import TASK_SPLITS, Mixture, make_task, needle, regbench, task_arrays, task_dataset, task_names

# Small settings of tasks whose defaults are large.
SMALL = {"regbench": {"sequence_length": 128, "max_strings": 12, "max_string_length": 10}}
SMALL |= {name: {"sequence_length": 640} for name in task_names() if "niah" in name}


def _equal(a, b):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name])
        assert a[name].dtype == b[name].dtype


@pytest.mark.parametrize("name", task_names())
def test_examples(name):
    task = make_task(name, **SMALL.get(name, {}))
    length, size = task.sequence_length, task.vocabulary_size
    for split in TASK_SPLITS:
        for index in (0, 1, 7, 2**40):
            example = task.example(index, seed=3, split=split)
            shapes = {field: values.shape for field, values in example.items() if field != "allowed_targets"}
            assert shapes == dict.fromkeys(
                ("inputs", "targets", "loss_weights", "query_ids", "segment_ids", "positions"), (length,)
            )
            dtypes = {field: values.dtype.name for field, values in example.items()}
            assert {dtypes[field] for field in shapes if field != "loss_weights"} == {"int32"}
            assert dtypes["loss_weights"] == "float32"
            assert example["inputs"].min() >= 0 and example["inputs"].max() < size
            assert example["targets"].min() >= 0 and example["targets"].max() < size
            queries = example["query_ids"]
            assert queries.max() >= 1 and set(queries) - {0} == set(range(1, queries.max() + 1))
            assert (example["loss_weights"][queries > 0] == 1).all()
            assert set(np.unique(example["loss_weights"])) <= {0.0, 1.0}
            # Padding is at the end and asks nothing.
            real = example["segment_ids"] == 1
            assert (np.diff(example["segment_ids"]) <= 0).all() and set(example["segment_ids"]) <= {0, 1}
            assert not example["loss_weights"][~real].any() and not queries[~real].any()
            np.testing.assert_array_equal(example["positions"], np.arange(length))
            if split != "train":
                np.testing.assert_array_equal(example["loss_weights"], queries > 0)
            _equal(example, task.example(index, seed=3, split=split))
    first = task.example(0)["inputs"]
    others = [
        task.example(1),
        task.example(0, seed=1),
        task.example(0, split="validation"),
        task.example(0, split="test"),
    ]
    assert all(not np.array_equal(first, other["inputs"]) for other in others)
    assert pickle.loads(pickle.dumps(task)) == task
    assert "allowed_targets" in task.example(0) or name != "regbench"


@pytest.mark.parametrize("name", task_names())
def test_lengths_have_no_limit(name):
    task = make_task(name)
    for length in (2 * task.sequence_length, 4096):
        longer = task.at_length(length)
        assert longer.example(5)["inputs"].shape == (length,)
        assert dataclasses.replace(longer, sequence_length=task.sequence_length) == task


def test_a_mixture_draws_from_all_of_its_tasks():
    short, long = make_task("mk_niah_2"), make_task("s_niah_3")
    mixture = Mixture(sequence_length=640, tasks=(short, long))
    answers = [int((mixture.example(i)["query_ids"] > 0).sum()) for i in range(40)]
    assert set(answers) == {8, 37} and 8 < answers.count(8) < 32
    assert mixture.at_length(700).example(3, split="test")["inputs"].shape == (700,)
    assert mixture.at_length(700).at_length(640) == mixture
    assert mixture.vocabulary_size == short.vocabulary_size
    with pytest.raises(ValueError, match=r"same vocabulary_size; got \[.*\]"):
        Mixture(tasks=(short, make_task("parity")))
    with pytest.raises(ValueError, match="tasks must not be empty"):
        Mixture(tasks=())
    languages = make_task("regbench")
    recall = make_task("mad_in_context_recall", vocabulary_size=languages.vocabulary_size)
    message = r"same extra_arrays, .* got \[\('RegBench', \('allowed_targets',\)\), \('InContextRecall', \(\)\)\]"
    with pytest.raises(ValueError, match=message):
        Mixture(tasks=(languages, recall))
    assert "allowed_targets" in Mixture(sequence_length=64, tasks=(languages, languages)).example(0)


def test_short_essays_always_have_a_word():
    """Lines of tables, which the language reference has, are no words."""
    task = make_task("s_niah_3", sequence_length=520)
    for i in range(200):
        assert task.example(i)["inputs"].shape == (520,)


def test_an_essay_without_words_is_named(tmp_path):
    path = tmp_path / "long.txt"
    path.write_text("x" * 41)
    with pytest.raises(ValueError, match=r"essay_paths=\('.*long.txt',\) hold no word of at most 40 characters"):
        make_task("s_niah_2", essay_paths=(str(path),)).example(0)
    path.write_text("x" * 40)
    assert make_task("s_niah_2", essay_paths=(f"{tmp_path}/*",)).example(0)["query_ids"].any()


def test_a_haystack_has_no_more_needles_than_there_are_keys(monkeypatch):
    monkeypatch.setattr(needle, "ADJECTIVES", ("able", "agile"))
    monkeypatch.setitem(needle._COUNTS, "words", 2 * len(needle.NOUNS))
    assert make_task("mk_niah_2", sequence_length=30_000).example(0)["inputs"].shape == (30_000,)
    with pytest.raises(ValueError, match=r"sequence_length=40000 is too long: .* the 524 keys of key_kind='words'"):
        make_task("mk_niah_2", sequence_length=40_000).example(0)


@pytest.mark.parametrize(
    "knobs", [{"held_out_fraction": 1e-9}, {"num_symbols": 2, "min_alphabet": 1, "max_edges": 1, "max_states": 2}]
)
def test_splits_without_a_language_are_named(monkeypatch, knobs):
    monkeypatch.setattr(regbench, "_MOST_DRAWS", 200)
    task = make_task("regbench", min_states=2, **knobs)
    with pytest.raises(ValueError, match=r"none of 200 .* belongs to split 'test': .* got RegBench\(.*max_states="):
        task.example(0, split="test")


def test_unknown_names_and_knobs(unchecked_shapes):
    with pytest.raises(ValueError, match=r"task must be one of mqar, .*; got 'recall'"):
        make_task("recall")
    with pytest.raises(ValueError, match=r"task 'mqar' has no pairs; it has sequence_length, num_pairs"):
        make_task("mqar", pairs=3)
    with pytest.raises(ValueError, match=r"split must be one of train, validation, test; got 'dev'"):
        make_task("parity").example(0, split="dev")
    with pytest.raises(ValueError, match="index must be at least 0"):
        make_task("parity").example(-1)


@pytest.mark.parametrize(
    "name, knobs, message",
    [
        ("mqar", {"sequence_length": 15}, "sequence_length must be even and at least 16"),
        ("mqar", {"num_pairs": 17}, "at least 68 for num_pairs=17"),
        ("mqar", {"num_pairs": 0}, "MQAR: num_pairs is 0, expected an integer of at least 1"),
        ("mqar", {"vocabulary_size": 64}, "vocabulary_size must be even and larger"),
        ("mqar", {"power_a": float("inf")}, "power_a=inf gives fewer than num_pairs=4 gaps a probability above 0"),
        ("mqar", {"power_a": -600.0}, "power_a=-600.0 gives fewer than num_pairs=4"),
        ("palindrome", {"sequence_length": 5}, "sequence_length must be even"),
        ("stack", {"push_probability": 1.0}, "push_probability is 1.0, expected a number of at least 0 and below 1"),
        ("stack", {"num_stacks": 0}, "num_stacks is 0, expected an integer of at least 1"),
        ("regbench", {"min_states": 20}, "min_states=20 must not be above max_states=12"),
        ("regbench", {"held_out_fraction": 1.0}, "held_out_fraction is 1.0, expected a number above 0 and below 1"),
        (
            "regbench",
            {"min_strings": 1, "max_strings": 1, "max_string_length": 1},
            "max_strings and max_string_length must not both be 1",
        ),
        ("mad_in_context_recall", {"noise_fraction": 0.2}, "needs noise_vocabulary_size"),
        ("mad_noisy_recall", {"vocabulary_size": 16}, "vocabulary_size must leave"),
        ("mad_noisy_recall", {"noise_fraction": 1.5}, "noise_fraction is 1.5, expected a number from 0 to 1"),
        ("mad_fuzzy_recall", {"vocabulary_size": 6}, "too few keys or values"),
        ("mad_memorization", {"sequence_length": 3}, "sequence_length must be even"),
        ("mad_compression", {"noise_fraction": 0.2}, "needs noise_vocabulary_size"),
        (
            "mad_compression",
            {"noise_fraction": 1.0, "noise_vocabulary_size": 3},
            "noise_fraction is 1.0, expected a number of at least 0 and below 1",
        ),
        ("mad_selective_copying", {"sequence_length": 33}, "sequence_length must be at least 34"),
        ("parity", {"supervise": "first"}, "Parity: supervise is 'first', expected 'all' or 'last'"),
        ("modular_arithmetic", {"brackets": True, "supervise": "all"}, "needs brackets=False"),
        ("permutations", {"num_items": 7}, "num_items is 7, expected an integer from 2 to 6"),
        ("permutations", {"generators": "some"}, "generators is 'some', expected 'all' or 'swaps'"),
        ("s_niah_1", {"haystack": "web"}, "haystack is 'web', expected 'repeat', 'essay' or 'needles'"),
        ("s_niah_1", {"key_kind": "names"}, "key_kind is 'names', expected 'words', 'numbers' or 'uuids'"),
        ("s_niah_1", {"depth": 2.0}, "depth is 2.0, expected a number from 0 to 1 or None"),
        ("s_niah_1", {"essay_paths": ("x",)}, "goes with haystack='essay'"),
        ("s_niah_1", {"tokenizer": "nowhere"}, "there is no file 'nowhere'"),
        ("s_niah_1", {"num_keys": 49_781}, "num_keys=49781 is more than the 49780 keys of key_kind='words'"),
        ("s_niah_2", {"essay_paths": "one.txt"}, r"essay_paths must be a tuple .* such as \('one.txt',\)"),
        ("s_niah_2", {"essay_paths": 3}, "essay_paths is 3, expected"),
    ],
)
def test_knobs_that_do_not_fit(unchecked_shapes, name, knobs, message):
    with pytest.raises(ValueError, match=message):
        make_task(name, **knobs)


def _take(batches, count):
    return list(itertools.islice(batches, count))


def _dataset(task, **options):
    return task_dataset(task, process_index=0, process_count=1, **options)


def test_unlimited_training_batches_resume():
    task = make_task("mqar", sequence_length=16, num_pairs=2, vocabulary_size=64)
    batches = _take(_dataset(task, batch_size=4, seed=5), 6)
    arrays = task_arrays(task, 24, seed=5)
    for name, values in arrays.items():
        np.testing.assert_array_equal(np.concatenate([batch[name] for batch in batches]), values)
    start = iter(_dataset(task, batch_size=4, seed=5))
    _take(start, 3)
    again = iter(_dataset(task, batch_size=4, seed=5))
    again.set_state(json.loads(json.dumps(start.get_state())))
    for a, b in zip(_take(again, 3), batches[3:], strict=True):
        _equal(a, b)
    other = iter(_dataset(dataclasses.replace(task, num_pairs=3), batch_size=4, seed=5))
    with pytest.raises(ValueError, match="not that of the saved position"):
        other.set_state(start.get_state())


def test_finite_training_sets_are_shuffled_and_repeated():
    task = make_task("palindrome", sequence_length=8)
    expected = sorted(task_arrays(task, 10)["inputs"].tolist())
    rows = np.concatenate([batch["inputs"] for batch in _take(_dataset(task, batch_size=5, num_examples=10), 6)])
    epochs = [part.tolist() for part in np.split(rows, 3)]
    assert all(sorted(epoch) == expected for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_evaluation_sets_are_finite_and_ordered():
    task = make_task("palindrome", sequence_length=8)
    dataset = _dataset(task, batch_size=4, split="test", num_examples=10)
    batches = list(dataset)
    assert len(batches) == len(dataset) == 3
    rows = np.concatenate([batch["inputs"] for batch in batches])
    np.testing.assert_array_equal(rows[:10], task_arrays(task, 10, split="test")["inputs"])
    last = batches[-1]
    assert last["loss_weights"][:2].any() and not last["loss_weights"][2:].any() and not last["query_ids"][2:].any()


def test_batch_arguments(unchecked_shapes):
    task = make_task("parity")
    with pytest.raises(ValueError, match="split 'test' needs num_examples"):
        _dataset(task, batch_size=4, split="test")
    positive = "expected an integer of at least 1"
    for name, value, expected in (
        ("batch_size", 0, positive),
        ("batch_size", 2.5, positive),
        ("batch_size", "4", positive),
        ("num_examples", 2.5, f"{positive} or None"),
        ("num_workers", -1, "expected an integer of at least 0"),
        ("prefetch", 0, positive),
    ):
        with pytest.raises(ValueError, match=f"task_dataset: {name} is {value!r}, {expected}"):
            _dataset(task, **{"batch_size": 4, name: value})
    with pytest.raises(ValueError, match=r"split must be one of train, validation, test; got 'val'"):
        _dataset(task, batch_size=4, split="val")
    with pytest.raises(ValueError, match=f"task_arrays: num_examples is 0, {positive}"):
        task_arrays(task, 0)
    with pytest.raises(ValueError, match=r"sequence_length=300 is too short: needles, question and answer alone are"):
        _dataset(make_task("s_niah_1", sequence_length=300), batch_size=4)
