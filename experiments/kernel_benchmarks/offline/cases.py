"""Calls whose kernels are compiled: every kernel of every operator, with the launches that the package chooses."""

import dataclasses
import functools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from typing import Any

import jax
import jax.numpy as jnp

from experiments.kernel_benchmarks.offline.cards import CARDS
from pallas_kernels import operators
from pallas_kernels.attention.api import token_attention
from pallas_kernels.attention.mosaic_gpu.bwd import attention_gradients
from pallas_kernels.delta_rule.api import gated_delta_rule
from pallas_kernels.delta_rule.delayed_state import DelayedState, without_pending
from pallas_kernels.delta_rule.delayed_update import delayed_token, flush
from pallas_kernels.delta_rule.dplr import dplr
from pallas_kernels.delta_rule.tuned_configs import load_table
from pallas_kernels.linear_attention.api import linear_attention
from pallas_kernels.ridge.api import ridge_solve
from pallas_kernels.short_convolution.api import fused_convolutions
from pallas_kernels.short_convolution.branch import ConvolutionBranch, Epilogue
from pallas_kernels.short_convolution.decode import TokenStream, one_token_convolutions
from rnnlib import ops

Shape = tuple[int, int, int]  # B, T, H
Arrays = dict[str, jax.ShapeDtypeStruct]

MANY: Shape = (8, 4096, 16)
"""So many heads that each multiprocessor has two programs of a pass over chunks: one segment."""
ONE_EACH: Shape = (8, 4096, 8)
"""At most one program for each multiprocessor: the launches that a table calls underfilled."""
FEW: Shape = (1, 8192, 8)
"""So few heads that sequences are split into segments, which adds kernels."""


@dataclass(frozen=True)
class Case:
    """A call, differentiated.

    Attributes:
        name: by which reports and lists of exceptions know it.
        loss: from arrays to a number, which is differentiated with respect to all floating-point arrays.
        arrays: what it takes.
        differentiated: whether its gradient is compiled, too.
    """

    name: str
    loss: Callable[[Any], jax.Array]
    arrays: Arrays
    differentiated: bool = True

    @property
    def function(self) -> Callable[[Any], Any]:
        """What is compiled: the loss with its gradient, so that no kernel of the forward is left out, or it alone."""
        return jax.value_and_grad(self.loss, allow_int=True) if self.differentiated else self.loss


def _total(results: Any) -> jax.Array:
    return sum((jnp.sum(x.astype(jnp.float32) ** 2) for x in jax.tree.leaves(results)), jnp.zeros(()))


