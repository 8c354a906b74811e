"""Every kernel lowers for an H200 on a machine without a GPU, and the tables and schedules hold together."""

import json
import re
from importlib import resources

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import operators
from pallas_kernels.common.config import KernelConfig
from pallas_kernels.common.triton.backend import interpreted
from pallas_kernels.delta_rule.api import gated_delta_rule
from pallas_kernels.delta_rule.config import DeltaRuleConfig, choose_num_splits, choose_sum_num_splits
from pallas_kernels.delta_rule.inputs import Inputs
from pallas_kernels.delta_rule.tuned_configs import choose_config, load_table, table_launches
from pallas_kernels.linear_attention.api import linear_attention
from rnnlib import ops
from rnnlib.layers import AttentionConfig, mixer_preset
from rnnlib.ops.arguments import default_preference
from rnnlib.ops.float8 import float8_product
from rnnlib.ops.log_sum_exp import log_sum_exp
from rnnlib.ops.rms_norm import rms_norm
from rnnlib.ops.rotated_keys import rotated_keys
from rnnlib.ops.softplus_decay import softplus_decay
from tests.selection import mostly_slow

H200 = AbstractMesh(
    (1,),
    ("x",),
    axis_types=(AxisType.Auto,),
    abstract_device=AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu"),
)
# Forward: prepare and output, with segments also maps and fold. Backward: states, reverse, two of gradients, zeros of
# closed gates (of one number a token); with segments also offsets and fold. Channel-wise decay: two kernels for extreme
# chunks, the list of these, and the factors once more.
KERNELS = {
    ("none", 1): 7,
    ("none", 2): 11,
    ("scalar", 1): 7,
    ("scalar", 2): 11,
    ("channel", 1): 10,
    ("channel", 2): 14,
}


def lowered_text(function, *arguments):
    with jax.sharding.use_abstract_mesh(H200):
        assert not interpreted()
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def distinct_kernels(text):
    """Hashes of the Mosaic GPU kernels of a lowered program: each is compiled once."""
    return set(re.findall(r'kernel_hash = "((?:[^"\\]|\\.)*)"', text))


def count_kernels(function, *arguments):
    return lowered_text(function, *arguments).count("xla.gpu.triton")


def arguments(decay, channels, dtype, size=(128, 128), length=256, **extra):
    batch, heads, value_heads = 1, 1, 2
    rows = (batch, length, value_heads)
    shapes = {
        "q": (batch, length, heads, size[0]),
        "k": (batch, length, heads, size[0]),
        "v": (*rows, size[1]),
        "erase": (*rows, size[0]) if channels else rows,
        "write": (*rows, size[1]) if channels else rows,
        "write_key": (batch, length, heads, size[0]),
        "initial_state": (batch, value_heads, *size),
    }
    x = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
    if decay != "none":
        x["log_decay"] = jax.ShapeDtypeStruct((*rows, size[0]) if decay == "channel" else rows, jnp.float32)
    return x


@pytest.mark.parametrize("dtype", mostly_slow([jnp.bfloat16, jnp.float32], [jnp.bfloat16]), ids=["bfloat16", "float32"])
@pytest.mark.parametrize(("decay", "segments"), KERNELS)
def test_forward_and_backward_lower(decay, segments, dtype):
    def loss(x):
        out, state = gated_delta_rule(**x, config=DeltaRuleConfig(num_splits=segments))
        return jnp.sum(out.astype(jnp.float32) ** 2) + jnp.sum(state)

    assert count_kernels(jax.grad(loss), arguments(decay, False, dtype)) == KERNELS[decay, segments]


@pytest.mark.parametrize("size", mostly_slow([(16, 16), (64, 256), (256, 256)], [(64, 256)]), ids=str)
def test_packed_channel_gates_of_any_size_lower(size):
    ids = jax.ShapeDtypeStruct((1, 200), jnp.int32)
    schedule = DeltaRuleConfig(num_splits=1 if size[0] == 256 else 2)  # a key size of 256 is not split

    def loss(x, ids):
        out, _ = gated_delta_rule(**x, segment_ids=ids, config=schedule)
        return jnp.sum(out.astype(jnp.float32) ** 2)

    x = arguments("channel", True, jnp.bfloat16, size, 200)
    assert count_kernels(jax.grad(loss), x, ids) == KERNELS["channel", schedule.num_splits] - 1


