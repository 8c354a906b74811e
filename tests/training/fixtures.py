"""A tiny corpus and model, and one cache of compiled functions for all runs, in this process and others."""

import os

import jax
import pytest

from rnnlib.data import DataConfig
from rnnlib.models import ModelConfig
from rnnlib.training import CheckpointConfig, EvaluationConfig, OptimizerConfig, TrainConfig

CACHE_OPTIONS = {
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


@pytest.fixture(scope="session")
def compiled_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def compilation_cache(compiled_folder):
    """This process keeps compiled functions in the folder: a second run of one config does not compile."""
    options = {"jax_compilation_cache_dir": str(compiled_folder)} | CACHE_OPTIONS
    before = {name: getattr(jax.config, name) for name in options}
    for name, value in options.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(scope="session")
def process_environment(compiled_folder):
    """Environment of subprocesses that share the folder."""
    options = {name.upper(): str(value) for name, value in CACHE_OPTIONS.items()}
    return os.environ | options | {"JAX_COMPILATION_CACHE_DIR": str(compiled_folder)}


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A few small text files."""
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(12):
        words = " ".join(f"{number} plus {i} is {number + i};" for i in range(40))
        (folder / f"{number:02}.txt").write_text(words)
    return folder


@pytest.fixture(scope="session")
def tiny_config(corpus):
    """A config whose steps take milliseconds."""
    return TrainConfig(
        model=ModelConfig(width=16, num_layers=1, num_heads=2, mlp_width=16, mixers=("gated_deltanet",)),
        data=DataConfig(
            source="text", paths=(f"{corpus}/*.txt",), split_by="tail", sequence_length=32, batch_size=2, prefetch=1
        ),
        optimizer=OptimizerConfig(learning_rate=1e-2),
        evaluation=EvaluationConfig(every=50, batches=2),
        checkpoint=CheckpointConfig(every=20),
        steps=400,
    )
