"""Each task against its definition, checked by other means than its generator's."""

import collections
import itertools
import math
import re

import numpy as np
import pytest

from rnnlib.data import ByteTokenizer, train_tokenizer
from rnnlib.data.tasks import Automaton, make_task, task_arrays


def _examples(task, count, **options):
    return [task.example(i, **options) for i in range(count)]


# MQAR


@pytest.mark.parametrize("num_passes, random_non_queries", [(1, False), (2, False), (1, True)])
def test_mqar_definition(num_passes, random_non_queries):
    length, pairs, size = 64, 4, 256
    task = make_task(
        "mqar",
        sequence_length=length,
        num_pairs=pairs,
        vocabulary_size=size,
        num_passes=num_passes,
        random_non_queries=random_non_queries,
    )
    context = 2 * pairs * num_passes
    for example in _examples(task, 50):
        inputs, targets = example["inputs"], example["targets"]
        keys, values = inputs[0 : 2 * pairs : 2], inputs[1 : 2 * pairs : 2]
        assert len(set(keys)) == pairs and ((keys >= 1) & (keys < size // 2)).all()
        assert len(set(values)) == pairs and ((size // 2 <= values) & (values < size)).all()
        np.testing.assert_array_equal(inputs[:context], np.tile(inputs[: 2 * pairs], num_passes))
        value_of = dict(zip(keys.tolist(), values.tolist(), strict=True))
        asked = np.flatnonzero(example["loss_weights"])
        assert len(asked) == pairs and (asked >= context).all() and (asked % 2 == 0).all()
        assert sorted(inputs[asked]) == sorted(keys)
        assert [value_of[key] for key in inputs[asked].tolist()] == targets[asked].tolist()
        rest = np.delete(inputs[context:], asked - context)
        assert rest.any() == random_non_queries


def test_mqar_statistics():
    """Keys and values are uniform, and gaps follow the power law that the description gives."""
    task = make_task("mqar", sequence_length=24, num_pairs=2, vocabulary_size=32)
    count, space = 4000, (24 - 4) // 2
    arrays = task_arrays(task, count, seed=1)
    firsts = np.bincount(arrays["inputs"][:, 0], minlength=32)
    values = np.bincount(arrays["inputs"][:, 1], minlength=32)
    # Counts of n draws at probability p have the standard deviation sqrt(n p (1 - p)); 4.5 of them is beyond chance.
    assert (abs(firsts[1:16] - count / 15) < 4.5 * math.sqrt(count / 15)).all() and firsts[
        [0, *range(16, 32)]
    ].sum() == 0
    assert (abs(values[16:] - count / 16) < 4.5 * math.sqrt(count / 16)).all() and values[:16].sum() == 0
    power = np.arange(1, space + 1) ** (0.01 - 1.0)
    power /= power.sum()
    gaps = (np.argmax(arrays["query_ids"] == 1, axis=1) - 4) // 2
    second_gaps = (np.argmax(arrays["query_ids"] == 2, axis=1) - 4) // 2
    observed = np.bincount(gaps, minlength=space) / count
    assert (abs(observed - power) < 4.5 * np.sqrt(power * (1 - power) / count)).all()
    # The second is drawn from what the first left over.
    second = np.array([sum(power[j] * power[i] / (1 - power[j]) for j in range(space) if j != i) for i in range(space)])
    observed = np.bincount(second_gaps, minlength=space) / count
    assert (abs(observed - second) < 4.5 * np.sqrt(second * (1 - second) / count)).all()
    uniform = task_arrays(make_task("mqar", sequence_length=24, num_pairs=2, vocabulary_size=32, power_a=1.0), count)
    gaps = (np.argmax(uniform["query_ids"] == 1, axis=1) - 4) // 2
    assert (abs(np.bincount(gaps, minlength=space) / count - 1 / space) < 4.5 * math.sqrt(1 / space / count)).all()


# Palindrome and stack


@pytest.mark.parametrize("predict_first", [False, True])
def test_palindrome_definition(predict_first):
    task = make_task("palindrome", sequence_length=20, num_symbols=5, predict_first=predict_first)
    for example in _examples(task, 20):
        inputs = example["inputs"].tolist()
        symbols, separator, answer = inputs[:10], inputs[10], inputs[11:]
        assert separator == 0 and 0 not in symbols + answer and max(symbols) <= 5
        assert answer == symbols[::-1][:-1]
        expected = symbols[::-1] if predict_first else symbols[::-1][1:]
        assert example["targets"][example["loss_weights"] > 0].tolist() == expected
        assert np.flatnonzero(example["loss_weights"]).tolist() == list(range(20 - len(expected), 20))


def test_stack_definition():
    task = make_task("stack", sequence_length=302, num_stacks=3, num_elements=5, push_probability=0.6)
    pushes = total = 0
    for example in _examples(task, 20):
        stacks = collections.defaultdict(list)
        inputs, asked = example["inputs"].tolist(), example["loss_weights"]
        assert inputs[300:] == [0, 0] and example["segment_ids"].sum() == 300
        for start in range(0, 300, 3):
            operation, stack, element = inputs[start : start + 3]
            assert 3 <= stack < 6 and 6 <= element < 11
            was_empty = not any(stacks.values())
            if operation == 1:
                stacks[stack].append(element)
                assert not asked[start : start + 3].any()
            else:
                assert operation == 2 and stacks[stack].pop() == element
                assert asked[start : start + 3].tolist() == [0, 1, 0] and example["targets"][start + 1] == element
            pushes, total = pushes + (operation == 1 and not was_empty), total + (not was_empty)
    assert abs(pushes / total - 0.6) < 4.5 * math.sqrt(0.24 / total)


# RegBench


def test_regbench_definition():
    task = make_task("regbench", sequence_length=1024)
    lengths, counts = [], []
    for index in range(15):
        example = task.example(index)
        # The generator's first draws are the automaton's, so it can be had again.
        automaton = task.automaton(np.random.default_rng([0, 0, index]), "train")
        assert 4 <= len(automaton.transitions) <= 12
        for state, edges in enumerate(automaton.transitions):
            assert 1 <= len(edges) <= 4 and state not in edges.values() and len(set(edges.values())) == len(edges)
        real = example["segment_ids"] > 0
        text = [*example["inputs"][real].tolist(), example["targets"][real][-1].item()]
        assert (example["inputs"][~real] == 19).all()
        strings = [list(part) for is_end, part in itertools.groupby(text, lambda token: token == 18) if not is_end]
        counts.append(len(strings))
        lengths += map(len, strings)
        for string in strings:
            state = 0
            for symbol in string:
                state = automaton.transitions[state][symbol]
        assert not example["loss_weights"][example["targets"] == 18].any()
        asked = np.flatnonzero(example["loss_weights"])
        assert len(asked) == len(text) - len(strings) - len(strings[0]) + len(strings[0])
        # A symbol is allowed when the automaton has an edge for it after the string so far.
        for t in asked:
            prefix = text[: t + 1]
            begin = len(prefix) - prefix[::-1].index(18) if 18 in prefix else 0
            state = 0
            for symbol in prefix[begin:]:
                state = automaton.transitions[state][symbol]
            assert set(np.flatnonzero(example["allowed_targets"][t])) == set(automaton.transitions[state])
            assert example["allowed_targets"][t, example["targets"][t]]
    assert min(counts) >= 10 and max(counts) <= 20 and min(lengths) >= 1 and max(lengths) <= 50


def test_regbench_languages_are_held_out():
    # With few possible languages the same ones come often, yet never in two splits.
    task = make_task(
        "regbench", num_symbols=2, min_alphabet=2, max_edges=2, min_states=2, max_states=3, held_out_fraction=0.5
    )
    languages = {}
    for split in ("train", "validation", "test"):
        drawn = [task.automaton(np.random.default_rng(i), split).canonical() for i in range(60)]
        languages[split] = set(drawn)
        assert 1 <= len(languages[split]) < 30
    assert languages["train"].isdisjoint(languages["validation"] | languages["test"])
    assert languages["validation"].isdisjoint(languages["test"])


def test_canonical_automata_are_equal_for_equal_languages():
    two = Automaton(({0: 1}, {0: 0, 1: 1}))
    # The same language: an unreachable state, a doubled state, other numbers.
    same = Automaton(({0: 3}, {1: 0}, {0: 0, 1: 3}, {0: 0, 1: 2}))
    assert two.canonical() == same.canonical() == (((0, 1),), ((0, 0), (1, 1)))
    assert Automaton(({0: 1}, {0: 0})).canonical() == (((0, 0),),)
    assert two.canonical() != Automaton(({0: 1}, {0: 1, 1: 0})).canonical()
    counts = collections.Counter(tuple(two.sample(np.random.default_rng(i), 3)) for i in range(2000))
    assert set(counts) == {(0, 0, 0), (0, 1, 0), (0, 1, 1)}
    assert abs(counts[0, 0, 0] - 1000) < 4.5 * math.sqrt(500) and abs(counts[0, 1, 0] - 500) < 4.5 * math.sqrt(375)


# MAD


@pytest.mark.parametrize("name, noise", [("mad_in_context_recall", 0), ("mad_noisy_recall", 16)])
@pytest.mark.parametrize("split", ["train", "test"])
def test_recall_definition(name, noise, split):
    noisy_slots = slots = 0
    for example in _examples(make_task(name), 40, split=split):
        pairs = example["inputs"].reshape(-1, 2).tolist()
        assert pairs[-1][0] < 8
        values, queries = {}, []
        for i, (key, value) in enumerate(pairs):
            if key >= 16:
                assert value >= 16 and noise
                noisy_slots += 1
                continue
            assert key < 8 <= value < 16 and values.get(key, value) == value
            if key in values:
                queries.append(2 * i)
            values[key] = value
        slots += len(pairs)
        assert np.flatnonzero(example["query_ids"]).tolist() == queries and queries[-1] == 126
        np.testing.assert_array_equal(example["targets"][queries], example["inputs"][np.array(queries) + 1])
        if split == "train":
            assert example["loss_weights"].tolist() == [1.0] * 127 + [0.0]
            np.testing.assert_array_equal(example["targets"][:-1], example["inputs"][1:])
    assert abs(noisy_slots / slots - (0.2 if noise else 0)) < 0.03


@pytest.mark.parametrize("split", ["train", "validation"])
def test_fuzzy_recall_definition(split):
    task = make_task("mad_fuzzy_recall")
    key_lengths, value_lengths, repeated = collections.Counter(), collections.Counter(), 0
    for example in _examples(task, 60, split=split):
        text = [*example["inputs"].tolist(), example["targets"][-1].item()]
        answered = [0, *example["query_ids"].tolist()]
        start = next(i for i, token in enumerate(text) if token != 15)
        assert 15 not in text[start:]
        # Keys (0 to 6) and values (7 to 14) alternate as runs.
        runs = [list(run) for _, run in itertools.groupby(range(start, len(text)), lambda i: text[i] < 7)]
        assert len(runs) % 2 == 0
        values = {}
        for key_run, value_run in zip(runs[::2], runs[1::2], strict=True):
            key, value = tuple(text[i] for i in key_run), tuple(text[i] for i in value_run)
            assert len(set(key)) == len(key) <= 3 and len(set(value)) == len(value) <= 3
            assert values.get(key, value) == value
            ids = {answered[i] for i in value_run}
            assert len(ids) == 1 and (ids != {0}) == (key in values) and not any(answered[i] for i in key_run)
            repeated += key in values
            values[key] = value
            key_lengths[len(key)] += 1
            value_lengths[len(value)] += 1
        assert answered[-1] > 0  # the last pair was shown before
        if split == "train":
            np.testing.assert_array_equal(example["loss_weights"], np.arange(128) >= start - 1)
    assert repeated > 60
    assert set(key_lengths) == ({1, 2, 3} if split == "train" else {3}) and set(value_lengths) == {1, 2, 3}
    for lengths in [key_lengths, value_lengths] if split == "train" else [value_lengths]:
        total = lengths.total()
        assert all(abs(count / total - 1 / 3) < 4.5 * math.sqrt(2 / 9 / total) for count in lengths.values())


def test_memorization_definition():
    values = {}
    for split in ("train", "test"):
        for example in _examples(make_task("mad_memorization"), 200, split=split, seed=len(split)):
            keys, blanks = example["inputs"][0::2], example["inputs"][1::2]
            assert (keys < 127).all() and (blanks == 255).all()
            assert np.flatnonzero(example["loss_weights"]).tolist() == list(range(1, 32, 2))
            for key, value in zip(keys.tolist(), example["targets"][1::2].tolist(), strict=True):
                assert values.setdefault(key, value) == value and 127 <= value < 255
    assert len(values) == 127 and len(set(values.values())) == 127
    noisy = make_task("mad_memorization", vocabulary_size=64, noise_fraction=0.5, noise_vocabulary_size=8)
    example = task_arrays(noisy, 200)
    noise = (example["inputs"] >= 55) & (example["inputs"] < 63)
    assert abs(noise.mean() - 0.5 * 15 / 16) < 0.03 and not example["loss_weights"][noise].any()
    assert (example["loss_weights"].sum(1) >= 1).all()


def test_compression_definition():
    example = task_arrays(make_task("mad_compression"), 100)
    assert (example["inputs"][:, -1] == 15).all() and (example["inputs"][:, :-1] < 15).all()
    np.testing.assert_array_equal(example["targets"][:, :-1], example["inputs"][:, :-1])
    assert (example["loss_weights"] == ([1] * 31 + [0])).all()
    noisy = task_arrays(make_task("mad_compression", noise_fraction=0.3, noise_vocabulary_size=5), 200)
    noise = (noisy["inputs"][:, :-1] >= 10) & (noisy["inputs"][:, :-1] < 15)
    np.testing.assert_array_equal(noisy["loss_weights"][:, :-1], ~noise)
    assert abs(noise.mean() - 0.3) < 0.03


def test_selective_copying_definition():
    task = make_task("mad_selective_copying", sequence_length=40, num_copied=5)
    before_first = []
    for example in _examples(task, 300):
        text = example["inputs"][:34]
        assert example["inputs"][34] == 15 and (example["inputs"][35:] == 14).all()
        tokens = text[text != 14]
        assert len(tokens) == 5 and (tokens < 14).all() and text[-1] != 14
        np.testing.assert_array_equal(example["targets"][35:], tokens)
        assert np.flatnonzero(example["loss_weights"]).tolist() == list(range(35, 40))
        before_first.append(np.argmax(text != 14))
    # Each of the 29 blanks falls before one of the 5 tokens.
    assert abs(np.mean(before_first) - 29 / 5) < 4.5 * math.sqrt(29 * 4 / 25 / 300)


# State tracking


def test_parity_definition():
    for example in _examples(make_task("parity", supervise="all"), 10):
        expected = [sum(example["inputs"][: t + 1].tolist()) % 2 for t in range(40)]
        assert example["targets"].tolist() == expected and example["loss_weights"].all()
    last = make_task("parity", sequence_length=9).example(0)
    assert last["loss_weights"].tolist() == [0] * 8 + [1] and last["targets"][-1] == last["inputs"].sum() % 2


def _expression(tokens, modulus):
    return "".join(str(token) if token < modulus else "+-*()="[token - modulus] for token in tokens)


def test_modular_arithmetic_definition():
    task = make_task("modular_arithmetic", sequence_length=13, supervise="all")
    for example in _examples(task, 50):
        text = _expression(example["inputs"][:12].tolist(), 5)
        assert re.fullmatch(r"\d([-+*]\d){5}=", text) and example["segment_ids"].tolist() == [1] * 12 + [0]
        asked = np.flatnonzero(example["loss_weights"]).tolist()
        assert asked == [0, 2, 4, 6, 8, 10, 11]
        for t in asked:
            assert example["targets"][t] == eval(text[: t + 1].rstrip("=")) % 5
    lengths = (2, 3, 4, 5, 6, 7, 8, 20, 41)
    for length, modulus in itertools.product(lengths, (3, 5)):
        nested = make_task("modular_arithmetic", sequence_length=length, brackets=True, modulus=modulus)
        for example in _examples(nested, 10):
            text = _expression(example["inputs"].tolist(), modulus)
            assert text.endswith("=") and "=" not in text[:-1]
            assert example["targets"][-1] == eval(text[:-1]) % modulus
            assert example["loss_weights"].tolist() == [0] * (length - 1) + [1]
    assert 0 in make_task("modular_arithmetic", brackets=True).at_length(3000).example(0)["loss_weights"]


@pytest.mark.parametrize("generators", ["all", "swaps"])
def test_permutations_definition(generators):
    task = make_task("permutations", num_items=4, generators=generators, sequence_length=20)
    permutations = task.permutations()
    assert len(set(permutations)) == 24 and permutations[0] == (0, 1, 2, 3)
    seen = set()
    for example in _examples(task, 20):
        state = [0, 1, 2, 3]  # where each thing is
        for number, target in zip(example["inputs"].tolist(), example["targets"].tolist(), strict=True):
            state = [permutations[number][place] for place in state]
            assert permutations[target] == tuple(state)
            seen.add(number)
    # The identity and the six exchanges of two of four things.
    assert len(seen) == (24 if generators == "all" else 7)


# Needles


@pytest.fixture(scope="module")
def byte_pair_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    from pydoc_data.topics import topics

    train_tokenizer([topics[name] for name in sorted(topics)[:5]], vocabulary_size=400, path=path)
    return str(path)


VALUES = {"number": r"\d{7}", "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"}


@pytest.mark.parametrize("encoding", ["byte", "file"])
@pytest.mark.parametrize(
    "name, needles, kind",
    [
        ("s_niah_1", 1, "number"),
        ("s_niah_2", 1, "number"),
        ("s_niah_3", 1, "uuid"),
        ("mk_niah_1", 4, "number"),
        ("mk_niah_2", None, "number"),
        ("mk_niah_3", None, "uuid"),
    ],
)
def test_needle_definition(byte_pair_file, encoding, name, needles, kind):
    from rnnlib.data import load_tokenizer

    tokenizer = load_tokenizer("byte" if encoding == "byte" else byte_pair_file)
    task = make_task(name, sequence_length=1500, tokenizer="byte" if encoding == "byte" else byte_pair_file)
    assert task.vocabulary_size == tokenizer.vocabulary_size
    for example in _examples(task, 3):
        real = example["segment_ids"] > 0
        targets = example["targets"]
        asked = np.flatnonzero(example["query_ids"])
        answer = tokenizer.decode(targets[asked])
        assert set(example["query_ids"]) == {0, 1} and asked.tolist() == list(range(asked[0], real.sum()))
        np.testing.assert_array_equal(targets[asked][:-1], example["inputs"][asked[1:]])
        prompt = tokenizer.decode(example["inputs"][: asked[0] + 1])
        found = re.fullmatch(
            rf"A special magic {kind} is hidden within the following text\. Make sure to memorize it\. I will quiz you "
            rf"about the {kind} afterwards\.\n(.*)\nWhat is the special magic {kind} for (\S+) mentioned in the "
            rf"provided text\? The special magic {kind} for (\S+) mentioned in the provided text is",
            prompt,
            flags=re.DOTALL,
        )
        assert found and found[2] == found[3]
        pairs = re.findall(rf"One of the special magic {kind}s for (\S+) is: ({VALUES[kind]})\.", found[1])
        assert len(dict(pairs)) == len(pairs) and answer == " " + dict(pairs)[found[2]]
        assert len(pairs) == needles or (needles is None and len(pairs) > 5)
        if name == "mk_niah_3":
            assert all(re.fullmatch(VALUES["uuid"], key) for key, _ in pairs)
        else:
            assert all(re.fullmatch(r"[a-z]+-[a-z]+", key) for key, _ in pairs)
        # The haystack fills the room to the last word (some are rulers of 80 signs), or to the last line.
        assert (~real).sum() < (90 if task.haystack == "essay" else 140)
        if name == "s_niah_1":
            lines = found[1].split("\n")
            assert sum(line.startswith("One of") for line in lines) == 1
            noise = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
            assert {line for line in lines if not line.startswith("One of")} == {noise}


def test_needle_depth(tmp_path):
    (tmp_path / "essay.txt").write_text("One. Two. Three. Four. Five. Six. Seven. Eight. Nine. Ten. " * 3)
    options = {"sequence_length": 700, "essay_paths": (str(tmp_path / "*.txt"),), "random_start": False}
    places = []
    for depth in (0.0, 0.5, 1.0):
        example = make_task("s_niah_2", depth=depth, **options).example(0)
        text = ByteTokenizer().decode(example["inputs"][example["segment_ids"] > 0])
        begin, end = text.index("afterwards.\n") + 12, text.index("\nWhat is")
        assert text[begin:end].lstrip().startswith("One. Two." if depth else "One of the special")
        places.append((text.index("One of the special") - begin) / (end - begin))
    assert places[0] < 0.01 and 0.35 < places[1] < 0.55 and places[2] > 0.7
    hay = re.sub(r"One of the special [^.]*\. ?", "", text[begin:end]).split()
    numbers = ["One.", "Two.", "Three.", "Four.", "Five.", "Six.", "Seven.", "Eight.", "Nine.", "Ten."]
    assert hay == list(itertools.islice(itertools.cycle(numbers), len(hay)))  # the essay begins again past its end


# RULER's tasks that trace and count


def _text_and_answers(tokenizer, example):
    """The text up to the first answer, and the answers; that they follow one after another is checked."""
    queries, targets = example["query_ids"], example["targets"]
    asked = np.flatnonzero(queries)
    assert asked[-1] + 1 == np.count_nonzero(example["segment_ids"]) and (np.diff(asked) == 1).all()
    assert (np.diff(queries[asked]) >= 0).all()
    np.testing.assert_array_equal(targets[asked][:-1], example["inputs"][asked[1:]])
    answers = [tokenizer.decode(targets[queries == i]) for i in range(1, queries.max() + 1)]
    assert all(answer[0] == " " for answer in answers)
    return tokenizer.decode(example["inputs"][: asked[0] + 1]), [answer[1:] for answer in answers]


@pytest.mark.parametrize("chains, hops", [(1, 4), (3, 2)])
def test_variable_tracking_definition(chains, hops):
    task = make_task("variable_tracking", num_chains=chains, num_hops=hops, sequence_length=1500)
    depths = []
    for example in _examples(task, 20):
        text, answers = _text_and_answers(ByteTokenizer(), example)
        value_of, lines = {}, text.split("\n")[2:-1]
        for line in lines:
            if found := re.fullmatch(r"VAR ([A-Z]{5}) = (?:VAR ([A-Z]{5})|(\d{5}))", line):
                assert found[1] not in value_of
                value_of[found[1]] = found[3] or value_of[found[2]]  # what a variable is assigned stands before it
            else:
                assert line.startswith("The grass is green.")
        assert len(value_of) == chains * (hops + 1) and len(set(value_of.values())) == chains
        question = re.search(r"Find all variables that are assigned the value (\d{5}) in", text)
        assert question and answers == [name for name, value in value_of.items() if value == question[1]]
        depths.append(next(i for i, line in enumerate(lines) if answers[-1] in line) / len(lines))
        assert np.sum(example["segment_ids"] == 0) < 91  # not one more line of noise fits
    assert min(depths) < 0.75 and max(depths) > 0.9
    with pytest.raises(ValueError, match="sequence_length=300 is too short: chains, question and answers alone are"):
        make_task("variable_tracking", sequence_length=300).example(0)


@pytest.mark.parametrize("encoding", ["byte", "file"])
def test_common_words_definition(byte_pair_file, encoding):
    from rnnlib.data import load_tokenizer

    name = "byte" if encoding == "byte" else byte_pair_file
    task = make_task(
        "common_words", num_common=4, common_repeats=7, uncommon_repeats=2, sequence_length=900, tokenizer=name
    )
    for example in _examples(task, 10):
        text, answers = _text_and_answers(load_tokenizer(name), example)
        entries = re.findall(r"(\d+)\. ([a-z]+)", text[: text.index("\nQuestion")])
        assert [int(number) for number, _ in entries] == list(range(1, len(entries) + 1))
        counts = collections.Counter(word for _, word in entries)  # in the order in which words first stand
        assert set(counts.values()) == {7, 2} and answers == [word for word, count in counts.items() if count == 7]
        assert len(answers) == 4 and np.sum(example["segment_ids"] == 0) < 40
    with pytest.raises(
        ValueError, match=r"sequence_length=400 is too short: num_common=4 words, common_repeats=7 times"
    ):
        task.at_length(400).example(0)
    with pytest.raises(ValueError, match=r"sequence_length=90000 is too long: .* than the 452 words"):
        task.at_length(90_000).example(0)
    with pytest.raises(ValueError, match="uncommon_repeats=3 must be less than common_repeats=3"):
        make_task("common_words", common_repeats=3)


def test_frequent_words_definition():
    task = make_task("frequent_words", num_answers=4, num_words=30, alpha=1.5, sequence_length=3000)
    law = np.arange(1, 31) ** -1.5 / np.sum(np.arange(1, 31) ** -1.5)
    for example in _examples(task, 10):
        text, answers = _text_and_answers(ByteTokenizer(), example)
        words = text[text.index("coded words.") + 12 : text.index("\nQuestion")].split()
        counts = collections.Counter(words).most_common()
        assert [word for word, _ in counts[:5]] == ["...", *answers]
        assert all(re.fullmatch("[a-z]{6}", word) for word, _ in counts[1:])
        # The counts are the law's, of some number of words, and one word more would not have fitted.
        numbers = [count for _, count in counts]
        totals = [n for n in range(1, 1000) if np.floor(n * law)[: len(numbers)].tolist() == numbers]
        assert totals and np.sum(example["segment_ids"] == 0) < 7 * 30
    with pytest.raises(ValueError, match=r"sequence_length=500 is too short: the 4 most frequent .* \[\d.*\] times"):
        task.at_length(500).example(0)
    with pytest.raises(ValueError, match="num_words=4 must be at least num_answers"):
        make_task("frequent_words", num_words=4)
    with pytest.raises(ValueError, match="num_words=700 is more than the 676 words of word_length=2"):
        make_task("frequent_words", num_words=700, word_length=2)
