"""How a call is cut into programs: segments of the sequence, block widths, warps and pipeline depth of each kernel."""

from dataclasses import dataclass

from pallas_kernels.triton.backend import Launch


@dataclass(frozen=True)
class Schedule:
    """Compilation of each kernel and the number of segments.

    Attributes:
        segments: parts of the sequence that run side by side; 1 for one pass from end to end.
        prepare: first stage.
        maps: affine maps of segments.
        fold: their composition.
        output: outputs and final state.
        states: recomputed states, in the backward.
        reverse: the state's gradient.
        gradients: gradients of the arguments; `block` is a block of key channels.
    """

    segments: int = 1
    prepare: Launch = Launch(num_warps=4, num_stages=1)
    maps: Launch = Launch(num_warps=4, num_stages=2)
    fold: Launch = Launch(num_warps=4, num_stages=1)
    output: Launch = Launch(num_warps=4, num_stages=2)
    states: Launch = Launch(num_warps=4, num_stages=2)
    reverse: Launch = Launch(num_warps=4, num_stages=2)
    gradients: Launch = Launch(num_warps=8, num_stages=1, block=128)
