"""Compiles calls for a described card and reads what the assembler and XLA say of each kernel.

XLA compiles Triton kernels with its own copy of Triton, so these are the kernels that run on a card. Its report comes
from `ptxas -v`, printed by XLA's log, and from a dump of the launches. Mosaic GPU has the assembler compile its kernels
itself and dumps what that says, and what a kernel asks of shared memory. All this is chosen by environment variables
that are read when jax is first imported: `compile_cases` runs this file in a process of its own.
"""

import importlib.util
import json
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from experiments.harness.child import Child

PACKAGES = ("jax_plugins.xla_cuda13", "nvidia.cu13")
_BARRIER = 8
"""Bytes of a barrier in shared memory."""


@dataclass(frozen=True)
class Kernel:
    """What a compiled kernel takes.

    Attributes:
        case: name of the call that it belongs to.
        name: its name, of a Mosaic GPU kernel with `_mosaic` at its end; a second one of that name in a call ends in
            `__1`.
        registers: of a thread; of a Mosaic GPU kernel those of its launch, before warpgroups exchange some.
        spills: bytes of stores to local memory for want of registers, of a thread.
        shared_memory: bytes, of a program, its barriers included.
        serialized: whether the assembler made its wgmma wait for one another.
    """

    case: str
    name: str
    registers: int
    spills: int
    shared_memory: int
    serialized: bool


@dataclass(frozen=True)
class Refusal:
    """A call that did not compile, or that the package refuses: the reason in a line."""

    case: str
    reason: str


def missing_packages() -> str | None:
    """Why nothing can be compiled here, or None."""
    for name in PACKAGES:
        try:
            found = importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:
            found = False
        if not found:
            return f"{name} is not installed: `uv sync --group offline`, on Linux"
    return None


def _data_folder() -> pathlib.Path:
    spec = importlib.util.find_spec("nvidia.cu13")
    assert spec is not None and spec.submodule_search_locations is not None
    return pathlib.Path(next(iter(spec.submodule_search_locations)))


def environment() -> dict[str, str]:
    """Variables of a process that compiles for a described card, beside those of this one."""
    return {
        "JAX_PLATFORMS": "",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # the plugin registers without cuDNN and the like
        "JAX_ENABLE_COMPILATION_CACHE": "false",  # what comes from a cache is not assembled, and says nothing
        "XLA_FLAGS": f"--xla_gpu_cuda_data_dir={_data_folder()}",
    }


