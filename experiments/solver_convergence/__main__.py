"""Measures how the ridge solvers and their gradients converge: `uv run python -m experiments.solver_convergence`."""

import dataclasses
import datetime
import json
import math
import os
import time
from typing import Any

import jax
import tyro
from rich.console import Console

from experiments.solver_convergence import figures, forward, gradients
from experiments.solver_convergence.config import SolverConvergenceConfig

PARTS = {
    "residuals": forward.residuals,
    "strengths": forward.strengths,
    "backwards": forward.backwards,
    "single_layer": gradients.single_layer,
    "model": gradients.model,
}


def plain(value: Any) -> Any:
    """A copy with five digits of each number, since people read the results too; those that JSON lacks are null."""
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [plain(entry) for entry in value]
    if not isinstance(value, float):
        return value
    return float(f"{value:.5g}") if math.isfinite(value) else None


def measure(config: SolverConvergenceConfig, console: Console) -> dict[str, Any]:
    """All parts of the study."""
    settings = dataclasses.asdict(config)
    del settings["output"], settings["from_json"]
    results: dict[str, Any] = {
        "command": "uv run python -m experiments.solver_convergence",
        "date": datetime.date.today().isoformat(),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "cores": os.cpu_count(),
        "config": settings,
        "seconds": {},
    }
    for name, part in PARTS.items():
        start = time.perf_counter()
        results[name] = plain(part(config))
        results["seconds"][name] = round(time.perf_counter() - start, 1)
        console.print(f"{name}: {results['seconds'][name]} s")
    return results


def main(config: SolverConvergenceConfig) -> None:
    """Measures, unless told not to, and draws."""
    console = Console()
    path = config.output / "results.json"
    if not config.from_json:
        results = measure(config, console)
        config.output.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=1) + "\n")
    for picture in figures.draw(json.loads(path.read_text()), config.output):
        console.print(str(picture))


if __name__ == "__main__":
    main(tyro.cli(SolverConvergenceConfig, prog="python -m experiments.solver_convergence"))
