"""What is measured, each part giving records."""

import concurrent.futures
import functools
import importlib.util
import json
import os
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from experiments.harness.child import Child
from experiments.harness.device import turn
from experiments.harness.records import Record, describe, read_records
from experiments.harness.timing import peak_mib, timed_record
from experiments.ridge_benchmark.config import METHODS, PRECISIONS, RIDGES, RidgeBenchmarkConfig
from experiments.ridge_benchmark.inputs import draw
from rnnlib import ops
from rnnlib.layers.presets import mixer_preset
from rnnlib.ops.ridge_solve import LinearSolver

Arrays = dict[str, Array]
Compiled = tuple[Callable[..., Any], tuple[Any, ...]]
PRODUCT_DTYPES = {"bfloat16": jnp.bfloat16, "split": jnp.float32}
COMPILERS = 8
"""Processes among which the peer's candidates are shared out for compilation."""
LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Gated DeltaNet": ("gated_deltanet", {}),
    "Gated KalmaNet": ("gated_kalmanet", {}),
    "Gated KalmaNet, sketched": ("gated_kalmanet", {"solve.sketch_size": None}),
    "MesaNet": ("mesanet", {}),
}


def mesanet(x: Arrays, iterations: int, precision: str) -> Array:
    """MesaNet's operator: `o_t = U_t^T (H_t + Diag(lambda))^-1 q_t`, as flash-linear-attention's function has it."""
    key = (jnp.sqrt(x["beta"].astype(jnp.float32))[..., None] * x["k"]).astype(x["k"].dtype)
    solution, _ = ops.ridge_solve(
        x["q"],
        key,
        ridge=x["ridge"],
        adaptive=False,
        log_decay=x["log_decay"],
        iterations=iterations,
        solver=LinearSolver("conjugate_gradient", product_dtype=PRODUCT_DTYPES[precision]),
    )
    return ops.linear_attention(solution, x["k"], x["v"], log_decay=x["log_decay"], write=x["beta"], scale=1.0)[0]


def ridge_solution(x: Arrays, method: str, iterations: int, precision: str) -> Array:
    """The solve alone."""
    return ops.ridge_solve(
        x["q"],
        x["k"],
        ridge=RIDGES[method],
        adaptive=method == "chebyshev",
        log_decay=x["log_decay"],
        iterations=iterations,
        solver=LinearSolver(method, product_dtype=PRODUCT_DTYPES[precision]),
    )[0]


def with_gradients(function: Callable[[Arrays], Array], names: tuple[str, ...]) -> Callable[[Arrays], Any]:
    """The function's value and its gradients in the arrays of these names, for the cotangent `d_out`."""

    def run(x: Arrays) -> Any:
        inputs = {name: x[name] for name in names}
        out, pull_back = jax.vjp(lambda inputs: function({**x, **inputs}), inputs)
        return out, pull_back(x["d_out"].astype(out.dtype))[0]

    return run


def compile_all(jobs: dict[Any, Callable[[], Compiled]]) -> Iterator[tuple[Any, Compiled | str]]:
    """Compiles side by side; a failure comes as its description."""
    with concurrent.futures.ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        futures = {key: pool.submit(job) for key, job in jobs.items()}
    for key, future in futures.items():
        error = future.exception()
        yield key, future.result() if error is None else describe(error)


def compiled(function: Callable[..., Any], *arguments: Any) -> Compiled:
    """A function compiled for its arguments, and they."""
    return jax.jit(function).lower(*arguments).compile(), arguments


def timed(config: RidgeBenchmarkConfig, what: Record, job: Compiled | str) -> Record:
    """A record of a compiled function's time and memory."""
    if isinstance(job, str):
        return {**what, "kind": "failure", "of": what["kind"], "reason": job}
    call, arguments = job
    timing = timed_record(lambda: call(*arguments), config.repeats, with_kernels=jax.default_backend() == "gpu")
    return {**what, **timing, "peak_mib": peak_mib(call)}


