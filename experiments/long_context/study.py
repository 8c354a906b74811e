"""Which models read the same tokens, after which contexts. PLAN.md says why, and what would refute what."""

import dataclasses
import pathlib
from typing import Any, Literal

from experiments.harness.study import Mixer, pick
from experiments.language_modelling.study import LanguageStudy, Tests
from experiments.language_modelling.study import study as language_study
from experiments.long_context.contexts import ContextTests
from experiments.long_context.text import LongText, write_long_text
from rnnlib.data import DataConfig, Tokenizer

LongContextSetting = Literal["small", "real"]
LONG = LongText(min_bytes=100_000)
# The better of two rates for models of width 768 (language_modelling/README.md, seed 0); the slowest model first.
CHOSEN = (("Mamba-2", 2e-3), ("Transformer++", 1e-3), ("KLA", 2e-3), ("Gated DeltaNet", 2e-3))
SETTINGS: tuple[LongContextSetting, ...] = ("small", "real")


@dataclasses.dataclass(frozen=True)
class LongContextStudy(LanguageStudy):
    """Language models that are tested on the same tokens after several contexts.

    Attributes:
        chosen: learning rate of each mixer, by its label.
        documents: what is held out.
        contexts: tokens before the scored ones, ascending.
        block: scored tokens in a row.
        blocks: most rows.
    """

    name: str = "long_context"
    chosen: tuple[tuple[str, float], ...] = ()
    documents: LongText = LONG
    contexts: tuple[int, ...] = (1024, 2048, 4096, 8192, 16_384, 32_768)
    block: int = 1024
    blocks: int = 256

    @property
    def runs(self) -> list[tuple[Mixer, float, int]]:
        """Each mixer at its own rate."""
        return [run for run in super().runs if run[1] == dict(self.chosen)[run[0].label]]

    @property
    def identity(self) -> tuple[Any, ...]:
        """What a run depends on beside its training configuration."""
        return self.vocabulary_size, repr(self.documents), self.contexts, self.block, self.blocks

    def text(self, work: pathlib.Path) -> DataConfig:
        """The text without long documents and what is like them, as files under `work`."""
        data = self.train.data
        written = write_long_text(self.documents, data, work)
        return dataclasses.replace(data, source="jsonl", paths=(str(written.train),))

    def tests(self, text: DataConfig, tokenizer: Tokenizer) -> Tests:
        """Every context before the same tokens."""
        held_out = pathlib.Path(text.paths[0]).with_name("held_out.jsonl")
        trained = self.train.data.sequence_length
        return ContextTests(
            held_out, tokenizer, self.contexts, trained, self.block, self.blocks, batch=self.test_tokens
        )


def study(setting: LongContextSetting) -> LongContextStudy:
    """The study at a setting: "real" has models of width 768 and 105M tokens a run."""
    base = language_study("small" if setting == "small" else "large")
    plan = LongContextStudy.of(base, name="long_context", lengths=(), seeds=(1,))  # seed 0 chose the rates
    if setting == "small":
        return dataclasses.replace(
            plan,
            chosen=tuple((mixer.label, base.learning_rates[0]) for mixer in base.mixers),
            documents=LongText(min_bytes=20_000),
            contexts=(64, 128, 256),
            block=64,
            blocks=16,
        )
    mixers = pick(base.mixers, [label for label, _ in CHOSEN])
    return dataclasses.replace(plan, test_tokens=33_792, seconds=330.0, mixers=mixers, chosen=CHOSEN)
