"""Use of a trained model: generation from a cache, continuous batching, and log-probabilities of texts."""

from rnnlib.inference.cache_rows import gather_rows, insert_rows
from rnnlib.inference.engine import Continuation, Engine
from rnnlib.inference.generation import Generated, generate, stream
from rnnlib.inference.sampling import NaNLogitsError, Sampling, sample
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
