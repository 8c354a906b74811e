"""Training and testing one language model, and the file that its result goes to."""

import dataclasses
import hashlib
import json
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from experiments.language_modelling.study import LanguageStudy, model_config
from experiments.sweep.results import write_text
from experiments.sweep.study import Mixer, slug
from rnnlib.data import DataConfig, TokenCorpus, Tokenizer, iterate_documents, load_tokenizer, make_dataset
from rnnlib.data import train_tokenizer as learn_tokenizer
from rnnlib.models import DecoderLM
from rnnlib.training import TrainConfig, Trainer, bits_per_byte, read_csv


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """The held-out documents in two halves: one to choose the learning rate by, one to report."""

    validation: TokenCorpus
    test: TokenCorpus


def get_tokenizer(study: LanguageStudy, work: pathlib.Path) -> tuple[Tokenizer, str]:
    """The study's tokenizer and its name; a byte-pair one is learned once, on training text."""
    if not study.vocabulary_size:
        return load_tokenizer("byte"), "byte"
    path = work / f"tokenizer-{study.vocabulary_size}.json"
    if not path.exists():
        work.mkdir(parents=True, exist_ok=True)
        sample = dataclasses.replace(study.train.data, max_train_bytes=16_000_000)
        learn_tokenizer(iterate_documents(sample, "train"), vocabulary_size=study.vocabulary_size, path=path)
    return load_tokenizer(path), str(path)


def hold_out(data: DataConfig, tokenizer: Tokenizer) -> HeldOut:
    """Every other held-out document to each half."""
    documents = list(iterate_documents(data, "validation"))
    return HeldOut(
        TokenCorpus.from_documents(documents[0::2], tokenizer), TokenCorpus.from_documents(documents[1::2], tokenizer)
    )


def run_config(study: LanguageStudy, mixer: Mixer, rate: float, seed: int, tokenizer: str) -> TrainConfig:
    """Everything that a run depends on."""
    train = study.train
    return dataclasses.replace(
        train,
        model=model_config(train.model, mixer),
        data=dataclasses.replace(train.data, tokenizer=tokenizer),
        optimizer=dataclasses.replace(train.optimizer, learning_rate=rate),
        seed=seed,
    )


def result_path(results: pathlib.Path, mixer: Mixer, rate: float, seed: int) -> pathlib.Path:
    """The file of a run."""
    return results / f"{slug(mixer.label)}--{rate:g}--{seed}.json"


def fingerprint(study: LanguageStudy, mixer: Mixer, rate: float, seed: int) -> str:
    """Changes when anything that a run depends on does, other than the code."""
    config = run_config(study, mixer, rate, seed, "byte")
    described = repr((config, study.vocabulary_size, study.lengths))
    return hashlib.blake2b(described.encode(), digest_size=8).hexdigest()


def read_run(study: LanguageStudy, results: pathlib.Path, mixer: Mixer, rate: float, seed: int) -> dict | None:
    """A finished run; None where there is none of this configuration."""
    path = result_path(results, mixer, rate, seed)
    if not path.exists():
        return None
    content = json.loads(path.read_text())
    return content if content["fingerprint"] == fingerprint(study, mixer, rate, seed) else None


def test_model(model: DecoderLM, corpus: TokenCorpus, length: int, tokens: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """Bits per byte of a text, in all and by the position in the document.

    Args:
        model: the model.
        corpus: the text, packed into rows of `length` tokens; a document that is longer goes on in the next row from
            an empty state.
        length: tokens a row.
        tokens: tokens a batch.
        tokenizer: gives the bytes that each token stands for.

    Returns:
        `bits_per_byte`, `tokens`, and `by_position`: pairs of the largest position of a bucket and its bits per byte.
    """
    token_bytes = jnp.asarray(tokenizer.token_bytes, jnp.float32)
    graphdef, state = nnx.split(model)

    @jax.jit
    def sums(state: Any, batch: dict[str, jax.Array]) -> jax.Array:
        run: Any = nnx.merge(graphdef, state)
        logits = run(batch["inputs"], segment_ids=batch["segment_ids"], positions=batch["positions"])
        weights = batch["loss_weights"]
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.where(weights > 0, batch["targets"], 0))
        bucket = jnp.ceil(jnp.log2(batch["positions"] + 1.0)).astype(jnp.int32)
        values = jnp.stack([nats * weights, token_bytes[batch["targets"]] * weights, weights], -1)
        return jnp.zeros((buckets, 3)).at[bucket].add(values)

    buckets = math.ceil(math.log2(length)) + 1
    rows = DataConfig(sequence_length=length, batch_size=max(1, tokens // length))
    totals = np.zeros((buckets, 3))
    for batch in make_dataset(rows, split="validation", tokenizer=tokenizer, corpus=corpus):
        totals += jax.device_get(sums(state, dict(batch)))
    nats, num_bytes, num_tokens = totals.sum(0).tolist()
    return {
        "bits_per_byte": bits_per_byte(nats, num_bytes),
        "tokens": round(num_tokens),
        "by_position": [
            [2**i, round(bits_per_byte(n, b), 5)] for i, (n, b, count) in enumerate(totals.tolist()) if count and b
        ],
    }


def train_and_test(
    study: LanguageStudy,
    mixer: Mixer,
    rate: float,
    seed: int,
    *,
    work: pathlib.Path,
    results: pathlib.Path,
    tokenizer: tuple[Tokenizer, str],
    held_out: HeldOut,
    environment: dict[str, Any],
) -> dict[str, Any]:
    """Trains a run (or goes on with one that was stopped), tests it and writes its result."""
    config = run_config(study, mixer, rate, seed, tokenizer[1])
    folder = work / f"{slug(mixer.label)}--{rate:g}--{seed}-{fingerprint(study, mixer, rate, seed)}"
    trainer = Trainer(config, tokenizer=tokenizer[0])
    trainer.open(folder, resume=folder.exists())
    outcome = trainer.run()
    if outcome.stopped_by is not None:
        raise KeyboardInterrupt
    rows = read_csv(folder / "metrics.csv")
    rates = [row["tokens_per_second"] for row in rows if math.isfinite(row.get("tokens_per_second", math.nan))]
    model = trainer.trained_model()

    def test(corpus: TokenCorpus, length: int) -> dict[str, Any]:
        return test_model(model, corpus, length, study.test_tokens, tokenizer[0])

    content = {
        "study": "language_modelling",
        "mixer": {"label": mixer.label, "preset": list(mixer.preset), "overrides": repr(mixer.overrides)},
        "fingerprint": fingerprint(study, mixer, rate, seed),
        "learning_rate": rate,
        "seed": seed,
        "num_parameters": trainer.num_parameters,
        "train_tokens": outcome.tokens,
        "steps": outcome.step,
        "median_tokens_per_second": round(float(np.median(rates))) if rates else None,
        "train_loss": [[row["step"], round(row["loss"], 5)] for row in rows[:: max(1, len(rows) // 200)]],
        "validation": test(held_out.validation, config.data.sequence_length),
        "test": {str(length): test(held_out.test, length) for length in study.lengths},
        "config": repr(config),
        "environment": environment,
    }
    write_text(result_path(results, mixer, rate, seed), json.dumps(content, indent=1) + "\n")
    return content
