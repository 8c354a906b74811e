"""Needles in a haystack, trained from nothing on short texts and tested up to 8K.

Claims: KLA answers all of S-NIAH at every length from 1K to 8K, Gated DeltaNet 98 to 99 %, Mamba-2 next to none (KLA
paper, table 4). Language models answer S-NIAH-1 most surely, then S-NIAH-2 and -3, several keys least (Preconditioned
DeltaNet, table 5; Gated DeltaNet-2, table 3). Exact match: the whole answer has to be right.
"""

from typing import Any

from experiments.harness.study import Setting
from experiments.sweep import Cell, Mixer, Study
from rnnlib.data.tasks import Mixture, make_task

MIXERS = (
    Mixer.of("KLA", "kla"),
    Mixer.of("Gated DeltaNet", "gated_deltanet"),
    Mixer.of("Mamba-2", "mamba2"),
    Mixer.of("DeltaNet", "deltanet"),
    Mixer.of("attention", "attention"),
    Mixer.of("PGDN", "pgdn"),
    Mixer.of("Gated DeltaNet-2", "gated_deltanet2"),
)
# Cell, task, length of training: introduction, needle, question and answer take 350 bytes, with four keys 550, with a
# uuid 450.
_TASKS = (
    ("S-NIAH-1", "s_niah_1", 512),
    ("S-NIAH-2", "s_niah_2", 512),
    ("S-NIAH-3", "s_niah_3", 512),
    ("MK-NIAH-1", "mk_niah_1", 768),
)
_ALL = tuple(make_task(task, sequence_length=768, train_on_all_tokens=True) for _, task, _ in _TASKS)
_TESTED = (1024, 2048, 4096, 8192)
# Whole answers, percent, by (row, cell) at 512 (where the paper has it) and 1K to 8K. The KLA paper trains on the task;
# the other two are language models: 340M parameters and 15B tokens, and 1.3B and 100B.
_PAPER: dict[tuple[str, str], tuple[float | None, ...]] = {
    ("Gated DeltaNet, KLA paper", "S-NIAH-1"): (None, 98.85, 98.25, 98.05, 98.5),
    ("KLA, KLA paper", "S-NIAH-1"): (None, 100.0, 100.0, 100.0, 100.0),
    ("Mamba-2, KLA paper", "S-NIAH-1"): (None, 0.1, 0.0, 0.0, 0.05),
    ("DeltaNet, PDN paper", "S-NIAH-1"): (100.0, 100.0, 100.0, 100.0, 100.0),
    ("DeltaNet, PDN paper", "S-NIAH-2"): (100.0, 91.8, 95.4, 29.2, 8.4),
    ("DeltaNet, PDN paper", "S-NIAH-3"): (79.2, 18.0, 33.4, 19.0, 3.0),
    ("Gated DeltaNet, PDN paper", "S-NIAH-1"): (100.0, 100.0, 100.0, 99.6, 95.2),
    ("Gated DeltaNet, PDN paper", "S-NIAH-2"): (100.0, 100.0, 97.6, 29.4, 1.4),
    ("Gated DeltaNet, PDN paper", "S-NIAH-3"): (96.2, 10.4, 35.4, 20.0, 3.0),
    ("Mamba-2, Gated DeltaNet-2 paper", "S-NIAH-1"): (None, 100.0, 100.0, 97.0, 55.8),
    ("Mamba-2, Gated DeltaNet-2 paper", "S-NIAH-2"): (None, 99.6, 99.6, 62.6, 21.0),
    ("Mamba-2, Gated DeltaNet-2 paper", "S-NIAH-3"): (None, 59.2, 38.6, 14.4),
    ("Mamba-2, Gated DeltaNet-2 paper", "MK-NIAH-1"): (None, 29.0, 21.2, 21.4),
    ("Gated DeltaNet, Gated DeltaNet-2 paper", "S-NIAH-1"): (None, 99.8, 100.0, 100.0, 97.6),
    ("Gated DeltaNet, Gated DeltaNet-2 paper", "S-NIAH-2"): (None, 100.0, 100.0, 87.2, 32.0),
    ("Gated DeltaNet, Gated DeltaNet-2 paper", "S-NIAH-3"): (None, 89.8, 54.2, 60.6),
    ("Gated DeltaNet, Gated DeltaNet-2 paper", "MK-NIAH-1"): (None, 58.0, 37.0, 27.8),
    ("Transformer, Gated DeltaNet-2 paper", "S-NIAH-1"): (None, 100.0, 100.0, 51.2, 0.0),
    ("Transformer, Gated DeltaNet-2 paper", "S-NIAH-2"): (None, 100.0, 100.0, 44.2, 0.0),
    ("Transformer, Gated DeltaNet-2 paper", "S-NIAH-3"): (None, 95.8, 94.8, 37.0),
    ("Transformer, Gated DeltaNet-2 paper", "MK-NIAH-1"): (None, 75.6, 66.6, 38.2),
}


def study(setting: Setting) -> Study:
    """The study at a setting."""
    if setting == "small":
        cells = tuple(
            Cell(
                name,
                make_task(task, sequence_length=length, train_on_all_tokens=True),
                (length,),
                width=32,
                num_layers=1,
                steps=20,
                batch_size=16,
                train_examples=512,
                validation_examples=64,
                test_examples=64,
            )
            for name, task, length in _TASKS
        )
        return Study("s_niah", "Needles, small", MIXERS[:2], cells, (3e-3, 1e-2), (0, 1, 2), "query_accuracy")
    sizes: dict[str, Any] = {
        "width": 128,
        "batch_size": 32,
        "validation_examples": 256,
        "test_examples": 256,
        "dtype": "bfloat16",
    }
    longer = sizes | {"steps": 4000, "chunks": 20, "train_examples": 64_000}
    cells = (
        *(
            Cell(
                name,
                make_task(task, sequence_length=length, train_on_all_tokens=True),
                (length, *_TESTED),
                answer_weight=16.0,
                **longer,
            )
            for name, task, length in _TASKS
        ),
        Cell(
            "mixture",
            Mixture(sequence_length=768, tasks=_ALL),
            (768, *_TESTED),
            answer_weight=16.0,
            tests=tuple((name, task) for (name, _, _), task in zip(_TASKS, _ALL)),
            **longer,
        ),
        Cell(
            "loss on all tokens alike",
            make_task("s_niah_1", sequence_length=512, train_on_all_tokens=True),
            (512, *_TESTED),
            **longer,
        ),
        # The first try, in which nothing was learned.
        Cell(
            "loss on the answer alone",
            make_task("s_niah_1", sequence_length=1024),
            _TESTED,
            steps=3000,
            train_examples=16_000,
            **sizes,
        ),
    )
    return Study(
        "s_niah",
        "Needles in a haystack: whole answers, beyond the length of training",
        MIXERS,
        cells,
        (7e-4, 2e-3),
        (0, 1, 2),
        "query_accuracy",
        paper=tuple(
            (row, cell, length, value)
            for (row, cell), values in _PAPER.items()
            for length, value in zip((512, *_TESTED), values)
            if value is not None
        ),
    )
