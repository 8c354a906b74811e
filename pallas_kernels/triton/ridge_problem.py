"""What a ridge solve is about: its arrays, its static facts, and the decays that its kernels share."""

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.triton.backend import Launch, Operand, call, cdiv, interpreted
from pallas_kernels.triton.decay import CHUNK, ChunkDecay, chunk_decay, decay_from_start, decay_of_chunk, decay_to_end
from pallas_kernels.triton.problem import Problem

METHODS = ("chebyshev", "conjugate_gradient", "gradient_descent", "nesterov")
PRECISIONS = ("bfloat16", "split", "tf32", "float32")


class RidgeInputs(NamedTuple):
    """Arguments of a solve, lengths padded to whole chunks and channels to powers of two.

    Attributes:
        q: right-hand sides `[B, T, H, K]`.
        k: `[B, T, H, K]`.
        ridge: `[H, 1 or K]` float32.
        log_decay: None or `[B, T, H]` float32.
        initial_gram: None or `[B, H, K, K]` float32, symmetric.
        starts: None, or `[B, T]` int32, 1 at each token that starts a segment; then there is a `log_decay`.
    """

    q: Array
    k: Array
    ridge: Array
    log_decay: Array | None = None
    initial_gram: Array | None = None
    starts: Array | None = None


@dataclass(frozen=True)
class Method:
    """How a solve iterates.

    Attributes:
        name: one of `METHODS`.
        iterations: their number.
        adaptive: whether the ridge is relative to the Gram matrix's Frobenius norm.
        epsilon: added to both divisors of conjugate gradients.
        precision: of the products, one of `PRECISIONS`.
    """

    name: str = "chebyshev"
    iterations: int = 30
    adaptive: bool = True
    epsilon: float = 0.0
    precision: str = "bfloat16"

    @property
    def needs_norm(self) -> bool:
        """Whether the Gram matrix's norm is the ridge's unit or bounds the eigenvalues."""
        return self.adaptive or self.name != "conjugate_gradient"

    @property
    def parts(self) -> int:
        """In how many parts of bfloat16 a state is stored."""
        return 2 if self.precision == "split" else 1

    @property
    def state_dtype(self) -> Any:
        """The dtype of stored states."""
        return jnp.bfloat16 if self.precision in ("bfloat16", "split") else jnp.float32


@dataclass(frozen=True)
class RidgeSchedule:
    """How a solve is cut into programs.

    Attributes:
        increments: what each chunk adds to the Gram matrix.
        scan: Gram matrices at the chunks' starts; `block` is a number of rows, `inner` the number of chunks whose loads
            are begun together.
        solve: the iterations.
        start_gradients: what each chunk adds to the gradient of the Gram matrix; `block` is a block of key channels.
        reverse_scan: that gradient; likewise.
        boundary_gradients: gradients of keys and decay through the chunks' ends; `block` is a block of key channels.
        gradients: through pairs of tokens; likewise.
        keeps_states: whether the backward keeps the Gram matrices at the chunks' starts, which take as much memory as
            keys and solutions of 128 channels do, or makes them again.
    """

    increments: Launch = Launch(num_warps=8, num_stages=1)
    scan: Launch = Launch(num_warps=4, num_stages=1, block=8, inner=8)
    solve: Launch = Launch(num_warps=4, num_stages=1)
    start_gradients: Launch = Launch(num_warps=8, num_stages=1, block=64)
    reverse_scan: Launch = Launch(num_warps=4, num_stages=1, block=8, inner=8)
    boundary_gradients: Launch = Launch(num_warps=4, num_stages=2, block=64)
    gradients: Launch = Launch(num_warps=4, num_stages=1, block=128)
    keeps_states: bool = True


def ridge_problem(inputs: RidgeInputs) -> Problem:
    """The static facts of a solve, as those of linear attention from keys to keys."""
    batch, length, heads, size = inputs.k.shape
    dtype = jnp.dtype(inputs.k.dtype)
    return Problem(batch, length, heads, heads, size, size, dtype, False, 1.0)


