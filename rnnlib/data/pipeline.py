"""Batches for training and evaluation, from text or tasks, with a position that can be saved and restored."""

import hashlib
import multiprocessing
import os
import pathlib
import sys
import threading
from collections.abc import Sequence
from typing import Any

import grain
import numpy as np
from absl import flags

from rnnlib.data.config import DataConfig, Split, check_split
from rnnlib.data.conversation import ConversationEncoder
from rnnlib.data.corpus import TokenCorpus, load_corpus
from rnnlib.data.mixture import mixture
from rnnlib.data.packing import PackedDocuments
from rnnlib.data.streaming import StreamedRows
from rnnlib.tokenizers import Tokenizer, load_tokenizer

Batch = dict[str, np.ndarray]


class BatchDataset(grain.IterDataset[Batch]):
    """Batches of examples that are found by index.

    Since each example is a function of its index alone, a position is one number, and neither the number of worker
    processes nor where a run was interrupted changes the batches.
    """

    def __init__(self, batches: grain.MapDataset[Batch], *, fingerprint: str, num_workers: int = 0, prefetch: int = 2):
        """Wraps batches.

        Args:
            batches: batch i at index i.
            fingerprint: identifies the data; a saved position is only restored where it is the same.
            num_workers: worker processes; 0 prepares batches in a thread of this process.
            prefetch: batches prepared ahead, per worker.

        Raises:
            ValueError: worker processes would run this program's script again.
        """
        super().__init__()
        if num_workers:
            _expect_guarded_script()
        self._batches = batches
        self._num_workers = num_workers
        self._prefetch = prefetch
        self.fingerprint = fingerprint

    def __len__(self) -> int:
        """Batches in one pass; sys.maxsize when the data repeats without end."""
        return len(self._batches)

    def read(self, index: int) -> Batch:
        """Batch `index`, found directly."""
        return self._batches[index]

    def iterate_from(self, index: int) -> grain.DatasetIterator[Batch]:
        """A plain grain iterator over the batches from `index` on."""
        batches = self._batches[index:] if index else self._batches
        if not self._num_workers:
            return iter(batches.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=self._prefetch)))
        # Grain reads its options from absl flags, which are not parsed unless the program is an absl one.
        if not flags.FLAGS.is_parsed():
            flags.FLAGS(sys.argv[:1], known_only=True)
        stream = batches.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
        # Shared memory outlives a killed process; batches are small enough to go through a pipe.
        stream = grain.experimental.WithOptionsIterDataset(
            stream, grain.experimental.DatasetOptions(min_shm_size=sys.maxsize)
        )
        options = grain.MultiprocessingOptions(num_workers=self._num_workers, per_worker_buffer_size=self._prefetch)
        return iter(stream.mp_prefetch(options, worker_init_fn=_end_with_parent))

    def __iter__(self) -> "BatchIterator":
        return BatchIterator(self)

    def __str__(self) -> str:
        return f"BatchDataset(fingerprint={self.fingerprint})"


class BatchIterator(grain.DatasetIterator[Batch]):
    """Yields batches; `get_state` and `set_state` save and restore the position. `close` ends worker processes."""

    def __init__(self, dataset: BatchDataset):
        super().__init__()
        self._dataset = dataset
        self._next_batch = 0
        self._stream: grain.DatasetIterator[Batch] | None = None

    def __next__(self) -> Batch:
        self._assert_not_closed()
        if self._stream is None:  # started here, so that restoring a position does not start workers twice
            self._stream = self._dataset.iterate_from(self._next_batch)
        try:
            batch = next(self._stream)
        except RuntimeError as error:  # of grain, which has no class of its own for it
            if "Worker process was terminated" not in str(error):
                raise
            raise ChildProcessError(
                "a worker process of the data was killed, perhaps for want of memory: expected it to live"
            ) from error
        self._next_batch += 1
        return batch

    def get_state(self) -> dict[str, Any]:
        """The position: the next batch's index, and the fingerprint of the data. JSON can hold it."""
        return {"next_batch": self._next_batch, "fingerprint": self._dataset.fingerprint}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues where `get_state` was called; batches are then bit-identical.

        Raises:
            ValueError: the data differs from that of the saved position.
        """
        if state["fingerprint"] != self._dataset.fingerprint:
            raise ValueError(
                "the data is not that of the saved position: its files, tokenizer, split, shape or seed have changed "
                f"(fingerprint {self._dataset.fingerprint}, saved {state['fingerprint']})"
            )
        self._end_stream()
        self._next_batch = int(state["next_batch"])

    def close(self) -> None:
        """Ends worker processes; the iterator yields no more."""
        super().close()
        self._end_stream()

    def _end_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def __str__(self) -> str:
        return f"BatchIterator(next_batch={self._next_batch})"


def _expect_guarded_script() -> None:
    """ValueError where each worker process would run this program's script again, and would then never get its data."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    try:
        source = pathlib.Path(script).read_bytes() if script else None
    except OSError:
        return
    if source is not None and b"__name__" not in source and b"parent_process" not in source:
        raise ValueError(
            f"num_workers: each worker process imports {script}, expected what it runs under "
            'if __name__ == "__main__":; 0 workers prepare the batches in this process'
        )


