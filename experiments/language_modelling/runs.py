"""Training and testing one language model, and the file that its result goes to."""

import concurrent.futures
import dataclasses
import hashlib
import math
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from experiments.harness.device import turn
from experiments.harness.recorded import recorded
from experiments.harness.study import Mixer, slug
from experiments.harness.tables import Row, add_rows, read_table
from experiments.language_modelling.study import LanguageStudy, model_config
from rnnlib.data import (
    DataConfig,
    TokenCorpus,
    Tokenizer,
    iterate_documents,
    load_corpus,
    load_tokenizer,
    make_dataset,
)
from rnnlib.data import train_tokenizer as learn_tokenizer
from rnnlib.models import DecoderLM
from rnnlib.training import ProgressReporter, StepReport, TrainConfig, Trainer, bits_per_byte, read_csv

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
_BATCH = ("inputs", "targets", "segment_ids", "positions", "loss_weights")


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
    with turn(work / "tokenizer.lock"):
        if not path.exists():
            sample = dataclasses.replace(study.train.data, max_train_bytes=8_000_000)
            learn_tokenizer(iterate_documents(sample, "train"), vocabulary_size=study.vocabulary_size, path=path)
    return load_tokenizer(path), str(path)


class OutOfTimeError(Exception):
    """A run would end after the time by which it must."""


class Deadline(ProgressReporter):
    """Shows progress, and gives a run up that would end too late at the best speed that it has shown.

    The best one, because other models that compile on the same device slow a run down for a while.
    """

    LOOK = range(80, 401, 80)
    """Steps at which the end is estimated."""
    SETTLED = 40
    """Steps before which the speed tells nothing."""
    TESTS = 6.0
    """Seconds for the tests behind the training."""

    def __init__(self, steps: int, until: float | None, plain_seconds: float):
        """`until` is in seconds since the epoch; None never gives up."""
        super().__init__(steps, plain_seconds=plain_seconds)
        self._until = until
        self._step_seconds = math.inf

    def step(self, report: StepReport) -> None:
        """Shows a training step.

        Raises:
            OutOfTimeError: the run would end too late.
        """
        super().step(report)
        left = self._steps - report.step
        if self._until is None or report.seconds_left is None or not left:
            return
        if report.step >= self.SETTLED:
            self._step_seconds = min(self._step_seconds, report.seconds_left / left)
        if report.step not in self.LOOK:
            return
        # Evaluations and checkpoints take about a twentieth.
        late = time.time() + 1.05 * self._step_seconds * left + self.TESTS - self._until
        if late > 0:
            raise OutOfTimeError(f"step {report.step}: it would end {late:.0f} s too late")


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


def fingerprint(study: LanguageStudy, mixer: Mixer, rate: float, seed: int) -> str:
    """Changes when anything that a run depends on does, other than the code."""
    return _fingerprints(study, mixer, rate, seed)[0]


def _fingerprints(study: LanguageStudy, mixer: Mixer, rate: float, seed: int) -> tuple[str, ...]:
    """Of a configuration without its later options, and as results that were made with `remat_keeps` have it."""
    config = run_config(study, mixer, rate, seed, "byte")
    texts = (recorded((config, study.vocabulary_size, study.lengths), names) for names in _RECORDED)
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