def test_linear_attention_and_one_token_lower():
    x = arguments("scalar", False, jnp.bfloat16)
    linear = {name: x[name] for name in ("q", "k", "v", "write", "log_decay", "initial_state")}
    for segments, forward, both in ((1, 2, 5), (2, 4, 9)):  # rows, sums; what segments add, and the scan over it

        def run(x, segments=segments):
            return linear_attention(**x, config=DeltaRuleConfig(num_splits=segments))

        assert count_kernels(run, linear) == forward
        loss = jax.value_and_grad(lambda x, run=run: sum(jnp.sum(y.astype(jnp.float32)) for y in run(x)))
        assert count_kernels(loss, linear) == both
    for decay in ("none", "scalar", "channel"):
        one = arguments(decay, decay == "channel", jnp.bfloat16, length=1)
        assert count_kernels(lambda x: gated_delta_rule(**x), one) == 1


def test_kernels_count_in_32_bits_whatever_the_program_around_them_does(x64):
    def loss(x):
        out, _ = gated_delta_rule(**x, config=DeltaRuleConfig(num_splits=2))
        return jnp.sum(out.astype(jnp.float32) ** 2)

    assert count_kernels(jax.grad(loss), arguments("scalar", False, jnp.bfloat16)) == KERNELS["scalar", 2]
    key = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)
    assert count_kernels(ops.diagonal_preconditioner, key) == 2


def test_the_default_device_says_where_a_call_runs(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert default_preference(64)[:2] == ("mosaic", "triton")
    with jax.default_device(jax.devices("cpu")[0]):
        assert default_preference(64)[0] == "chunked"


@pytest.mark.parametrize(
    "per_channel, size, dtype",
    [(False, 128, jnp.bfloat16), pytest.param(True, 24, jnp.float32, marks=pytest.mark.slow)],
    ids=str,
)
@pytest.mark.parametrize("operator", mostly_slow(["preconditioner", "key", "query", "unstable"], ["key"]))
def test_the_diagonal_gram_lowers(operator, per_channel, size, dtype):
    """Forward: what each part adds, and the recurrence; likewise backward."""
    heads, length = 2, 1000
    k = jax.ShapeDtypeStruct((1, length, heads, size), dtype)
    gate = jax.ShapeDtypeStruct(k.shape if per_channel else k.shape[:3], jnp.float32)
    number = jax.ShapeDtypeStruct((heads,), jnp.float32)
    state = jax.ShapeDtypeStruct((1, heads, size), jnp.float32)
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
    run = {
        "preconditioner": lambda k, p, **x: ops.diagonal_preconditioner(k, center=p, squash="tanh", **x),
        "key": lambda k, p, **x: ops.precondition_key(k, center=p, write_key_dtype=jnp.float32, **x),
        "query": lambda k, p, **x: ops.precondition_query(k, k, ridge=p, **x),
        "unstable": lambda k, p, **x: ops.sherman_morrison_key(k, ridge=p, **x),
    }[operator]

    def loss(k, gate, number, state, ids):
        options = {"log_decay": gate, "gain": gate, "initial_state": state, "segment_ids": ids}
        return sum(jnp.sum(x.astype(jnp.float32) ** 2) for x in run(k, number, **options, implementation="triton"))

    assert count_kernels(jax.grad(loss, argnums=(0, 1, 2, 3)), k, gate, number, state, ids) == 4


@pytest.mark.parametrize(
    "channels, norm_size", [(1024, 128), (200, None), pytest.param(96, 24, marks=pytest.mark.slow)]
)
def test_the_short_convolution_lowers(channels, norm_size):
    x = jax.ShapeDtypeStruct((2, 1000, channels), jnp.bfloat16)
    kernel = jax.ShapeDtypeStruct((4, channels), jnp.float32)
    bias, state = jax.ShapeDtypeStruct((channels,), jnp.float32), jax.ShapeDtypeStruct((2, 3, channels), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((2, 1000), jnp.int32)

    def loss(x, kernel, bias, state, ids):
        options = {"bias": bias, "initial_state": state, "segment_ids": ids, "activation": "silu"}
        y, _ = ops.short_convolution(x, kernel, **options, norm_size=norm_size, implementation="triton")
        return jnp.sum(y.astype(jnp.float32) ** 2)

    assert count_kernels(jax.grad(loss, argnums=(0, 1, 2, 3)), x, kernel, bias, state, ids) == 2
    assert count_kernels(jax.grad(lambda x, kernel: loss(x, kernel, None, None, None)), x, kernel) == 2
    if norm_size is None:

        def by_row(x, kernel):
            return jnp.sum(jax.vmap(lambda row: loss(row[None], kernel, None, None, None))(x))

        assert count_kernels(jax.grad(by_row), x, kernel) == 2


@pytest.mark.parametrize("features", [100, 1024, 8192])
@pytest.mark.parametrize("gated", [False, True])
def test_the_norm_lowers_and_is_taken_for_large_arrays(features, gated):
    def loss(x, scale):
        y, kept = rms_norm(x, scale, z=x if gated else None, keeps=True)
        return jnp.sum((y + kept).astype(jnp.float32) ** 2)

    x, scale = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1 << 20, features), (features,)))
    assert count_kernels(jax.grad(loss, (0, 1)), x, scale) == 2
    few = jax.ShapeDtypeStruct((16, features), jnp.bfloat16)
    assert count_kernels(jax.grad(loss, (0, 1)), few, scale) == 0


