"""The ridge solve: reading with the solution of a ridge regression over all past keys (Gated KalmaNet, MesaNet)."""

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from rnnlib import ops
from rnnlib.fields import PositiveInteger, PositiveNumber
from rnnlib.layers.array_types import SegmentIds, ValueHeads
from rnnlib.layers.base import MixerShape
from rnnlib.layers.input_projection import ProjectedInput
from rnnlib.layers.solve import OperatorOptions, RecurrenceInputs, SolveConfig, Solver, expect_no_previous
from rnnlib.ops.ridge_solve import LinearSolver


class FixedProjection(nnx.Variable):
    """A random projection that is stored with the model and not trained."""


class RidgeState(NamedTuple):
    """The state of a ridge solver, float32.

    Attributes:
        gram: `[B, H, K, K]`, or `[B, H, d, d]` where keys are sketched to d channels.
        memory: `[B, HV, K, V]`, linear attention's state.
    """

    gram: Array
    memory: Array


@dataclasses.dataclass(frozen=True)
class RidgeRegression(SolveConfig):
    """Ridge regression at test time: linear attention read with `x_t = (H_t + lambda_t)^-1 q_t` in place of `q_t`.

    `H_t = gamma_t H_(t-1) + beta_t k_t k_t^T` and `U_t = gamma_t U_(t-1) + beta_t k_t v_t^T` with one decay per head,
    and with the gain axis's `beta` as weight of the token (Gated KalmaNet, section 4.1; MesaNet, arXiv 2506.05233).

    Attributes:
        ridge: strength of the regularisation; the initial value of a learned ridge.
        adaptive: whether the ridge is relative to the Frobenius norm of `H_t` (Gated KalmaNet) or absolute (MesaNet).
        learned: learns `lower_bound + softplus(p)` with a `p` per key channel.
        lower_bound: of a learned ridge.
        solver: `"chebyshev"`, `"conjugate_gradient"`, `"gradient_descent"`, `"nesterov"` or `"exact"`.
        iterations: of the solver.
        differentiation: `"implicit"`, `"unrolled"` or `"reversed"`, see `rnnlib.ops.ridge_solve.LinearSolver`.
        product_dtype: what the solver's products are rounded to, see `rnnlib.ops.ridge_solve.LinearSolver`.
        epsilon: added to the divisors of conjugate gradients.
        alpha_connection: reads with `q + alpha (x - q)`, `alpha = sigmoid(W x + b)` per head (Gated KalmaNet, section
            4.3).
        squared_gain: weighs tokens by `beta^2`: Gated KalmaNet's code multiplies both key and value by beta.
        sketch_size: solves in a projection of keys and queries to this many channels, `x = P (P^T H P + lambda)^-1
            P^T q` (appendix H); None is no sketch.
        sketch: whether the projection, one per head, starting orthonormal, is `"trained"` or stays `"random"`.
    """

    ridge: PositiveNumber = 0.02
    adaptive: bool = True
    learned: bool = False
    lower_bound: float = 0.0
    solver: str = "chebyshev"
    iterations: PositiveInteger = 30
    differentiation: str = "implicit"
    product_dtype: str | None = None
    epsilon: float = 0.0
    alpha_connection: bool = True
    squared_gain: bool = False
    sketch_size: PositiveInteger | None = None
    sketch: Literal["trained", "random"] = "trained"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.learned and not 0 <= self.lower_bound < self.ridge:
            raise ValueError(
                f"RidgeRegression: lower_bound is {self.lower_bound}, expected at least 0, below ridge = {self.ridge}"
            )

    def linear_solver(self) -> LinearSolver:
        """The operator's solver."""
        return LinearSolver(self.solver, self.differentiation, self.product_dtype, self.epsilon)

    def build(self, shape: MixerShape, options: OperatorOptions, *, rngs: nnx.Rngs) -> "RidgeSolver":
        """Builds the module.

        Raises:
            ValueError: value heads share key heads, the sketch is larger than a key, or there is no such solver.
        """
        self.linear_solver()
        if shape.group != 1:
            raise ValueError(
                f"RidgeRegression: expected as many value heads as the {shape.key_heads} key heads, whose Gram "
                f"matrices take one decay and one gain each, not {shape.value_heads}"
            )
        if self.sketch_size is not None and self.sketch_size > shape.key_size:
            raise ValueError(
                f"RidgeRegression: sketch_size is {self.sketch_size}, expected at most the {shape.key_size} channels "
                "of a key"
            )
        return RidgeSolver(self, shape, options, rngs=rngs)

    def describe(self) -> str:
        """The axis in a few words, for the table of mixers."""
        return f"ridge ({self.solver.replace('_', ' ')})"

    def erases(self) -> bool:
        """False: both states decay alone."""
        return False


