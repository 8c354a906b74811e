"""Kernels that are known to spill on an H200, and why they stay so."""

import re

TUNED = "accumulators that stay in registers; the launch was chosen by its time on the card, spill and all (`tune.py`)"

KNOWN: dict[str, tuple[int, str]] = {
    "delta_output": (120, TUNED),
    "delta_reverse": (28, TUNED),
    "delta_fold_segments": (12, TUNED),
}
"""By kernel, the most bytes of stores a thread in any case, and the reason."""


def allowed_spills(case: str, kernel: str) -> int:
    """Bytes of stores a thread that a kernel of a case is known to spill on an H200."""
    most, _ = KNOWN.get(re.sub(r"__\d+$", "", kernel), (0, ""))
    return most
