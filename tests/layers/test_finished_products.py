"""Gates that end in the kernel of their maps' products, and maps of low rank whose second parts share a launch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rnnlib.layers import mixer_preset
from rnnlib.layers.products import Finishing, InputLinear, LowRank, finished_product, joined_inputs
from rnnlib.ops.thin_products import BoundedSigmoid, thin_products
from tests.pallas_kernels.cases import relative_error

WIDTH = 16


class Launches:
    """Calls of the kernel for maps of an input: the columns of each product, with an "f" where it is finished."""

    def __init__(self):
        self.found: list[list[str]] = []
        self.serves = True

    def few_rows(self, x, kernels):
        return self.serves and x.shape[-2] == 1

    def products(self, xs, kernels, finishes):
        self.found.append([f"{w.shape[1]}{'' if f is None else 'f'}" for w, f in zip(kernels, finishes)])
        return thin_products(xs, kernels, finishes=finishes)


@pytest.fixture
def launches(monkeypatch):
    """Kernels serve one token as they would on a GPU, interpreted."""
    launches = Launches()
    for module in ("rnnlib.ops.thin_products", "rnnlib.layers.products"):
        monkeypatch.setattr(f"{module}.thin_kernel_serves", launches.few_rows)
    monkeypatch.setattr("rnnlib.layers.products.thin_products", launches.products)
    return launches


def built(preset, dtype=jnp.float32, **overrides):
    """A mixer with two heads of 8 channels, no parameter of which is 0."""
    mixer = mixer_preset(preset, **overrides).build(WIDTH, 2, rngs=nnx.Rngs(0), dtype=dtype)
    rng = np.random.default_rng(0)
    graph, state = nnx.split(mixer)
    return nnx.merge(graph, jax.tree.map(lambda p: p + jnp.asarray(0.3 * rng.standard_normal(p.shape), p.dtype), state))


def of_a_token(mixer, dtype=jnp.float32):
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

    return jax.jit(everything)(state, x[:, 5:])


def assert_same_by_kernels(mixer, launches, expected, dtype=jnp.float32, error=2e-5):
    """With the launches that are expected, in their order; products of one may come in any."""
    launches.serves = False
    plain = of_a_token(mixer, dtype)
    assert launches.found == []
    launches.serves = True
    found = of_a_token(mixer, dtype)
    number = len(expected)
    assert [sorted(some) for some in launches.found[:number]] == [sorted(some) for some in expected]
    assert launches.found == launches.found[:number] * (len(launches.found) // number)
    errors = jax.tree.leaves(jax.tree.map(relative_error, found, plain))
    assert max(errors) < error, errors
    launches.found.clear()


FIRST = ["8", "8", "2f", "16", "16", "16"]


@pytest.mark.parametrize(
    ("preset", "overrides", "expected"),
    [
        ("kda", {"negative_eigenvalues": True}, [FIRST, ["16f", "16"]]),
        # A second map as wide as the mixer's input is no map of that input.
        ("kda", {"decay.rank": WIDTH, "readout.gate_rank": 4}, [["16", "4", "2f", "16", "16", "16"], ["16f", "16"]]),
        # A bias is added to the product: the norm's kernel adds the preset's gate's, nothing finishes the decay's.
        ("kda", {"readout.gate_bias": False}, [FIRST, ["16f", "16"]]),
        ("kda", {"decay.use_bias": True}, [FIRST, ["16", "16"]]),
        ("kda", {"decay.step_limits": (0.1, 0.5)}, [FIRST, ["16", "16"]]),
        ("kda", {"gain.use_bias": True}, [["8", "8", "16", "16", "16"], ["16f", "16"]]),
        (
            "kda",
            {"readout.gate_rank": None, "readout.gate_bias": False},
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
def test_a_mixer_of_a_token_is_the_same_by_finished_products(preset, overrides, expected, launches):
    mixer = built(preset, **overrides)
    if expected is None:
        of_a_token(mixer)
        expected = launches.found[: 1 + any(type(node) is LowRank for _, node in nnx.iter_graph(mixer))]
        launches.found = []
        has_finish = preset not in ("mamba3", "gla")
        assert any(name.endswith("f") for some in expected for name in some) == has_finish
    assert_same_by_kernels(mixer, launches, expected)


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
        (("decay", "projection", "up"), [FIRST]),
        (("decay", "projection", "down"), [FIRST]),
        (("decay", "projection"), [FIRST, ["16", "16"]]),
        (("readout", "gate", "up"), [FIRST, ["16f"]]),
        (("gain", "projection"), [["8", "8", "2", "16", "16", "16"], ["16f", "16"]]),
    ],
    ids=lambda value: ".".join(value) if isinstance(value, tuple) else "",
)
def test_an_adapter_in_place_of_a_map_is_called(place, expected, launches):
    mixer = built("kda")
    owner = mixer
    for name in place[:-1]:
        owner = getattr(owner, name)
    plain = of_a_token(mixer)[0][0]
    launches.found.clear()
    setattr(owner, place[-1], Adapter(getattr(owner, place[-1])))
    assert_same_by_kernels(mixer, launches, expected)
    assert relative_error(of_a_token(mixer)[0][0], plain) > 1e-3


class Gate(nnx.Module, Finishing):
    """A sigmoid of a map."""

    def __init__(self, projection):
        self.projection = projection

    def finishes(self):
        return [(self.projection, BoundedSigmoid(3.0))]


class Gates(nnx.Module):
    """Two gates of one map, one of a map of low rank, and one of a map of its own."""

    def __init__(self, rngs):
        options = {"use_bias": False, "dtype": jnp.float32, "rngs": rngs}
        shared, own = InputLinear(8, 3, **options), InputLinear(8, 4, **options)
        raised = LowRank(InputLinear(8, 8, **options), nnx.Linear(8, 5, **options))
        self.first, self.second, self.own, self.raised = Gate(shared), Gate(shared), Gate(own), Gate(raised)


def test_what_is_finished_is_of_one_part_and_one_input(launches):
    gates, x = Gates(nnx.Rngs(0)), jnp.asarray(np.random.default_rng(0).standard_normal((2, 1, 8)), jnp.float32)
    plain = {name: getattr(gates, name).projection(x) for name in ("first", "second", "own", "raised")}
    assert finished_product(gates.own.projection, x) is None
    with joined_inputs(gates, x):
        for name, y in plain.items():
            f = getattr(gates, name).projection
            assert relative_error(f(x), y) < 1e-5  # also where the kernel has made something else of it
            assert relative_error(f(2 * x), 2 * y) < 1e-5
            assert finished_product(f, 2 * x) is None
            found = finished_product(f, x)
            assert (found is not None) == (name in ("own", "raised"))
            if found is not None:
                assert relative_error(found, 3 * jax.nn.sigmoid(y)) < 1e-5
    assert [sorted(some) for some in launches.found] == [["3", "4f", "8"], ["5f"]]
    assert finished_product(gates.own.projection, x) is None
