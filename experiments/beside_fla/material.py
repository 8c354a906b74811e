"""What both libraries get: rows of bytes and initial weights, as files."""

import dataclasses
import hashlib
import pathlib
from typing import Literal

import numpy as np
from flax import nnx

from experiments.beside_fla.study import CurveStudy
from experiments.harness.device import turn
from experiments.harness.study import Mixer, slug
from rnnlib.data import DataConfig, iterate_documents
from rnnlib.hub import save_pretrained
from rnnlib.models import DecoderLM


@dataclasses.dataclass(frozen=True)
class Material:
    """Files that every run of a model reads.

    Attributes:
        weights: folder of the initial weights, as flash-linear-attention reads them.
        rows: file of the training rows, int32 `[steps, B, T + 1]`.
        held_out: likewise, of other documents.
        rates: file of the steps' learning rates.
    """

    weights: pathlib.Path
    rows: pathlib.Path
    held_out: pathlib.Path
    rates: pathlib.Path

    def digest(self) -> str:
        """Of all that a run reads: runs of different digests, on machines with other texts, are not compared."""
        found = hashlib.blake2b(digest_size=8)
        for path in (*sorted(self.weights.glob("*.safetensors")), self.rows, self.held_out, self.rates):
            found.update(path.read_bytes())
        return found.hexdigest()


def prepare(plan: CurveStudy, mixer: Mixer, work: pathlib.Path) -> Material:
    """Writes what is missing of a model's files under `work`; several processes may ask at once."""
    made = Material(work / slug(mixer.label), *(work / f"{name}.npy" for name in ("rows", "held_out", "rates")))
    with turn([work / "material.lock"]):
        if not made.rates.exists():
            np.save(made.rows, _rows(plan, "train", plan.steps))
            np.save(made.held_out, _rows(plan, "validation", plan.held_out_batches))
            np.save(made.rates, [plan.rate(step) for step in range(plan.steps)])
        if not made.weights.exists():
            save_pretrained(DecoderLM(plan.model_config(mixer), rngs=nnx.Rngs(0)), made.weights)
    return made


def _rows(plan: CurveStudy, part: Literal["train", "validation"], count: int) -> np.ndarray:
    """Batches of documents on end, in an order drawn once; documents are not told apart, in neither library."""
    data = DataConfig(source="python", split_by="document", max_train_bytes=plan.train_bytes)
    text = bytearray()
    for document in iterate_documents(data, part):
        text += document.encode() + b"\0"
        if len(text) >= plan.train_bytes:
            break
    length = plan.sequence_length + 1
    rows = np.frombuffer(bytes(text[: len(text) // length * length]), np.uint8).reshape(-1, length)
    order = np.random.default_rng(0).permutation(len(rows))
    chosen = rows[np.resize(order, count * plan.batch_size)]
    return chosen.astype(np.int32).reshape(count, plan.batch_size, length)
