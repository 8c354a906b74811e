"""Multi-query associative recall: every mixer against the task's size and the model's width.

Claims: DeltaNet solves the hardest setting without convolutions (DeltaNet paper, section 4.1, figure 1);
preconditioning keeps or improves the accuracy (Preconditioned DeltaNet, figures 5 and 10); Gated KalmaNet beats every
linear baseline at all lengths and widths, also where the width is smaller than the number of pairs (its figure 3a).
"""

from experiments.harness.study import Setting
from experiments.mqar_settings import long_recall_cell, recall_cell, small_recall_cell
from experiments.sweep import Cell, Mixer, Study
from rnnlib.data.tasks import MQAR

MIXERS = (
    Mixer.of("attention", "attention"),
    Mixer.of("Mamba-2", "mamba2"),
    Mixer.of("GLA", "gla"),
    Mixer.of("DeltaNet", "deltanet"),
    Mixer.of("DeltaNet, no conv", "deltanet", convolution=None),
    Mixer.of("PDN", "pdn"),
    Mixer.of("Gated DeltaNet", "gated_deltanet"),
    Mixer.of("PGDN", "pgdn"),
    Mixer.of("KDA", "kda"),
    Mixer.of("PKDA", "pkda"),
    Mixer.of("Gated DeltaNet-2", "gated_deltanet2"),
    Mixer.of("KLA", "kla"),
    Mixer.of("Gated KalmaNet", "gated_kalmanet"),
)


def study(setting: Setting) -> Study:
    """The study at a setting."""
    if setting == "small":
        return Study(
            "mqar",
            "MQAR, small",
            MIXERS,
            (small_recall_cell(),),
            (1e-3, 1e-2),
            (0, 1, 2),
            figure="bars",
        )
    papers = Cell(
        "T=64, 4 pairs, width 32",
        MQAR(sequence_length=64, num_pairs=4),
        width=32,
        steps=1500,
        batch_size=128,
        train_examples=100_000,
        validation_examples=1000,
        test_examples=3000,
    )
    return Study(
        "mqar",
        "MQAR: test accuracy over the task's size and the model's width",
        MIXERS,
        (long_recall_cell(), recall_cell(128, 32, 64), papers),
        (1e-3, 3e-3, 1e-2),
        (0, 1, 2),
        figure="bars",
    )