def compile_cases(card: str, names: Sequence[str], timeout: float = 7200) -> list[Kernel | Refusal]:
    """Compiles cases for a card, in a process of its own.

    Args:
        card: a key of `cards.CARDS`.
        names: of cases.
        timeout: seconds, after which the process is stopped.

    Returns:
        Every kernel of every case, or why a case has none.

    Raises:
        RuntimeError: the process failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        dump = pathlib.Path(folder)
        variables = environment()
        variables["XLA_FLAGS"] += f" --xla_dump_to={dump} --xla_dump_hlo_as_text=true"
        variables |= {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "subprocess_compilation=2"}
        variables |= {"MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_TO": folder}
        printed, failure = Child(__name__, card, folder, variables=variables).finish(json.dumps(list(names)), timeout)
    if failure:
        raise RuntimeError(f"{card}: {', '.join(names)}: {failure[-4000:]}")
    lines = [json.loads(line) for line in printed if line.startswith("{")]
    return [Refusal(**line) if "reason" in line else Kernel(**line) for line in lines]


def read_report(case: str, names: Iterable[str], log: str, launches: str) -> list[Kernel]:
    """The Triton kernels of one call.

    Args:
        case: its name.
        names: the kernels' names in the lowered program, in order, with repetitions.
        log: what XLA printed while it compiled the call.
        launches: its dump of what the program launches.

    Raises:
        ValueError: a kernel is missing in either.
    """
    memory = {name: int(size) for name, size in re.findall(r"\] (\w+) grid.*?shared_memory: (\d+)", launches)}
    reports = _assembled(log)
    counts: dict[str, int] = {}
    kernels = []
    for name in names:
        unique = _numbered(name, counts)
        if unique in reports and unique in memory:
            used, spilled, serialized = reports[unique]
            kernels.append(Kernel(case, unique, used, spilled, memory[unique], serialized))
    found = {kernel.name.partition("__")[0] for kernel in kernels}
    if missing := sorted(set(counts) - found):
        raise ValueError(f"{case}: XLA said nothing of {', '.join(missing)}")
    return kernels


def read_mosaic_report(case: str, lowered: str, dumps: Mapping[str, str]) -> list[Kernel]:
    """The Mosaic GPU kernels of one call: however many there are, by whatever name.

    Args:
        case: its name.
        lowered: text of the lowered program.
        dumps: text of each file that Mosaic GPU wrote while the call was compiled, by the file's name. Of each kernel
            these are `NAME_NUMBER.ptxas`, the assembler's report, and `NAME_NUMBER.resources.txt`. Since jax 0.12 each
            kind of file has numbers of its own.

    Raises:
        ValueError: there are more or fewer reports than kernels in the lowered program, or one is not as expected.
    """
    # Calls of one kernel, which is compiled once, differ in what they are given.
    calls = [line for line in lowered.split("\n") if "@mosaic_gpu_v2(" in line]
    wanted = len({line.partition("backend_config")[2] for line in calls})
    stems = _in_order(dumps, ".ptxas")
    if len(stems) != wanted:
        told = ", ".join(sorted(stems)) or "none"
        raise ValueError(f"{case}: Mosaic GPU compiled {wanted} kernels and reported {len(stems)} ({told})")
    counts: dict[str, int] = {}
    kernels = []
    memories: dict[str, list[str]] = {}
    for stem in _in_order(dumps, ".resources.txt"):
        memories.setdefault(stem.rpartition("_")[0], []).append(dumps[f"{stem}.resources.txt"])
    for stem in stems:
        own = memories.get(stem.rpartition("_")[0])
        reports, resources = _assembled(dumps[f"{stem}.ptxas"]), own.pop(0) if own else ""
        scratch = re.search(r"smem_scratch_bytes=(\d+)", resources)
        if len(reports) != 1 or scratch is None:
            raise ValueError(f"{case}: Mosaic GPU's report of {stem} lacks the assembler's figures or shared memory")
        barriers = re.findall(r"num_barriers=(\d+)[^()]*\): (\d+)", resources)
        memory = int(scratch[1]) + _BARRIER * sum(int(size) * int(count) for size, count in barriers)
        ((name, (used, spilled, serialized)),) = reports.items()
        kernels.append(
            Kernel(case, _numbered(name.removesuffix("_gpu_kernel"), counts), used, spilled, memory, serialized)
        )
    return kernels


def _in_order(files: Iterable[str], end: str) -> list[str]:
    """`NAME_NUMBER` of the files with this end, in the order of their numbers."""
    stems = [file.removesuffix(end) for file in files if file.endswith(end)]
    return sorted(stems, key=lambda stem: int(stem.rpartition("_")[2]))


def _assembled(log: str) -> dict[str, tuple[int, int, bool]]:
    """Registers, bytes spilled, and whether wgmma wait for one another, by function, from the assembler's reports."""
    reports = {}
    for entry in re.split(r"Compiling entry function '", log)[1:]:
        name = entry.partition("'")[0]
        spills, registers = re.search(r"(\d+) bytes spill stores", entry), re.search(r"Used (\d+) registers", entry)
        if spills and registers:
            # By its words: beside the numbers of those that say so, C7519 means an added `warpgroup.arrive`, no wait.
            serialized = bool(re.search(rf"instructions are serialized .*'{name}'", log))
            reports[name] = int(registers[1]), int(spills[1]), serialized
    return reports


def _numbered(name: str, counts: dict[str, int]) -> str:
    """The name as reports have it, which a repeated one has its number in; `counts` has how often each has come."""
    seen = counts.get(name, 0)
    counts[name] = seen + 1
    return name if seen == 0 else f"{name}__{seen}"


def _compile(card: str, folder: str, names: Sequence[str]) -> None:
    """Prints a line of JSON for each kernel."""
    import jax

    from experiments.kernel_benchmarks.offline.cards import CARDS
    from experiments.kernel_benchmarks.offline.cases import cases

    sharding, mesh = CARDS[card].alone()
    known = cases(card, every=True)
    errors = os.dup(2)
    for name in names:
        case = known[name]
        arrays = {k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for k, x in case.arrays.items()}
        before = set(pathlib.Path(folder).iterdir())
        with tempfile.TemporaryFile("w+") as log:
            os.dup2(log.fileno(), 2)  # XLA writes to the descriptor, not to sys.stderr
            try:
                with jax.sharding.use_abstract_mesh(mesh):
                    lowered = jax.jit(case.function).trace(arrays).lower(lowering_platforms=("cuda",))
                    lowered.compile()
            except Exception as error:
                reason = next(iter(str(error).splitlines()), type(error).__name__)[:300]
                print(json.dumps(asdict(Refusal(name, reason))), flush=True)
                continue
            finally:
                os.dup2(errors, 2)
            log.seek(0)
            text = log.read()
        program = lowered.as_text()
        wanted = re.findall(r'xla\.gpu\.triton.*?name = "(\w+)"', program)
        new = [file for file in pathlib.Path(folder).iterdir() if file not in before]
        launches = "\n".join(file.read_text() for file in new if file.name.endswith("thunk_sequence.txt"))
        dumps = {file.name: file.read_text() for file in new if file.name.endswith((".ptxas", ".resources.txt"))}
        for file in new:
            file.unlink()
        for kernel in [*read_report(name, wanted, text, launches), *read_mosaic_report(name, program, dumps)]:
            print(json.dumps(asdict(kernel)), flush=True)


if __name__ == "__main__":
    _compile(sys.argv[1], sys.argv[2], json.loads(sys.stdin.read()))
