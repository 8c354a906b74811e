"""Recall of as many pairs as key channels, half and twice as many, with seeds that choose and seeds that report.

PLAN.md says why, and what would refute what.
"""

import dataclasses

from experiments.harness.study import Setting
from experiments.mqar_settings import long_recall_cell, small_recall_cell
from experiments.sweep import Cell, Mixer, Study
from rnnlib.data.tasks import MQAR
from rnnlib.layers import ConvolutionConfig, Initializer, LinearAttention, SigmoidGain

# PyTorch's start of a filter, which keeps a stream's size: keys are about fifteen times as long as from ours.
LONG_KEYS = ConvolutionConfig(initializer=Initializer("fan_in_uniform", 1.0))
MIXERS = (
    Mixer.of("DeltaNet", "deltanet"),
    Mixer.of("Gated DeltaNet", "gated_deltanet"),
    Mixer.of("KLA", "kla"),
    Mixer.of("KLA, long keys", "kla", convolution=LONG_KEYS),
    Mixer.of("KLA without key norm, long keys", "kla", convolution=LONG_KEYS, gain=SigmoidGain()),
    Mixer.of("PDN", "pdn"),
    Mixer.of("KDA", "kda"),
    Mixer.of("Gated DeltaNet-2", "gated_deltanet2"),
    Mixer.of("Gated KalmaNet", "gated_kalmanet"),
    Mixer.of("attention", "attention"),
    # The same layers with an additive rule: what erasing does, and nothing else.
    Mixer.of("DeltaNet's layer, additive", "deltanet", solve=LinearAttention()),
    Mixer.of("Gated DeltaNet's layer, additive", "gated_deltanet", solve=LinearAttention()),
)
RATES = (5e-4, 1e-3, 2e-3, 4e-3)


def recall_cell(num_pairs: int, sequence_length: int) -> Cell:
    """So many pairs for 32 key channels a head, four times the steps of the other studies."""
    task = MQAR(sequence_length=sequence_length, num_pairs=num_pairs, vocabulary_size=640)
    return dataclasses.replace(
        long_recall_cell(16_000),
        name=f"{num_pairs} pairs, T={sequence_length}",
        task=task,
        learning_rates=(),
        chunks=40,
        max_lanes=20,
    )


def study(setting: Setting) -> Study:
    """The study at a setting: "small" for a CPU, "real" for GPUs."""
    if setting == "small":
        return Study(
            "recall",
            "Recall with seeds, small",
            MIXERS[:2],
            (small_recall_cell(),),
            (1e-3, 1e-2),
            (0, 1),
            figure="bars",
            report_seeds=(2, 3),
        )
    return Study(
        "recall",
        "Recall with 32 key channels a head, ten seeds that chose no rate",
        MIXERS,
        (recall_cell(32, 128), recall_cell(16, 128), recall_cell(64, 256)),
        RATES,
        tuple(range(10)),
        figure="bars",
        report_seeds=tuple(range(10, 20)),
        seconds_of_a_run=12.0,
    )
