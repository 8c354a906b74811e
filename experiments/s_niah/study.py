"""Needles in a haystack, trained from nothing on short texts and tested up to 8K.

Claims: KLA answers all of S-NIAH at every length from 1K to 8K, Gated DeltaNet 98 to 99 %, Mamba-2 next to none (KLA
paper, table 4). Language models answer S-NIAH-1 most surely, then S-NIAH-2 and -3, several keys least (Preconditioned
DeltaNet, table 5; Gated DeltaNet-2, table 3). Exact match: the whole answer has to be right.
"""

from experiments.sweep import Cell, Mixer, Study
from experiments.sweep.study import Setting
from rnnlib.data.tasks import make_task

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
_TESTED = (1024, 2048, 4096, 8192)
_PAPER = {
    "Gated DeltaNet": (98.85, 98.25, 98.05, 98.5),
    "KLA": (100.0, 100.0, 100.0, 100.0),
    "Mamba-2": (0.1, 0.0, 0.0, 0.05),
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
    sizes = {"width": 128, "validation_examples": 256, "test_examples": 256, "dtype": "bfloat16"}
    cells = (
        *(
            Cell(
                name,
                make_task(task, sequence_length=length, train_on_all_tokens=True),
                (length, *_TESTED),
                steps=4000,
                chunks=20,
                batch_size=32,
                train_examples=64_000,
                answer_weight=16.0,
                **sizes,  # type: ignore[arg-type]
            )
            for name, task, length in _TASKS
        ),
        Cell(
            "loss on all tokens alike",
            make_task("s_niah_1", sequence_length=512, train_on_all_tokens=True),
            (512, *_TESTED),
            steps=4000,
            chunks=20,
            batch_size=32,
            train_examples=64_000,
            **sizes,  # type: ignore[arg-type]
        ),
        # The first try, in which nothing was learned.
        Cell(
            "loss on the answer alone",
            make_task("s_niah_1", sequence_length=1024),
            _TESTED,
            steps=3000,
            batch_size=32,
            train_examples=16_000,
            **sizes,  # type: ignore[arg-type]
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
            (f"{mixer}, KLA paper", "S-NIAH-1", length, value)
            for mixer, values in _PAPER.items()
            for length, value in zip(_TESTED, values)
        ),
    )