class Rows(NamedTuple):
    """Decay by token, `[B, H, T]` float32 (int32 for `runs`); see `ChunkDecay` for the first three.

    Attributes:
        total: cumulative log decay in the chunk.
        fine: the rest of its digits.
        runs: number of segment starts in the chunk; None without segments.
        from_start: decay from the chunk's start up to and with each token.
        to_end: from each token, left out, to the chunk's end.
        kept: decay over each chunk, `[B, H, N]`.
    """

    total: Array | None = None
    fine: Array | None = None
    runs: Array | None = None
    from_start: Array | None = None
    to_end: Array | None = None
    kept: Array | None = None


def _rows_kernel(r):
    starts = None if r.starts is None else r.starts[...]
    decay = chunk_decay(r.log_decay[...].astype(jnp.float32), starts)
    r.total[...] = decay.total
    r.fine[...] = decay.fine
    if starts is not None:
        r.runs[...] = decay.runs
    r.from_start[...] = decay_from_start(decay)
    r.to_end[...] = decay_to_end(decay)
    r.kept[...] = decay_of_chunk(decay)


def decay_rows(problem: Problem, inputs: RidgeInputs) -> Rows:
    """Decays by token and chunk; all None without decay."""
    p = problem
    if inputs.log_decay is None:
        return Rows()

    def at(h, n, b):
        return b, n, h, 0

    row = p.of_head(p.per_head(p.length, dtype=jnp.float32), (CHUNK,), lambda h, n, b: (b, h, n))
    kept = Operand(p.per_head(p.chunks, dtype=jnp.float32), (None, None, None), lambda h, n, b: (b, h, n))
    runs = p.of_head(p.per_head(p.length, dtype=jnp.int32), (CHUNK,), lambda h, n, b: (b, h, n))
    results = call(
        _rows_kernel,
        "ridge_decay",
        p.chunk_grid,
        {"log_decay": p.of_token(inputs.log_decay, CHUNK, at), "starts": p.of_position(inputs.starts, at)},
        {
            "total": row,
            "fine": row,
            "runs": None if inputs.starts is None else runs,
            "from_start": row,
            "to_end": row,
            "kept": kept,
        },
        Launch(num_warps=1, num_stages=1),
    )
    return Rows(**results)


def rows_of_chunk(problem: Problem, rows: Rows, names: tuple[str, ...]) -> dict[str, Operand | None]:
    """Operands for kernels of one program a chunk, on `chunk_grid`."""

    def operand(name):
        return problem.of_head(getattr(rows, name), (CHUNK,), lambda h, n, b: (b, h, n))

    return {name: operand(name) for name in names}


def loaded_decay(r) -> ChunkDecay:
    """The `ChunkDecay` that `decay_rows` stored."""
    if r.total is None:
        return ChunkDecay(None, None, None)
    return ChunkDecay(r.total[...], r.fine[...], None if r.runs is None else r.runs[...])


def split(x: Array) -> tuple[Array, Array]:
    """`x` as a sum of two bfloat16 values."""
    # XLA takes a cast there and back, which is what remains when interpreted, for no change of the value.
    high = (lax.reduce_precision(x, 8, 7) if interpreted() else x).astype(jnp.bfloat16)
    return high, (x - high.astype(jnp.float32)).astype(jnp.bfloat16)


def choose_schedule(problem: Problem, precision: str = "bfloat16") -> RidgeSchedule:
    """The schedule measured best on an H200.

    A scan whose programs crowd the card loads further ahead; factors of more than one part take smaller blocks.
    """
    schedule = RidgeSchedule()
    programs = problem.batch * problem.value_heads * cdiv(problem.key_size, schedule.scan.block)
    if programs >= 256:
        schedule = dataclasses.replace(schedule, scan=dataclasses.replace(schedule.scan, inner=16))
    if precision == "bfloat16":
        return schedule
    return dataclasses.replace(
        schedule,
        boundary_gradients=dataclasses.replace(schedule.boundary_gradients, block=32),
        gradients=dataclasses.replace(schedule.gradients, block=64),
    )
