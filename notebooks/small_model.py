"""A small byte-level model, trained on this machine's Python sources while a notebook waits, and text to look at."""

import tempfile
from pathlib import Path

import jax.numpy as jnp

from rnnlib.data import DataConfig, make_dataset
from rnnlib.models import DecoderLM, ModelConfig
from rnnlib.training import CheckpointConfig, EvaluationConfig, LoggingConfig, TrainConfig, load_run, train

DATA = DataConfig(sequence_length=256, batch_size=8, max_train_bytes=4_000_000)


def train_small_model(mixer: str, *, steps: int, layers: int = 4) -> DecoderLM:
    """Trains a model of 3 heads of 32 channels per layer, about a minute per 100 steps on two cores.

    Args:
        mixer: name of its mixers.
        steps: training steps of 2048 bytes each.
        layers: number of blocks.
    """
    config = TrainConfig(
        model=ModelConfig(
            vocabulary_size=257,
            width=96,
            num_layers=layers,
            num_heads=3,
            mixers=(mixer,),
            mixer_overrides={mixer: {"output_gate": False}},
            tie_embeddings=True,
        ),
        data=DATA,
        steps=steps,
        evaluation=EvaluationConfig(every=steps, batches=4),
        checkpoint=CheckpointConfig(every=steps, keep=1),
        logging=LoggingConfig(tensorboard=False, picture=False, plain_seconds=20.0),
    )
    with tempfile.TemporaryDirectory() as folder:
        train(config, Path(folder) / "run")
        return load_run(Path(folder) / "run").model


def held_out_tokens(rows: int = 4) -> tuple[jnp.ndarray, jnp.ndarray]:
    """Tokens `[rows, 256]` of files that the model was not trained on, and which document each belongs to."""
    batch = next(iter(make_dataset(DATA, split="validation")))
    return jnp.asarray(batch["inputs"][:rows]), jnp.asarray(batch["segment_ids"][:rows])