def test_small_kernels_lower_and_are_taken_for_large_arrays():
    rows = jax.ShapeDtypeStruct((4096, 32000), jnp.float32)
    assert count_kernels(jax.grad(lambda x: jnp.sum(log_sum_exp(x))), rows) == 1
    assert count_kernels(log_sum_exp, jax.ShapeDtypeStruct((16, 32000), jnp.float32)) == 0
    p, rate = jax.ShapeDtypeStruct((4096, 1000), jnp.bfloat16), jax.ShapeDtypeStruct((1000,), jnp.float32)
    assert count_kernels(jax.grad(lambda *x: jnp.sum(softplus_decay(*x)), (0, 1, 2)), p, rate, rate) == 2


@pytest.mark.parametrize(
    ("rows", "dtype", "kernels"), [(4096, "bfloat16", 3), (4095, "bfloat16", 1), (64, "float32", 0)]
)
def test_rounding_to_float8_lowers_and_is_taken_for_tiles_of_bfloat16(rows, dtype, kernels):
    """Of rows, matrix and gradient, of 4095 rows of the matrix alone; without a gradient nothing is transposed."""
    x, kernel = jax.ShapeDtypeStruct((1, rows, 512), dtype), jax.ShapeDtypeStruct((512, 320), dtype)

    def loss(x, kernel):
        return jnp.sum(float8_product(x, kernel, (((2,), (0,)), ((), ()))).astype(jnp.float32) ** 2)

    assert count_kernels(jax.grad(loss, (0, 1)), x, kernel) == kernels
    assert count_kernels(loss, x, kernel) == 0


@pytest.mark.parametrize(
    ("length", "groups", "kernels"), [(2048, 1, 1), pytest.param(2048, 2, 1, marks=pytest.mark.slow), (1, 1, 0)]
)
def test_mamba_takes_skip_gate_and_norm_from_one_kernel(length, groups, kernels):
    config = mixer_preset("mamba2", key_heads=groups, **{"output_projection.norm": "group"})
    built = nnx.eval_shape(lambda: config.build(1024, 32, rngs=nnx.Rngs(0), dtype=jnp.bfloat16))
    graph, state = nnx.split(built)
    x = jax.ShapeDtypeStruct((1024 if length == 1 else 2, length, 1024), jnp.bfloat16)

    def loss(state, x):
        return jnp.sum(nnx.merge(graph, state)(x)[0].astype(jnp.float32))

    text = lowered_text(jax.grad(loss, (0, 1)), state, x)
    assert len(re.findall(r'name = "rms_norm_reverse"', text)) == kernels
    assert len(re.findall(r'name = "rms_norm"', text)) == kernels