Jobs = list[tuple[Record, Callable[[], Compiled]]]
"""What is to be timed: a record's beginning, and what compiles it."""


def solve_jobs(config: RidgeBenchmarkConfig) -> Jobs:
    """Forward and backward of both methods, of sketched sizes and other precisions, and of MesaNet's operator."""
    jobs: Jobs = []
    arrays: dict[Any, Arrays] = {}
    for sizes in config.shapes:
        cases = [(method, "bfloat16", config.head_size) for method in METHODS]
        cases += [("chebyshev", "bfloat16", size) for size in config.sketch_sizes]
        cases += [("chebyshev", "split", config.head_size)]
        # The default, and what the peer multiplies in.
        cases += [("mesanet", precision, config.head_size) for precision in ("split", "bfloat16")]
        for method, precision, size in cases:
            shape = (*sizes, size)
            if shape not in arrays:
                ridge = jnp.full((shape[2], size), 1.0, jnp.float32)
                arrays[shape] = {**draw(shape, jnp.bfloat16), "ridge": ridge}
            function: Callable[[Arrays], Array] = functools.partial(
                ridge_solution, method=method, iterations=config.iterations, precision=precision
            )
            names: tuple[str, ...] = ("q", "k", "log_decay")
            if method == "mesanet":
                function = functools.partial(mesanet, iterations=config.iterations, precision=precision)
                names += ("v", "beta", "ridge")
            both = with_gradients(function, names)
            for name, run in (("forward", function), ("forward_backward", both)):
                what = {"kind": "time", "operator": method, "precision": precision, "shape": shape, "pass": name}
                jobs.append(({**what, "implementation": "ours"}, functools.partial(compiled, run, arrays[shape])))
    return jobs


def _relative(x: Any, expected: np.ndarray) -> dict[str, float]:
    difference = np.linalg.norm(np.asarray(x, np.float64) - expected, axis=-1)
    norm = np.linalg.norm(expected, axis=-1)
    return {
        "error": float(np.linalg.norm(difference) / np.linalg.norm(norm)),
        "worst": float(np.max(difference / np.maximum(norm, 1e-30))),
    }


def solve_errors(config: RidgeBenchmarkConfig) -> Iterator[Record]:
    """Errors of the products' precisions against the same iterate and against the exact solution, in float64.

    Inputs are bfloat16 (or float32) numbers; solutions come out in float32, so that rounding them is not counted.
    """
    from pallas_kernels import operators

    for dtype in (jnp.bfloat16, jnp.float32):
        x = draw((*config.error_shape, config.head_size), dtype)
        names = ("q", "k", "log_decay")
        references: dict[Any, np.ndarray] = {}
        with jax.enable_x64(True):
            doubles = {name: jnp.asarray(np.asarray(x[name].astype(jnp.float32)), jnp.float64) for name in names}

            def reference(method: str, iterations: int, solver: str, doubles: Arrays = doubles) -> np.ndarray:
                options: dict[str, Any] = {"ridge": RIDGES[method], "adaptive": method == "chebyshev"}
                solve = functools.partial(
                    ops.ridge_solve, **options, iterations=iterations, solver=solver, implementation="scan"
                )
                return np.asarray(jax.jit(solve)(**doubles)[0])

            for method in METHODS:
                references[method, "exact"] = reference(method, 1, "exact")
                for iterations in config.error_iterations:
                    references[method, iterations] = reference(method, iterations, method)
        jobs: dict[Any, Callable[[], Compiled]] = {}
        for method in METHODS:
            for precision in PRECISIONS:
                for iterations in config.error_iterations:
                    ridge = jnp.full((config.error_shape[2], 1), RIDGES[method], jnp.float32)
                    solve = functools.partial(
                        operators.ridge.ridge_solve,
                        adaptive=method == "chebyshev",
                        iterations=iterations,
                        solver=method,
                        precision=precision,
                    )
                    arguments = {**{name: x[name] for name in names}, "q": x["q"].astype(jnp.float32), "ridge": ridge}
                    jobs[method, precision, iterations] = functools.partial(
                        compiled, lambda x, solve=solve: solve(**x)[0], arguments
                    )
        for (method, precision, iterations), job in compile_all(jobs):
            what = {"operator": method, "precision": precision, "iterations": iterations}
            what |= {"inputs": jnp.dtype(dtype).name, "shape": (*config.error_shape, config.head_size)}
            if isinstance(job, str):
                yield {**what, "kind": "failure", "of": "error", "reason": job}
                continue
            found = job[0](*job[1])
            exact = references[method, "exact"]
            yield {
                **what,
                "kind": "error",
                "of_iterate": _relative(found, references[method, iterations]),
                "of_solution": _relative(found, exact),
                "iterate_itself": _relative(references[method, iterations], exact),
            }


