"""A process that measures one peer, in one of three ways.

`FOLDER PEER warm OPERATOR SIZES` only compiles: peers choose among dozens of compiled candidates for each kernel at an
operator's first run, and such processes compile them side by side beforehand; Triton's are not launched there.
`FOLDER PEER time` chooses and times, alone on the GPU. `FOLDER PEER errors OPERATOR` compares with the float64
references, beside others.
"""

import contextlib
import pathlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import triton

from experiments.harness.records import Record, RecordWriter, installed_versions
from experiments.harness.torch_timing import compile_only, short_trials, take_first, timed_record
from experiments.kernel_benchmarks.config import Measurement
from experiments.kernel_benchmarks.inputs import (
    FLOAT32_ARRAYS,
    Drawn,
    Shape,
    draw_all,
    draw_segments,
    draw_tile,
    take_rows,
    tile_shape,
)
from experiments.kernel_benchmarks.operators import OPERATORS
from experiments.kernel_benchmarks.peers import PEERS, Call
from experiments.kernel_benchmarks.work import Work, error_record, measure_all, read_work, reference_path

Tensors = dict[str, torch.Tensor]
THREADS = 3
"""In which a process compiles a peer's candidates: there is a process for each operator."""


def to_device(name: str, array: np.ndarray, dtype: str) -> torch.Tensor:
    """An argument on the GPU in the dtype that is measured."""
    kept = torch.float32 if name in FLOAT32_ARRAYS else getattr(torch, dtype)
    return torch.from_numpy(np.array(array)).cuda().to(kept)


