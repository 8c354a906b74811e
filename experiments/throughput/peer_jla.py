"""jax-linear-attention's training step, of the same size and on as many tokens, beside ours.

Its own trainer as its users run it, by its command line (`jla train`), with what its configuration offers for speed:
nothing recomputed but what its custom derivatives leave out, its fused loss, AdamW over float32 weights, clipping at a
norm of 1. Each model runs in a process of its own, and its trainer's own log says what a step takes.

Its package holds no configuration files. Those of its published numbers are not public here: the settings below are
what the comments of its presets and options say is fastest on an H100.
"""

import contextlib
import itertools
import json
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from experiments.harness.child import Child, last_line
from experiments.harness.device import turn
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
# Windows of its log, whose first step waits for the window before; the first window is left out.
_WINDOWS = 3
# What its trainer writes into the run's folder when the step is compiled.
_COMPILED = "compile_preflight.json"
_LATE = "not compiled in time"


def configuration(
    plan: ThroughputStudy,
    model: Model,
    rows: int,
    folder: pathlib.Path,
    *,
    fp8: bool = False,
    programs: pathlib.Path | None = None,
) -> dict[str, Any]:
    """Its configuration of a model.

    Args:
        plan: gives the tokens a step and a row, and how many steps are timed.
        model: which.
        rows: of each part of a step; the parts' gradients are added up.
        folder: of its run.
        fp8: matmuls in float8 with delayed scaling.
        programs: folder of compiled programs, which it adds to and takes from; None keeps none.
    """
    # Of a recurrent mixer it can compute the operator again in the backward pass, which many rows at once need.
    again = model in ("gated_deltanet", "kda") and rows * plan.main_length > 8192
    window = max(1, plan.steps - 1)
    in_fp8 = {"fp8": "delayed", "fp8_fused": True, "fp8_min_features": 1024}
    return {
        "name": model,
        "model": {"preset": PRESETS[model], "remat": "none", "lean_vjp": True, "lean_remat_core": again}
        | (in_fp8 if fp8 else {}),
        "optim": {"lr": 1e-4, "schedule": "constant", "max_grad_norm": 1.0},
        "train": {
            "max_steps": window * _WINDOWS,
            "seq_len": plan.main_length,
            "micro_batch_per_replica": rows,
            "grad_accum": plan.tokens // plan.main_length // rows,
            "log_every": window,
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
        "runtime": {"compile_cache_dir": "" if programs is None else str(programs)},
    }


def _variants(models: Sequence[Model], fp8: bool) -> list[tuple[str, Model, bool]]:
    """Names, models and whether in float8."""
    return [
        (f"{model}{'--fp8' * in_fp8}", model, in_fp8)
        for model, in_fp8 in itertools.product(models, (False, True)[: 1 + fp8])
    ]


def _rows(plan: ThroughputStudy) -> int:
    return plan.tokens // plan.main_length // plan.accumulation


def start_compiling(
    plan: ThroughputStudy,
    models: Sequence[Model],
    programs: pathlib.Path,
    *,
    fp8: bool = False,
    seconds: float | None = None,
) -> Callable[[], dict[str, float | str]]:
    """Begins to compile the models' steps side by side: its trainer's own runs, ended when they have compiled.

    Args:
        plan: gives the tokens a step and a row, and in how many parts a step is taken.
        models: which.
        programs: folder of compiled programs, for the run that is timed.
        fp8: also with matmuls in float8.
        seconds: after which a process is ended.

    Returns:
        A function that waits for them and gives, by name, the seconds that compiling took or why it did not end.
    """
    end = None if seconds is None else time.monotonic() + seconds
    folder = tempfile.TemporaryDirectory()
    children = {}
    for name, model, in_fp8 in _variants(models, fp8):
        run, config = pathlib.Path(folder.name) / name, pathlib.Path(folder.name) / f"{name}.json"
        config.write_text(json.dumps(configuration(plan, model, _rows(plan), run, fp8=in_fp8, programs=programs)))
        children[name] = Child("jla.cli", "train", "--config", config), run / _COMPILED

    def wait() -> dict[str, float | str]:
        found: dict[str, float | str] = {}
        while len(found) < len(children):
            for name, (child, compiled) in children.items():
                late = end is not None and time.monotonic() > end
                if name not in found and (compiled.exists() or late or not child.is_running):
                    # Its first step would take memory that the others need to compile.
                    has_ended = not child.is_running
                    _, failure = child.finish("", 0)
                    reason = last_line(failure) if has_ended else _LATE
                    found[name] = _compile_seconds(compiled) if compiled.exists() else reason
            time.sleep(0.05)
        folder.cleanup()
        return found

    return wait


def _compile_seconds(compiled: pathlib.Path) -> float:
    return round(json.loads(compiled.read_text())["compile_seconds"], 1)


def time_models(
    plan: ThroughputStudy,
    models: Sequence[Model],
    *,
    fp8: bool = False,
    seconds: float | None = None,
    programs: pathlib.Path | None = None,
    compiled: Mapping[str, float | str] | None = None,
    exclusive: Sequence[pathlib.Path] = (),
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The name and the record of each model, one after another; of what failed the record says why.

    A model's process compiles whatever else happens, is stopped before its first step, and goes on when nobody else
    times anything.

    Args:
        plan: gives the tokens a step and a row, and in how many parts a step is taken. Where the parts do not fit, they
            are halved.
        models: which.
        fp8: also with matmuls in float8.
        seconds: after which a process is ended.
        programs: folder of compiled programs; None compiles all.
        compiled: what `start_compiling` found: seconds for the records of what comes from `programs`.
        exclusive: lock files of the device, as those of `turn`.
    """
    for name, model, in_fp8 in _variants(models, fp8):
        before = (compiled or {}).get(name)
        if before == _LATE:  # again it would be as late
            what = {"model": model, "fp8": in_fp8, "rows_at_once": _rows(plan)}
            yield name, what | {"error": f"not compiled in {seconds:.0f} s"}
            continue
        record = _time(plan, model, in_fp8, seconds, programs, exclusive)
        if isinstance(before, float) and record.get("rows_at_once") == _rows(plan) and "error" not in record:
            record["compile_seconds"] = before
        yield name, record


def _time(
    plan: ThroughputStudy,
    model: Model,
    fp8: bool,
    seconds: float | None,
    programs: pathlib.Path | None,
    exclusive: Sequence[pathlib.Path],
) -> dict[str, Any]:
    rows = _rows(plan)
    while True:
        with tempfile.TemporaryDirectory() as temporary:
            folder = pathlib.Path(temporary)
            config = folder / "config.json"
            content = configuration(plan, model, rows, folder / "run", fp8=fp8, programs=programs)
            config.write_text(json.dumps(content))
            settings = {k: v for k, v in (content["model"] | content["train"]).items() if k != "output_dir"}
            what: dict[str, Any] = {"model": model, "fp8": fp8, "rows_at_once": rows, "settings": settings}
            failure = _train_in_turn(config, folder / "run" / _COMPILED, seconds, exclusive)
            if not failure:
                return what | read_run(folder / "run", plan)
        reason = next((line for line in reversed(failure.splitlines()) if "RESOURCE_EXHAUSTED" in line), None)
        if reason is None or rows == 1:
            return what | {"error": reason[:300] if reason else last_line(failure)}
        rows //= 2


def _train_in_turn(
    config: pathlib.Path, compiled: pathlib.Path, seconds: float | None, exclusive: Sequence[pathlib.Path]
) -> str:
    """Runs its trainer, whose steps wait for the device, which does not count; gives "" or why it failed."""
    begin = time.monotonic()
    child = Child("jla.cli", "train", "--config", config)

    def left() -> float | None:
        return None if seconds is None else begin + seconds - time.monotonic()

    while child.is_running and not compiled.exists():
        if (remaining := left()) is not None and remaining < 0:
            child.finish("", 0)
            return _LATE
        time.sleep(0.05)
    remaining = left()
    with contextlib.ExitStack() as device:
        with child.paused():
            device.enter_context(turn(exclusive))
        return child.finish("", remaining)[1]


def read_run(folder: pathlib.Path, plan: ThroughputStudy) -> dict[str, Any]:
    """What its trainer has recorded: seconds of a step in each window but the first, parameters, planned memory."""
    windows = [record["metrics"] for record in _lines(folder / "metrics.jsonl") if record["event"] == "train"]
    compiled = json.loads((folder / _COMPILED).read_text())
    return {
        "length": plan.main_length,
        "tokens": plan.tokens,
        "num_parameters": json.loads((folder / "run.json").read_text())["parameters"],
        "step_seconds": [round(window["step_time"], 6) for window in windows[1:]],
        "peak_bytes": int(compiled["memory"].get("total_size_gib", 0) * 2**30),
        "loss": windows[-1]["loss"],
        "compile_seconds": _compile_seconds(folder / _COMPILED),
    }


def _lines(path: pathlib.Path) -> Iterator[dict[str, Any]]:
    return map(json.loads, path.read_text().splitlines())
