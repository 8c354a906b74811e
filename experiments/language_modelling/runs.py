"""Training and testing one language model, and the file that its result goes to."""

import concurrent.futures
import dataclasses
import hashlib
import math
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from experiments.harness.config_fingerprint import config_text
from experiments.harness.device import turn
from experiments.harness.study import Mixer, slug
from experiments.harness.tables import Row, add_rows, read_table
from experiments.language_modelling.study import LanguageStudy
from rnnlib.data import (
    DataConfig,
    TokenCorpus,
    Tokenizer,
    iterate_documents,
    load_corpus,
    load_tokenizer,
)
from rnnlib.data import train_tokenizer as learn_tokenizer
from rnnlib.models import DecoderLM
from rnnlib.training import TrainConfig, Trainer, read_csv

# The options that were there when the first results were made. An option that came later counts in a fingerprint only
# where it differs from its default, which is what was before: those results stay valid. New options need nothing here.
_FIRST_NAMES = """
model vocabulary_size width num_layers num_heads mixers mixer_overrides attention_heads head_dim window
rope_base mlp_ratio mlp_width tie_embeddings norm_eps initializer_std dtype param_dtype remat
scan_layers data source paths validation_paths text_field encoding tokenizer sequence_length batch_size
seed split_by validation_fraction deduplicate max_train_bytes max_validation_bytes num_workers prefetch
cache_folder optimizer learning_rate schedule warmup_steps final_fraction decay_fraction beta1 beta2
epsilon weight_decay clip_norm evaluation every batches checkpoint keep logging tensorboard picture
plain_seconds steps accumulation_steps max_skipped_steps deterministic devices kind scale size
use_bias query key value initializer
"""
_FIRST = frozenset(_FIRST_NAMES.split())
_RECORDED = (_FIRST, _FIRST | {"remat_keeps"})


def get_tokenizer(study: LanguageStudy, text: DataConfig, work: pathlib.Path) -> tuple[Tokenizer, str]:
    """The study's tokenizer and its name; a byte-pair one is learned once, on training text."""
    if not study.vocabulary_size:
        return load_tokenizer("byte"), "byte"
    path = work / f"tokenizer-{study.vocabulary_size}.json"
    with turn([work / "tokenizer.lock"]):
        if not path.exists():
            sample = dataclasses.replace(text, max_train_bytes=8_000_000)
            learn_tokenizer(iterate_documents(sample, "train"), vocabulary_size=study.vocabulary_size, path=path)
    return load_tokenizer(path), str(path)


def run_config(study: LanguageStudy, mixer: Mixer, rate: float, seed: int, tokenizer: str) -> TrainConfig:
    """Everything that a run depends on."""
    train = study.train
    return dataclasses.replace(
        train,
        model=study.model(mixer),
        data=dataclasses.replace(train.data, tokenizer=tokenizer),
        optimizer=dataclasses.replace(train.optimizer, learning_rate=rate),
        seed=seed,
    )


def fingerprint(study: LanguageStudy, mixer: Mixer, rate: float, seed: int) -> str:
    """Changes when anything that a run depends on does, other than the code."""
    return _fingerprints(study, mixer, rate, seed)[0]


def _fingerprints(study: LanguageStudy, mixer: Mixer, rate: float, seed: int) -> tuple[str, ...]:
    """Of a configuration without its later options, and as results that were made with `remat_keeps` have it."""
    config = run_config(study, mixer, rate, seed, "byte")
    texts = (config_text((config, *study.identity), names) for names in _RECORDED)
    return tuple(hashlib.blake2b(text.encode(), digest_size=8).hexdigest() for text in texts)


def read_run(study: LanguageStudy, results: pathlib.Path, mixer: Mixer, rate: float, seed: int) -> Row | None:
    """A finished run, from a table; None where it has none of this configuration."""
    wanted = _fingerprints(study, mixer, rate, seed)
    return next((row for row in read_table(results) if row["fingerprint"] in wanted), None)


def read_runs(study: LanguageStudy, results: pathlib.Path, mixer: Mixer) -> list[Row]:
    """All finished runs of a mixer that are the study's but for rate and seed, in the order of rates and seeds."""
    rows = [row for row in read_table(results) if row["mixer"]["label"] == mixer.label]
    own = (r for r in rows if r["fingerprint"] in _fingerprints(study, mixer, r["learning_rate"], r["seed"]))
    return sorted(own, key=lambda row: (row["learning_rate"], row["seed"]))


