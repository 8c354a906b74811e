"""The result of the gain axis."""

from typing import NamedTuple

from jax import Array


class Gates(NamedTuple):
    """Erase and write gates, float32; a gate left out is 1.

    Attributes:
        beta: `[B, T, HV]`, short for `erase = write = beta`.
        erase: `[B, T, HV]` or `[B, T, HV, K]`.
        write: `[B, T, HV]` or `[B, T, HV, V]`.
        previous: `[B, T, HV]`, a gate on the previous token's key and value, which are written again; None writes none.
    """

    beta: Array | None = None
    erase: Array | None = None
    write: Array | None = None
    previous: Array | None = None
