"""Several processes of one run, on JAX's distributed runtime: how they find and follow each other, and how they end.

Processes meet through `jax.distributed.initialize`. Its key-value store carries what they tell each other beside the
arrays: decisions of process 0, failures, and signs of life. JAX's runtime ends a process whose peer is lost after its
own timeout, with a trace and no Python code run; a thread here is before it with one line.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import jax

from rnnlib.fields import NaturalNumber, PositiveInteger, Range, check_fields

_PREFIX = "rnnlib"
_MEETING_SECONDS = 300
# The runtime's own limit is later than ours: with it a process ends in a trace.
_RUNTIME_SECONDS_MORE = 60


class DistributedError(ValueError):
    """Processes that do not find each other, or process 0 refused what all were to do."""


@dataclasses.dataclass(frozen=True)
class DistributedConfig:
    """Which process of which run this is; left out, what SLURM, Open MPI or Kubernetes say.

    Where none of them has started several processes, the run is one process.
    """

    coordinator: str | None = None
    """Address of process 0 for the others, host:port; left out, JAX_COORDINATOR_ADDRESS."""
    processes: PositiveInteger | None = None
    """How many processes the run has; left out, JAX_NUM_PROCESSES."""
    process: NaturalNumber | None = None
    """The number of this one among them, from 0; left out, JAX_PROCESS_ID or JOB_COMPLETION_INDEX."""
    lost_seconds: Annotated[float, Range(at_least=2)] = 60.0
    """A process without a sign of life for so long is lost: all others end with one line."""

    def __post_init__(self):
        """Checks every value."""
        check_fields(self)
        if self.process is not None and self.processes is not None and self.process >= self.processes:
            raise ValueError(f"DistributedConfig: process is {self.process}, expected below processes={self.processes}")
        if self.coordinator is not None and not self.coordinator.rpartition(":")[2].isdecimal():
            raise ValueError(f"DistributedConfig: coordinator is {self.coordinator!r}, expected host:port")


def launch_arguments(config: DistributedConfig, environment: Mapping[str, str]) -> dict[str, Any] | None:
    """Arguments of `jax.distributed.initialize`, or None where there is one process.

    An empty dictionary leaves it to JAX to find the others. `local_device_ids=[]` leaves a process all devices that it
    sees: without it, JAX gives each process of SLURM and Open MPI the one GPU of its number on the machine.

    Args:
        config: what flags say; it comes first.
        environment: variables of the launcher.

    Raises:
        DistributedError: only some of coordinator, processes and process are known.
    """
    address = config.coordinator or environment.get("JAX_COORDINATOR_ADDRESS")
    indexed = environment.get("JOB_COMPLETION_INDEX") if "KUBERNETES_SERVICE_HOST" in environment else None
    numbers = {
        "processes": (config.processes, environment.get("JAX_NUM_PROCESSES")),
        "process": (config.process, environment.get("JAX_PROCESS_ID", indexed)),
    }
    found: dict[str, int] = {}
    for name, (flag, variable) in numbers.items():
        if flag is not None:
            found[name] = flag
        elif variable is not None:
            if not variable.isdecimal():
                raise DistributedError(f"distributed.{name}: the environment says {variable!r}, expected a number")
            found[name] = int(variable)
    asked = config.coordinator is not None or config.processes is not None or config.process is not None
    if asked or (address is not None and "processes" in found):
        if found.get("processes") == 1 and found.get("process", 0) == 0:
            return None
        lacking = [name for name in numbers if name not in found] + ([] if address else ["coordinator"])
        if lacking:
            raise DistributedError(
                f"several processes: no distributed.{' and no distributed.'.join(lacking)}, expected the coordinator's "
                "address, the number of processes and this one's number together"
            )
        if found["process"] >= found["processes"]:
            raise DistributedError(
                f"distributed.process={found['process']}: expected below distributed.processes={found['processes']}"
            )
        arguments = {"coordinator_address": address, "num_processes": found["processes"]}
        return arguments | {"process_id": found["process"], "cluster_detection_method": "deactivate"}
    if "SLURM_STEP_NODELIST" in environment:  # srun; the script of sbatch alone has none
        if int(environment.get("SLURM_STEP_NUM_TASKS", environment.get("SLURM_NTASKS", "1"))) > 1:
            one_a_node = {
                entry.partition("(")[0] for entry in environment.get("SLURM_STEP_TASKS_PER_NODE", "").split(",")
            }
            return _with_own_devices(environment, alone=one_a_node == {"1"})
        return None
    if int(environment.get("OMPI_COMM_WORLD_SIZE", "1")) > 1:
        return _with_own_devices(environment, alone=environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") == "1")
    hosts = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES") or ""
    if "," in hosts or environment.get("MEGASCALE_NUM_SLICES", "1") not in (
        "",
        "1",
    ):  # of one slice of TPUs, or several
        return {}
    if indexed is not None and _has_kubernetes():
        return {}
    return None


def _with_own_devices(environment: Mapping[str, str], *, alone: bool) -> dict[str, Any]:
    visible = environment.get("CUDA_VISIBLE_DEVICES", "")
    return {"local_device_ids": []} if alone or (visible and "," not in visible) else {}


def _has_kubernetes() -> bool:
    import importlib.util

    return importlib.util.find_spec("kubernetes") is not None


def join_processes(config: DistributedConfig | None = None) -> None:
    """Joins the other processes of this run, if there are any; before anything is computed.

    SIGTERM stays with Python: `Trainer` agrees with the others on the step to stop after.

    Raises:
        DistributedError: if the launcher says too little, or something was computed before.
    """
    config = DistributedConfig() if config is None else config
    arguments = launch_arguments(config, os.environ)
    if arguments is None:
        return
    if arguments.get("process_id") is not None:
        where = (
            f"process {arguments['process_id']} of {arguments['num_processes']} at {arguments['coordinator_address']}"
        )
    else:
        where = "process of a cluster"
    # It cannot be caught: the runtime ends the process.
    print(f"{where}: waiting for the others, at most {_MEETING_SECONDS} s", file=sys.stderr, flush=True)
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            **arguments,
            initialization_timeout=_MEETING_SECONDS,
            heartbeat_timeout_seconds=round(config.lost_seconds + _RUNTIME_SECONDS_MORE),
            shutdown_timeout_seconds=_MEETING_SECONDS,
        )
    except (RuntimeError, ValueError) as error:
        raise DistributedError(f"the processes of this run cannot meet: {error}") from error
    if jax.process_count() > 1:
        watch = _Watch(config.lost_seconds)
        for target in (watch.beat, watch.listen, *([watch.look] if jax.process_index() == 0 else [])):
            thread = threading.Thread(target=target, daemon=True)
            thread.start()
            _threads.append(thread)


def is_primary() -> bool:
    """Whether this process is the one that writes records and prints."""
    return jax.process_index() == 0


def _client() -> Any:
    # The store that `initialize` sets up has no public name.
    from jax._src.distributed import global_state

    return global_state.client


_asked = itertools.count()


def broadcast_from_primary[Answer](decide: Callable[[], Answer], *, seconds: float = 600) -> Answer:
    """What `decide` gives in process 0, in every process; all of them call it at the same places in the same order.

    Args:
        decide: gives what JSON holds; other processes do not call it.
        seconds: how long to wait for process 0.

    Raises:
        DistributedError: in the other processes, if it raised an error in process 0, with its text.
    """
    if jax.process_count() == 1:
        return decide()
    name = f"{_PREFIX}/broadcast/{next(_asked)}"
    if is_primary():
        try:
            answer = decide()
        except Exception as error:
            _client().key_value_set(name, json.dumps({"error": str(error) or type(error).__name__}))
            _told.set()
            raise
        _client().key_value_set(name, json.dumps({"answer": answer}))
        return answer
    told = json.loads(_client().blocking_key_value_get(name, round(1000 * seconds)))
    if "error" in told:
        _told.set()
        raise DistributedError(told["error"])
    return told["answer"]


def await_shared(path: Path, *, seconds: float = 30) -> None:
    """Waits until this process sees a file that process 0 has made.

    Raises:
        DistributedError: it does not: the processes have no folder in common.
    """
    end = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > end:
            raise DistributedError(
                f"process {jax.process_index()} does not see {path}, which process 0 has made: "
                "expected a folder that all of them share"
            )
        time.sleep(0.1)


def tell_failure(text: str) -> None:
    """Ends all other processes of this run with one line that says why; nothing where there is one process."""
    if jax.process_count() == 1:
        return
    _finished.set()
    if not _told.is_set():
        try:
            _client().key_value_set(f"{_PREFIX}/failed", f"process {jax.process_index()}: {text}")
        except Exception:  # another has failed before, or process 0 is gone
            return
    if is_primary():
        time.sleep(1.0)  # it holds the store: the others must have heard


def leave_processes() -> None:
    """Ends the watch over the other processes: this one is done, and so are they."""
    if jax.process_count() > 1:
        _finished.set()
        for thread in _threads:  # in a call of the runtime they must not meet the interpreter's end
            thread.join()
        _client().key_value_set(f"{_PREFIX}/alive/{jax.process_index()}", "done", allow_overwrite=True)


@contextlib.contextmanager
def ending_together(report: Callable[[BaseException], int]) -> Iterator[None]:
    """Within it, what ends one process ends all of them; nothing where there is one process.

    Without it, a process that raised an error would wait for the others, and they for it.

    Args:
        report: prints an error and gives the exit code of this process.
    """
    try:
        yield
    except BaseException as error:
        if jax.process_count() == 1:
            raise
        code = report(error)
        sys.stdout.flush()
        sys.stderr.flush()
        tell_failure(" ".join(str(error).split()) or type(error).__name__)
        os._exit(code)
    leave_processes()


_threads: list[threading.Thread] = []
_finished = threading.Event()
# All have heard from `broadcast_from_primary` why they end.
_told = threading.Event()


class _Watch:
    """Threads by which a process shows that it lives, and hears that another failed or is lost."""

    def __init__(self, lost_seconds: float):
        self._lost_seconds = lost_seconds
        self._every = min(lost_seconds / 6, 5.0)

    def beat(self) -> None:
        name = f"{_PREFIX}/alive/{jax.process_index()}"
        for count in itertools.count():
            try:
                _client().key_value_set(name, str(count), allow_overwrite=True)
            except Exception:
                self._end("process 0 is gone")
            if _finished.wait(self._every):
                return

    def look(self) -> None:
        """In process 0: which of the others is lost."""
        seen: dict[str, tuple[str, float]] = {}
        while not _finished.wait(self._every):
            now = time.monotonic()
            try:
                told = dict(_client().key_value_dir_get(f"{_PREFIX}/alive/"))
            except Exception:
                return
            for name, value in told.items():
                if seen.get(name, ("", 0))[0] != value:
                    seen[name] = value, now
            lost = [name for name, (value, at) in seen.items() if value != "done" and now - at > self._lost_seconds]
            if lost and not _finished.is_set():
                number = min(int(name.rpartition("/")[2]) for name in lost)
                text = f"process {number}: no sign of life for {self._lost_seconds:.0f} s"
                try:
                    _client().key_value_set(f"{_PREFIX}/failed", text)
                except Exception:
                    return
                return

    def listen(self) -> None:
        while not _finished.is_set():
            try:
                text = _client().blocking_key_value_get(f"{_PREFIX}/failed", 1000)
            except Exception as error:
                if "DEADLINE" in str(error):
                    continue
                text = "process 0 is gone"
            if not _finished.is_set():
                self._end(text)

    def _end(self, text: str) -> None:
        if _finished.is_set():
            return
        _finished.set()
        line = f"process {jax.process_index()} of {jax.process_count()} stops: {text}; what was saved stays\n"
        os.write(2, line.encode(errors="replace"))
        if is_primary():
            time.sleep(0.5)  # it holds the store: the others must have heard
        os._exit(1)
