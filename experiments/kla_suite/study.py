"""Kaczmarz Linear Attention's synthetic suite: MQAR, Palindrome and Stack, trained short and tested long.

Claims (KLA paper, table 4): at 8 times the length of training KLA keeps more of MQAR than Gated DeltaNet (73.84
against 66.81 %) and than Mamba-2; solves S-NIAH where Gated DeltaNet stays at 98 %; Stack alike or better; Palindrome
alike, a little worse at 2048. The paper gives one seed and neither vocabulary nor pairs in what we have of its text.
"""

from typing import Any

from experiments.harness.study import Setting
from experiments.sweep import Cell, Mixer, Study
from rnnlib.data.tasks import MQAR, Palindrome, Stack

MIXERS = (
    Mixer.of("Gated DeltaNet", "gated_deltanet"),
    Mixer.of("KLA", "kla"),
    Mixer.of("Mamba-2", "mamba2"),
    Mixer.of("DeltaNet", "deltanet"),
)

_LENGTHS = (256, 512, 1024, 2048)
_PAPER = {
    "MQAR": {
        "Gated DeltaNet": (98.74, 98.36, 94.31, 66.81),
        "KLA": (99.00, 98.56, 95.64, 73.84),
        "Mamba-2": (99.08, 99.02, 96.54, 64.29),
    },
    "Palindrome": {
        "Gated DeltaNet": (99.94, 99.81, 98.24, 80.74),
        "KLA": (99.96, 99.50, 98.33, 79.96),
        "Mamba-2": (3.20, 17.92, 88.22, 0.86),
    },
    "Stack": {
        "Gated DeltaNet": (99.93, 99.73, 98.94, 95.64),
        "KLA": (99.97, 99.96, 99.25, 96.94),
        "Mamba-2": (99.98, 99.94, 99.54, 93.82),
    },
}


def study(setting: Setting) -> Study:
    """The study at a setting."""
    if setting == "small":
        sizes: dict[str, Any] = {"width": 32, "num_layers": 1, "steps": 200, "batch_size": 32, "train_examples": 2048}
        cells: tuple[Cell, ...] = (
            Cell("MQAR", MQAR(sequence_length=32, num_pairs=4, vocabulary_size=128), (32, 64), **sizes),
            Cell("Palindrome", Palindrome(sequence_length=16, num_symbols=8), (16, 32), **sizes),
            Cell("Stack", Stack(sequence_length=24, num_stacks=2, num_elements=4), (24, 48), **sizes),
        )
        return Study("kla_suite", "KLA's suite, small", MIXERS[:2], cells, (3e-3, 1e-2), (0, 1, 2))
    sizes = {
        "width": 128,
        "steps": 4000,
        "batch_size": 64,
        "train_examples": 40_000,
        "validation_examples": 256,
        "test_examples": 512,
        "dtype": "bfloat16",
    }
    cells = (
        Cell("Stack", Stack(sequence_length=256), _LENGTHS, **sizes),
        Cell("Palindrome", Palindrome(sequence_length=256), _LENGTHS, **(sizes | {"steps": 6000})),
        Cell(
            "MQAR",
            MQAR(sequence_length=256, num_pairs=32, vocabulary_size=4096),
            _LENGTHS,
            **(sizes | {"steps": 5000, "chunks": 20}),
        ),
    )
    paper = tuple(
        (f"{mixer}, KLA paper", task, length, value)
        for task, rows in _PAPER.items()
        for mixer, values in rows.items()
        for length, value in zip(_LENGTHS, values)
    )
    return Study(
        "kla_suite",
        "KLA's suite: test accuracy beyond the length of training",
        MIXERS,
        cells,
        (7e-4, 2e-3),
        (0, 1, 2),
        paper=paper,
    )
