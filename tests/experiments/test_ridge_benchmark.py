"""The ridge solve's benchmark: what it times is what it says, and its report holds to its records."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.ridge_benchmark import __main__ as command
from experiments.ridge_benchmark import measure
from experiments.ridge_benchmark.config import RidgeBenchmarkConfig
from experiments.ridge_benchmark.inputs import draw
from experiments.ridge_benchmark.report import markdown


def test_mesanets_operator_is_its_recurrence():
    x = {**draw((1, 20, 1, 8), jnp.float32), "ridge": jnp.full((1, 8), 0.5)}
    found = jax.jit(measure.mesanet, static_argnums=(1, 2))(x, 12, "split")
    a = {name: np.asarray(array, np.float64)[0, :, 0] for name, array in x.items() if name != "ridge"}
    gram, memory = np.zeros((8, 8)), np.zeros((8, 8))
    for t in range(20):
        decay = np.exp(a["log_decay"][t])
        gram = decay * gram + a["beta"][t] * np.outer(a["k"][t], a["k"][t])
        memory = decay * memory + a["beta"][t] * np.outer(a["k"][t], a["v"][t])
        expected = memory.T @ np.linalg.solve(gram + 0.5 * np.eye(8), a["q"][t])
        np.testing.assert_allclose(found[0, t, 0], expected, atol=1e-4)


def test_gradients_are_of_the_named_arrays_for_the_given_cotangent():
    x = {"a": jnp.arange(3.0), "b": jnp.ones(3), "d_out": jnp.array([1.0, 2.0, 3.0])}
    out, gradients = measure.with_gradients(lambda x: x["a"] * x["b"], ("b",))(x)
    np.testing.assert_array_equal(out, x["a"])
    assert list(gradients) == ["b"]
    np.testing.assert_array_equal(gradients["b"], x["a"] * x["d_out"])


def results(records):
    config = RidgeBenchmarkConfig().settings()
    head = {"device": "a card", "versions": {"jax": "1"}, "commit": "abc", "command": "python", "date": "today"}
    return {**head, "config": config, "records": records}


def layer(name, wall):
    timing = {"wall_ms": wall, "device_ms": wall, "kernels": {"ridge_chebyshev": wall}, "peak_mib": 1.0}
    return [{"kind": "layer", "layer": name, "shape": [1, 64, 32], "pass": p, **timing} for p in measure_passes()]


def measure_passes():
    return ("forward", "forward_backward")


def test_report_from_records(tmp_path, capsys):
    time = {"kind": "time", "operator": "chebyshev", "precision": "bfloat16", "shape": [1, 64, 1, 16]}
    time |= {"wall_ms": 0.25, "device_ms": 0.125, "kernels": {}, "peak_mib": 3.0}
    records = [
        {**time, "pass": "forward", "implementation": "ours"},
        {**time, "pass": "forward", "implementation": "fla", "operator": "mesanet", "wall_ms": 0.5},
        *layer("Gated DeltaNet", 2.0),
        *layer("Gated KalmaNet", 3.0),
        {
            "kind": "gradient_error",
            "operator": "conjugate_gradient",
            "inputs": "float32",
            "shape": [1, 64, 1, 16],
            "errors": {"x": 1e-6, "k": 2.5e-5},
        },
        {"kind": "failure", "of": "error", "reason": "out of memory"},
    ]
    text = markdown(results(records))
    assert "| Chebyshev | ours | 1, 64, 1, 16 | 0.250 | 0.125 |" in text
    assert "| MesaNet's operator | FLA | 1, 64, 1, 16 | 0.500 |" in text
    assert "| Gated KalmaNet | 3.000 | 3.000 | 3.000 | 1.50 |" in text
    assert "| conjugate gradients | float32 | 1.0e-06 | 2.5e-05 |" in text
    assert "- error: out of memory" in text

    (tmp_path / "run.json").write_text(json.dumps(results(records)))
    assert command.main(["--from-json", "--output", str(tmp_path), "--name", "run"]) == 0
    assert (tmp_path / "run.md").read_text() == text
    assert (tmp_path / "run.png").stat().st_size > 0
    assert command.main(["--from-json", "--output", str(tmp_path), "--name", "other"]) == 2
    assert "there is no" in capsys.readouterr().out


def test_gradient_errors_are_small_where_the_kernels_are_right(monkeypatch):
    monkeypatch.setattr(measure, "METHODS", ("chebyshev",))
    config = RidgeBenchmarkConfig(error_shape=(1, 70, 1), head_size=16, iterations=5)
    half, single = list(measure.gradient_errors(config))
    assert half["inputs"] == "bfloat16" and single["inputs"] == "float32"
    assert max(single["errors"].values()) < 1e-4 < max(half["errors"].values()) < 5e-2


def test_layers_alone_are_timed(tmp_path):
    sizes = "--layer-shape 1 16 --width 32 --layer-heads 2 --sketch-sizes 8"
    arguments = f"--only layers --name run --repeats 2 --no-peer {sizes}".split()
    assert command.main(["--output", str(tmp_path), *arguments]) == 0
    records = json.loads((tmp_path / "run.json").read_text())["records"]
    assert [r["kind"] for r in records] == ["worker", *["layer"] * 2 * len(measure.LAYERS)]
    assert all(r["wall_ms_quantiles"][0] <= r["wall_ms"] <= r["wall_ms_quantiles"][1] for r in records[1:])
    assert "| Gated KalmaNet |" in (tmp_path / "run.md").read_text()


def test_what_is_timed_of_a_peers_layer():
    torch = pytest.importorskip("torch")
    from experiments.ridge_benchmark.peer import layer_passes

    layer = torch.nn.Linear(4, 4)
    # Its first result is its output, [1, 3, 4].
    passes = layer_passes(torch.nn.Sequential(layer, torch.nn.Unflatten(0, (1, 1))), torch.ones(1, 3, 4))
    assert passes["forward"]().dtype == torch.bfloat16 and not passes["forward"]().requires_grad
    gradients = passes["forward_backward"]()
    assert [g.shape for g in gradients] == [(1, 3, 4), (4, 4), (4,)]


def test_bad_sizes_are_refused():
    with pytest.raises(ValueError, match="width is 100, expected a multiple of layer_heads = 8"):
        RidgeBenchmarkConfig(width=100)


def test_the_peer_is_passed_over_where_it_is_not_installed():
    assert not measure.peer_installed()