def gradient_errors(config: RidgeBenchmarkConfig) -> Iterator[Record]:
    """Errors of solutions and gradients, by default products, against the scan's in float64 with as many iterations."""
    jobs: dict[Any, Callable[[], Compiled]] = {}
    references: dict[Any, dict[str, np.ndarray]] = {}
    for dtype in (jnp.bfloat16, jnp.float32):
        drawn = draw((*config.error_shape, config.head_size), dtype)
        names = ("q", "k", "log_decay", "ridge")
        for method in METHODS:
            ridge = jnp.full((config.error_shape[2],), RIDGES[method], jnp.float32)
            x = {**{name: drawn[name] for name in names[:3]}, "ridge": ridge, "d_out": drawn["d_out"]}

            def solve(x: Arrays, method: str = method, implementation: str = "triton") -> Array:
                return ops.ridge_solve(
                    x["q"],
                    x["k"],
                    ridge=x["ridge"],
                    adaptive=method == "chebyshev",
                    log_decay=x["log_decay"],
                    iterations=config.iterations,
                    solver=method,
                    implementation=implementation,
                )[0]

            key = method, jnp.dtype(dtype).name
            jobs[key] = functools.partial(compiled, with_gradients(solve, names), x)
            with jax.enable_x64(True):
                doubles = {name: jnp.asarray(np.asarray(a.astype(jnp.float32)), jnp.float64) for name, a in x.items()}
                scan = with_gradients(functools.partial(solve, implementation="scan"), names)
                out, gradients = jax.jit(scan)(doubles)
                references[key] = {"x": np.asarray(out), **{n: np.asarray(g) for n, g in gradients.items()}}
    for (method, inputs), job in compile_all(jobs):
        what = {"operator": method, "inputs": inputs, "shape": (*config.error_shape, config.head_size)}
        if isinstance(job, str):
            yield {**what, "kind": "failure", "of": "gradient_error", "reason": job}
            continue
        out, gradients = job[0](*job[1])
        expected = references[method, inputs]
        found = {"x": out, **gradients}
        errors = {
            name: float(np.linalg.norm(np.asarray(found[name], np.float64) - value) / np.linalg.norm(value))
            for name, value in expected.items()
        }
        yield {**what, "kind": "gradient_error", "errors": errors}


