"""The erase gate and the write gate of a token, and whether they are one."""

import dataclasses
import functools
from typing import Any

import jax
from jax import Array

from rnnlib.ops.arguments import check_shape


@functools.partial(jax.tree_util.register_dataclass, data_fields=("erase", "own_write"), meta_fields=("tied",))
@dataclasses.dataclass(frozen=True)
class ResolvedGates:
    """Gates of the delta rule, as its implementations take them.

    Whether they are tied is a static fact, and never read from values or identities.

    Attributes:
        erase: None (1), `[B, T, HV]` or `[B, T, HV, K]`.
        own_write: the write gate where it is not tied: None (1), `[B, T, HV]` or `[B, T, HV, V]`.
        tied: whether `erase`, `[B, T, HV]`, is the write gate too. Kernels then load it once and round its gradient
            once.
    """

    erase: Any = None  # jax rebuilds pytrees with other leaves than arrays
    own_write: Any = None
    tied: bool = False

    @property
    def write(self) -> Array | None:
        """The write gate, tied or not."""
        return self.erase if self.tied else self.own_write

    def with_write(self, write: Array) -> "ResolvedGates":
        """The same erase gate with another write gate of its own."""
        return ResolvedGates(self.erase, write)


def resolve_gates(
    operator: str, beta: Array | None, erase: Array | None, write: Array | None, per_head: tuple[int, ...]
) -> ResolvedGates:
    """The gates that arguments mean: `beta` is both, tied; `erase` and `write` are two, also where they are equal.

    Args:
        operator: the public function's name, which begins the message.
        beta: None or `[B, T, HV]`.
        erase: as of `ResolvedGates`.
        write: likewise.
        per_head: `[B, T, HV]`.

    Raises:
        ValueError: `beta` has another shape, or comes with `erase` or `write`.
    """
    if beta is None:
        return ResolvedGates(erase, write)
    if erase is not None or write is not None:
        given = "erase" if erase is not None else "write"
        raise ValueError(f"{operator}: beta is short for erase = write = beta, so it can't be given with {given}")
    check_shape(operator, "beta", beta, per_head, axes="[B, T, HV]")
    return ResolvedGates(beta, tied=True)
