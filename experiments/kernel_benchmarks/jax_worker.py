"""The process that measures our implementations and the peers in JAX. Its parent is `__main__`.

Records go to a file as they are made. It compiles everything and computes the float64 references first, while peers in
torch compile too, and times only once its parent writes a line to its standard input: nothing else uses the GPU then.
"""

import concurrent.futures
import dataclasses
import functools
import os
import pathlib
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.harness.records import Record, RecordWriter, describe
from experiments.harness.timing import peak_mib, timed_record
from experiments.kernel_benchmarks.config import Measurement, part_of
from experiments.kernel_benchmarks.inputs import (
    FLOAT32_ARRAYS,
    Drawn,
    Shape,
    draw,
    draw_all,
    draw_tile,
    segment_ids,
    take_rows,
    tile_shape,
)
from experiments.kernel_benchmarks.operators import OPERATORS
from experiments.kernel_benchmarks.peers import PEERS, Call
from experiments.kernel_benchmarks.work import Work, error_record, measure_all, read_work, reference_path

Results = dict[str, Any]
REFERENCE_BLOCK = 64


def array_dtype(name: str, dtype: str) -> Any:
    """The dtype in which an argument is measured."""
    return jnp.dtype(jnp.float32 if name in FLOAT32_ARRAYS else dtype)


def array_shape(name: str, shape: Shape) -> tuple[int, ...]:
    """An argument's shape."""
    batch, length, heads, *sizes = shape
    drawn = draw(name, (1, 1, 1, *sizes)).shape  # type: ignore[arg-type]
    return (batch, heads, *sizes) if name == "d_state" else (batch, length, heads, *drawn[3:])


@functools.cache
def _calls_of(peer: str) -> dict[str, Call]:
    return PEERS[peer].calls()


def run(operator: str, implementation: str, arrays: Results, ids: Any = None) -> tuple[jax.Array, jax.Array]:
    """Output and final state of an operator, by one of our implementations or by a peer in JAX."""
    if implementation in PEERS:
        return _calls_of(implementation)[operator](arrays, segment_ids=ids)
    return OPERATORS[operator].run(arrays, implementation, segment_ids=ids)


def forward(operator: str, implementation: str, arrays: Results, ids: Any = None) -> Results:
    """Output and final state, by name."""
    out, state = run(operator, implementation, arrays, ids)
    return {"out": out, "final_state": state}


def forward_backward(operator: str, implementation: str, arrays: Results, ids: Any = None) -> Results:
    """Output, final state and the gradient in every array, for cotangents `d_out` and `d_state` among `arrays`."""
    inputs = {name: arrays[name] for name in OPERATORS[operator].arrays}
    (out, state), pull_back = jax.vjp(lambda x: run(operator, implementation, x, ids), inputs)
    (gradients,) = pull_back((arrays["d_out"], arrays["d_state"].astype(state.dtype)))
    return {"out": out, "final_state": state, **gradients}


def reference(name: str, arrays: Results, ids: Any = None) -> Results:
    """The same by the scan, in blocks whose states alone are kept; meant for float64 arrays."""
    if arrays["q"].shape[1] % REFERENCE_BLOCK:
        return forward_backward(name, "scan", arrays, ids)
    operator = OPERATORS[name]

    def in_blocks(inputs: Results) -> tuple[jax.Array, jax.Array]:
        last = None if ids is None else jnp.pad(ids[:, :-1], ((0, 0), (1, 0)), mode="edge")
        blocks = jax.tree.map(
            lambda x: jnp.moveaxis(x.reshape(x.shape[0], -1, REFERENCE_BLOCK, *x.shape[2:]), 1, 0),
            (operator.prepared(inputs, "scan", ids), ids, last),
        )

        @jax.checkpoint
        def step(state: jax.Array, block: tuple[Results, Any, Any]) -> tuple[jax.Array, jax.Array]:
            given, ids, last = block
            if ids is not None:  # the first token of a call continues its state
                state = jnp.where((ids == last)[:, :1, None, None], state, 0.0)
            out, state = operator.apply(given, "scan", initial_state=state, segment_ids=ids)
            return state, out

        state, out = jax.lax.scan(step, jnp.zeros_like(arrays["d_state"]), blocks)
        return jnp.moveaxis(out, 0, 1).reshape(inputs["v"].shape), state

    inputs = {name: arrays[name] for name in operator.arrays}
    (out, state), pull_back = jax.vjp(in_blocks, inputs)
    (gradients,) = pull_back((arrays["d_out"], arrays["d_state"]))
    return {"out": out, "final_state": state, **gradients}