@pytest.mark.parametrize(
    ("mixer", "length", "kernels"),
    [("mamba3", 2048, 1), pytest.param("mamba3_mimo", 2048, 1, marks=pytest.mark.slow), ("mamba3", 1, 0)],
)
def test_mamba_3_turns_queries_and_keys_by_one_kernel_behind_their_norms(mixer, length, kernels):
    built = nnx.eval_shape(lambda: mixer_preset(mixer).build(1024, 8, rngs=nnx.Rngs(0), dtype=jnp.bfloat16))
    graph, state = nnx.split(built)
    x = jax.ShapeDtypeStruct((512 if length == 1 else 8, length, 1024), jnp.bfloat16)

    def loss(state, x):
        return jnp.sum(nnx.merge(graph, state)(x)[0].astype(jnp.float32))

    text = lowered_text(jax.grad(loss, (0, 1)), state, x)
    for name, count in (("rotated_keys", 1), ("rms_norm", 2)):
        for direction in (name, f"{name}_reverse"):
            assert len(re.findall(rf'name = "{direction}"', text)) == count * kernels


@pytest.mark.parametrize("mixer, kernels", [("kda", 3), pytest.param("gated_deltanet", 0, marks=pytest.mark.slow)])
def test_a_mixer_of_many_tokens_has_one_product_and_takes_its_kernels(mixer, kernels):
    """Three convolutions, the heads' norm, and the decay by channel, each with its backward; beside the delta rule."""
    config = mixer_preset(mixer, **({} if mixer == "kda" else {"output_gate": False}))
    built = nnx.eval_shape(lambda: config.build(1024, 8, rngs=nnx.Rngs(0), dtype=jnp.bfloat16))
    graph, state = nnx.split(built)
    x = jax.ShapeDtypeStruct((2, 2048, 1024), jnp.bfloat16)

    def loss(state, x):
        return jnp.sum(nnx.merge(graph, state)(x)[0].astype(jnp.float32))

    text = lowered_text(jax.grad(loss, (0, 1)), state, x)
    names = re.findall(r"short_convolution_reverse|softplus_decay_reverse|rms_norm_reverse", text)
    assert sorted(set(names)) == sorted(
        {"short_convolution_reverse", "rms_norm_reverse"} | ({"softplus_decay_reverse"} if kernels else set())
    )
    narrow = 2 * 128 + 8 if mixer == "kda" else 16
    columns = 3072 + narrow + -narrow % 64
    assert f"tensor<1024x{columns}xbf16>" in text


@pytest.mark.parametrize(
    "options, kernels",
    [({}, 1), ({"key_heads": 2, "window": 64}, 1), ({"head_dim": 8}, 0)],
    ids=["full", "window_and_grouped_queries", "few_channels"],
)
def test_attention_of_one_token_takes_its_kernel(options, kernels):
    build = AttentionConfig(num_heads=4, **options).build
    graph, state = nnx.split(nnx.eval_shape(lambda: build(256, 4, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)))

    def token(state, x):
        layer = nnx.merge(graph, state)
        out, cache = layer(x, cache=layer.init_cache(3, 100))
        return out, cache.key

    for tokens, expected in ((1, kernels), (2, 0)):
        text = lowered_text(token, state, jax.ShapeDtypeStruct((3, tokens, 256), jnp.bfloat16))
        assert len(re.findall(r'name = "token_attention"', text)) == expected


@pytest.mark.parametrize(("mixer", "products"), [("kda", 3), ("gated_deltanet", 2), ("gated_deltanet2", 3)])
def test_a_token_s_gates_end_in_the_kernels_of_their_products(mixer, products):
    """Maps of the input, the second ones of low rank, the output; the convolutions; the delta rule; the norm."""
    built = nnx.eval_shape(lambda: mixer_preset(mixer).build(1024, 8, rngs=nnx.Rngs(0), dtype=jnp.bfloat16))
    graph, state = nnx.split(built)

    def token(state, x):
        layer = nnx.merge(graph, state)
        return layer(x, cache=layer.init_cache(len(x), 1))

    text = lowered_text(token, state, jax.ShapeDtypeStruct((256, 1, 1024), jnp.bfloat16))
    names = re.findall(r'name = "(\w+)", num_stages', text)
    assert sorted(names) == sorted(
        ["skinny_matmuls"] * products + ["short_convolution_one_token", "delta_decode", "rms_norm"]
    )
    assert not re.search("stablehlo.(logistic|exponential|log_plus_one)", text)  # of a gate


