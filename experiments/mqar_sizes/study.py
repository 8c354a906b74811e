"""Multi-query associative recall over the model's width, the number of pairs and the length, one at a time.

Claims: accuracy grows with the width, and DeltaNet needs the least of it (DeltaNet paper, figure 1); preconditioning
keeps or improves the accuracy at every width (Preconditioned DeltaNet, figures 5 and 10); Gated KalmaNet is ahead of
every linear baseline at all lengths and widths, also with fewer channels than pairs (its figure 3a).
"""

import dataclasses

from experiments.harness.study import Setting, pick
from experiments.mqar.study import MIXERS
from experiments.mqar_settings import long_recall_cell, small_recall_cell
from experiments.sweep import Cell, Mixer, Study
from experiments.sweep.study import Axis
from rnnlib.data.tasks import MQAR

# The papers' other baselines.
BASELINES = (
    Mixer.of("Mamba-3", "mamba3"),
    Mixer.of("Comba", "comba"),
    Mixer.of("MesaNet", "mesanet"),
    Mixer.of("Longhorn", "longhorn"),
    Mixer.of("EFLA", "efla"),
    Mixer.of("NLMS", "nlms"),
    Mixer.of("RetNet", "retnet"),
    Mixer.of("linear attention", "linear_attention"),
)

FEW = ("DeltaNet", "PDN", "Gated DeltaNet", "KLA", "Gated KalmaNet")  # of the small setting: 45 s a size each


def sized_cell(setting: Setting, sequence_length: int, num_pairs: int, width: int) -> Cell:
    """One size, in the budget of `mqar`; all have one vocabulary, larger than the longest sequence."""
    base, vocabulary_size = (small_recall_cell(), 72) if setting == "small" else (long_recall_cell(), 640)
    task = MQAR(sequence_length=sequence_length, num_pairs=num_pairs, vocabulary_size=vocabulary_size)
    name = f"T={sequence_length}, {num_pairs} pairs, width {width}"
    return dataclasses.replace(base, name=name, task=task, width=width)


def study(setting: Setting) -> Study:
    """The study at a setting: a middle, and each of three sizes varied from there."""
    small = setting == "small"
    (length, pairs, width), widths, numbers, lengths = (
        ((32, 4, 32), (16, 32, 64), (2, 4, 8), (32, 48, 64))
        if small
        else ((128, 32, 64), (32, 64, 128), (8, 16, 32), (128, 256, 512))
    )
    lines = {
        "width": {size: sized_cell(setting, length, pairs, size) for size in widths},
        "key-value pairs": {size: sized_cell(setting, length, size, width) for size in numbers},
        "sequence length": {size: sized_cell(setting, size, pairs, width) for size in lengths},
    }
    middle = sized_cell(setting, length, pairs, width)
    # The middle first: it stands on all three axes.
    cells = dict.fromkeys((middle, *(cell for line in lines.values() for cell in line.values())))
    return Study(
        "mqar_sizes",
        f"MQAR from T={length}, {pairs} pairs and width {width}, one varied at a time",
        pick(MIXERS, FEW) if small else MIXERS + BASELINES,
        tuple(cells),
        (1e-3, 1e-2) if small else (7e-4, 2e-3),
        (0, 1, 2),
        figure="axes",
        axes=tuple(Axis(name, tuple((size, cell.name) for size, cell in line.items())) for name, line in lines.items()),
    )
