"""Long documents that nothing like them was trained on: made of the text that comes with the interpreter."""

import collections
import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Iterable

from experiments.harness.device import turn
from experiments.harness.tables import write_text
from rnnlib.data import DataConfig, iterate_documents


@dataclasses.dataclass(frozen=True)
class LongText:
    """Which documents are held out, and which are too much like them to train on.

    Attributes:
        min_bytes: of a held-out document.
        fraction: of the documents that long which is held out, chosen by a hash of the text.
        min_line: characters of a line that tells documents apart; shorter ones stand in many.
        max_shared: a training document is left out if more than this part of its such lines stands in one held-out
            document, or of that one's in it.
        min_shared: lines that must be shared before a document is left out.
    """

    min_bytes: int
    fraction: float = 0.25
    min_line: int = 30
    max_shared: float = 0.3
    min_shared: int = 5

    def is_held_out(self, text: str) -> bool:
        """Whether a document is one of the held-out ones."""
        content = text.encode()
        digest = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest())
        return len(content) >= self.min_bytes and digest < self.fraction * 2**64

    def lines(self, text: str) -> set[int]:
        """Hashes of the lines of a document that tell it apart."""
        return {hash(line) for part in text.split("\n") if len(line := part.strip()) >= self.min_line}


@dataclasses.dataclass(frozen=True)
class WrittenText:
    """A text as files of JSON lines.

    Attributes:
        train: training documents.
        held_out: held-out documents.
        counts: of documents, bytes and lines, of what was left out, and of what is still shared.
    """

    train: pathlib.Path
    held_out: pathlib.Path
    counts: dict[str, int]


def write_long_text(config: LongText, source: DataConfig, folder: pathlib.Path) -> WrittenText:
    """Writes training and held-out documents, once; several processes may ask.

    Args:
        config: what is held out.
        source: where the documents are from; both of its splits are read.
        folder: where the files go.
    """
    written = WrittenText(folder / "train.jsonl", folder / "held_out.jsonl", {})
    counts = folder / "counts.json"
    with turn([folder / "text.lock"]):
        if not counts.exists():
            documents = [*iterate_documents(source, "train"), *iterate_documents(source, "validation")]
            train, held_out, found = split_documents(config, documents)
            _write(written.train, train)
            _write(written.held_out, held_out)
            write_text(counts, json.dumps(found, indent=1) + "\n")
    return dataclasses.replace(written, counts=json.loads(counts.read_text()))


def split_documents(config: LongText, documents: Iterable[str]) -> tuple[list[str], list[str], dict[str, int]]:
    """Training documents, held-out ones, and the counts of `WrittenText`.

    Raises:
        ValueError: no document is held out.
    """
    rest: list[str] = []
    held_out: list[str] = []
    for text in documents:
        (held_out if config.is_held_out(text) else rest).append(text)
    if not held_out:
        raise ValueError(f"no document of {config.min_bytes} bytes or more is held out; expected a text that has some")
    lines = [config.lines(text) for text in held_out]
    where: dict[int, list[int]] = {}
    for number, own in enumerate(lines):
        for line in own:
            where.setdefault(line, []).append(number)
    train, left_out, still_shared = [], [], set()
    for text in rest:
        own = config.lines(text)
        found = own & where.keys()
        shared = collections.Counter(number for line in found for number in where[line])
        if any(
            count >= config.min_shared and count > config.max_shared * min(len(own), len(lines[number]))
            for number, count in shared.items()
        ):
            left_out.append(text)
        else:
            train.append(text)
            still_shared |= found

    def size(texts: list[str]) -> int:
        return sum(len(text.encode()) for text in texts)

    counts = {"train_documents": len(train), "train_bytes": size(train)}
    counts |= {"held_out_documents": len(held_out), "held_out_bytes": size(held_out)}
    counts |= {"left_out_documents": len(left_out), "left_out_bytes": size(left_out)}
    counts |= {"held_out_lines": len(where), "held_out_lines_in_training_text": len(still_shared)}
    return train, held_out, counts


def _write(path: pathlib.Path, texts: Iterable[str]) -> None:
    with path.open("w") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
