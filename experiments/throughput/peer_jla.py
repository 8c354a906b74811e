"""jax-linear-attention's training step, of the same size and on as many tokens, beside ours.

Its own trainer as its users run it, by its command line (`jla train`), with what its configuration offers for speed:
nothing recomputed but what its custom derivatives leave out, its fused loss, AdamW over float32 weights, clipping at a
norm of 1. Each model runs in a process of its own, and its trainer's own log says what a step takes.

Its package holds no configuration files. Those of its published numbers are not public here: the settings below are
what the comments of its presets and options say is fastest on an H100.
"""

import json
import pathlib
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from experiments.harness.child import Child, last_line
from experiments.throughput.study import ThroughputStudy

Model = Literal["gated_deltanet", "kda", "mamba2", "transformer"]
# Its presets of flash-linear-attention's published 1.3B shapes, by our names of the mixers.
PRESETS: dict[Model, str] = {
    "gated_deltanet": "gdn-hd128-1p3b",
    "kda": "kda-1p3b",
    "mamba2": "mamba2-1p3b",
    "transformer": "transformer-1p3b",
}
PACKAGES = ("jax", "jax-linear-attention", "equinox", "optax")
# Steps of a window of its log, whose first step waits for the window before; the first window is left out.
_WINDOW, _WINDOWS = 5, 3


def configuration(
    plan: ThroughputStudy, model: Model, rows: int, folder: pathlib.Path, *, fp8: bool = False
) -> dict[str, Any]:
    """Its configuration of a model.

    Args:
        plan: gives the tokens a step and a row.
        model: which.
        rows: of each part of a step; the parts' gradients are added up.
        folder: of its run.
        fp8: matmuls in float8 with delayed scaling.
    """
    # Of a recurrent mixer it can compute the operator again in the backward pass, which many rows at once need.
    again = model in ("gated_deltanet", "kda") and rows * plan.main_length > 8192
    in_fp8 = {"fp8": "delayed", "fp8_fused": True, "fp8_min_features": 1024}
    return {
        "name": model,
        "model": {"preset": PRESETS[model], "remat": "none", "lean_vjp": True, "lean_remat_core": again}
        | (in_fp8 if fp8 else {}),
        "optim": {"lr": 1e-4, "schedule": "constant", "max_grad_norm": 1.0},
        "train": {
            "max_steps": _WINDOW * _WINDOWS,
            "seq_len": plan.main_length,
            "micro_batch_per_replica": rows,
            "grad_accum": plan.tokens // plan.main_length // rows,
            "log_every": _WINDOW,
            "ce_impl": "auto",
            "ce_grad_in_forward": True,
            "update_guard": "select",
            "final_eval": False,
            "save_final": False,
            "resume": "never",
            "output_dir": str(folder),
        },
        # Random tokens: speed does not depend on what they are.
        "data": {"source": "synthetic", "synthetic_kind": "uniform", "synthetic_samples": 1024},
    }


def time_models(
    plan: ThroughputStudy, models: Sequence[Model], *, fp8: bool = False, seconds: float | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The name and the record of each model, one after another; of what failed the record says why.

    Args:
        plan: gives the tokens a step and a row, and in how many parts a step is taken. Where the parts do not fit, they
            are halved.
        models: which.
        fp8: also with matmuls in float8.
        seconds: after which a process is ended.
    """
    for model in models:
        for in_fp8 in (False, True)[: 1 + fp8]:
            yield f"{model}{'--fp8' * in_fp8}", _time(plan, model, in_fp8, seconds)


def _time(plan: ThroughputStudy, model: Model, fp8: bool, seconds: float | None) -> dict[str, Any]:
    rows = plan.tokens // plan.main_length // plan.accumulation
    while True:
        with tempfile.TemporaryDirectory() as temporary:
            folder = pathlib.Path(temporary)
            config = folder / "config.json"
            content = configuration(plan, model, rows, folder / "run", fp8=fp8)
            config.write_text(json.dumps(content))
            settings = {k: v for k, v in (content["model"] | content["train"]).items() if k != "output_dir"}
            what: dict[str, Any] = {"model": model, "fp8": fp8, "rows_at_once": rows, "settings": settings}
            _, failure = Child("jla.cli", "train", "--config", config).finish("", seconds)
            if not failure:
                return what | read_run(folder / "run", plan)
        reason = next((line for line in reversed(failure.splitlines()) if "RESOURCE_EXHAUSTED" in line), None)
        if reason is None or rows == 1:
            return what | {"error": reason[:300] if reason else last_line(failure)}
        rows //= 2


def read_run(folder: pathlib.Path, plan: ThroughputStudy) -> dict[str, Any]:
    """What its trainer has recorded: seconds of a step in each window but the first, parameters, planned memory."""
    windows = [record["metrics"] for record in _lines(folder / "metrics.jsonl") if record["event"] == "train"]
    compiled = json.loads((folder / "compile_preflight.json").read_text())
    return {
        "length": plan.main_length,
        "tokens": plan.tokens,
        "num_parameters": json.loads((folder / "run.json").read_text())["parameters"],
        "step_seconds": [round(window["step_time"], 6) for window in windows[1:]],
        "peak_bytes": int(compiled["memory"].get("total_size_gib", 0) * 2**30),
        "loss": windows[-1]["loss"],
        "compile_seconds": round(compiled["compile_seconds"], 1),
    }


def _lines(path: pathlib.Path) -> Iterator[dict[str, Any]]:
    return map(json.loads, path.read_text().splitlines())