def _end_with_parent(worker: int, num_workers: int) -> None:
    """Ends a worker process when the process that started it is gone: killed, it cannot end its workers itself."""

    def wait() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def make_dataset(
    config: DataConfig,
    *,
    split: Split,
    tokenizer: Tokenizer | None = None,
    corpus: TokenCorpus | None = None,
    finite: bool | None = None,
    process_index: int | None = None,
    process_count: int | None = None,
    own_rows: Sequence[int] | None = None,
    chat: ConversationEncoder | None = None,
) -> BatchDataset:
    """Batches of packed text.

    Each batch is a dictionary of `inputs`, `targets`, `segment_ids`, `positions` (int32 `[B, T]`) and `loss_weights`
    (float32 `[B, T]`); see `PackedDocuments`. Training batches never end: every epoch has its own order of documents
    and of rows. The validation split is read once, in order, in this process, and its last batch is filled
    with padding (weight 0), so that every token counts exactly once and all batches have one shape.

    Args:
        config: what to read.
        split: "train" or "validation".
        tokenizer: in place of `config.tokenizer`.
        corpus: tokens in place of what `config` would read.
        finite: True reads the split once and in order, False repeats and shuffles it. By default the validation split
            is finite.
        process_index: this process among those that share a batch, of which it gets every `process_count`-th row;
            by default JAX's.
        process_count: number of processes; it divides `batch_size`.
        own_rows: in place of these two, which rows of each batch are wanted, numbers below `batch_size`.
        chat: encodes the conversations of format "chat", in place of the template that `config` names.

    Raises:
        ValueError: a path, size or name is wrong, or the split is empty (names it).
    """
    check_split(split)
    if own_rows is None:
        index, count = share_by_process(config.batch_size, process_index, process_count)
        own_rows = range(index, config.batch_size, count)
    tokenizer = tokenizer if tokenizer is not None else load_tokenizer(config.tokenizer)
    if config.format == "chat" and chat is None and corpus is None:
        from rnnlib.data.chat import chat_encoder  # imports jax, which worker processes do without

        chat = chat_encoder(config, tokenizer)
    finite = split == "validation" if finite is None else finite
    if finite:
        corpus = corpus if corpus is not None else load_corpus(config, split, tokenizer, chat)
        padding = -len(PackedDocuments(corpus, config.sequence_length)) % config.batch_size
        rows: grain.MapDataset = PackedDocuments(corpus, config.sequence_length, padded_rows=padding)
        fingerprint = f"{corpus.fingerprint}-{config.sequence_length}-{config.batch_size}"
    else:
        rows, fingerprint = _endless_rows(config, split, tokenizer, corpus, chat)
        fingerprint += f"-{config.sequence_length}-{config.batch_size}-seed{config.seed}"
    if len(own_rows) < config.batch_size:
        rows = _RowsOfBatches(rows, config.batch_size, tuple(own_rows))
    batches = rows.batch(len(own_rows), drop_remainder=True)
    workers = 0 if finite else config.num_workers
    return BatchDataset(batches, fingerprint=fingerprint, num_workers=workers, prefetch=config.prefetch)


def _endless_rows(
    config: DataConfig,
    split: Split,
    tokenizer: Tokenizer,
    corpus: TokenCorpus | None,
    chat: ConversationEncoder | None,
) -> tuple[grain.MapDataset, str]:
    """Shuffled rows that never end, of a mixture by its weights, and what identifies their text."""
    parts: list[tuple[grain.MapDataset, str, float]] = []
    for part, weight in [(config, 1.0)] if corpus is not None else mixture(config):
        if corpus is None and config.streaming and split == "train":
            streamed = StreamedRows(part, tokenizer, chat)
            parts.append((streamed, streamed.fingerprint, weight))
            continue
        own = corpus if corpus is not None else load_corpus(part, split, tokenizer, chat)
        packed = PackedDocuments(own, config.sequence_length, seed=config.seed)
        parts.append((packed.shuffle(config.seed).repeat(), own.fingerprint, weight))
    if len(parts) == 1:
        return parts[0][0], parts[0][1]
    fingerprint = hashlib.blake2b(repr([entry[1:] for entry in parts]).encode(), digest_size=16).hexdigest()
    return grain.MapDataset.mix([rows for rows, _, _ in parts], [weight for _, _, weight in parts]), fingerprint


class _RowsOfBatches(grain.MapDataset):
    """Of each batch of rows, those with these numbers."""

    def __init__(self, rows: grain.MapDataset, batch_size: int, numbers: tuple[int, ...]):
        super().__init__(rows)
        self._batch_size = batch_size
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._parents[0]) // self._batch_size * len(self._numbers)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return self.slice(index)
        batch, row = divmod(int(index), len(self._numbers))
        return self._parents[0][batch * self._batch_size + self._numbers[row]]

    def __str__(self) -> str:
        return f"_RowsOfBatches({len(self._numbers)} of {self._batch_size})"


def share_by_process(batch_size: int, index: int | None, count: int | None) -> tuple[int, int]:
    """This process's number and how many share a batch, by default JAX's.

    Raises:
        ValueError: the number is out of range, or the processes do not divide the batch.
    """
    if index is None or count is None:
        import jax

        index = jax.process_index() if index is None else index
        count = jax.process_count() if count is None else count
    if not 0 <= index < count:
        raise ValueError(f"process_index must be in [0, process_count={count}); got {index}")
    if batch_size % count:
        raise ValueError(f"batch_size must be a multiple of the number of processes, {count}; got {batch_size}")
    return index, count