def timing_inputs(operator: str, shape: Shape, dtype: str) -> Tensors:
    """Arguments for timing: some tokens are drawn and the rest repeats them."""
    drawn, tensors = tile_shape(shape), {}
    for name in (*OPERATORS[operator].arrays, "d_out"):
        part = to_device(name, draw_tile(name, drawn), dtype)
        repeats = [-(-a // b) for a, b in zip(shape[:2], part.shape)]
        tensors[name] = part.repeat(*repeats, *[1] * (part.ndim - 2))[: shape[0], : shape[1]].contiguous()
    return tensors


def passes(
    operator: str, call: Call, tensors: Mapping[str, torch.Tensor], *, forward_only: bool = False
) -> dict[str, Callable[[], Any]]:
    """Forward, and forward + backward for a cotangent of the output."""

    def forward() -> Any:
        with torch.no_grad():
            return call(tensors, final=False)[0]

    if forward_only:
        return {"forward": forward}
    inputs = [tensors[name].requires_grad_() for name in OPERATORS[operator].arrays if name != "write_key"]

    def forward_backward() -> Any:
        out = call(tensors, final=False)[0]
        return torch.autograd.grad(out, inputs, tensors["d_out"])

    return {"forward": forward, "forward_backward": forward_backward}


class Session:
    """A peer's calls."""

    def __init__(self, work: Work, peer: str) -> None:
        self.work, self.peer = work, peer
        self.described = PEERS[peer]
        self.calls = self.described.calls()
        self.decode = self.described.decode()
        self.not_same = dict(self.described.not_same)
        self.versions = loaded_versions(peer)
        self.drawn: Drawn = {}

    def passes(self, operator: str, shape: Shape) -> dict[str, Callable[[], Any]]:
        """What is timed of an operator at a shape."""
        tensors = self.described.prepare(timing_inputs(operator, shape, self.work.dtype))
        return passes(operator, self.calls[operator], tensors, forward_only=self.described.forward_only)

    def measure(self, m: Measurement) -> list[Record]:
        """Records of a measurement."""
        torch.cuda.empty_cache()
        if m.kind == "error":
            return [self._error_record(m)]
        if m.kind == "decode":
            tensors = timing_inputs(m.operator, m.shape, self.work.dtype)
            batch, _, heads, *sizes = m.shape
            state = torch.zeros(batch, heads, *sizes, device="cuda")
            moved = 2 * state.nbytes + sum(x.nbytes for x in tensors.values())  # d_out stands for the output
            timing = timed_record(lambda: self.decode[m.operator](tensors, state), self.work.repeats)
            return [{"kind": "decode", **timing, "bytes": moved}]
        records = []
        for name, call in self.passes(m.operator, m.shape).items():
            timing = timed_record(call, self.work.repeats, self.not_same.get(m.operator, ()))
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            call()
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - before
            times = {"kind": "time", "pass": name, **timing, "peak_mib": round(peak / 2**20, 1)}
            records.append({**times, "versions": self.versions})
        return records

    def _error_record(self, m: Measurement) -> Record:
        names = OPERATORS[m.operator].arrays
        tensors = {
            name: to_device(name, self.drawn[name, m.shape, m.case, m.seed], self.work.dtype)
            for name in OPERATORS[m.operator].all_arrays
        }
        bounds = torch.from_numpy(draw_segments(m.shape)).cuda() if m.case == "packed" else None
        differentiated = not self.described.forward_only

        def run() -> Tensors:
            inputs = [tensors[name].detach().requires_grad_(differentiated) for name in names]
            arguments = self.described.prepare(dict(zip(names, inputs)))
            out, state = self.calls[m.operator](arguments, final=True, bounds=bounds)
            results = {"out": out, "final_state": state[-m.shape[0] :]}
            if not differentiated:
                return results
            d_state = torch.zeros_like(state)
            d_state[-len(tensors["d_state"]) :] = tensors["d_state"]  # the final state is that of the last document
            gradients = torch.autograd.grad([out, state], inputs, [tensors["d_out"], d_state])
            return {**results, **dict(zip(names, gradients))}

        results, again = run(), run()
        identical = all(torch.equal(results[name], again[name]) for name in results)
        while (
            not reference_path(self.work, m).exists() and time.time() < self.work.deadline
        ):  # JAX may not have come to it
            time.sleep(0.1)
        rows = {name: take_rows(name, x.detach(), m.shape).float().cpu().numpy() for name, x in results.items()}
        return error_record(self.work, m, rows, identical=identical)


def warm(session: Session, operator: str, shape: Shape) -> None:
    """Compiles what timing an operator needs at a shape."""
    short_trials(once=True)
    with compile_only(THREADS):
        for call in session.passes(operator, shape).values():
            call()
    torch.cuda.synchronize()


def loaded_versions(peer: str) -> dict[str, str]:
    """Versions of PyTorch and of a peer's packages; of Triton the one that is imported, where several are installed."""
    found = installed_versions(("torch", *PEERS[peer].packages))
    return {**found, "triton": triton.__version__} if "triton" in found else found


def tune(session: Session, measurements: list[Measurement]) -> None:
    """Lets the peer choose its kernels for each operator and number of heads at a shape of middling size."""
    timed: dict[Any, list[Shape]] = {}
    for m in measurements:
        timed.setdefault((m.operator, m.shape[2:]), []).append(m.shape)
    for (operator, _), shapes in timed.items():
        ordered = sorted(shapes, key=lambda shape: shape[0] * shape[1])
        # What fails here fails again, and is recorded, where it is measured.
        with contextlib.suppress(Exception):
            for call in session.passes(operator, ordered[len(ordered) // 2]).values():
                call()


def main(folder: pathlib.Path, peer: str, mode: str, *arguments: str) -> None:
    """Does a process's part."""
    work = read_work(folder)
    mine = [m for m in work.measurements if m.implementation == peer]
    session = Session(work, peer)
    if mode == "warm":
        operator, *sizes = arguments
        batch, length, heads, key_size, value_size = map(int, sizes)
        warm(session, operator, (batch, length, heads, key_size, value_size))
    elif mode == "time":
        write = RecordWriter(folder / f"{peer}.jsonl")
        write({"kind": "worker", "worker": peer, **session.versions, "device": torch.cuda.get_device_name()})
        short_trials(once=False)
        tune(session, [m for m in mine if m.kind == "time"])
        write({"kind": "prepared", "worker": peer})
        measure_all((m for m in mine if m.kind != "error"), work.deadline, session.measure, write)
    else:
        (operator,) = arguments
        short_trials(once=True)
        take_first()
        mine = [m for m in mine if m.kind == "error" and m.operator == operator]
        names = OPERATORS[operator].all_arrays
        session.drawn = draw_all((name, m.shape, m.case, m.seed) for m in mine for name in names)
        measure_all(mine, work.deadline, session.measure, RecordWriter(folder / f"{peer}_errors_{operator}.jsonl"))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), *sys.argv[2:])