class BitsPerByte:
    """Bits per byte of a text, in all and by the position in the document; compiled when it is made."""

    def __init__(self, model: DecoderLM, length: int, tokens: int, tokenizer: Tokenizer):
        """Compiles.

        Args:
            model: the model, or one of shapes alone.
            length: tokens a row. A document that is longer goes on in the next row from an empty state.
            tokens: tokens a batch.
            tokenizer: gives the bytes that each token stands for.
        """
        token_bytes = jnp.asarray(tokenizer.token_bytes, jnp.float32)
        graphdef, state = nnx.split(model)
        buckets = math.ceil(math.log2(length)) + 1

        def sums(state: Any, batch: dict[str, jax.Array]) -> jax.Array:
            run: Any = nnx.merge(graphdef, state)
            logits = run(batch["inputs"], segment_ids=batch["segment_ids"], positions=batch["positions"])
            weights = batch["loss_weights"]
            counted = weights > 0  # what padding is read as has no influence, not even if it is not finite
            nats = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.where(counted, batch["targets"], 0))
            nats = jnp.where(counted, nats, 0.0)
            # Bits of the position: 0, 1, 2 to 3, 4 to 7. A logarithm that is rounded up would be one too many.
            bucket = 32 - jax.lax.clz(batch["positions"])
            values = jnp.stack([nats * weights, token_bytes[batch["targets"]] * weights, weights], -1)
            return jnp.zeros((buckets, 3)).at[bucket].add(values)

        self._rows = DataConfig(sequence_length=length, batch_size=max(1, tokens // length))
        self._tokenizer = tokenizer
        shape = (self._rows.batch_size, length)
        integers = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name in _BATCH if name != "loss_weights"}
        batch = integers | {"loss_weights": jax.ShapeDtypeStruct(shape, jnp.float32)}
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
        self._sums = jax.jit(sums).lower(shapes, batch).compile()

    def __call__(self, model: DecoderLM, corpus: TokenCorpus) -> dict[str, Any]:
        """Tests a model of the shapes that this was made for.

        Args:
            model: the model.
            corpus: the text.

        Returns:
            `bits_per_byte`, `tokens`, and `by_position`: pairs of the largest position of a bucket and its bits per
            byte.
        """
        state = nnx.split(model)[1]
        batches = make_dataset(self._rows, split="validation", tokenizer=self._tokenizer, corpus=corpus)
        parts = [self._sums(state, {name: batch[name] for name in _BATCH}) for batch in batches]
        totals = np.sum([np.asarray(part, np.float64) for part in parts], axis=0)
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
    held_out: Callable[[], HeldOut],
    environment: dict[str, Any],
    exclusive: pathlib.Path | None = None,
    until: float | None = None,
) -> dict[str, Any] | None:
    """Trains a run (or goes on with one that was stopped), tests it and writes its result.

    While the training step is compiled the text is read and the weights are drawn; while the model trains the tests
    are compiled.

    Args:
        study: the study.
        mixer: of the model.
        rate: learning rate.
        seed: of the initial weights.
        work: folder for checkpoints and tokens.
        results: the table of results.
        tokenizer: from `get_tokenizer`.
        held_out: gives what `hold_out` does.
        environment: recorded with the run.
        exclusive: lock file of the device: training and testing wait for it, compiling does not.
        until: time (since the epoch) by which the run must be done; one that would take longer is given up.

    Returns:
        The result, or None where there was no time.
    """
    config = run_config(study, mixer, rate, seed, tokenizer[1])
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, cache_folder=str(work / "tokens")))
    folder = work / f"{slug(mixer.label)}--{rate:g}--{seed}-{fingerprint(study, mixer, rate, seed)}"
    begin = time.monotonic()

    def say(what: str) -> None:
        print(f"{mixer.label}: {what} ({time.monotonic() - begin:.0f} s)", flush=True)

    def prepare() -> TokenCorpus:
        with turn(work / "tokens.lock"):
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
    lengths = dict.fromkeys((config.data.sequence_length, *study.lengths))
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        preparing = pool.submit(prepare)
        trainer.compile()
        say("compiled")
        corpus = preparing.result()
        made = {n: pool.submit(BitsPerByte, shapes, n, study.test_tokens, tokenizer[0]) for n in lengths}
        testing = pool.submit(held_out)
        with turn(exclusive):
            say("training")
            try:
                outcome = trainer.run(Deadline(config.steps, until, config.logging.plain_seconds))
            except OutOfTimeError as error:
                say(f"no time left: {error}")
                return None
            if outcome.stopped_by is not None:
                raise KeyboardInterrupt
            say("testing")
            memory = jax.local_devices()[0].memory_stats()
            model = trainer.trained_model()
            testers, texts = {n: future.result() for n, future in made.items()}, testing.result()
            validation = testers[config.data.sequence_length](model, texts.validation)
            tests = {str(n): testers[n](model, texts.test) for n in study.lengths}
            say("done")
    rows = read_csv(folder / "metrics.csv")
    rates = [row["tokens_per_second"] for row in rows if math.isfinite(row.get("tokens_per_second", math.nan))]
    content = {
        "study": "language_modelling",
        "setting": results.stem,
        "id": f"{mixer.label}; rate {rate:g}, seed {seed}; {fingerprint(study, mixer, rate, seed)}",
        "mixer": {"label": mixer.label, "preset": list(mixer.preset), "overrides": repr(mixer.overrides)},
        "fingerprint": fingerprint(study, mixer, rate, seed),
        "learning_rate": rate,
        "seed": seed,
        "num_parameters": trainer.num_parameters,
        "train_tokens": outcome.tokens,
        "steps": outcome.step,
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
        "validation": validation,
        "test": tests,
        "config": repr(config),
        "environment": environment,
    }
    add_rows(results, [content])
    return content