class RidgeSolver(Solver):
    """Calls `rnnlib.ops.ridge_solve`, then `rnnlib.ops.linear_attention` with its solutions."""

    def __init__(self, config: RidgeRegression, shape: MixerShape, options: OperatorOptions, *, rngs: nnx.Rngs):
        self.config = config
        self.shape = shape
        self.options = options
        self.solved_size = shape.key_size if config.sketch_size is None else config.sketch_size
        if config.alpha_connection:
            self.read_columns(alpha=shape.project(shape.key_heads, use_bias=True, rngs=rngs))
        self.ridge = self._initial_ridge() if config.learned else None
        self.projection = None if config.sketch_size is None else self._initial_projection(rngs)

    def _initial_ridge(self) -> nnx.Param:
        """`p` with `softplus(p) = ridge - lower_bound`; a vector, so that no optimizer decays it."""
        start = math.log(math.expm1(self.config.ridge - self.config.lower_bound))
        return nnx.Param(jnp.full((self.shape.key_heads * self.solved_size,), start, jnp.float32))

    def _initial_projection(self, rngs: nnx.Rngs) -> nnx.Variable:
        shape = self.shape
        normal = jax.random.normal(rngs.params(), (shape.key_heads, shape.key_size, self.solved_size), jnp.float32)
        orthonormal = jnp.linalg.qr(normal)[0].astype(shape.param_dtype)
        return nnx.Param(orthonormal) if self.config.sketch == "trained" else FixedProjection(orthonormal)

    def __call__(
        self,
        inputs: ProjectedInput,
        recurrence_inputs: RecurrenceInputs,
        *,
        segment_ids: SegmentIds | None = None,
        state: Any = None,
    ) -> tuple[ValueHeads, Any]:
        """Output and next state.

        Raises:
            ValueError: the decay is per channel, the gain gives more than a beta per head, or the keys axis gives a
                write key: the Gram matrix has none of these.
        """
        gates, keys, log_decay = recurrence_inputs.gates, recurrence_inputs.keys, recurrence_inputs.decay.log_decay
        expect_no_previous("RidgeRegression", gates)
        if log_decay is not None and log_decay.ndim != 3:
            raise ValueError("RidgeRegression: the decay is per channel, expected one per head: Gram matrices take one")
        if gates.erase is not None or gates.write is not None:
            raise ValueError("RidgeRegression: the gain gives erase or write gates, expected beta, the token's weight")
        if keys.write_key is not None:
            raise ValueError(
                "RidgeRegression: the keys axis gives a write key, expected none: a regression has one key"
            )
        weight = gates.beta
        if weight is not None and self.config.squared_gain:
            weight = jnp.square(weight)

        shared: dict[str, Any] = {
            "log_decay": log_decay,
            "segment_ids": segment_ids,
            "chunk_size": self.options.chunk_size,
            "implementation": self.options.implementation,
        }
        # A solution is linear in its query, so alpha multiplies the query. The solve's gradient then needs no alpha.
        reader, dtype = keys.query, self.shape.gate_dtype
        alpha = jax.nn.sigmoid(inputs["alpha"].astype(dtype))[..., None] if self.config.alpha_connection else None
        query = reader if alpha is None else (alpha * reader.astype(dtype)).astype(reader.dtype)
        solution, gram = self._solve(query, keys.key, weight, None if state is None else state.gram, shared)
        if alpha is not None:
            solution = ((1.0 - alpha) * reader.astype(dtype) + solution.astype(dtype)).astype(reader.dtype)
        out, memory = ops.linear_attention(
            solution,
            keys.key,
            recurrence_inputs.value,
            write=weight,
            initial_state=None if state is None else state.memory,
            scale=self.options.scale,
            **shared,
        )
        return out, RidgeState(gram, memory)

    def _solve(
        self, query: Array, key: Array, weight: Array | None, gram: Array | None, shared: dict[str, Any]
    ) -> tuple[Array, Array]:
        """The solutions `[B, T, H, K]` and the next Gram matrix."""
        config = self.config
        projection = None if self.projection is None else self.projection[...].astype(query.dtype)
        if projection is not None:
            query, key = (jnp.einsum("bthk,hkd->bthd", y, projection) for y in (query, key))
        if weight is not None:
            # beta k k^T is the outer product of sqrt(beta) k; the floor keeps the root's derivative finite.
            key = (jnp.sqrt(jnp.maximum(weight, 1e-12))[..., None] * key).astype(key.dtype)
        solution, gram = ops.ridge_solve(
            query,
            key,
            ridge=config.ridge if self.ridge is None else self._learned_ridge(),
            adaptive=config.adaptive,
            iterations=config.iterations,
            solver=config.linear_solver(),
            initial_gram=gram,
            **shared,
        )
        if projection is not None:
            solution = jnp.einsum("bthd,hkd->bthk", solution, projection)
        return solution, gram

    def _learned_ridge(self) -> Float[Array, "H K"]:
        assert self.ridge is not None
        ridge = self.config.lower_bound + jax.nn.softplus(self.ridge[...].astype(self.shape.gate_dtype))
        return ridge.reshape(self.shape.key_heads, self.solved_size)

    def init_state(self, batch_size: int) -> RidgeState:
        """The state before the first token: zeros."""
        shape, dtype = self.shape, self.shape.gate_dtype
        gram = (batch_size, shape.key_heads, self.solved_size, self.solved_size)
        memory = (batch_size, shape.value_heads, shape.key_size, shape.value_size)
        return RidgeState(jnp.zeros(gram, dtype), jnp.zeros(memory, dtype))
