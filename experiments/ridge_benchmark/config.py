"""What the command measures."""

import dataclasses
import pathlib
from dataclasses import dataclass
from typing import Literal

Sizes = tuple[int, int, int]
METHODS = ("chebyshev", "conjugate_gradient")
PRECISIONS = ("bfloat16", "tf32", "split")
PEER_LAYER = "Gated DeltaNet, flash-linear-attention"
"""Of the records of the peer's layer."""
RIDGES = {"chebyshev": 0.02, "conjugate_gradient": 0.25}
"""Relative to the Gram matrix's norm, as Gated KalmaNet has it, and absolute, the least that MesaNet allows."""


@dataclass(frozen=True)
class RidgeBenchmarkConfig:
    """Times the ridge solve, its precisions and the layers with it, and writes JSON, a table and a picture."""

    name: str = "h200"
    """Results go to NAME.json, NAME.md and NAME.png."""
    output: pathlib.Path = pathlib.Path(__file__).parent / "results"
    """Folder of the results."""
    from_json: bool = False
    """Measure nothing: make table and picture again from NAME.json."""
    commit: str | None = None
    """The source's commit, where the folder it runs from is no checkout."""

    exclusive: tuple[pathlib.Path, ...] = ()
    """Lock files, for several commands on one GPU: all compile side by side and time one after another."""

    only: tuple[Literal["solves", "layers", "errors"], ...] = ("solves", "layers", "errors")
    """Parts to measure."""
    shapes: tuple[Sizes, ...] = ((1, 8192, 8), (4, 4096, 8))
    """(B, T, H) of the solves."""
    head_size: int = 128
    """Channels of a key."""
    sketch_sizes: tuple[int, ...] = (32, 64)
    """Smaller numbers of channels at which Chebyshev's solve is timed too, and the layer with keys sketched to the
    first."""
    iterations: int = 30
    """Of the solvers."""

    error_shape: Sizes = (1, 1024, 2)
    """(B, T, H) at which errors are measured against float64."""
    error_iterations: tuple[int, ...] = (10, 20, 30)
    """Iterations at which they are."""

    layer_shape: tuple[int, int] = (4, 4096)
    """(B, T) of the layers."""
    width: int = 1024
    """Of the layers."""
    layer_heads: int = 8
    """Of the layers."""

    peer: bool = True
    """Time flash-linear-attention's MesaNet and its Gated DeltaNet layer beside ours, where it is installed."""
    repeats: int = 15
    """Timed calls of each; medians are reported."""
    time_limit: float = 900.0
    """Seconds after which no further measurement starts."""

    def __post_init__(self) -> None:
        """Checks sizes."""
        if self.width % self.layer_heads:
            raise ValueError(f"width is {self.width}, expected a multiple of layer_heads = {self.layer_heads}")
        if not self.sketch_sizes:
            raise ValueError("sketch_sizes is empty, expected at least one size")

    def settings(self) -> dict[str, object]:
        """What of it decides the results."""
        left_out = ("output", "from_json", "commit", "name", "exclusive")
        return {key: value for key, value in dataclasses.asdict(self).items() if key not in left_out}
