"""The end of a block's half: a product, its sum with the residual stream, and the norm that reads the sum."""

from typing import Any

from flax import nnx
from jaxtyping import Array, Float

from rnnlib.layers.linear import is_plain
from rnnlib.layers.normalization import norm_and_stream, scale_and_eps
from rnnlib.ops.rms_norm import norm_kernel_supports, rms_norm_of_sum
from rnnlib.ops.sharding import is_split
from rnnlib.ops.skinny_gemm import residual_product, skinny_kernel_supports, split_k_partials, sum_of_partials


def residual_add(
    stream: Float[Array, "*rows D"],
    features: Float[Array, "*rows F"],
    output: Any = None,
    norm: nnx.Module | None = None,
    *,
    scale: float = 1.0,
) -> tuple[Float[Array, "*rows D"], Float[Array, "*rows D"] | None]:
    """`stream + scale * output(features)`, and the norm of this sum.

    Of few rows, the matmul's kernel adds the stream. Where programs of the kernel share the inner axis, the norm's
    kernel adds up their partial sums and the stream.

    Args:
        stream: the residual stream.
        features: what the output map reads.
        output: a linear map, or any other; None adds the features themselves.
        norm: what reads the sum next; None for no norm.
        scale: of what is added. No kernel serves another than 1.

    Returns:
        The new stream, and its norm (None without one).
    """
    kernel = _kernel_for_few_rows(stream, features, output) if scale == 1 else None
    if kernel is None:
        y = features if output is None else output(features)
        total = stream + (y if scale == 1 else y * scale)
    else:
        partials = split_k_partials(features, kernel)
        found = None if norm is None else scale_and_eps(norm)
        if partials is None:
            total = residual_product(features, kernel, stream)
        elif found is not None and norm_kernel_supports(stream, found[0], between_kernels=True):
            options: dict[str, Any] = {"eps": found[1], "dtype": norm.dtype}  # type: ignore[union-attr]
            normed, total = rms_norm_of_sum(partials, stream, found[0], **options)
            return total, normed
        else:
            total = sum_of_partials(partials, stream)
    if norm is None:
        return total, None
    normed, total = norm_and_stream(norm, total)
    return total, normed


def _kernel_for_few_rows(stream: Array, features: Array, output: Any) -> Array | None:
    """The matrix of an output map whose product with few rows a kernel adds to the stream; None for others."""
    if not is_plain(output) or not features.size or stream.dtype != features.dtype or is_split(stream):
        return None
    if output.dtype != features.dtype or stream.shape != (*features.shape[:-1], output.out_features):
        return None
    kernel = output.kernel[...].astype(features.dtype)
    return kernel if skinny_kernel_supports(features, (kernel,)) else None