@pytest.mark.parametrize(
    "operator",
    [
        "delta_rule",
        "linear_attention",
        "ridge_solve",
        "preconditioner",
        "convolution",
        "decay",
        "rotated_keys",
        pytest.param("mixer", marks=pytest.mark.slow),
        "log_sum_exp",
    ],
)
def test_operators_lower_inside_shard_map(operator):
    """At its default, which types arrays by what they vary along: with constants, and arguments that devices share."""
    x, row = jax.ShapeDtypeStruct((1, 100, 2, 64), jnp.bfloat16), jax.ShapeDtypeStruct((1, 100, 2), jnp.float32)
    ridge, kernel = jax.ShapeDtypeStruct((2,), jnp.float32), jax.ShapeDtypeStruct((4, 128), jnp.float32)

    kda = mixer_preset("kda").build(128, 1, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)

    def mixer(x):
        return kda(x)

    def loss(x, row, ridge, kernel):
        state = jnp.zeros((1, 2, 64, 64))
        results = {
            "delta_rule": lambda: ops.gated_delta_rule(x, x, x, beta=jnp.ones((1, 100, 2)), initial_state=state),
            "linear_attention": lambda: ops.linear_attention(x, x, x, log_decay=-row, initial_state=state),
            "ridge_solve": lambda: ops.ridge_solve(x, x, ridge=ridge, log_decay=-row),
            "preconditioner": lambda: ops.precondition_query(x, x, ridge=ridge, log_decay=-row),
            "convolution": lambda: ops.short_convolution(x.reshape(1, 100, 128), kernel),
            "decay": lambda: [softplus_decay(x.reshape(1, 100, 128), jnp.ones(128), kernel[0])],
            "rotated_keys": lambda: rotated_keys(
                *[x[:, :, :1, None]] * 2, *[jnp.ones((2, 1, 64))] * 2, row[..., None], implementation="triton"
            ),
            "mixer": lambda: [mixer(jnp.tile(x.reshape(1, 100, 128), (1, 2, 1)))[0]],
            "log_sum_exp": lambda: [log_sum_exp(jnp.tile(x.reshape(100, 128), (100, 1)))],
        }[operator]()
        return sum(jnp.sum(y.astype(jnp.float32)) for y in results)

    def inside(*arguments):
        return jax.lax.psum(loss(*arguments), "x")

    sharded = jax.shard_map(inside, mesh=H200, in_specs=(P("x"), P("x"), P(), P()), out_specs=P())
    alone, split = (count_kernels(jax.grad(f, argnums=(0, 1, 2, 3)), x, row, ridge, kernel) for f in (loss, sharded))
    assert split == alone > 0


def test_what_does_not_fit_in_shared_memory_is_refused_on_a_gpu_only():
    x, gate = jnp.zeros((1, 64, 1, 256)), jnp.zeros((1, 64, 1))
    assert operators.delta_rule.unsupported_reason(x, x, x, x, None) is None
    with jax.sharding.use_abstract_mesh(H200):
        assert "shared memory" in operators.delta_rule.unsupported_reason(x, x, x, x, None)
        assert operators.delta_rule.unsupported_reason(x, x, x, gate, None) is None


def test_tables_are_of_stages_and_launches():
    tables = [f for f in (resources.files("pallas_kernels.delta_rule") / "tuned").iterdir() if f.name.endswith(".json")]
    for file in tables:
        table = json.loads(file.read_text())
        assert table["processors"] > 0
        for variant in (*table["variants"].values(), *table.get("underfilled", {}).values()):
            DeltaRuleConfig(**{stage: KernelConfig(**parameters) for stage, parameters in variant.items()})
        assert set(table.get("underfilled", {})) <= set(table["variants"])


def test_a_device_without_a_table_is_noted_once(caplog):
    """An H100 has an H200's processors and shared memory, and so its launches; of others nothing is known."""
    load_table.cache_clear()
    with caplog.at_level("INFO", "pallas_kernels"):
        assert load_table("NVIDIA H100 80GB HBM3") == load_table("NVIDIA H200") is not None
        assert load_table("NVIDIA X1") is load_table("NVIDIA X1") is None
    similar, unknown = (record.getMessage() for record in caplog.records)
    assert "'NVIDIA H100 80GB HBM3': using that of 'NVIDIA H200'" in similar
    assert "'NVIDIA X1': using a safe default" in unknown


