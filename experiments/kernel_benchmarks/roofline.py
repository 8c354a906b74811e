"""What an operator must at least move and compute, counted by the chunk form with chunks of 64."""

from experiments.kernel_benchmarks.inputs import FLOAT32_ARRAYS, Shape
from experiments.kernel_benchmarks.operators import OPERATORS

CHUNK = 64


def operations(operator: str, shape: Shape, run: str) -> float:
    """Floating-point operations of matrix products; run is "forward" or "forward_backward".

    Forward, a chunk of C tokens of one head: the scores of queries (2 C^2 K), their product with values (2 C^2 V),
    reading and writing the state (4 C K V); the delta rule adds the triangle's scores and its inverse applied to keys
    and values (4 C^2 K + 2 C^2 V) and one more read of the state (2 C K V). Inverting the triangle, C^3 / 3, is left
    out. The backward has two products for each; what it computes again is not counted.
    A low-rank transition has two vectors beside the key: two more scores (4 C^2 K), their products with values
    (4 C^2 V), and one more write of the state (2 C K V).
    """
    batch, length, heads, key_size, value_size = shape
    products = 2 * CHUNK**2 * (key_size + value_size) + 4 * CHUNK * key_size * value_size
    if OPERATORS[operator].online:
        products += CHUNK**2 * (4 * key_size + 2 * value_size) + 2 * CHUNK * key_size * value_size
    if "a" in OPERATORS[operator].arrays:
        products += CHUNK**2 * (4 * key_size + 4 * value_size) + 2 * CHUNK * key_size * value_size
    return float(products * -(-length // CHUNK) * batch * heads * (3 if run == "forward_backward" else 1))


def moved_bytes(operator: str, shape: Shape, run: str, dtype_bytes: int = 2) -> float:
    """Bytes of arguments read once and results written once; backward: a cotangent read, gradients written too."""
    batch, length, heads, key_size, value_size = shape
    widths = {"q": key_size, "k": key_size, "v": value_size, "write_key": key_size, "a": key_size, "b": key_size}
    widths |= {"erase": key_size, "write": value_size, "channel_decay": key_size, "bounded_decay": key_size}
    tokens = batch * length * heads
    inputs = sum(
        tokens * widths.get(name, 1) * (4 if name in FLOAT32_ARRAYS else dtype_bytes)
        for name in OPERATORS[operator].arrays
    )
    out = tokens * value_size * dtype_bytes
    once = inputs + out
    return float(once if run == "forward" else once + inputs + out + inputs)


def floor_milliseconds(operator: str, shape: Shape, run: str, copy_gb_s: float, matmul_tflops: float) -> float:
    """The larger of the times that bytes and operations take at what the card reaches."""
    of_bytes = moved_bytes(operator, shape, run) / copy_gb_s / 1e9
    of_operations = operations(operator, shape, run) / matmul_tflops / 1e12
    return max(of_bytes, of_operations) * 1e3
