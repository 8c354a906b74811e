"""The same tokens after several contexts: which documents are held out, which rows are scored, what follows."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.harness.verdicts import Interval, Verdict, above, below, between_counts, between_seeds, combined, equal
from experiments.long_context.contexts import FOREIGN, Blocks, ContextTests, bits_per_byte
from experiments.long_context.report import change, rise_of_perplexity
from experiments.long_context.study import study
from experiments.long_context.text import LongText, split_documents
from rnnlib.data import TokenCorpus, load_tokenizer
from rnnlib.models import DecoderLM, ModelConfig


def numbered(count: int, first: int = 0) -> str:
    return "\n".join(f"this is the line of the number {i}" for i in range(first, first + count))


def test_documents_like_a_held_out_one_are_left_out_and_counted():
    config = LongText(min_bytes=3000, fraction=1.0, min_shared=5)
    held = numbered(100)
    copy, part, little, other = numbered(60), numbered(40) + numbered(40, 500), numbered(4), numbered(70, 900)
    train, held_out, counts = split_documents(config, [copy, held, part, little, other])
    assert held_out == [held] and train == [little, other]
    assert counts["left_out_documents"] == 2 and counts["held_out_lines"] == 100
    assert counts["held_out_lines_in_training_text"] == 4
    assert counts["train_bytes"] == len(little) + len(other)
    with pytest.raises(ValueError, match="no document of 3000 bytes or more is held out"):
        split_documents(config, [little])


def test_half_of_the_long_documents_are_held_out_by_their_text():
    config = LongText(min_bytes=10, fraction=0.5)
    texts = [f"a text with the number {i}" for i in range(400)]
    chosen = [config.is_held_out(text) for text in texts]
    assert 150 < sum(chosen) < 250 and chosen == [config.is_held_out(text) for text in texts]
    assert not LongText(min_bytes=100, fraction=1.0).is_held_out(texts[0])


def corpus_of(*lengths: int) -> TokenCorpus:
    rng = np.random.default_rng(0)
    return TokenCorpus.from_documents(
        ["".join(map(chr, rng.integers(97, 122, length))) for length in lengths], load_tokenizer("byte")
    )


def test_blocks_lie_deep_in_documents_and_are_the_same_for_every_context():
    corpus = corpus_of(40, 23, 100, 50)
    blocks = Blocks.of(corpus, size=8, context=32, count=8)
    # Tokens are one more than bytes, and a block's last token predicts one more.
    assert blocks.document == [0, 2, 3, 2, 3, 2, 2, 2]
    assert blocks.start == [32, 32, 32, 40, 40, 48, 56, 64]
    for i in range(len(blocks)):
        rows = [blocks.row(i, context) for context in (0, 8, 32)]
        assert [len(row) for row in rows] == [9, 17, 41]
        assert all((row[-9:] == rows[0]).all() for row in rows)
        foreign = blocks.foreign_row(i, 32, own=8)
        assert (foreign[-17:] == rows[1]).all() and (foreign[:24] != rows[2][:24]).any()
    with pytest.raises(ValueError, match="no held-out document has 201 tokens"):
        Blocks.of(corpus, size=8, context=192, count=8)


def test_nats_are_those_of_the_blocks_tokens_alone(tmp_path):
    tokenizer = load_tokenizer("byte")
    text = "".join(chr(97 + i * i % 23) for i in range(60))
    (tmp_path / "held_out.jsonl").write_text(f'{{"text": "{text}"}}\n{{"text": "{text[::-1]}"}}\n')
    config = ModelConfig(vocabulary_size=257, width=8, num_layers=1, num_heads=1, mixers=("linear_attention",))
    model = DecoderLM(config, rngs=nnx.Rngs(0))
    tests = ContextTests(tmp_path / "held_out.jsonl", tokenizer, (8, 32), trained=8, size=8, count=3, batch=64)
    with ThreadPoolExecutor(2) as pool:
        blocks = tests.prepare(model, pool)(model)["blocks"]
    assert blocks["bytes"] == [8, 8, 8] and set(blocks["nats"]) == {"8", "32", FOREIGN}
    read = tests.read()
    for arm, rows in {
        "8": [read.row(i, 8) for i in range(3)],
        "32": [read.row(i, 32) for i in range(3)],
        FOREIGN: [read.foreign_row(i, 32, 8) for i in range(3)],
    }.items():
        for row, found in zip(rows, blocks["nats"][arm]):
            tokens = jnp.asarray(row[None], jnp.int32)
            log_probs = jax.nn.log_softmax(model(tokens[:, :-1])[0])[-8:]
            expected = -jnp.take_along_axis(log_probs, tokens[0, -8:, None], 1).sum()
            assert found == pytest.approx(float(expected), abs=2e-3)
    total = sum(blocks["nats"]["8"]) / np.log(2) / 24
    assert bits_per_byte(blocks, "8") == pytest.approx(total)


def test_a_change_has_an_interval_over_documents():
    blocks = {"size": 4, "document": [0, 0, 1, 2], "bytes": [4] * 4, "nats": {"a": [1.0, 2.0, 1.0, 2.0]}}
    blocks["nats"]["b"] = [0.9 * x for x in blocks["nats"]["a"]]
    blocks["nats"]["c"] = [0.9, 1.8, 1.0, 2.2]
    same = change(blocks, "a", "b")
    assert same.estimate == pytest.approx(-0.1) and same.low == pytest.approx(-0.1) and same.high == pytest.approx(-0.1)
    mixed = change(blocks, "a", "c")
    assert [mixed.low, mixed.estimate, mixed.high] == pytest.approx([-0.1, -0.1 / 6, 0.1])
    risen = rise_of_perplexity(blocks, "a", "b")
    assert risen.estimate == pytest.approx(np.exp(-0.1 * 6 / 16) - 1)


def test_a_verdict_is_where_the_interval_lies():
    interval = Interval(-0.02, -0.03, -0.015)
    assert below(0.01).judge(interval) is Verdict.AGREES and equal(0.01).judge(interval) is Verdict.DISAGREES
    assert below(0.02).judge(interval) is Verdict.UNDECIDED and above(0.0).judge(interval) is Verdict.DISAGREES
    agrees, disagrees, undecided = Verdict.AGREES, Verdict.DISAGREES, Verdict.UNDECIDED
    assert combined([agrees, agrees]) is agrees and combined([agrees, undecided]) is Verdict.PARTLY
    assert combined([disagrees, undecided]) is disagrees and combined([undecided]) is undecided
    assert combined([Verdict.PARTLY, disagrees]) is Verdict.PARTLY


def test_intervals_between_seeds_and_counts():
    # Welch: -4, an error of sqrt(5 / 3), 2.94 degrees of freedom, of which the quantile is 3.2186.
    found = between_seeds([1.0, 2.0, 3.0], [4.0, 6.0, 8.0])
    assert found.estimate == pytest.approx(-4 / 6)
    assert [6 * found.low, 6 * found.high] == pytest.approx([-4 - 4.1554, -4 + 4.1554], abs=1e-3)
    assert between_seeds([2.0, 2.0], [1.0, 1.0]) == Interval(1.0, 1.0, 1.0)
    # Newcombe 1998, table II, row (a): 56/70 and 48/80, method 10: 0.0524 to 0.3339.
    counts = between_counts((56, 70), (48, 80))
    assert [counts.low, counts.high] == pytest.approx([0.0524, 0.3339], abs=1e-4)


def test_the_real_setting_reports_no_seed_that_chose_a_rate():
    plan = study("real")
    assert plan.seeds == (1,) and len(plan.runs) == 4
    assert {mixer.label: rate for mixer, rate, _ in plan.runs} == dict(plan.chosen)
