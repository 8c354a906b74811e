"""Use of a trained model: generation from a cache, continuous batching, and log-probabilities of texts."""

from rnnlib.inference.decode_state import gather_rows, insert_rows
from rnnlib.inference.engine import Continuation, Engine, Generated, generate
from rnnlib.inference.generation import NaNLogitsError, Sampling, sample, stream
from rnnlib.inference.scoring import Scores, score

__all__ = [
    "Continuation",
    "Engine",
    "Generated",
    "NaNLogitsError",
    "Sampling",
    "Scores",
    "gather_rows",
    "generate",
    "insert_rows",
    "sample",
    "score",
    "stream",
]
