"""Kernels that are known to spill on an H200, and why they stay so."""

import re

TUNED = "accumulators that stay in registers; the launch was chosen by its time on the card, spill and all (`tune.py`)"
WIDE = "default launches for 256 channels, where nothing was measured that spills less"
EXTREME = "programs for chunks of extreme decay, of which there are few: pairs in four groups, all in registers"
ITERATES = "the iterates of a chunk stay in registers through all iterations (`ridge_solve`)"
READOUT = "one warp holds all channels of its tokens; `GramSchedule` was chosen by time, with 128 channels"
OPERANDS = "three sums, a factor and a product's left operand of a chunk in registers at once; no wgmma waits"
GATES = "gates by channel in float32, with launches that were chosen without them"
COPIES = "places in arrays, stored before the loops, read mostly by the warpgroup that copies; no wgmma waits"
SCORES = "two registers of the warpgroup that finds scores to keep, stored and loaded once a chunk; no wgmma waits"
MMA = "state, residuals and output of 64 rows in one warpgroup, all in registers; for cards without wgmma, untimed"
KEYS = "one warp holds eight heads' channels, biases and sums; the launch was chosen by its time on the card"

KNOWN: tuple[tuple[str, str, int, str], ...] = (
    ("", "delta_prepare", 136, TUNED),
    ("", "delta_prepare_extreme", 816, EXTREME),
    ("", "delta_fold_segments", 128, TUNED),
    ("", "delta_output", 156, TUNED),
    ("", "delta_reverse", 136, TUNED),
    ("", "delta_gradients", 156, TUNED),
    ("", "delta_gradients_extreme", 720, EXTREME),
    ("", "linear_sums", 144, TUNED),
    ("few heads", "delta_output_mosaic", 8, COPIES),
    ("scalar-128x128-bfloat16 many heads", "delta_output_mosaic", 8, SCORES),
    ("channel-128x128-bfloat16 few heads", "delta_reverse_mosaic", 8, COPIES),
    ("delta+key", "delta_gradients_mosaic", 28, COPIES),
    ("channel", "delta_channel_gradients_mosaic", 80, OPERANDS),
    ("grouped packed", "delta_channel_gradients_mosaic", 176, OPERANDS),
    ("channel", "delta_channel_factors_mosaic", 128, COPIES),
    ("channel gates", "delta_prepare", 224, GATES),
    ("channel gates", "delta_prepare_extreme", 1028, GATES),
    ("channel gates", "delta_gradients_extreme", 808, GATES),
    ("forward mosaic_mma", "delta_mma_output_mosaic", 44, MMA),
    ("256x256", "delta_prepare", 580, WIDE),
    ("256x256", "delta_prepare_extreme", 1696, EXTREME),
    ("256x256", "delta_output", 392, WIDE),
    ("256x256", "delta_reverse", 232, WIDE),
    ("ridge", "ridge_chebyshev", 460, ITERATES),
    ("ridge", "ridge_conjugate_gradient", 1308, ITERATES),
    ("ridge", "ridge_gradients", 192, ITERATES),
    ("rotated keys", "rotated_keys_reverse", 256, KEYS),
    ("preconditioner query", "gram_apply", 296, READOUT),
    ("preconditioner query", "gram_reverse", 120, READOUT),
    ("preconditioner write key 256", "gram_sums", 5320, READOUT),
    ("preconditioner write key 256", "gram_apply", 2976, READOUT),
    ("preconditioner write key 256", "gram_reverse_sums", 808, READOUT),
    ("preconditioner write key 256", "gram_reverse", 3176, READOUT),
)
"""What a call's name has in it, the kernel, the most bytes of stores a thread in any such call, and the reason."""


def allowed_spills(case: str, kernel: str) -> int:
    """Bytes of stores a thread that a kernel of a case is known to spill on an H200."""
    name = re.sub(r"__\d+$", "", kernel)
    return max((most for part, known, most, _ in KNOWN if part in case and known == name), default=0)
