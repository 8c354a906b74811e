"""Mosaic GPU kernels of a lowered program, compiled beside it.

XLA compiles them one after another in the thread that compiles the program, after its passes over the program. A
kernel that a process has compiled for any program is not compiled again. So each is made a program of its own here,
which other threads compile during those passes. The lowered program and what XLA makes of it stay the same.
"""

import contextlib
import dataclasses
import threading
from typing import Any

import jax
from jax.extend.mlir import ir

_TARGET = "mosaic_gpu_v2"


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A call of a kernel in a lowered program.

    Attributes:
        arguments: shapes and dtypes of what it reads.
        results: of what it gives.
        attributes: of the call: the kernel itself, its hash, and how it is launched.
    """

    arguments: tuple[jax.ShapeDtypeStruct, ...]
    results: tuple[jax.ShapeDtypeStruct, ...]
    attributes: dict[str, Any]

    def compile(self) -> None:
        """Compiles a program that only calls the kernel; it is the kernel that stays, in XLA's memory."""
        call = jax.ffi.ffi_call(_TARGET, self.results)
        jax.jit(lambda *arguments: call(*arguments, **self.attributes)).lower(*self.arguments).compile()


def mosaic_kernels(lowered: jax.stages.Lowered) -> list[Kernel]:
    """The kernels that a lowered program for one device calls, each once."""
    found: dict[bytes, Kernel] = {}

    def visit(visited: Any) -> ir.WalkResult:
        operation = visited.operation
        if operation.name == "stablehlo.custom_call" and operation.attributes["call_target_name"].value == _TARGET:
            # Bytes and flags; a program of several devices has more.
            attributes: dict[str, Any] = {
                entry.name: entry.attr.value if isinstance(entry.attr, ir.BoolAttr) else entry.attr.value_bytes
                for entry in operation.attributes["mhlo.backend_config"]
            }
            arguments, results = map(_shapes, (operation.operands, operation.results))
            found.setdefault(attributes["kernel_hash"], Kernel(arguments, results, attributes))
        return ir.WalkResult.ADVANCE

    module: Any = lowered.compiler_ir("stablehlo")
    with module.context:
        module.operation.walk(visit)
    return list(found.values())


def compile_kernels_ahead(lowered: jax.stages.Lowered, name: str) -> list[threading.Thread]:
    """Begins to compile a program's kernels.

    What is not as expected, or does not compile, is left to the program: it compiles without this, too.

    Args:
        lowered: the program, which has one device.
        name: how the threads' names begin.

    Returns:
        The threads, one for each kernel.
    """

    def compiled(kernel: Kernel) -> None:
        with contextlib.suppress(Exception):
            kernel.compile()

    kernels: list[Kernel] = []
    with contextlib.suppress(Exception):  # how JAX lowers such kernels may change
        kernels = mosaic_kernels(lowered)
    # No daemons: a process that ends while XLA compiles would crash.
    threads = [
        threading.Thread(target=compiled, args=[kernel], name=f"{name}_kernel_{i}") for i, kernel in enumerate(kernels)
    ]
    for thread in threads:
        thread.start()
    return threads


def _shapes(values: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes and dtypes of arrays of a lowered program."""
    arrays = [ir.RankedTensorType(value.type) for value in values]
    return tuple(jax.ShapeDtypeStruct(tuple(x.shape), _DTYPES[str(x.element_type)]) for x in arrays)


_DTYPES = {"bf16": "bfloat16", "i1": "bool"} | {f"f{n}": f"float{n}" for n in (16, 32, 64)}
_DTYPES |= {f"{short}{n}": f"{name}{n}" for short, name in (("i", "int"), ("ui", "uint")) for n in (8, 16, 32, 64)}
_DTYPES |= {"f8E4M3FN": "float8_e4m3fn", "f8E5M2": "float8_e5m2"}