def delta_rule(
    variant: str,
    shape: Shape,
    place: str,
    *,
    channel_gates: bool = False,
    gate_dtype: Any = None,
    packed: bool = False,
    grouped: bool = False,
    one: bool = False,
    one_gate: bool = False,
    backend: str = "triton",
) -> Case:
    """A call of the delta rule or of linear attention.

    Args:
        variant: as tables name it, such as `delta+key-scalar-128x128-bfloat16`.
        shape: (B, T, H).
        place: what `shape` is an example of, for the name.
        channel_gates: whether erase and write gates are by channel.
        gate_dtype: theirs; None for that of the variant.
        packed: whether rows hold several documents.
        grouped: whether two value heads share a key head.
        one: whether a single token is decoded, which has no gradient.
        one_gate: whether the erase gate is the write gate, too.
        backend: `"mosaic"` for stages in Mosaic GPU, `"mosaic_mma"` for the delta rule with those for other cards.
    """
    solve, decay, sizes, dtype = variant.split("-")
    key_size, value_size = (int(x) for x in sizes.split("x"))
    batch, _, heads = shape
    tokens = (batch, 1 if one else shape[1], heads)

    def struct(*tail: int, dtype: Any = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*tokens, *tail), dtype)

    key = jax.ShapeDtypeStruct((*tokens[:2], heads // 2 if grouped else heads, key_size), dtype)
    x = {"q": key, "k": key, "v": struct(value_size)}
    gate_dtype = gate_dtype or dtype
    if not one_gate:
        x["write"] = struct(*([value_size] if channel_gates else []), dtype=gate_dtype)
    x["initial_state"] = jax.ShapeDtypeStruct((batch, heads, key_size, value_size), jnp.float32)
    if solve != "linear":
        x["erase"] = struct(*([key_size] if channel_gates else []), dtype=gate_dtype)
    if solve == "delta+key":
        x["write_key"] = key
    if decay != "none":
        x["log_decay"] = struct(*([key_size] if decay == "channel" else []), dtype=jnp.float32)
    if packed:
        x["segment_ids"] = jax.ShapeDtypeStruct(tokens[:2], jnp.int32)
    # Linear attention with channel-wise decay is a delta rule that erases nothing, under its public name.
    operator: Callable[..., Any] = linear_attention if solve == "linear" else gated_delta_rule
    run = functools.partial(operator, backend=backend)
    words = [variant, place, *["channel gates"] * channel_gates, *["grouped"] * grouped, *["packed"] * packed]
    words += [*["one gate"] * one_gate, *[backend] * (backend != "triton")]

    def loss(x: Any) -> jax.Array:
        return _total(run(**x, **({"tied_gates": True} if one_gate else {})))

    return Case(" ".join(words), loss, x, differentiated=not one)


def diagonal_plus_low_rank(size: int, dtype: Any, shape: Shape, place: str, packed: bool = False) -> Case:
    """A call of RWKV-7's rule."""
    keys = jax.ShapeDtypeStruct((*shape, size), dtype)
    x = dict.fromkeys(("q", "k", "v", "a", "b"), keys)
    x["log_decay"] = jax.ShapeDtypeStruct(keys.shape, jnp.float32)
    if packed:
        x["segment_ids"] = jax.ShapeDtypeStruct(shape[:2], jnp.int32)
    name = f"dplr-channel-{size}x{size}-{jnp.dtype(dtype).name} {place}{' packed' if packed else ''}"
    return Case(name, lambda x: _total(dplr(**x)), x)


def tuned() -> list[Case]:
    """Every variant of the H200's table, where heads abound, where they are few, and in between where that differs."""
    table = json.loads((resources.files("pallas_kernels.delta_rule") / "tuned" / "nvidia_h200.json").read_text())
    cases = []
    for variant in table["variants"]:
        cases += [delta_rule(variant, MANY, "many heads"), delta_rule(variant, FEW, "few heads")]
        if variant in table["underfilled"]:
            cases.append(delta_rule(variant, ONE_EACH, "a program each"))
        cases.append(delta_rule(variant, (64, 1, 8), "one token", one=True))
    return cases


def defaults() -> list[Case]:
    """The delta rule and linear attention in all sizes and dtypes whose code differs, mostly with segments."""
    variants = [
        *(
            f"delta-{decay}-{size}x{size}-bfloat16"
            for size in (64, 128, 256)
            for decay in ("none", "scalar", "channel")
        ),
        *(f"delta-{decay}-128x128-float32" for decay in ("none", "scalar", "channel")),
        "delta-scalar-256x256-float32",
        "delta-scalar-64x64-float32",
        "delta-channel-64x64-float32",
        "delta+key-scalar-128x128-bfloat16",
        "delta+key-channel-128x128-bfloat16",
        "delta+key-scalar-256x256-bfloat16",
        "delta+key-channel-128x128-float32",
        *(f"linear-{decay}-128x128-bfloat16" for decay in ("none", "scalar", "channel")),
        "linear-scalar-128x128-float32",
        "linear-scalar-256x256-bfloat16",
        "linear-scalar-256x256-float32",
    ]
    gates = ("delta-channel-64x64-bfloat16", "delta-channel-128x128-bfloat16", "delta-channel-256x256-bfloat16")
    return [
        *(delta_rule(variant, FEW, "few heads") for variant in variants),
        *(delta_rule(variant, FEW, "few heads", channel_gates=True, packed=True) for variant in gates),
        delta_rule("delta-channel-128x128-float32", FEW, "few heads", channel_gates=True, packed=True),
        delta_rule("linear-scalar-64x64-bfloat16", (2, 7, 4), "seven tokens"),
        *(diagonal_plus_low_rank(size, jnp.bfloat16, FEW, "few heads") for size in (64, 128)),
        diagonal_plus_low_rank(64, jnp.bfloat16, MANY, "many heads", packed=True),
        diagonal_plus_low_rank(64, jnp.float32, FEW, "few heads"),
        diagonal_plus_low_rank(128, jnp.float32, FEW, "few heads"),
        diagonal_plus_low_rank(256, jnp.bfloat16, FEW, "few heads"),
        *(delta_rule(variant, (64, 1, 8), "one token", one=True) for variant in variants if "linear" not in variant),
    ]


def mosaic() -> list[Case]:
    """The delta rule's stages in Mosaic GPU, with each choice of `delta_rule.config.mosaic_config`."""
    places = {"many heads": MANY, "few heads": FEW, "a program each": ONE_EACH}
    variants = [
        f"{solve}-128x128-bfloat16" for solve in ("delta-none", "delta-scalar", "delta-channel", "delta+key-scalar")
    ]
    mosaic = functools.partial(delta_rule, backend="mosaic")
    # As layers give them.
    gates: dict[str, Any] = {"channel_gates": True, "gate_dtype": jnp.float32}
    return [
        *(mosaic("delta-channel-128x128-bfloat16", shape, place, **gates) for place, shape in places.items()),
        mosaic("delta+key-channel-128x128-bfloat16", FEW, "few heads", grouped=True, packed=True, **gates),
        mosaic("delta+key-channel-128x128-bfloat16", FEW, "few heads", packed=True),
        *(mosaic(variant, shape, place) for variant in variants for place, shape in places.items()),
        *(mosaic(variant, MANY, "many heads", one_gate=True) for variant in variants),
        *(
            dataclasses.replace(mosaic(variant, MANY, "forward alone", one_gate=True), differentiated=False)
            for variant in variants[:2]
        ),
        *(
            mosaic(f"delta-{decay}-128x128-bfloat16", FEW, "few heads", one_gate=True)
            for decay in ("scalar", "channel")
        ),
        mosaic("delta-scalar-128x128-bfloat16", FEW, "few heads", grouped=True, packed=True),
        *(mosaic("linear-channel-128x128-bfloat16", shape, place) for place, shape in places.items()),
        mosaic("linear-channel-128x128-bfloat16", FEW, "few heads", grouped=True, packed=True),
        *(attention_backward(*case) for case in ((16, 16, None), (16, 4, None), (16, 16, 1000))),
        ring_attention(256, 640, 16),
        *(waiting(decay, "mosaic") for decay in ("scalar", "channel")),
        _preconditioner("write key", 128, jnp.bfloat16, backend="mosaic"),
    ]


def forwards() -> list[Case]:
    """The delta rule's forward in one segment, by Triton and by the kernels that stand in where Triton goes."""
    variants = [f"delta-{kind}-bfloat16" for kind in ("scalar-128x128", "none-128x128", "scalar-64x64")]
    return [
        dataclasses.replace(delta_rule(variant, MANY, "forward", backend=backend), differentiated=False)
        for variant in variants
        for backend in ("triton", "mosaic_mma")
    ]


def token_and_ring(rows: int, capacity: int, heads: int, key_heads: int, size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays of a token's attention."""
    shapes: dict[str, tuple[int, ...]] = {name: (rows, n, size) for name, n in zip("qkv", (heads, *[key_heads] * 2))}
    shapes |= dict.fromkeys(("key", "value"), (rows, capacity, key_heads, size))
    arrays = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
    counts = {"segment": (rows, capacity), "length": (rows,), "current": (rows,)}
    return arrays | {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in counts.items()}


def ring_attention(rows: int, capacity: int, heads: int) -> Case:
    """A token's attention for many rows: the launch that stores the token is Triton's."""
    arrays = token_and_ring(rows, capacity, heads, heads, 64)
    arrays["angle"] = jax.ShapeDtypeStruct((rows, 32), jnp.float32)

    def loss(x: Any) -> jax.Array:
        return _total(token_attention(**x, backend="mosaic"))

    return Case(f"token attention of {rows} rows, {heads} heads of 64, mosaic", loss, arrays, differentiated=False)


def waiting(decay: str, backend: str = "triton") -> Case:
    """A token of 256 texts whose writes wait, and the store of them."""
    texts, heads, size = 256, 8, 128
    one = (texts, 1, heads)
    arrays = {name: jax.ShapeDtypeStruct((*one, size), jnp.bfloat16) for name in "qkv"}
    arrays["gate"] = jax.ShapeDtypeStruct(one, jnp.float32)
    arrays["log_decay"] = jax.ShapeDtypeStruct(one if decay == "scalar" else (*one, size), jnp.float32)
    state = jax.ShapeDtypeStruct((texts, heads, size, size), jnp.float32)
    arrays |= jax.eval_shape(without_pending, state, arrays["k"], arrays["log_decay"])._asdict()

    def loss(x: Any) -> jax.Array:
        delayed = DelayedState(**{name: x[name] for name in DelayedState._fields})
        token = {name: x[name] for name in ("q", "k", "v", "log_decay")}
        gates = {"erase": x["gate"], "write": x["gate"]}
        out, after = delayed_token(**token, **gates, delayed=delayed, backend=backend)
        return _total((out, flush(after)))

    name = f"delayed updates {decay}-128x128-bfloat16" + (", mosaic" if backend == "mosaic" else "")
    return Case(name, loss, arrays, differentiated=False)


def attention_backward(heads: int, key_heads: int, window: int | None) -> Case:
    """The gradients of attention; its forward pass is cuDNN's."""
    batch, length, _ = MANY
    arrays = {
        name: jax.ShapeDtypeStruct((batch, length, key_heads if name in "kv" else heads, 64), jnp.bfloat16)
        for name in ("q", "k", "v", "out", "d_out")
    }
    arrays["log_sums"] = jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)
    over = "" if window is None else f" over a window of {window}"

    def loss(x: Any) -> jax.Array:
        return _total(attention_gradients(**x, scale=0.125, window=window))

    return Case(f"attention gradients, {heads} and {key_heads} heads{over}", loss, arrays, differentiated=False)


def ridge_solves() -> list[Case]:
    """The ridge solve with each precision of its products, by Chebyshev's method and by conjugate gradients."""

    def case(dtype: Any, size: int, precision: str, solver: str) -> Case:
        x = {name: jax.ShapeDtypeStruct((4, 4096, 8, size), dtype) for name in ("q", "k")}
        x["ridge"] = jax.ShapeDtypeStruct((8, size), jnp.float32)
        x["log_decay"] = jax.ShapeDtypeStruct((4, 4096, 8), jnp.float32)
        x["initial_gram"] = jax.ShapeDtypeStruct((4, 8, size, size), jnp.float32)

        def loss(x: Any) -> jax.Array:
            return _total(ridge_solve(**x, solver=solver, precision=precision, adaptive=solver == "chebyshev"))

        name = f"ridge solve {size} {jnp.dtype(dtype).name} {solver.replace('_', ' ')}, {precision} products"
        return Case(name, loss, x)

    bf16, f32 = jnp.bfloat16, jnp.float32
    return [
        case(bf16, 128, "bfloat16", "chebyshev"),
        case(bf16, 128, "bfloat16", "conjugate_gradient"),
        case(bf16, 128, "split", "conjugate_gradient"),
        case(bf16, 128, "mixed", "conjugate_gradient"),
        case(f32, 128, "split", "chebyshev"),
        case(f32, 64, "float32", "chebyshev"),
        case(f32, 64, "tf32", "chebyshev"),
    ]


def preconditioners() -> list[Case]:
    """The diagonal Gram with each of its readouts."""
    return [
        _preconditioner("gain", 128, jnp.bfloat16),
        _preconditioner("write key", 128, jnp.bfloat16),
        _preconditioner("write key", 256, jnp.float32, by_channel=True),
        _preconditioner("query", 128, jnp.bfloat16, by_channel=True),
        _preconditioner("Sherman-Morrison key", 128, jnp.bfloat16),
    ]


def _preconditioner(readout: str, size: int, dtype: Any, *, by_channel: bool = False, backend: str = "triton") -> Case:
    runs: dict[str, Callable[..., Any]] = {
        "gain": lambda k, **x: ops.diagonal_preconditioner(k, squash="tanh", **x),
        "write key": lambda k, **x: ops.precondition_key(k, write_key_dtype=jnp.float32, **x),
        "query": lambda k, **x: ops.precondition_query(k, k, **x),
        "Sherman-Morrison key": lambda k, **x: ops.sherman_morrison_key(k, **x),
    }
    rows = (1, 8192, 8) if backend == "triton" else (8, 4096, 16)
    x = {"k": jax.ShapeDtypeStruct((*rows, size), dtype)}
    gate = (*rows, size) if by_channel else rows
    x |= {name: jax.ShapeDtypeStruct(gate, jnp.float32) for name in ("log_decay", "gain")}

    def loss(x: Any) -> jax.Array:
        with_ridge = {"ridge": 0.1} if readout in ("query", "Sherman-Morrison key") else {"center": 0.1}
        return _total(runs[readout](**x, **with_ridge, implementation=backend))

    suffix = "" if backend == "triton" else f" {backend}"
    return Case(f"preconditioner {readout} {size} {jnp.dtype(dtype).name}{suffix}", loss, x)


def convolutions() -> list[Case]:
    """The short convolution with and without the norm of heads."""

    def case(norm_size: int | None, dtype: Any) -> Case:
        x = {
            "x": jax.ShapeDtypeStruct((4, 4096, 1024), dtype),
            "kernel": jax.ShapeDtypeStruct((4, 1024), jnp.float32),
            "bias": jax.ShapeDtypeStruct((1024,), jnp.float32),
        }

        def loss(x: Any) -> jax.Array:
            return _total(operators.short_convolution.short_convolution(**x, activation="silu", norm_size=norm_size))

        return Case(f"short convolution {jnp.dtype(dtype).name}{', norm' if norm_size else ''}", loss, x)

    def joined(x: Any) -> jax.Array:
        streams = [ConvolutionBranch(x["kernel"], None, None, Epilogue("silu", norm)) for norm in (128, None)]
        return _total(fused_convolutions(x["x"], streams))

    columns = {
        "x": jax.ShapeDtypeStruct((4, 4096, 2112), jnp.bfloat16),
        "kernel": jax.ShapeDtypeStruct((4, 1024), jnp.bfloat16),
    }
    both = Case("short convolution bfloat16, columns of one product", joined, columns)
    return [case(128, jnp.bfloat16), case(None, jnp.bfloat16), case(128, jnp.float32), both]


def rows() -> list[Case]:
    """What goes over rows once: norms of the stream, of heads and of Mamba-2, the decay by channel, the normalizer."""

    def norm(x: Any) -> jax.Array:
        return _total(operators.norms.rms_norm(**x, keeps=True))

    def gate_first(groups: int, features: int) -> Case:
        """Skip, gate and norm of Mamba-2."""
        x = {name: array(16384, groups, features) for name in ("x", "z", "v")}
        x |= {name: array(groups, features, dtype=jnp.float32) for name in ("scale", "skip")}
        name = f"rms norm bfloat16, {groups} x {features} with skip, behind the gate"
        return Case(name, lambda x: _total(operators.norms.rms_norm(**x, gate_first=True)), x)

    def decay(x: Any) -> jax.Array:
        return _total(operators.softplus_decay.softplus_decay(**x))

    def rounded(x: Any) -> Any:
        return operators.float8.round_both_ways(**x, dtype=jnp.float8_e4m3fn)

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    def turned(rank: int) -> Case:
        """Mamba-3's keys and queries, of as many rows a token."""
        x = {name: array(16384, 1, rank, 128) for name in ("query", "key")}
        x |= {f"{name}_bias": array(8, rank, 128, dtype=jnp.float32) for name in ("query", "key")}
        x["turns"] = array(16384, 8, 32, dtype=jnp.float32)
        name = f"rotated keys bfloat16, {rank} of a token"
        return Case(name, lambda x: _total(operators.rotated_keys.rotated_keys(**x)), x)

    of_channels = {name: array(1024, dtype=jnp.float32) for name in ("rate", "bias")}
    return [
        *(turned(rank) for rank in (1, 4)),
        Case("rms norm bfloat16, stream", norm, {"x": array(16384, 1024), "scale": array(1024, dtype=jnp.float32)}),
        Case(
            "rms norm bfloat16, heads with gate and bias",
            norm,
            {name: array(16384, 8, 128) for name in ("x", "z")} | {"scale": array(128), "z_bias": array(8, 128)},
        ),
        *(gate_first(groups, features) for groups, features in ((1, 4096), (1, 3072), (4, 1024))),
        Case("softplus decay bfloat16", decay, {"p": array(16384, 1024)} | of_channels),
        Case(
            "rounding to float8 and transposing",
            rounded,
            {"x": array(8192, 6464), "scale": array(dtype=jnp.float32)},
            differentiated=False,
        ),
        Case(
            "log sum exp float32",
            lambda x: _total(operators.cross_entropy.log_sum_exp(x["x"])),
            {"x": array(4096, 32000, dtype=jnp.float32)},
            differentiated=False,
        ),
    ]


def decoding() -> list[Case]:
    """A token of some texts: products of few rows, convolutions of three streams, writes that wait, and attention."""
    bf16 = jnp.bfloat16

    def products(rows: int, columns: tuple[int, ...], inner: int, words: str, *, is_gated: bool = False) -> Case:
        kernels = {f"kernel_{i}": jax.ShapeDtypeStruct((inner, n), bf16) for i, n in enumerate(columns)}
        arrays = {"x": jax.ShapeDtypeStruct((rows, inner), bf16)} | kernels

        def loss(x: Any) -> jax.Array:
            return _total(
                operators.skinny_gemm.skinny_matmuls(x["x"], [x[name] for name in kernels], is_gated=is_gated)
            )

        return Case(f"skinny matmuls {words}, {rows} rows", loss, arrays, differentiated=False)

    def convolutions(x: Any) -> jax.Array:
        streams = [
            TokenStream(x["x"], x["kernel"], None, x["state"], Epilogue("silu", norm)) for norm in (128, 128, None)
        ]
        return _total(one_token_convolutions(streams))

    def attention(rows: int, capacity: int, heads: int, key_heads: int, size: int) -> Case:
        arrays = token_and_ring(rows, capacity, heads, key_heads, size)
        name = f"token attention of {rows} rows, {heads} and {key_heads} heads of {size}"
        return Case(name, lambda x: _total(token_attention(**x)), arrays, differentiated=False)

    def low_rank(rows: int) -> Case:
        """The second maps of a decay and of an output gate, the one ended as a decay."""
        shapes = {"x": (rows, 128), "z": (rows, 128), "first": (128, 1024), "second": (128, 1024)}
        arrays = {name: jax.ShapeDtypeStruct(shape, bf16) for name, shape in shapes.items()}
        arrays |= {name: jax.ShapeDtypeStruct((n,), jnp.float32) for name, n in (("rate", 8), ("bias", 1024))}

        def loss(x: Any) -> jax.Array:
            epilogue = operators.skinny_gemm.Epilogue(log_rate=x["rate"], bias=x["bias"])
            kernels = [x["first"], x["second"]]
            return _total(operators.skinny_gemm.skinny_matmuls([x["x"], x["z"]], kernels, epilogues=[epilogue, None]))

        return Case(f"skinny matmuls of second maps, {rows} rows", loss, arrays, differentiated=False)

    def norm_of_sum(rows: int, parts: int) -> Case:
        arrays = {
            "parts": jax.ShapeDtypeStruct((parts, rows, 1024), jnp.float32),
            "added": jax.ShapeDtypeStruct((rows, 1024), bf16),
            "scale": jax.ShapeDtypeStruct((1024,), bf16),
        }
        name = f"rms norm of a sum of {parts} parts, {rows} rows"
        return Case(name, lambda x: _total(operators.norms.rms_norm_of_sum(**x)), arrays, differentiated=False)

    shapes = {"x": (64, 1024), "kernel": (4, 1024), "state": (64, 3, 1024)}
    token = {name: jax.ShapeDtypeStruct(shape, bf16) for name, shape in shapes.items()}
    return [
        *(products(rows, (1024, 1024, 1024, 8, 8), 1024, "of five maps") for rows in (1, 64, 256, 512)),
        *(products(256, (n, n, n, 128, 128, n // 128), n, f"of six maps of {n}") for n in (1024, 2048)),
        *(products(rows, (2816, 2816), 1024, "gated", is_gated=True) for rows in (1, 64, 256, 512)),
        products(256, (5632, 5632), 2048, "gated, of 5632", is_gated=True),
        *(products(rows, (1024,), 2816, "of one map") for rows in (1, 256, 512)),
        products(256, (2048,), 5632, "of one map from 5632 to 2048"),
        *(products(rows, (n,), n, f"of one map of {n}") for rows, n in ((64, 1024), (128, 2048), (256, 2048))),
        *(low_rank(rows) for rows in (1, 256)),
        *(norm_of_sum(rows, parts) for rows, parts in ((1, 11), (256, 4))),
        Case("short convolution bfloat16, one token of three streams", convolutions, token, differentiated=False),
        *(waiting(decay) for decay in ("scalar", "channel")),
        *(attention(rows, 640, 16, 16, 64) for rows in (1, 256)),
        *(attention(rows, 8192, 32, 8, 128) for rows in (1, 16)),
        attention(1, 8192, 8, 1, 256),
    ]


USUAL = (
    r"^delta-(none|scalar|channel)-128x128-bfloat16 (few|many) heads$",
    r"^delta-(scalar|channel)-128x128-bfloat16 (a program each|one token)$",
    r"^delta-scalar-(64x64|256x256)-bfloat16 few heads$",
    r"^delta-channel-(128x128|256x256)-bfloat16 few heads channel gates packed$",
    r"^delta\+key-(scalar|channel)-128x128-bfloat16 few heads$",
    r"^linear-(none|scalar)-128x128-bfloat16 few heads$",
    r"^dplr-channel-(64x64|128x128)-bfloat16 few heads$",
    r"^ridge solve 128 bfloat16 (chebyshev, bfloat16|conjugate gradient, split) products$",
    r"^(preconditioner|short convolution|skinny matmuls|rms norm|softplus decay|log sum exp|delayed updates)",
    r"^(rotated keys|token attention|attention gradients)",
    r" mosaic$",
    r" forward( mosaic_mma)?$",
)
"""Patterns of the cases in bfloat16 that models take, a third of all."""


def cases(card: str, *, every: bool = False) -> dict[str, Case]:
    """Cases by name.

    Args:
        card: a key of `CARDS`; one with a table takes the tuned launches too, a Hopper card Mosaic GPU kernels.
        every: whether to take all of them: the other sizes, float32, rarer combinations.
    """
    target = CARDS[card]
    found = [*(tuned() if load_table(target.kind) is not None else []), *defaults()]
    found += mosaic() if target.is_hopper else []
    found += forwards() if target.takes_mma else []
    found += [*ridge_solves(), *preconditioners(), *convolutions(), *rows(), *decoding()]
    by_name = {case.name: case for case in found}
    return {name: case for name, case in by_name.items() if every or any(re.search(x, name) for x in USUAL)}
