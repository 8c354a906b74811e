"""Rows of text that is still being tokenized: training begins with the first block of documents."""

import hashlib
import os
import sys
import threading
from collections.abc import Iterator

import grain
import numpy as np

from rnnlib.data.config import DataConfig
from rnnlib.data.conversation import ConversationEncoder
from rnnlib.data.corpus import TokenCorpus, cache_key, in_batches
from rnnlib.data.packing import PackedDocuments, Row
from rnnlib.data.sources import iterate_documents, source_sizes
from rnnlib.files import new_folder
from rnnlib.tokenizers import Tokenizer

BLOCK_CHARACTERS = 32_000_000
"""Documents are tokenized in blocks of about so many characters; rows are shuffled within a block."""


class StreamedRows(grain.MapDataset[Row]):
    """Rows of blocks of documents, without end, while a thread reads and tokenizes the blocks after them.

    The first epoch goes through the blocks in the order of the text, later ones in an order drawn from the seed. Within
    a block, documents and rows are shuffled anew in each epoch. So row i is a function of the text, the seed and i, and
    a position is a number as for any other data. Reading a row waits until its block is tokenized.
    """

    def __init__(self, config: DataConfig, tokenizer: Tokenizer, chat: ConversationEncoder | None = None):
        """Begins to read, and waits for the first block.

        Args:
            config: what to read; with `cache_folder` blocks are kept there, and memory holds none of them.
            tokenizer: gives the ids.
            chat: gives those of conversations.

        Raises:
            ValueError: see `iterate_documents`.
        """
        super().__init__()
        self._config, self._tokenizer, self._chat, self._block_characters = config, tokenizer, chat, BLOCK_CHARACTERS
        self._blocks: list[PackedDocuments] = []
        self._is_whole = False
        self._error: Exception | None = None
        self._changed = threading.Condition()
        self._orders: dict[tuple[int, int], np.ndarray] = {}
        hasher = hashlib.blake2b(repr((BLOCK_CHARACTERS, *source_sizes(config))).encode(), digest_size=16)
        hasher.update(cache_key(config, "train", tokenizer, chat, files=False).encode())
        self.fingerprint = hasher.hexdigest()
        threading.Thread(target=self._read, daemon=True).start()
        self._wait_for(1)

    def _read(self) -> None:
        """Tokenizes block after block, in a thread of its own."""
        try:
            for corpus in self._corpora():
                rows = PackedDocuments(corpus, self._config.sequence_length, seed=self._config.seed + len(self._blocks))
                with self._changed:
                    self._blocks.append(rows)
                    self._changed.notify_all()
        except Exception as error:
            self._error = error
        finally:
            with self._changed:
                self._is_whole = True
                self._changed.notify_all()

    def _corpora(self) -> Iterator[TokenCorpus]:
        blocks = in_batches(iterate_documents(self._config, "train"), self._block_characters)
        if self._config.cache_folder is None:
            for block in blocks:
                yield TokenCorpus.from_documents(block, self._tokenizer, chat=self._chat)
            return
        key = cache_key(self._config, "train", self._tokenizer, self._chat)
        name = f"blocks-{self._block_characters}-{key}"
        folder = os.path.join(self._config.cache_folder, name)
        for number, block in enumerate(blocks):
            path = os.path.join(folder, f"{number:06}")
            if not os.path.isdir(path):
                with new_folder(path, or_other=True) as staged:
                    TokenCorpus.from_documents(block, self._tokenizer, os.fspath(staged), chat=self._chat)
            yield TokenCorpus.load(path)

    def _wait_for(self, blocks: int) -> None:
        """Waits until so many blocks are tokenized, or all are.

        Raises:
            ValueError: the text cannot be read on.
        """
        with self._changed:
            self._changed.wait_for(lambda: len(self._blocks) >= blocks or self._is_whole)
        if self._error is not None and len(self._blocks) < blocks:
            raise self._error

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index):
        if isinstance(index, slice):
            return self.slice(index)
        row, number = int(index), 0
        while True:  # the first epoch, as far as the text is tokenized
            self._wait_for(number + 1)
            if number == len(self._blocks):
                break
            if row < len(self._blocks[number]):
                return self._row(0, number, row)
            row -= len(self._blocks[number])
            number += 1
        epoch, row = divmod(row, sum(map(len, self._blocks)))
        epoch += 1
        for block in np.random.default_rng([self._config.seed, epoch]).permutation(len(self._blocks)):
            if row < len(self._blocks[block]):
                return self._row(epoch, int(block), row)
            row -= len(self._blocks[block])
        raise AssertionError("a row of an epoch is in one of its blocks")

    def _row(self, epoch: int, number: int, row: int) -> Row:
        block, key = self._blocks[number], (epoch, number)
        with self._changed:
            if key not in self._orders:
                if len(self._orders) > 1:  # rows of two blocks may be wanted by turns around the border between them
                    del self._orders[next(iter(self._orders))]
                random = np.random.default_rng([self._config.seed, epoch, number])
                self._orders[key] = random.permutation(len(block))
            order = self._orders[key]
        return block[epoch * len(block) + int(order[row])]

    def __str__(self) -> str:
        return f"StreamedRows(blocks={len(self._blocks)}{'' if self._is_whole else ' so far'})"
