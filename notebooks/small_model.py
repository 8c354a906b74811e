"""Small byte-level models, trained on this machine's Python sources while a notebook waits, and text to look at."""

import dataclasses
import tempfile
from pathlib import Path

import jax.numpy as jnp

from rnnlib.data import DataConfig, make_dataset
from rnnlib.models import ModelConfig
from rnnlib.training import (
    CheckpointConfig,
    EvaluationConfig,
    LoadedRun,
    LoggingConfig,
    TrainConfig,
    load_run,
    train,
)


def small_config(mixer: str, *, steps: int, layers: int = 4) -> TrainConfig:
    """A model of 3 heads of 32 channels per layer; 100 steps of 4 layers take about a minute on two cores.

    Args:
        mixer: name of its mixers; all without output gate, so that only the recurrences differ.
        steps: training steps of 2048 bytes each.
        layers: number of blocks.
    """
    return TrainConfig(
        model=ModelConfig(
            vocabulary_size=257,
            width=96,
            num_layers=layers,
            num_heads=3,
            mixers=(mixer,),
            mixer_overrides={mixer: {"output_gate": False}},
            tie_embeddings=True,
        ),
        data=DataConfig(sequence_length=256, batch_size=8, max_train_bytes=4_000_000),
        steps=steps,
        evaluation=EvaluationConfig(every=max(1, steps // 4), batches=4),
        checkpoint=CheckpointConfig(every=steps, keep=1),
        logging=LoggingConfig(tensorboard=False, picture=False, plain_seconds=20.0),
    )


def train_small_model(mixer: str, *, steps: int, layers: int = 4) -> LoadedRun:
    """Trains the model of `small_config` in a folder that is removed afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        train(small_config(mixer, steps=steps, layers=layers), Path(folder) / "run")
        return load_run(Path(folder) / "run")


def held_out_tokens(run: LoadedRun, rows: int = 4, length: int = 256) -> tuple[jnp.ndarray, jnp.ndarray]:
    """Tokens `[rows, length]` of a run's validation text, and the documents that they belong to, 0 at padding."""
    data = dataclasses.replace(run.config.data, batch_size=rows, sequence_length=length)
    batch = next(iter(make_dataset(data, split="validation", tokenizer=run.tokenizer)))
    return jnp.asarray(batch["inputs"]), jnp.asarray(batch["segment_ids"])
