"""Gradients of attention in one Mosaic GPU kernel: interpreted, with races looked for, against the definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.attention.mosaic_gpu.bwd import attention_gradients, unsupported_reason
from rnnlib.ops import causal_attention
from rnnlib.ops.kernels import attention_gradient_kernel
from tests.pallas_kernels import mosaic_interpreter
from tests.pallas_kernels.cases import relative_error
from tests.pallas_kernels.test_lowering import H200, distinct_kernels, lowered_text

# Shape [B, T, H, HK], window.
CASES = {
    "one_block": ((1, 128, 1, 1), None),
    "rows_and_heads": ((2, 256, 2, 2), None),
    "heads_that_share_keys": ((1, 384, 4, 2), None),
    "window_of_two_tokens": ((1, 256, 1, 1), 2),
    "window_in_a_block": ((1, 384, 2, 1), 100),
    "window_over_blocks": ((1, 512, 1, 1), 130),
    "window_of_blocks": ((1, 512, 1, 1), 257),
    "window_longer_than_the_row": ((1, 256, 1, 1), 1000),
}
SCALE = 0.2


def make_arrays(shape, key=0):
    batch, length, heads, key_heads = shape
    keys = jax.random.split(jax.random.key(key), 4)
    sizes = {"q": heads, "k": key_heads, "v": key_heads, "d_out": heads}
    return {
        name: jax.random.normal(key, (batch, length, count, 64), jnp.bfloat16)
        for key, (name, count) in zip(keys, sizes.items())
    }


def attention(q, k, v, window):
    """The output, and the log sums `[B, H, T]`, by the definition."""
    length, group = q.shape[1], q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    distance = jnp.arange(length)[:, None] - jnp.arange(length)
    seen = (distance >= 0) & (distance < (window or length))
    scores = jnp.where(seen, jnp.einsum("bthk,bshk->bhts", q, k) * SCALE, -jnp.inf)
    log_sums = jax.nn.logsumexp(scores, axis=3)
    return jnp.einsum("bhts,bshv->bthv", jnp.exp(scores - log_sums[..., None]), v), log_sums


def outcome(arrays, window):
    """What the kernel gives, and the gradients of the definition in float64."""
    with jax.enable_x64(True):
        wide = [np.asarray(arrays[name], np.float64) for name in ("q", "k", "v", "d_out")]
        out, pull_back = jax.vjp(lambda *x: attention(*x, window)[0], *wide[:3])
        log_sums = attention(*wide[:3], window)[1]
        expected = pull_back(jnp.asarray(wide[3]))
    rounded = (jnp.asarray(np.asarray(x), dtype) for x, dtype in ((out, jnp.bfloat16), (log_sums, jnp.float32)))
    found = attention_gradients(
        *(arrays[name] for name in ("q", "k", "v")), *rounded, arrays["d_out"], scale=SCALE, window=window
    )
    return found, expected


def check(found, expected):
    for name, x, y in zip("qkv", found, expected, strict=True):
        assert x.dtype == jnp.bfloat16, name
        assert relative_error(np.asarray(x, np.float64), y) < 5e-3, name  # bfloat16's last digit is 4e-3


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_definition(name, capsys):
    mosaic_interpreter.install()
    shape, window = CASES[name]
    check(*outcome(make_arrays(shape), window))
    assert "RACE" not in "".join(capsys.readouterr())


def test_rows_may_be_mapped_over():
    """`jax.vmap` adds rows; an array that is not mapped over is the same for all."""
    mosaic_interpreter.install()
    arrays = make_arrays((2, 128, 1, 1))
    out, log_sums = attention(*(arrays[name].astype(jnp.float32) for name in ("q", "k", "v")), None)
    given = [arrays["q"], arrays["k"], arrays["v"], out.astype(jnp.bfloat16), log_sums, arrays["d_out"]]
    mapped = [x[:, None] for x in given]
    mapped[2] = given[2][:1]
    run = lambda *x: attention_gradients(*x, scale=SCALE)  # noqa: E731
    found = jax.vmap(run, in_axes=(0, 0, None, 0, 0, 0))(*mapped)
    for row in (0, 1):
        expected = run(*(x[row : row + 1] for x in given[:2]), given[2][:1], *(x[row : row + 1] for x in given[3:]))
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_array_equal(np.asarray(x[row], np.float32), np.asarray(y, np.float32))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (dict(dtype=jnp.float32), "of dtype float32"),
        (dict(channels=128), "of 128 channels"),
        (dict(length=192), "rows of 192 tokens"),
    ],
)
def test_calls_that_the_kernel_does_not_serve_are_named(changed, reason):
    sizes = dict(dtype=jnp.bfloat16, channels=64, length=256) | changed
    q = jnp.zeros((1, sizes["length"], 2, sizes["channels"]), sizes["dtype"])
    assert "this device" in unsupported_reason(q, q, q)
    with jax.sharding.use_abstract_mesh(H200):
        assert reason in unsupported_reason(q, q, q)
    with pytest.raises(NotImplementedError, match=reason):
        attention_gradients(q, q, q, q, jnp.zeros((1, 2, sizes["length"])), q, scale=1.0)


def test_hopper_cards_take_it():
    """More calls take no more kernels to compile. The forward pass, cuDNN's, cannot be lowered here."""
    q = jax.ShapeDtypeStruct((2, 256, 2, 64), jnp.bfloat16)
    log_sums = jax.ShapeDtypeStruct((2, 2, 256), jnp.float32)

    def of_calls(count):
        def run(q, k, v, *others):
            for _ in range(count):
                q, k, v = attention_gradients(q, k, v, *others, scale=SCALE)
            return q, k, v

        text = lowered_text(run, q, q, q, q, log_sums, q)
        assert text.count("mosaic_gpu_v2") == count
        return len(distinct_kernels(text))

    assert of_calls(1) == 1
    assert of_calls(6) == of_calls(3)
    array = jnp.zeros(q.shape, q.dtype)
    with jax.sharding.use_abstract_mesh(H200):
        assert attention_gradient_kernel(array, array, array) is attention_gradients
    assert attention_gradient_kernel(array, array, array) is None


