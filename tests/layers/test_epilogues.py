"""Gates that a matmul of few rows computes in its own kernel, and second maps of low rank, which share a launch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rnnlib.layers import InputProjection, MixerShape, mixer_preset
from rnnlib.layers.input_projection import ColumnReader, columns_of, epilogues_of
from rnnlib.layers.linear import LowRank
from rnnlib.ops.skinny_gemm import BoundedSigmoid, skinny_matmuls
from tests.pallas_kernels.cases import relative_error

WIDTH = 16


class Launches:
    """Calls of the kernel for maps of an input: the columns of each product, with an "f" for one with an epilogue."""

    def __init__(self):
        self.found: list[list[str]] = []
        self.serves = True

    def few_rows(self, x, kernels):
        return self.serves and x.shape[-2] == 1

    def products(self, xs, kernels, epilogues):
        self.found.append([f"{w.shape[1]}{'' if f is None else 'f'}" for w, f in zip(kernels, epilogues)])
        return skinny_matmuls(xs, kernels, epilogues=epilogues)


@pytest.fixture
def launches(monkeypatch):
    """Kernels serve one token as they would on a GPU, interpreted."""
    launches = Launches()
    for module in ("rnnlib.ops.skinny_gemm", "rnnlib.layers.input_projection"):
        monkeypatch.setattr(f"{module}.skinny_kernel_supports", launches.few_rows)
    monkeypatch.setattr("rnnlib.layers.input_projection.skinny_matmuls", launches.products)
    return launches


def built(preset, dtype=jnp.float32, **overrides):
    """A mixer with two heads of 8 channels, no parameter of which is 0."""
    mixer = mixer_preset(preset, **overrides).build(WIDTH, 2, rngs=nnx.Rngs(0), dtype=dtype)
    rng = np.random.default_rng(0)
    graph, state = nnx.split(mixer)
    return nnx.merge(graph, jax.tree.map(lambda p: p + jnp.asarray(0.3 * rng.standard_normal(p.shape), p.dtype), state))


def of_a_token(mixer, dtype=jnp.float32, *, derivatives=True, call=lambda function, *given: jax.jit(function)(*given)):
    """Output and cache of a token, gradients in all parameters and the token, and a derivative along a direction."""
    graph, state = nnx.split(mixer)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((3, 6, WIDTH)), dtype)
    cache = mixer(x[:, :5], cache=mixer.init_cache(3, 8))[1]

    def run(state, token):
        y, after = nnx.merge(graph, state)(token, cache=cache)
        return jnp.sum(jnp.sin(y.astype(jnp.float32))), (y, after)

    def everything(state, token):
        (_, results), gradients = jax.value_and_grad(run, (0, 1), has_aux=True)(state, token)
        tangents = jax.tree.map(jnp.cos, (state, token))
        return results, gradients, jax.jvp(lambda *given: run(*given)[0], (state, token), tangents)[1]

    return call(everything if derivatives else run, state, x[:, 5:])


def assert_same_by_kernels(mixer, launches, expected, dtype=jnp.float32, error=2e-5, derivatives=True):
    """With the launches that are expected, in their order; products of one may come in any. Returns the outputs."""
    launches.serves = False
    plain = of_a_token(mixer, dtype, derivatives=derivatives)
    assert launches.found == []
    launches.serves = True
    found = of_a_token(mixer, dtype, derivatives=derivatives)
    number = len(expected)
    assert [sorted(some) for some in launches.found[:number]] == [sorted(some) for some in expected]
    assert launches.found == launches.found[:number] * (len(launches.found) // number)
    errors = jax.tree.leaves(jax.tree.map(relative_error, found, plain))
    assert max(errors) < error, errors
    launches.found.clear()
    return found[0][0] if derivatives else found[1][0]


FIRST = ["8", "8", "2f", "16", "16", "16"]


@pytest.mark.parametrize(
    ("preset", "overrides", "expected"),
    [
        ("kda", {"negative_eigenvalues": True}, [FIRST, ["16f", "16"]]),
        # A second map as wide as the mixer's input is no map of that input.
        (
            "kda",
            {"decay.rank": WIDTH, "output_projection.gate_rank": 4},
            [["16", "4", "2f", "16", "16", "16"], ["16f", "16"]],
        ),
        # A bias is added to the product: the norm's kernel adds the gate's, and the decay has no epilogue.
        pytest.param(
            "kda", {"output_projection.gate_bias": False}, [FIRST, ["16f", "16"]], marks=pytest.mark.slow
        ),  # as without a rank, below
        ("kda", {"decay.use_bias": True}, [FIRST, ["16", "16"]]),
        ("kda", {"decay.step_limits": (0.1, 0.5)}, [FIRST, ["16", "16"]]),
        ("kda", {"gain.use_bias": True}, [["8", "8", "16", "16", "16"], ["16f", "16"]]),
        (
            "kda",
            {"output_projection.gate_rank": None, "output_projection.gate_bias": False},
            [["8", "16", "2f", "16", "16", "16"], ["16f"]],
        ),
        ("gated_deltanet", {}, [["2f", "2f", "16", "16", "16", "16"]]),
        pytest.param("gated_deltanet", {"value_heads": 4, "gain.heads": "key"}, None, marks=pytest.mark.slow),
        ("gated_deltanet2", {}, None),
        ("mamba2", {}, None),
        pytest.param("mamba3", {}, None, marks=pytest.mark.slow),
        pytest.param("gla", {}, None, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_mixer_of_a_token_is_the_same_by_epilogues(preset, overrides, expected, launches):
    mixer = built(preset, **overrides)
    if expected is None:
        of_a_token(mixer, call=jax.eval_shape)
        expected = launches.found[: 1 + any(type(node) is LowRank for _, node in nnx.iter_graph(mixer))]
        launches.found = []
        has_epilogue = preset not in ("mamba3", "gla")
        assert any(name.endswith("f") for some in expected for name in some) == has_epilogue
    # What has no epilogue is a plain product, whose derivatives are those of the other columns.
    has_every_epilogue = not {"decay.use_bias", "decay.step_limits", "gain.use_bias"} & set(overrides)
    assert_same_by_kernels(mixer, launches, expected, derivatives=has_every_epilogue)


@pytest.mark.parametrize("preset", ["kda", "gated_deltanet"])
def test_a_mixer_in_bfloat16_is_the_same_within_its_rounding(preset, launches):
    expected = {"kda": [FIRST, ["16f", "16"]], "gated_deltanet": [["2f", "2f", "16", "16", "16", "16"]]}[preset]
    mixer = built(preset, jnp.bfloat16)
    assert_same_by_kernels(mixer, launches, expected, jnp.bfloat16, 0.02)


class Adapter(nnx.Module):
    """What a user may put in place of a map."""

    def __init__(self, base):
        self.base = base
        self.scale = nnx.Param(jnp.asarray(0.5))

    def __call__(self, x):
        return self.base(x) * (1 + self.scale[...])


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("decay.up", [FIRST]),
        ("decay.down", [["8", "2f", "16", "16", "16"]]),
        ("decay", [["8", "2f", "16", "16", "16"]]),
        ("output_gate.up", [FIRST, ["16f"]]),
        ("write_gate", [["8", "8", "16", "16", "16"], ["16f", "16"]]),
        ("query", [["8", "8", "2f", "16", "16"], ["16f", "16"]]),
    ],
)
def test_an_adapter_in_place_of_a_map_is_called(place, expected, launches):
    mixer = built("kda")
    owner, _, name = place.rpartition(".")
    mixer.input_projection.separate(owner or name)
    owner = getattr(mixer.input_projection, owner) if owner else mixer.input_projection
    plain = of_a_token(mixer, derivatives=False)[1][0]
    launches.found.clear()
    setattr(owner, name, Adapter(getattr(owner, name)))
    # Of derivatives, what is above a map of low rank and a map by itself stand for all.
    output = assert_same_by_kernels(mixer, launches, expected, derivatives=place in ("decay.up", "write_gate"))
    assert relative_error(output, plain) > 1e-3


class Gate(nnx.Module, ColumnReader):
    """A sigmoid of a column."""

    def __init__(self, name, projection):
        self.name = name
        self.read_columns(**{name: projection})

    def epilogues(self):
        return {self.name: BoundedSigmoid(3.0)}

    def __call__(self, inputs):
        found = inputs.epilogue(self.name)
        return 3 * jax.nn.sigmoid(inputs[self.name]) if found is None else found


class Gates(nnx.Module, ColumnReader):
    """Gates of a map and of one of low rank, and a column without an epilogue."""

    def __init__(self, shape, rngs):
        self.own, self.raised = (
            Gate("own", shape.project(4, rngs=rngs)),
            Gate("raised", shape.project(5, rank=8, rngs=rngs)),
        )
        self.read_columns(plain=shape.project(3, rngs=rngs))


def test_parts_within_a_part_name_their_columns_and_epilogues(launches):
    shape, rngs = MixerShape(8, 1, 1, 8, 8), nnx.Rngs(0)
    gates, x = Gates(shape, rngs), jnp.asarray(np.random.default_rng(0).standard_normal((2, 2, 8)), jnp.float32)
    projection = InputProjection(shape, columns_of(gates), shared=["plain", "own", "raised"])
    assert [name for name, _, _ in projection.columns] == ["plain", "own", "raised.down"]
    many, one = (projection(rows, epilogues_of(gates)) for rows in (x, x[:, :1]))
    assert [sorted(some) for some in launches.found] == [["3", "4f", "8"], ["5f"]]
    assert many.epilogue("own") is None and one.epilogue("plain") is None
    for name, gate in (("own", gates.own), ("raised", gates.raised)):
        assert relative_error(one.epilogue(name), 3 * jax.nn.sigmoid(many[name][:, :1])) < 1e-5
        assert relative_error(gate(one), gate(many)[:, :1]) < 1e-5
        assert relative_error(one[name], many[name][:, :1]) < 1e-5  # though the kernel has made something else of it
    assert relative_error(one["plain"], many["plain"][:, :1]) < 1e-5
    with pytest.raises(ValueError, match="Gate: column 'own' is another part's, expected a name of its own"):
        columns_of(*(Gate("own", shape.project(4, rngs=rngs)) for _ in range(2)))
