"""RegBench and MAD's six tasks.

Claims (DeltaNet paper, section 4.1, figure 2 and table 2): DeltaNet is better than the other linear models and than
attention on recall, fuzzy recall above all, and worse on memorisation; on RegBench it is among the best. Compression is
trained as MAD does it, with an auto-encoder in place of a language model.
"""

from typing import Any

from experiments.harness.study import Setting
from experiments.sweep import Cell, Mixer, Study
from rnnlib.data.tasks import (
    Compression,
    FuzzyRecall,
    InContextRecall,
    Memorization,
    NoisyRecall,
    RegBench,
    SelectiveCopying,
)

MIXERS = (
    Mixer.of("attention", "attention"),
    Mixer.of("Mamba-2", "mamba2"),
    Mixer.of("GLA", "gla"),
    Mixer.of("DeltaNet", "deltanet"),
    Mixer.of("Gated DeltaNet", "gated_deltanet"),
    Mixer.of("PGDN", "pgdn"),
    Mixer.of("KLA", "kla"),
    Mixer.of("Gated DeltaNet-2", "gated_deltanet2"),
    Mixer.of("PDN", "pdn"),
    Mixer.of("KDA", "kda"),
    Mixer.of("PKDA", "pkda"),
    Mixer.of("Gated KalmaNet", "gated_kalmanet"),
)

_PAPER = {
    "Transformer": (94.1, 86.8, 29.8, 85.2, 99.6, 51.6),
    "GLA": (80.8, 81.6, 6.9, 63.3, 88.6, 38.8),
    "DeltaNet": (100.0, 100.0, 35.7, 52.8, 100.0, 42.2),
}
_COLUMNS = (
    ("in-context recall", 128),
    ("noisy recall", 128),
    ("fuzzy recall", 128),
    ("memorization", 32),
    ("selective copying", 256),
    ("compression", 32),
)


def study(setting: Setting) -> Study:
    """The study at a setting."""
    if setting == "small":
        sizes: dict[str, Any] = {"width": 32, "num_layers": 1, "steps": 200, "batch_size": 32, "train_examples": 2048}
        cells: tuple[Cell, ...] = (
            Cell("in-context recall", InContextRecall(sequence_length=32), **sizes),
            Cell("compression", Compression(sequence_length=8), **sizes),
            Cell("RegBench", RegBench(sequence_length=64, num_symbols=6, max_states=5), **sizes),
        )
        return Study(
            "regbench_mad", "RegBench and MAD, small", MIXERS[3:5], cells, (1e-3, 1e-2), (0, 1, 2), figure="bars"
        )
    # MAD trains on 12,800 examples of each task for 200 epochs; its validation split is its test split.
    sizes = {
        "width": 128,
        "steps": 1000,
        "batch_size": 128,
        "train_examples": 12_800,
        "test_examples": 1280,
        "dtype": "bfloat16",
    }
    cells = (
        Cell("fuzzy recall", FuzzyRecall(), **sizes),
        Cell("memorization", Memorization(), **(sizes | {"steps": 4000})),
        Cell(
            "RegBench",
            RegBench(sequence_length=512),
            **(sizes | {"steps": 2000, "batch_size": 32, "train_examples": 10_000}),
        ),
        Cell("in-context recall", InContextRecall(), **sizes),
        Cell("noisy recall", NoisyRecall(), **sizes),
        Cell("compression", Compression(), **(sizes | {"steps": 2000})),
        Cell("selective copying", SelectiveCopying(), **(sizes | {"steps": 2000, "batch_size": 64})),
    )
    paper = tuple(
        (f"{mixer}, DeltaNet paper", task, length, value)
        for mixer, values in _PAPER.items()
        for (task, length), value in zip(_COLUMNS, values)
    )
    return Study(
        "regbench_mad",
        "RegBench and MAD",
        MIXERS,
        cells,
        (1e-3, 3e-3),
        (0, 1, 2),
        figure="bars",
        paper=paper,
    )
