"""Packing: every token once and in order, segments and positions by document, targets one ahead."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rnnlib.data import ByteTokenizer, PackedDocuments, TokenCorpus

END = ByteTokenizer.end_of_document
texts = st.lists(st.text(alphabet="abcdé", min_size=1, max_size=20), min_size=1, max_size=12)


def _corpus(documents):
    return TokenCorpus.from_documents(documents, ByteTokenizer())


def _epoch(rows, epoch=0):
    """The epoch's rows laid end to end, without padding."""
    batch = [rows[epoch * len(rows) + i] for i in range(len(rows))]
    flat = {name: np.concatenate([row[name] for row in batch]) for name in batch[0]}
    real = flat["loss_weights"] > 0
    return {name: values[real] for name, values in flat.items()}, flat


def _documents(inputs):
    """Splits a stream of inputs where documents begin."""
    starts = np.flatnonzero(inputs == END)
    assert starts[0] == 0
    return [bytes(part[1:].astype(np.uint8)).decode() for part in np.split(inputs, starts[1:])]


@given(documents=texts, length=st.integers(1, 30), padded_rows=st.integers(0, 3))
@settings(max_examples=60)
def test_every_token_once_in_order(documents, length, padded_rows):
    rows = PackedDocuments(_corpus(documents), length, padded_rows=padded_rows)
    real, flat = _epoch(rows)
    assert _documents(real["inputs"]) == documents
    # Padding is only at the end, and everything there is 0.
    count = len(real["inputs"])
    assert count == sum(len(text.encode()) + 1 for text in documents)
    assert all(not values[count:].any() for values in flat.values())
    assert len(rows) == -(-count // length) + padded_rows


@given(documents=texts, length=st.integers(1, 30))
@settings(max_examples=60)
def test_targets_are_the_next_token_of_the_same_document(documents, length):
    real, _ = _epoch(PackedDocuments(_corpus(documents), length))
    expected = np.concatenate([[*text.encode(), END] for text in documents])
    np.testing.assert_array_equal(real["targets"], expected)


@given(documents=texts, length=st.integers(1, 30))
@settings(max_examples=60)
def test_segments_change_exactly_at_boundaries(documents, length):
    rows = PackedDocuments(_corpus(documents), length)
    for index in range(len(rows)):
        row = rows[index]
        real = row["segment_ids"] > 0
        inputs, segments, positions = row["inputs"][real], row["segment_ids"][real], row["positions"][real]
        assert segments[0] == 1 and positions[0] == 0
        begins = inputs[1:] == END
        np.testing.assert_array_equal(np.diff(segments), begins.astype(np.int32))
        np.testing.assert_array_equal(positions[1:], np.where(begins, 0, positions[:-1] + 1))
        np.testing.assert_array_equal(row["loss_weights"], real.astype(np.float32))
        assert {name: (values.dtype.name, values.shape) for name, values in row.items()} == {
            "inputs": ("int32", (length,)),
            "targets": ("int32", (length,)),
            "segment_ids": ("int32", (length,)),
            "positions": ("int32", (length,)),
            "loss_weights": ("float32", (length,)),
        }


@given(documents=texts, length=st.integers(1, 30), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=40)
def test_each_epoch_is_a_permutation(documents, length, seed):
    corpus = _corpus(documents)
    rows = PackedDocuments(corpus, length, seed=seed)
    for epoch in (0, 1, 5):
        real, _ = _epoch(rows, epoch)
        assert sorted(_documents(real["inputs"])) == sorted(documents)
    # Asked out of order, and of a second instance, the rows are the same.
    other = PackedDocuments(corpus, length, seed=seed)
    for index in (2 * len(rows), 0, len(rows), len(rows) - 1):
        for name, values in other[index].items():
            np.testing.assert_array_equal(values, rows[index][name])


def test_epochs_and_seeds_differ_in_order():
    documents = [chr(ord("a") + i) * 3 for i in range(20)]
    corpus = _corpus(documents)
    orders = [
        _documents(_epoch(PackedDocuments(corpus, 7, seed=seed), epoch)[0]["inputs"])
        for seed, epoch in ((0, 0), (0, 1), (1, 0))
    ]
    assert len({tuple(order) for order in orders}) == 3
    assert _documents(_epoch(PackedDocuments(corpus, 7), 1)[0]["inputs"]) == documents


@pytest.mark.parametrize("vocabulary_size, dtype", [(2**16, "uint16"), (2**16 + 1, "int32")])
def test_large_vocabularies_keep_their_ids(vocabulary_size, dtype):
    class Wide(ByteTokenizer):
        end_of_document = vocabulary_size - 1

        def encode_batch(self, texts):
            return [np.array([0, self.vocabulary_size - 2]) for _ in texts]

    Wide.vocabulary_size = vocabulary_size
    corpus = TokenCorpus.from_documents(["x"], Wide())
    assert corpus.tokens.dtype.name == dtype
    assert corpus.tokens.tolist() == [vocabulary_size - 1, 0, vocabulary_size - 2]