def timing_inputs(names: tuple[str, ...], shape: Shape, dtype: str) -> Results:
    """Arguments on the device for timing: some tokens are drawn and the rest repeats them."""
    drawn = tile_shape(shape)
    arrays = {}
    for name in names:
        part = jnp.asarray(draw_tile(name, drawn)).astype(array_dtype(name, dtype))
        whole = array_shape(name, shape)
        arrays[name] = jnp.tile(part, [-(-a // b) for a, b in zip(whole, part.shape)])[tuple(map(slice, whole))]
    return arrays


@functools.partial(jax.jit, static_argnums=0)
def _compiled_reference(operator: str, arrays: Results, ids: Any) -> Results:
    return reference(operator, arrays, ids)


def is_consistent(arrays: Results, results: Results) -> bool:
    """Whether a reference's gradients of queries and values agree with its output and state, which are linear in them.

    `<dq, q> = <do, o>` and `<dv, v> = <do, o> + <dS, S>` hold for each row and every operator here. On a card that
    other processes used too, a float64 scan came back with the right output and wrong gradients of some rows.
    """

    def terms(x: Any, y: Any) -> np.ndarray:
        products = np.asarray(x, np.float64) * np.asarray(y, np.float64)
        return products.reshape(len(products), -1)

    def agree(*sides: np.ndarray) -> bool:
        """Whether the terms of the first side add up to those of the others."""
        first, *others = (side.sum(axis=1) for side in sides)
        # What sums of so many terms vary by where these are wrong; rounding to float32 varies them by 1e-7 of it.
        spread = np.sqrt(sum(np.square(side).sum(axis=1) for side in sides))
        return bool(np.all(np.abs(first - sum(others)) <= 1e-3 * spread))

    read = terms(arrays["d_out"], results["out"])
    kept = terms(arrays["d_state"], results["final_state"])
    return agree(terms(results["q"], arrays["q"]), read) and agree(terms(results["v"], arrays["v"]), read, kept)


def compute_references(measurements: list[Measurement], work: Work, drawn: Drawn) -> None:
    """Computes the references of error measurements that differ by the seed, and keeps them for all workers.

    A scan takes a token's time for one row or many, so that of all seeds it is one.
    """
    name, shape, case = measurements[0].operator, measurements[0].shape, measurements[0].case
    with jax.enable_x64(True):
        arrays = {}
        for array in OPERATORS[name].all_arrays:
            rows = [take_rows(array, drawn[array, shape, case, m.seed], shape) for m in measurements]
            arrays[array] = jnp.asarray(np.concatenate(rows)).astype(array_dtype(array, work.dtype)).astype(jnp.float64)
        ids = jnp.asarray(segment_ids((len(arrays["q"]), *shape[1:]))) if case == "packed" else None
        for _ in range(3):
            # Float32 rounds a reference by 3e-8, far below every error that is compared here.
            results = {key: np.asarray(x, np.float32) for key, x in _compiled_reference(name, arrays, ids).items()}
            if is_consistent(arrays, results):
                break
        else:
            raise ArithmeticError(f"{name}, {case}: the reference's gradients contradict its output, three times")
    rows_of_each = len(arrays["q"]) // len(measurements)
    for n, m in enumerate(measurements):
        path = reference_path(work, m)
        part = slice(n * rows_of_each, (n + 1) * rows_of_each)
        whole = path.with_suffix(".part.npz")  # others wait for the file and must not see a half of it
        np.savez(whole, **{key: x[part] for key, x in results.items()})  # type: ignore[arg-type]
        whole.rename(path)


@dataclass(frozen=True)
class Unit:
    """Something to compile; measurements share it."""

    run: str
    operator: str
    implementation: str
    shape: Shape
    packed: bool


def units_of(m: Measurement) -> list[Unit]:
    """What a measurement runs."""
    runs = {"time": ("forward", "forward_backward"), "error": ("forward_backward",), "decode": ("decode",)}[m.kind]
    return [Unit(run, m.operator, m.implementation, m.shape, m.case == "packed") for run in runs]


def compile_unit(unit: Unit, work: Work) -> Callable[..., Any]:
    """Compiles for arguments of the measured shapes and dtypes, before there are any."""
    operator, shape = OPERATORS[unit.operator], unit.shape
    arguments = {
        name: jax.ShapeDtypeStruct(array_shape(name, shape), array_dtype(name, work.dtype))
        for name in operator.all_arrays
    }
    inputs = {name: arguments[name] for name in operator.arrays}
    implementation = unit.implementation
    if unit.run == "decode":
        state = jax.ShapeDtypeStruct(array_shape("d_state", shape), jnp.float32)

        def step(arrays, state):
            return operator.run(arrays, implementation, initial_state=state)

        return jax.jit(step, donate_argnums=1).lower(inputs, state).compile()
    ids = jnp.asarray(segment_ids(shape)) if unit.packed else None
    if unit.run == "forward":
        return jax.jit(lambda arrays: forward(unit.operator, implementation, arrays, ids)).lower(inputs).compile()
    return (
        jax.jit(lambda arrays: forward_backward(unit.operator, implementation, arrays, ids)).lower(arguments).compile()
    )


class Session:
    """Compiled passes, and arrays of the shape that was measured last."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.compiled: dict[Unit, Callable[..., Any] | str] = {}
        self._arrays: Results = {}
        self._key: Any = None
        self._drawn: Drawn = {}

    def prepare(self, until: float) -> None:
        """Compiles all passes and computes all references, side by side, in the order of the measurements.

        Args:
            until: time (as `time.time()`) after which nothing more is begun. What has begun is waited for, since it
                would disturb what is timed.
        """
        references: dict[Any, dict[int, Measurement]] = {}
        for m in self.work.measurements:
            if m.kind == "error":
                references.setdefault((m.operator, m.shape, m.case), {})[m.seed] = m
        self._drawn = draw_all(
            (name, m.shape, m.case, m.seed)
            for each in references.values()
            for m in each.values()
            for name in OPERATORS[m.operator].all_arrays
        )
        mine = [m for m in self.work.measurements if m.implementation in self.work.in_jax]
        with (
            concurrent.futures.ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool,
            concurrent.futures.ThreadPoolExecutor(4) as few,  # references take gigabytes of the card each
        ):
            jobs: dict[concurrent.futures.Future[Any], Unit | Measurement] = {}
            for unit in dict.fromkeys(unit for m in mine for unit in units_of(m)):
                jobs[pool.submit(compile_unit, unit, self.work)] = unit
            for each in references.values():
                measurements = list(each.values())
                jobs[few.submit(compute_references, measurements, self.work, self._drawn)] = measurements[0]
            end = threading.Timer(max(0.0, until - time.time()), _cancel, [list(jobs)])
            end.daemon = True
            end.start()
            for job in concurrent.futures.as_completed(jobs):
                what = jobs[job]
                error = TimeoutError("not compiled in time") if job.cancelled() else job.exception()
                if isinstance(what, Unit):
                    # A failure is recorded where its measurement's turn comes, and doesn't stop the others.
                    self.compiled[what] = job.result() if error is None else describe(error)
                print(f"{time.strftime('%X')} prepared {what} {error or ''}", flush=True)

    def arrays(self, m: Measurement) -> Results:
        """Arguments of a measurement."""
        names = OPERATORS[m.operator].all_arrays
        key = (m.shape, m.case, m.seed, m.kind == "error")
        if key != self._key:
            self._arrays, self._key = {}, key
        missing = tuple(name for name in names if name not in self._arrays)
        if m.kind == "error":
            for name in missing:
                array = jnp.asarray(self._drawn[name, m.shape, m.case, m.seed])
                self._arrays[name] = array.astype(array_dtype(name, self.work.dtype))
        else:
            self._arrays.update(timing_inputs(missing, m.shape, self.work.dtype))
        return {name: self._arrays[name] for name in names}

    def measure(self, m: Measurement) -> list[Record]:
        """Records of a measurement."""
        compiled: dict[str, Any] = {unit.run: self.compiled[unit] for unit in units_of(m)}
        for reason in compiled.values():
            if isinstance(reason, str):
                return [{"kind": "failure", "of": m.kind, "case": m.case, "reason": reason}]
        arrays = self.arrays(m)
        inputs = {name: arrays[name] for name in OPERATORS[m.operator].arrays}
        if m.kind == "error":
            return [self._error_record(m, compiled["forward_backward"], arrays)]
        if m.kind == "decode":
            return [self._decode_record(m, compiled["decode"], inputs)]
        records = []
        for name, call in compiled.items():
            given = inputs if name == "forward" else arrays
            # A scan's trace would hold ten kernels a token; its wall time is its device time.
            timing = timed_record(lambda: call(given), self.work.repeats, with_kernels=m.implementation != "scan")
            records.append({"kind": "time", "pass": name, **timing, "peak_mib": peak_mib(call)})
        return records

    def _error_record(self, m: Measurement, call: Callable[..., Results], arrays: Results) -> Record:
        results, again = call(arrays), call(arrays)
        identical = all(bool(jnp.array_equal(results[name], again[name])) for name in results)
        rows = {name: np.asarray(take_rows(name, x, m.shape).astype(jnp.float32)) for name, x in results.items()}
        return error_record(self.work, m, rows, identical=identical)

    def _decode_record(self, m: Measurement, call: Callable[..., Any], inputs: Results) -> Record:
        state = [jnp.zeros(array_shape("d_state", m.shape), jnp.float32)]

        def step() -> Any:
            out, state[0] = call(inputs, state[0])
            return out, state[0]

        timing = timed_record(step, self.work.repeats, with_kernels=True)
        moved = 2 * state[0].nbytes + sum(x.nbytes for x in inputs.values()) + inputs["v"].nbytes
        return {"kind": "decode", **timing, "bytes": moved}


def _cancel(jobs: Sequence[concurrent.futures.Future[Any]]) -> None:
    for job in jobs:
        job.cancel()


def ceilings(repeats: int) -> Record:
    """What the card reaches: a large copy (bytes read and written) and a large bfloat16 product."""
    size = (2**30, 8192) if jax.default_backend() == "gpu" else (2**16, 128)
    x = jax.random.bits(jax.random.key(0), (size[0],), jnp.uint32)
    copy = jax.jit(lambda x: x + 1).lower(x).compile()
    a, b = (jax.random.normal(jax.random.key(i), (size[1], size[1])).astype(jnp.bfloat16) for i in (1, 2))
    product = jax.jit(lambda a, b: a @ b).lower(a, b).compile()
    times = []
    for call in (lambda: copy(x), lambda: product(a, b)):
        timing = timed_record(call, repeats, with_kernels=True)
        times.append((timing["device_ms"] or timing["wall_ms"]) / 1e3)
    return {
        "kind": "ceiling",
        "copy_gb_s": round(2 * x.nbytes / times[0] / 1e9, 1),
        "matmul_tflops": float(f"{2 * size[1] ** 3 / times[1] / 1e12:.4g}"),
    }


def main(folder: pathlib.Path, part: int, parts: int) -> None:
    """Prepares part number `part` of `parts`, waits for a line on standard input, measures."""

    def read_part() -> Work:
        work = read_work(folder)
        return dataclasses.replace(work, measurements=tuple(part_of(work.measurements, part, parts)))

    work = read_part()
    write = RecordWriter(folder / f"jax_{part}.jsonl")
    device = jax.devices()[0]
    write({"kind": "worker", "worker": "jax", "jax": jax.__version__, "device": device.device_kind})
    session = Session(work)
    start = time.time()
    # What takes longer than half of the time to prepare would leave none for measuring what is ready.
    session.prepare((start + work.deadline) / 2)
    write({"kind": "prepared", "worker": "jax", "seconds": round(time.time() - start, 1)})
    sys.stdin.readline()
    session.work = work = read_part()  # the deadline may have been put off
    if part == 0 and any(m.kind == "time" for m in work.measurements):
        write(ceilings(work.repeats))
    mine = (m for m in work.measurements if m.implementation in work.in_jax)
    measure_all(mine, work.deadline, session.measure, write)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