def test_passes_that_underfill_the_card_have_launches_of_their_own():
    few, many = {"output": {"block": 64}}, {"output": {"block": 128, "num_warps": 8}, "prepare": {"block": 32}}
    table = {"variants": {"a": many, "b": many}, "underfilled": {"a": few}}
    assert table_launches(table, "a", True) == {"output": KernelConfig(block=64), "prepare": KernelConfig(block=32)}
    assert table_launches(table, "a", False) == table_launches(table, "b", True) == table_launches(table, "b", False)
    assert table_launches(table, "a", False)["output"] == KernelConfig(num_warps=8, block=128)
    assert table_launches({}, "a", True) == {}


def test_what_underfills_the_card_is_told_by_its_programs():
    def output(rows, length):
        q = jnp.zeros((rows, length, 8, 128), jnp.bfloat16)
        row = jnp.zeros(q.shape[:3])
        with jax.sharding.use_abstract_mesh(H200):
            return choose_config(Inputs(q=q, k=q, v=q, write_key=q, erase=row, write=row, log_decay=row), True).output

    assert output(8, 4096).num_stages == 3  # 128 programs in blocks of 64 channels: each has a processor's memory
    assert output(16, 4096).is_lean


@pytest.mark.parametrize(("dtype", "stages"), [(jnp.bfloat16, 3), (jnp.float32, 2)], ids=["bfloat16", "float32"])
def test_wide_float32_gates_leave_the_output_two_stages(dtype, stages):
    """Three stages of their tiles ask for more shared memory than there is."""
    x = jax.ShapeDtypeStruct((8, 4096, 8, 128), jnp.bfloat16)
    gate = jax.ShapeDtypeStruct(x.shape, dtype)
    decay = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    with jax.sharding.use_abstract_mesh(H200):
        run = jax.jit(lambda q, k, v, b, w, g: gated_delta_rule(q, k, v, erase=b, write=w, log_decay=g))
        text = run.trace(x, x, x, gate, gate, decay).lower(lowering_platforms=("cuda",)).as_text()
    assert re.findall(r'name = "delta_output", num_stages = (\d)', text) == [str(stages)]


@pytest.mark.parametrize("has_decay", [False, True])
def test_segments_of_sums_fill_an_idle_card_only(has_decay):
    assert choose_sum_num_splits(16, 8192, 132, has_decay) >= 8
    assert choose_sum_num_splits(256, 4096, 132, has_decay) == 1
    assert choose_sum_num_splits(16, 64, 132, has_decay) == 1


def test_segments_fill_an_idle_card_only():
    assert choose_num_splits(programs=16, length=8192, processors=132) >= 8
    assert choose_num_splits(programs=256, length=4096, processors=132) == 1
    assert choose_num_splits(programs=16, length=64, processors=132) == 1
    assert all(choose_num_splits(16, length, 132) <= max(1, (length + 63) // 128) for length in (1, 64, 128, 256, 1000))


def test_kernels_take_each_devices_share_of_explicit_axes():
    """What is sharded so need not be gathered: the kernels see a row and a head of each."""
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    mesh = AbstractMesh((2, 2), ("rows", "heads"), axis_types=(AxisType.Explicit,) * 2, abstract_device=device)
    sharding = NamedSharding(mesh, P("rows", None, "heads"))
    tokens = {name: jax.ShapeDtypeStruct((2, 256, 2, 64), jnp.bfloat16, sharding=sharding) for name in "qkv"}

    def loss(tokens):
        return jnp.sum(ops.gated_delta_rule(**tokens, implementation="triton")[0].astype(jnp.float32) ** 2)

    with jax.sharding.use_abstract_mesh(mesh):
        lowered = jax.jit(jax.grad(loss)).trace(tokens).lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count("xla.gpu.triton") == KERNELS["none", 1] - 1  # no gates
    assert "tensor<1x256x1x64xbf16>" in lowered
