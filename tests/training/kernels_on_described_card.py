"""Prints how many kernels an H200's program has, how many are compiled ahead of it, and then with it, without a card.

Run by `test_kernels_ahead.py` in a process of its own, since a described card needs variables of the environment.
"""

import dataclasses
import os
import pathlib
import tempfile

CASE = "delta-scalar-64x64-bfloat16 forward mosaic_mma"


def main(dump: pathlib.Path) -> None:
    """Compiles the kernels of a call, and then the call."""
    import jax

    from experiments.kernel_benchmarks.offline.cards import CARDS
    from experiments.kernel_benchmarks.offline.cases import cases
    from rnnlib.training.kernels_ahead import mosaic_kernels

    def described(array: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    sharding, mesh = CARDS["sm_90"].alone()
    case = cases("sm_90", every=True)[CASE]
    with jax.sharding.use_abstract_mesh(mesh):
        arrays = jax.tree.map(described, case.arrays)
        lowered = jax.jit(case.function).trace(arrays).lower(lowering_platforms=("cuda",))
    kernels = mosaic_kernels(lowered)
    for kernel in kernels:
        dataclasses.replace(kernel, arguments=tuple(map(described, kernel.arguments))).compile()
    ahead = len(list(dump.glob("*.ptxas")))
    lowered.compile()
    print(f"{len(kernels)} kernels, {ahead} compiled, then {len(list(dump.glob('*.ptxas'))) - ahead}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        # Read when jax is first imported.
        os.environ |= {"MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_TO": folder}
        main(pathlib.Path(folder))
