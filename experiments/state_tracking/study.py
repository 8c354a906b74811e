"""State tracking: parity and permutations of three things, with and without negative eigenvalues.

Claims: no linear recurrence whose transitions have positive eigenvalues only solves parity at all lengths; with
gains up to 2 the delta rules do (Grazzi et al. 2025, theorem 1, which the DeltaNet-family papers build on).
Preconditioned DeltaNet leaves negative eigenvalues of its own recurrences to future work (appendix E.4): here the gain
is bounded by 2 / x, which keeps them stable.
"""

from typing import Any

from experiments.harness.study import Setting
from experiments.sweep import Cell, Mixer, Study
from rnnlib.data.tasks import Parity, Permutations


def _both(label: str, preset: str) -> tuple[Mixer, Mixer]:
    return Mixer.of(label, preset), Mixer.of(f"{label} [-1, 1]", preset, negative_eigenvalues=True)


MIXERS = (
    Mixer.of("Mamba-2", "mamba2"),
    *_both("DeltaNet", "deltanet"),
    *_both("Gated DeltaNet", "gated_deltanet"),
    *_both("KDA", "kda"),
    *_both("Gated DeltaNet-2", "gated_deltanet2"),
    *_both("KLA", "kla"),
    *_both("PDN", "pdn"),
    *_both("PGDN", "pgdn"),
)


def study(setting: Setting) -> Study:
    """The study at a setting."""
    small = setting == "small"
    lengths = (16, 32) if small else (64, 128, 256, 512)
    sizes: dict[str, Any] = (
        {"width": 32, "num_layers": 1, "steps": 300, "batch_size": 32, "train_examples": 4096}
        if small
        else {"width": 64, "num_layers": 2, "steps": 1500, "batch_size": 128, "train_examples": 100_000}
    )
    cells = (
        Cell("parity", Parity(sequence_length=lengths[0], supervise="all"), lengths, weight_decay=0.01, **sizes),
        Cell(
            "permutations of 3, swaps",
            Permutations(sequence_length=lengths[0], num_items=3, generators="swaps"),
            lengths,
            weight_decay=0.01,
            **sizes,
        ),
    )
    return Study(
        "state_tracking",
        "State tracking beyond the length of training",
        MIXERS[1:5] if small else MIXERS,
        cells[:1] if small else cells,
        (1e-3, 1e-2) if small else (1e-3, 3e-3, 1e-2),
        (0, 1, 2),
        chance=(("parity", 50.0), ("permutations of 3, swaps", 100 / 6)),
    )
