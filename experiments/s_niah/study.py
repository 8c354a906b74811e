"""A needle in a haystack, trained from nothing at 512 tokens and tested up to 8K.

Claim (KLA paper, table 4): KLA answers all at every length from 1K to 8K, Gated DeltaNet 98 to 99 %, Mamba-2 next to
none. Exact match: the whole answer has to be right.
"""

from experiments.sweep import Cell, Mixer, Study
from experiments.sweep.study import Setting
from rnnlib.data.tasks import make_task

MIXERS = (
    Mixer.of("KLA", "kla"),
    Mixer.of("Gated DeltaNet", "gated_deltanet"),
    Mixer.of("Mamba-2", "mamba2"),
    Mixer.of("DeltaNet", "deltanet"),
    Mixer.of("PGDN", "pgdn"),
    Mixer.of("Gated DeltaNet-2", "gated_deltanet2"),
)
_LENGTHS = (512, 1024, 2048, 4096, 8192)
_PAPER = {
    "Gated DeltaNet": (98.85, 98.25, 98.05, 98.5),
    "KLA": (100.0, 100.0, 100.0, 100.0),
    "Mamba-2": (0.1, 0.0, 0.0, 0.05),
}


def study(setting: Setting) -> Study:
    """The study at a setting."""
    if setting == "small":
        cell = Cell(
            "S-NIAH-1",
            make_task("s_niah_1", sequence_length=512),
            (512,),
            width=32,
            num_layers=1,
            steps=20,
            batch_size=32,
            train_examples=2048,
        )
        return Study("s_niah", "S-NIAH-1, small", MIXERS[:2], (cell,), (3e-3, 1e-2), (0, 1, 2), "query_accuracy")
    sizes = {"width": 128, "validation_examples": 256, "test_examples": 256, "dtype": "bfloat16"}
    cells = (
        Cell(
            "S-NIAH-1",
            make_task("s_niah_1", sequence_length=512, train_on_all_tokens=True),
            _LENGTHS,
            steps=4000,
            batch_size=64,
            train_examples=32_000,
            **sizes,  # type: ignore[arg-type]
        ),
        # The first try, in which nothing was learned.
        Cell(
            "loss on the answer alone",
            make_task("s_niah_1", sequence_length=1024),
            _LENGTHS[1:],
            steps=3000,
            batch_size=32,
            train_examples=16_000,
            **sizes,  # type: ignore[arg-type]
        ),
    )
    return Study(
        "s_niah",
        "S-NIAH-1: whole answers, beyond the length of training",
        MIXERS,
        cells,
        (7e-4, 2e-3),
        (0, 1, 2),
        "query_accuracy",
        paper=tuple(
            (f"{mixer}, KLA paper", "S-NIAH-1", length, value)
            for mixer, values in _PAPER.items()
            for length, value in zip(_LENGTHS[1:], values)
        ),
    )