def layer_jobs(config: RidgeBenchmarkConfig) -> Jobs:
    """Forward + backward of whole layers, with respect to their parameters and inputs."""
    shape = (*config.layer_shape, config.width)
    x, d_out = (jax.random.normal(jax.random.key(n), shape, jnp.bfloat16) for n in range(2))
    jobs: Jobs = []
    for title, (name, options) in LAYERS.items():
        options = {key: config.sketch_sizes[0] if value is None else value for key, value in options.items()}
        mixer = mixer_preset(name, **options)
        layer = mixer.build(
            config.width, config.layer_heads, rngs=nnx.Rngs(0), dtype=jnp.bfloat16, param_dtype=jnp.float32
        )
        definition, state = nnx.split(layer)

        def forward(state: Any, x: Array, definition: Any = definition) -> Array:
            return nnx.merge(definition, state)(x)[0]

        def both(state: Any, x: Array, d_out: Array, forward: Callable[..., Array] = forward) -> Any:
            out, pull_back = jax.vjp(forward, state, x)
            return out, pull_back(d_out.astype(out.dtype))

        what = {"kind": "layer", "layer": title, "shape": shape}
        jobs.append(({**what, "pass": "forward"}, functools.partial(compiled, forward, state, x)))
        jobs.append(({**what, "pass": "forward_backward"}, functools.partial(compiled, both, state, x, d_out)))
    return jobs


def peer_installed() -> bool:
    """Whether flash-linear-attention and torch can be imported here."""
    return all(importlib.util.find_spec(name) is not None for name in ("torch", "fla"))


class PeerProcesses:
    """Processes that compile the peer's kernels side by side, and the one that times them."""

    def __init__(self, config: RidgeBenchmarkConfig, folder: pathlib.Path) -> None:
        self._folder = folder
        (folder / "peer.json").write_text(json.dumps(config.settings()))
        self._compiling = [self._start("compile", n, COMPILERS) for n in range(COMPILERS)]
        self._timing: Child | None = None

    def _start(self, *arguments: object) -> Child:
        module = "experiments.ridge_benchmark.peer"
        return Child(module, self._folder, *arguments, variables={"JAX_PLATFORMS": "cpu"})

    def prepare(self, deadline: float) -> None:
        """Waits until all is compiled and the peer has chosen its kernels: nothing else runs while ours are timed."""
        while any(child.is_running for child in self._compiling) and time.time() < deadline:
            time.sleep(0.2)
        self._timing = self._start("time")
        while self._timing.is_running and time.time() < deadline and not (self._folder / "prepared").exists():
            time.sleep(0.2)

    def time(self, deadline: float) -> list[Record]:
        """The peer's times."""
        failure = "not started"
        if self._timing is not None:
            _, failure = self._timing.finish("measure\n", max(20.0, deadline - time.time()))
        records = read_records(self._folder / "peer.jsonl")
        if not any(record["kind"] in ("time", "layer") for record in records):
            records.append({"kind": "failure", "of": "peer", "reason": failure[-1500:]})
        return records

    def end(self) -> None:
        """Ends what still runs."""
        for child in (*self._compiling, *([self._timing] if self._timing else [])):
            child.end()


def measure(config: RidgeBenchmarkConfig, write: Callable[[Record], None]) -> None:
    """Runs all parts, the most wanted first; each record goes to `write` as soon as it is there."""
    deadline = time.time() + config.time_limit
    device = jax.devices()[0]
    write({"kind": "worker", "worker": "jax", "device": device.device_kind})
    with tempfile.TemporaryDirectory() as temporary:
        peer = PeerProcesses(config, pathlib.Path(temporary)) if config.peer and peer_installed() else None
        try:
            parts = {"solves": solve_jobs, "layers": layer_jobs}
            jobs = [job for name, part in parts.items() if name in config.only for job in part(config)]
            ready = dict(compile_all(dict(enumerate(job for _, job in jobs))))
            if peer is not None:
                peer.prepare(time.time() + config.time_limit / 3)
            with turn(config.exclusive):
                for n, (what, _) in enumerate(jobs):
                    if time.time() < deadline:
                        write(timed(config, what, ready[n]))
                if peer is not None:
                    for record in peer.time(deadline):
                        write(record)
            for part in (solve_errors, gradient_errors) if "errors" in config.only else ():
                try:
                    for record in part(config) if time.time() < deadline else ():
                        write(record)
                except Exception as error:
                    write({"kind": "failure", "of": part.__name__, "reason": describe(error)})
        finally:
            if peer is not None:
                peer.end()