def cudnn_of_shapes(q, k, v, *, scale, implementation, is_causal, local_window_size, mask):
    """Stands for cuDNN's attention where programs are lowered alone: it saves log sums as cuDNN's does."""
    assert implementation == "cudnn" and is_causal and mask is None

    @jax.custom_vjp
    def run(q, k, v):
        return q * scale

    def forward(q, k, v):
        log_sums = jnp.sum(q.astype(jnp.float32), axis=3).transpose(0, 2, 1)
        return run(q, k, v), (q, k, v, log_sums)

    run.defvjp(forward, lambda kept, g: (g, *kept[1:3]))
    return run(q, k, v)


def gradient_of_attention(arrays):
    def loss(arrays):
        return jnp.sum(causal_attention(**arrays, window=200).astype(jnp.float32))

    return jax.grad(loss)(arrays)


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=str)
def test_it_lowers_on_rows_split_over_devices(kind, monkeypatch):
    """By the operator itself on an Explicit axis, else within `jax.shard_map`, which checks what varies."""
    monkeypatch.setattr(jax.nn, "dot_product_attention", cudnn_of_shapes)
    mesh = AbstractMesh((2,), ("x",), axis_types=(kind,), abstract_device=H200.abstract_device)
    sharding = NamedSharding(mesh, P("x")) if kind == AxisType.Explicit else None
    heads = {"q": 4, "k": 2, "v": 2}
    arrays = {n: jax.ShapeDtypeStruct((2, 256, h, 64), jnp.bfloat16, sharding=sharding) for n, h in heads.items()}
    gradient = gradient_of_attention
    if kind == AxisType.Auto:
        gradient = jax.shard_map(gradient, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=True)
    with jax.sharding.use_abstract_mesh(mesh):
        text = jax.jit(gradient).trace(arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 1


@pytest.mark.parametrize("mapped", [False, True])
def test_attention_takes_it(mapped, monkeypatch):
    """But not for packed rows, wider heads and other lengths: these are cuDNN's alone."""
    monkeypatch.setattr(jax.nn, "dot_product_attention", cudnn_of_shapes)
    shape = (2, 256, 2, 64)
    arrays = {name: jax.ShapeDtypeStruct((3, *shape) if mapped else shape, jnp.bfloat16) for name in "qkv"}
    gradient = jax.vmap(gradient_of_attention) if mapped else gradient_of_attention
    assert lowered_text(gradient, arrays).count("mosaic_gpu_v2") == 1
    for shape in ((2, 256, 2, 128), (2, 192, 2, 64)):
        others = dict.fromkeys("qkv", jax.ShapeDtypeStruct(shape, jnp.bfloat16))
        assert lowered_text(gradient_of_attention, others).count("mosaic_gpu_v2") == 0


def test_without_log_sums_gradients_are_cudnns(monkeypatch):
    """Another jax may keep something else for cuDNN's backward pass."""

    def other(q, k, v, **options):
        return q + k + v

    monkeypatch.setattr(jax.nn, "dot_product_attention", other)
    arrays = dict.fromkeys("qkv", jax.ShapeDtypeStruct((2, 256, 2, 64), jnp.bfloat16))
    # A function of its own: `jax.jit` keeps what it has traced of another.
    assert lowered_text(lambda x: gradient_of_attention(x), arrays).count("mosaic_gpu_v2") == 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu_gradients_are_those_of_the_definition(name):
    shape, window = CASES[name]
    check(*outcome(make_arrays(shape), window))
