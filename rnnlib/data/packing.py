"""Documents packed into rows of one length, by index: row i of epoch e is a pure function of (seed, e, i)."""

import threading

import grain
import numpy as np

from rnnlib.data.corpus import TokenCorpus

Row = dict[str, np.ndarray]


class PackedDocuments(grain.MapDataset[Row]):
    """Rows of `sequence_length` tokens cut from the documents laid end to end.

    An epoch lays all documents end to end, in an order drawn from `(seed, epoch)`, each led by the end-of-document
    id, and cuts the stream into rows; a document may go on in the next row. So every token of every document is
    the target of exactly one position of an epoch, and every target is the next token of its own document: the first
    token is predicted from the leading id, and after the last token comes the end-of-document id. Only the tail of
    the epoch's last row is padding.

    A row holds int32 `[T]` arrays `inputs`, `targets`, `segment_ids` (1, 2, ... by document within the row; 0 on
    padding) and `positions` (0, 1, ... within the segment), and float32 `[T]` `loss_weights`: of the targets, as the
    corpus has them (1 where it has none); 0 on padding and, of conversations, where the next one is the target.

    An index past the length of an epoch lies in a later epoch, as grain's `repeat` asks for it. With
    `seed=None` documents keep their order, and every epoch is alike.
    """

    def __init__(self, corpus: TokenCorpus, sequence_length: int, *, seed: int | None = None, padded_rows: int = 0):
        """Prepares rows.

        Args:
            corpus: the documents.
            sequence_length: T.
            seed: of the order of documents, or None to keep it.
            padded_rows: rows of padding alone after the last one (to fill a last batch).
        """
        super().__init__()
        self._corpus = corpus
        self._sequence_length = sequence_length
        self._seed = seed
        self._rows = -(-corpus.num_tokens // sequence_length)
        self._padded_rows = padded_rows
        self._orders: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._rows + self._padded_rows

    def __getitem__(self, index):
        if isinstance(index, slice):
            return self.slice(index)
        epoch, row = divmod(int(index), len(self))
        return self._row(epoch if self._seed is not None else 0, row)

    def __str__(self) -> str:
        return f"PackedDocuments(documents={self._corpus.num_documents}, rows={self._rows})"

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"} | {"_orders": {}}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    def _order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The documents' order in an epoch, and where each then ends in the stream."""
        with self._lock:  # grain may prefetch with threads
            if epoch not in self._orders:
                lengths = np.diff(self._corpus.starts)
                if self._seed is None:
                    order = np.arange(len(lengths))
                else:
                    order = np.random.default_rng([self._seed, epoch]).permutation(len(lengths))
                # Rows of two epochs may be wanted by turns around the border between them.
                self._orders = {e: kept for e, kept in self._orders.items() if abs(e - epoch) == 1}
                self._orders[epoch] = order, np.cumsum(lengths[order])
            return self._orders[epoch]

    def _row(self, epoch: int, row: int) -> Row:
        length = self._sequence_length
        stream = np.zeros(length + 1, np.int32)
        weights = np.zeros(length + 1, np.float32)
        segment_ids = np.zeros(length, np.int32)
        positions = np.zeros(length, np.int32)
        filled = 0
        if row < self._rows:
            order, ends = self._order(epoch)
            begin = row * length
            which = int(np.searchsorted(ends, begin, side="right"))
            segment = 0
            while filled < length and which < len(order):
                document = order[which]
                # Counted from the document's end, which the stream and the flat array share.
                left = int(ends[which]) - (begin + filled)
                stop = int(self._corpus.starts[document + 1])
                count = min(left, length - filled)
                # One token more than the inputs: the target of the last one, when the document goes on.
                taken = self._corpus.read(stop - left, min(stop - left + count + 1, stop))
                stream[filled : filled + len(taken)] = taken
                weights[filled : filled + len(taken)] = self._weights(stop - left, len(taken))
                segment += 1
                segment_ids[filled : filled + count] = segment
                positions[filled : filled + count] = np.arange(count)
                filled += count
                if count == left:
                    # What follows a document is the id that leads the next; at the very end too.
                    stream[filled] = self._corpus.end_of_document
                    weights[filled] = self._corpus.weights is None
                    which += 1
        inputs = stream[:length].copy()
        inputs[filled:] = 0
        targets = stream[1:].copy()
        targets[filled:] = 0
        return {
            "inputs": inputs,
            "targets": targets,
            "segment_ids": segment_ids,
            "positions": positions,
            "loss_weights": np.where(segment_ids > 0, weights[1:], np.float32(0)),
        }

    def _weights(self, start: int, count: int) -> np.ndarray:
        weights = self._corpus.weights
        return np.ones(count, np.float32) if weights is None else weights[start : start + count].astype(np.float32)
