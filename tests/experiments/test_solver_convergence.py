"""The study of the ridge solvers runs, small; what is committed says what its README says."""

import dataclasses
import json

import pytest

from experiments.solver_convergence import figures
from experiments.solver_convergence.__main__ import PARTS, main
from experiments.solver_convergence.config import GRADIENTS, PRECISIONS, SOLVERS, SolverConvergenceConfig

TINY = SolverConvergenceConfig(
    length=64,
    heads=1,
    size=16,
    ridges=(0.02, 0.1),
    iterations=6,
    reversed_iterations=4,
    gradient_length=20,
    gradient_heads=1,
    gradient_iterations=(3,),
    model_layers=1,
    vocabulary=11,
)
COMMITTED = SolverConvergenceConfig().output / "results.json"


@pytest.mark.slow
def test_a_small_study_measures_and_draws(tmp_path, monkeypatch):
    few = ("Chebyshev, implicit", "Chebyshev, reversed")
    for label in set(GRADIENTS) - set(few):
        monkeypatch.delitem(GRADIENTS, label)
    for label in set(SOLVERS) - {"Chebyshev", "Chebyshev, as printed"}:
        monkeypatch.delitem(SOLVERS, label)
    main(dataclasses.replace(TINY, output=tmp_path))
    results = json.loads((tmp_path / "results.json").read_text())
    assert set(PARTS) <= set(results)
    assert set(results["residuals"]["float32"]) == set(SOLVERS)
    for key, labels in (("single_layer", few), ("model", few[:1])):
        for precision in PRECISIONS:
            shown = [label for label in labels if precision != "bfloat16" or label.endswith("implicit")]
            curves = results[key][precision]
            assert set(curves) == {"exact", *shown}
            assert all(len(curves[label]) == 1 for label in shown)
        assert 0 < results[key]["float32"]["exact"] < 1e-3 < results[key]["bfloat16"]["exact"]
    assert len(list(tmp_path.glob("*.png"))) == 5
    # The pictures can be made again from the numbers alone.
    for picture in tmp_path.glob("*.png"):
        picture.unlink()
    main(dataclasses.replace(TINY, output=tmp_path, from_json=True))
    assert len(list(tmp_path.glob("*.png"))) == 5


@pytest.fixture(scope="module")
def committed():
    return json.loads(COMMITTED.read_text())


def test_committed_results_are_of_the_default_configuration(committed):
    for name, value in dataclasses.asdict(SolverConvergenceConfig()).items():
        if name not in ("output", "from_json"):
            assert committed["config"][name] == (list(value) if isinstance(value, tuple) else value), name
    assert {path.name for path in COMMITTED.parent.glob("*.png")} == {
        f"{name}.png" for name in ("residuals", "gradients_layer", "gradients_model", "backwards", "strengths")
    }
    assert figures.draw.__doc__


def test_committed_results_say_what_the_readme_says(committed):
    worst = {label: curve["largest"] for label, curve in committed["residuals"]["float32"].items()}
    # Conjugate gradients lead early; with MesaNet's divisors they stop, and Chebyshev passes them.
    assert worst["conjugate gradients"][10] < 0.2 * worst["Chebyshev"][10]
    assert worst["Chebyshev"][-1] < 1e-2 * worst["conjugate gradients, FLA"][-1]
    half = {label: curve["largest"] for label, curve in committed["residuals"]["bfloat16 products"].items()}
    assert half["Chebyshev"][-1] < 0.5 * half["Chebyshev, as printed"][-1]
    layer, model = committed["single_layer"], committed["model"]
    last = committed["config"]["gradient_iterations"].index(100)
    for curves in (layer["float32"], model["float32"]):
        assert curves["Chebyshev, implicit"][last] < 2 * curves["exact"]
        assert curves["conjugate gradients, FLA, implicit"][last] > 100 * curves["exact"]
    assert layer["bfloat16"]["Chebyshev, implicit"][last] < layer["bfloat16"]["conjugate gradients, implicit"][last]
    b = committed["backwards"]
    assert all(
        bound <= smallest * (1 + 1e-6) and largest <= 1
        for bound, smallest, largest in zip(b["chebyshev_lower_bound"], b["chebyshev_smallest"], b["chebyshev_largest"])
    )
    assert min(x for x in b["conjugate_gradient_smallest"] if x is not None) < 1e-3
