"""How one kernel is compiled."""

import dataclasses
from dataclasses import dataclass

NUM_SMS = 132
"""Of a card that is not known: a Hopper's."""
AMPLE_MEMORY = 160 * 1024
"""Bytes of shared memory of a program that cards for data centres have, and others have not."""


@dataclass(frozen=True)
class MosaicConfig:
    """How the Mosaic GPU kernel of a stage is compiled.

    Attributes:
        num_compute_warpgroups: of a program, each with 64 value channels or, in the first stage, a chunk.
        num_stages: chunks whose tiles, or queries and keys alone, are in shared memory at once; of the first stage,
            blocks of 64 key channels.
        num_ctas: at most, of a stage whose programs walk over all chunks: the number of processors.
        scores_in_output: whether the queries' scores are found by one more warpgroup of the output's programs, and not
            by the first stage; of these two stages.
    """

    num_compute_warpgroups: int = 1
    num_stages: int = 2
    num_ctas: int = NUM_SMS
    scores_in_output: bool = False


@dataclass(frozen=True)
class KernelConfig:
    """How one kernel is compiled.

    Attributes:
        num_warps: warps of 32 threads in a program.
        num_stages: depth of the software pipeline that loads ahead of matrix products in loops.
        block: width of the program's block along the axis that the kernel splits (value or key channels).
        inner: width of the blocks that the kernel loops over, where it does.
        is_lean: whether a loop keeps one buffer less of the tiles that only products read (see `load_tile`).
        mosaic: how the stage's kernel in Mosaic GPU is compiled, which then runs in place of Triton's; None for Triton.
        uses_mma: whether the stage's kernel by `mma.sync`, for cards without wgmma, runs in place of Triton's.
    """

    num_warps: int = 4
    num_stages: int = 2
    block: int = 64
    inner: int = 64
    is_lean: bool = False
    mosaic: MosaicConfig | None = None
    uses_mma: bool = False

    def with_stages(self, most: int) -> "KernelConfig":
        """The same with at most so many stages."""
        return dataclasses.replace(self, num_stages=min(self.num_stages, most))
