"""The exact preconditioner: checks and documentation."""

from jax import Array
from jaxtyping import Float, Int

from rnnlib.ops.arguments import (
    accumulation_dtype,
    check_rank,
    check_segment_ids,
    check_shape,
    choose_implementation,
    floating_arrays,
    per_head,
)
from rnnlib.ops.context_parallel import expect_whole_rows
from rnnlib.ops.exact_preconditioner.reference import exact_preconditioner_scan
from rnnlib.ops.sharding import split_over_mesh

_NAME = "exact_preconditioner"


@split_over_mesh
def exact_preconditioner(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    *,
    ridge: float | Float[Array, ""] | Float[Array, " H"] = 1.0,
    gain: Float[Array, "B T H"] | None = None,
    initial_inverse: Float[Array, "B H K K"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T H K"], Float[Array, "B T H K"], Float[Array, "B H K K"]]:
    """The inverse Gram that the diagonal preconditioners approximate, applied to queries and to keys.

        G_t = ridge I + sum_{i <= t} gain_i k_i k_i^T      P_t = G_t^-1      q~_t = P_t q_t      k~_t = gain_t P_t k_t

    Two recurrences without decay then give the same outputs, those of ridge regression from keys to values
    (Preconditioned DeltaNet, arXiv 2604.21100, theorem 3.1): linear attention with the queries `q~` and `write=gain`,
    and the delta rule with `write_key=k~` and no gates. The update of P by Sherman and Morrison's formula is sequential
    (appendix C.4): this operator is for study and tests, and `rnnlib.ops.ridge_solve` for models.

    Args:
        q: queries.
        k: keys.
        ridge: positive, one number or one a head.
        gain: weight of each token in the regression, `>= 0`; None is 1.
        initial_inverse: P before the first token, symmetric positive definite; None is `I / ridge`.
        segment_ids: documents packed into a row: P restarts from `I / ridge` where the id changes. The first token
            continues `initial_inverse`.
        implementation: `"scan"` or None; there is no other.

    Returns:
        `q~`, `k~` and P after the last token (of the last segment), in float32, or float64 for float64 inputs. Float32
        loses about as many digits as the Gram's condition number has.

    Raises:
        ValueError: a shape, `ridge` or `implementation` is none of those above.
        TypeError: an array is not floating, or `segment_ids` is not of integers.
        NotImplementedError: `implementation` is `"chunked"` or `"triton"`, or tokens are split over devices.
    """
    q, k, gain, initial_inverse = floating_arrays(_NAME, q=q, k=k, gain=gain, initial_inverse=initial_inverse)
    check_rank(_NAME, "k", k, 4, axes="[B, T, H, K]")
    check_shape(_NAME, "q", q, k.shape, axes="the shape of k, [B, T, H, K]")
    batch, length, heads, channels = k.shape
    if gain is not None:
        check_shape(_NAME, "gain", gain, (batch, length, heads), axes="[B, T, H]")
    if initial_inverse is not None:
        shape = (batch, heads, channels, channels)
        check_shape(_NAME, "initial_inverse", initial_inverse, shape, axes="[B, H, K, K]")
    ridges = per_head(_NAME, "ridge", ridge, heads, accumulation_dtype(k), is_positive=True)
    check_segment_ids(_NAME, segment_ids, batch, length)
    expect_whole_rows(_NAME)
    run = choose_implementation(_NAME, implementation, {"scan": exact_preconditioner_scan}, length)
    return run(q, k, gain, ridges, initial_inverse, segment_ids)