def best_rate(study: LanguageStudy, results: Sequence[pathlib.Path], mixer: Mixer) -> float | None:
    """The rate at which the choosing seeds have the fewest bits per byte in validation; None until all are there."""
    found: dict[float, list[float]] = {}
    for own, rate, seed in study.runs:
        if own == mixer:
            rows = [row for path in results if (row := read_run(study, path, mixer, rate, seed)) is not None]
            if not rows:
                return None
            found.setdefault(rate, []).append(rows[0]["validation"]["bits_per_byte"])
    finite = {rate: sum(bits) if math.isfinite(sum(bits)) else math.inf for rate, bits in found.items()}
    return min(finite, key=lambda rate: finite[rate])


def train_and_test(
    study: LanguageStudy,
    mixer: Mixer,
    rate: float,
    seed: int,
    *,
    text: DataConfig,
    work: pathlib.Path,
    results: pathlib.Path,
    tokenizer: tuple[Tokenizer, str],
    environment: dict[str, Any],
    exclusive: Sequence[pathlib.Path] = (),
) -> Row:
    """Trains a run (or goes on with one that was stopped), tests it and writes its result.

    While the training step is compiled the text is read and the weights are drawn; while the model trains the tests
    are compiled. A signal to stop makes a checkpoint, from which the next call goes on.

    Args:
        study: the study.
        mixer: of the model.
        rate: learning rate.
        seed: of the initial weights.
        text: what to read, from `study.text`.
        work: folder for checkpoints and tokens.
        results: the table of results.
        tokenizer: from `get_tokenizer`.
        environment: recorded with the run.
        exclusive: lock files of the devices: training and testing wait for them, compiling does not.

    Returns:
        The row of the run.

    Raises:
        KeyboardInterrupt: a signal stopped the training; it is saved.
    """
    config = run_config(study, mixer, rate, seed, tokenizer[1])
    mark = fingerprint(study, mixer, rate, seed)
    data = dataclasses.replace(text, tokenizer=tokenizer[1], cache_folder=str(work / "tokens"))
    config = dataclasses.replace(config, data=data)
    folder = work / f"{slug(mixer.label)}--{rate:g}--{seed}-{mark}"
    begin = time.monotonic()

    def say(what: str) -> None:
        print(f"{mixer.label}: {what} ({time.monotonic() - begin:.0f} s)", flush=True)

    def prepare() -> TokenCorpus:
        with turn([work / "tokens.lock"]):
            corpus = load_corpus(config.data, "train", tokenizer[0])
            trainer.read_data()
        say(f"read {corpus.num_tokens:,} tokens of text")
        trainer.open(folder, resume=folder.exists())
        return corpus

    trainer = Trainer(config, tokenizer=tokenizer[0], read_data=False)
    say("compiling")
    # Tests take seconds: what they are compiled in matters more, and that is less for layers as one scan.
    scanned = config.model.replace(vocabulary_size=trainer.config.model.vocabulary_size, scan_layers=True)
    shapes = nnx.eval_shape(lambda: DecoderLM(scanned, rngs=nnx.Rngs(0)))
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        preparing = pool.submit(prepare)
        trainer.compile()
        say("compiled")
        corpus = preparing.result()
        test = study.tests(data, tokenizer[0]).prepare(shapes, pool)
        with turn(exclusive):
            say("training")
            outcome = trainer.run()
            if outcome.stopped_by is not None:
                raise KeyboardInterrupt
            say("testing")
            memory = jax.local_devices()[0].memory_stats()
            tested = test(trainer.trained_model())
            say("done")
    rows = read_csv(folder / "metrics.csv")
    rates = [row["tokens_per_second"] for row in rows if math.isfinite(row.get("tokens_per_second", math.nan))]
    content = {
        "study": study.name,
        "setting": results.stem,
        "id": f"{mixer.label}; rate {rate:g}, seed {seed}; {mark}",
        "mixer": {"label": mixer.label, "preset": list(mixer.preset), "overrides": repr(mixer.overrides)},
        "fingerprint": mark,
        "learning_rate": rate,
        "seed": seed,
        "num_parameters": trainer.num_parameters,
        "train_tokens": outcome.tokens,
        "steps": outcome.step,
        "skipped": int(rows[-1]["skipped"]) if rows else 0,
        "first_skipped": next((int(row["step"]) for row in rows if row["skipped"]), None),
        "seconds": round(outcome.seconds, 1),
        "median_tokens_per_second": round(float(np.median(rates))) if rates else None,
        "peak_bytes": None if not memory else memory.get("peak_bytes_in_use"),
        "corpus": {
            "fingerprint": corpus.fingerprint,
            "documents": corpus.num_documents,
            "bytes": corpus.text_bytes,
            "tokens": corpus.num_tokens,
            "tokenizer": tokenizer[0].fingerprint,
        },
        "train_loss": [[row["step"], round(row["loss"], 5)] for row in rows[:: max(1, len(rows) // 200)]],
        **tested,
        "config": repr(config),
        "environment": environment,
    }
    add_rows(results, [content])
    return content
