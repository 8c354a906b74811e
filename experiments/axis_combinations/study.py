"""Combinations of the axes that no paper has tried, beside the models they are made of, on recall."""

from experiments.harness.study import Setting
from experiments.mqar_settings import long_recall_cell, small_recall_cell
from experiments.sweep import Mixer, Study
from rnnlib.layers import SoftplusDecay

MIXERS = (
    Mixer.of("Gated DeltaNet", "gated_deltanet"),
    Mixer.of("KLA", "kla"),
    Mixer.of("KLA + channel decay", "kla", decay=SoftplusDecay(channelwise=True, rank="value_size", rate=(1.0, 16.0))),
    Mixer.of("KLA + ATK", "pkla"),
    Mixer.of("KLA + ATQ", "kla_atq"),
    Mixer.of("PGDN", "pgdn"),
    Mixer.of("PGDN + ATQ", "pgdn_atq"),
    Mixer.of("PGDN [-1, 1]", "pgdn", negative_eigenvalues=True),
    Mixer.of("Gated DeltaNet-2", "gated_deltanet2"),
    Mixer.of("Gated DeltaNet-2 + ATK", "pgdn2"),
)


def study(setting: Setting) -> Study:
    """The study at a setting."""
    small = setting == "small"
    return Study(
        "axis_combinations",
        "Combinations of the axes on recall" + ", small setting" * small,
        MIXERS,
        (small_recall_cell() if small else long_recall_cell(),),
        (1e-3, 1e-2) if small else (1e-3, 3e-3, 1e-2),
        (0, 1, 2),
        figure="bars",
    )
