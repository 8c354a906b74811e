"""`python -m tests.training.on_all_meshes`: one mixer of each kind on every mesh of eight devices, beside one device.

A mesh is (data, fsdp, context, tensor) with product 8: there are twenty. Rows are packed, and documents cross devices.
Compared are the loss, the gradient's norm and each parameter's gradient of a training step. In float32 they differ by
less than 1e-5. Where they do not, they are compared in float64 as well, which tells rounding from an error, and the
table says so. Operators run token by token, which compiles fastest; devices exchange the same. Writes all_meshes.json
beside this file, after each model.

With `--gpus` the devices are this machine's GPUs, the models larger, and operators run by their kernels, in float32 and
in bfloat16 (`on_gpus`). Writes gpu_meshes.json.

Figures in both files are of the commits and dates that they name. Names of parameters ("worst") are of today: they
were renamed in the files when the parameters were.
"""

import concurrent.futures
import dataclasses
import json
import math
import os
import pathlib
import subprocess
import sys
import time
from itertools import product

if __name__ == "__main__" and "--gpus" not in sys.argv:  # before jax is imported
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import jax
import tyro

from experiments.harness.environment import command_line, environment
from rnnlib.models import ModelConfig
from rnnlib.training import MeshConfig, make_mesh

from .on_tensor_shards import SCAN, VOCABULARY, WIDE, batch, differences, step_of

FOLDER = pathlib.Path(__file__).parent
BOUND = 1e-5
AXES = ("data", "fsdp", "context", "tensor")


def meshes_of(count):
    """Every mesh of so many devices, a power of two."""
    sizes = [1 << i for i in range(count.bit_length())]
    return tuple(one for one in product(sizes, repeat=4) if math.prod(one) == count)


MESHES = meshes_of(8)
# Eight heads, and rows whose eighth is as long as a short convolution reads back.
SIZES = {
    "vocabulary_size": VOCABULARY,
    "width": 32,
    "num_layers": 1,
    "num_heads": 8,
    "mlp_width": 16,
    "mixer_overrides": SCAN,
}
ROWS, LENGTH = 8, 32
# On GPUs: heads as wide as models have them, and rows of several chunks.
GPU_SIZES = {"vocabulary_size": 256, "width": 256, "num_layers": 2, "num_heads": 4, "mlp_width": 256}
GPU_ROWS, GPU_LENGTH = 4, 512
# In float32. Gradients of ridge solves and of linear attention without a norm are sums that cancel: there even the two
# halves of a batch, each computed as before, differ by 1e-5.
GPU_BOUND = 1e-4
MODELS = {
    "hybrid, recomputed": {
        "mixers": ("gated_deltanet", "sliding_window_attention"),
        "num_layers": 2,
        "window": 4,
        "remat": True,
        "tie_embeddings": True,
    },
    "delta rule": {"mixers": ("gated_deltanet",)},
    "channel-wise decay": {"mixers": ("kda",)},
    "preconditioned": {"mixers": ("pgdn",)},
    "ridge solve": {"mixers": ("gated_kalmanet",)},
    "linear attention": {"mixers": ("linear_attention",)},
    "Mamba-2": {"mixers": ("mamba2",)},
    "Mamba-3": {"mixers": ("mamba3",)},
    "attention": {"mixers": ("attention",)},
}


@dataclasses.dataclass(frozen=True)
class Options:
    """Compares and writes the record; exits with 1 where a difference is above the bound."""

    only: tuple[str, ...] = ()
    """Names of models; all by default. Others keep what the record has."""
    workers: int = 2
    """Models at a time."""
    child: bool = False
    """Compare the one model of --only here, and print its part of the record."""
    gpus: bool = False
    """On the GPUs of this machine."""
    commit: str | None = None
    """Commit to record, on GPUs."""


def steps(options, wide, sizes=None):
    """What a step gives on a mesh, or on one device; in float32, or `wide`."""
    jax.config.update("jax_enable_x64", wide)
    config = ModelConfig(**(SIZES | options | (WIDE if wide else {})))
    mesh = None if sizes is None else make_mesh(8, MeshConfig(*sizes))
    return step_of(config, mesh, packed=batch(ROWS, LENGTH))[:2]


def compared(name):
    """A model's part of the record."""
    options, begin = MODELS[name], time.monotonic()
    one = steps(options, False)
    found = {}
    for sizes in MESHES:
        here = {"float32": differences(one, steps(options, False, sizes))}
        if here["float32"]["error"] >= BOUND:
            here["float64"] = differences(steps(options, True), steps(options, True, sizes))
        found[" ".join(map(str, sizes))] = here
        print(name, sizes, here, file=sys.stderr, flush=True)
    return {
        "mixers": options["mixers"],
        "meshes": found,
        "seconds": round(time.monotonic() - begin),
    }


def on_gpus(name, count):
    """A model's part of the record on GPUs: meshes beside one GPU, in float32 and in bfloat16.

    For bfloat16 there is a measure: how far one GPU's bfloat16 is from its float32 (`rounding`).
    """
    options = GPU_SIZES | MODELS[name] | {"num_layers": 2}
    packed = batch(GPU_ROWS, GPU_LENGTH, GPU_SIZES["vocabulary_size"])

    def results(dtype, sizes=None):
        mesh = None if sizes is None else make_mesh(count, MeshConfig(*sizes))
        with jax.default_matmul_precision("highest"):  # without it float32 products are in tf32
            return step_of(ModelConfig(**options, dtype=dtype), mesh, packed=packed)[:2]

    one = {dtype: results(dtype) for dtype in ("float32", "bfloat16")}
    found = {"rounding": differences(one["float32"], one["bfloat16"]), "meshes": {}}
    for sizes in meshes_of(count):
        here = {dtype: differences(one[dtype], results(dtype, sizes)) for dtype in one}
        found["meshes"][" ".join(map(str, sizes))] = here
        print(name, sizes, here, file=sys.stderr, flush=True)
    return {"mixers": options["mixers"]} | found


def error_of(mesh):
    """Of a model on a mesh, the difference that is held to the bound."""
    return mesh.get("float64", mesh["float32"])["error"]


def in_a_process(name, gpus):
    """`compared` or `on_gpus` in a process of its own."""
    command = [sys.executable, "-m", "tests.training.on_all_meshes", "--child", "--only", name]
    command += ["--gpus"] if gpus else []
    process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(process.stdout)


def gpu_table(models):
    """The largest difference of each model on each mesh of GPUs, in float32 and in bfloat16."""
    lines = [f"{'':22}{'float32 | bfloat16 on meshes of (data fsdp context tensor)':76}bfloat16 from float32"]
    lines += [f"{'':22}" + "".join(f"{sizes:>19}" for sizes in next(iter(models.values()))["meshes"])]
    for name, one in models.items():
        cells = (f"{m['float32']['error']:9.1e} |{m['bfloat16']['error']:8.1e}" for m in one["meshes"].values())
        lines.append(f"{name:22}" + "".join(cells) + f"{one['rounding']['error']:>12.1e}")
    return "\n".join(lines)


def table(models):
    """The largest difference of each model on each mesh."""
    lines = [f"{'data fsdp context tensor':26}" + "".join(f"{name:>20}" for name in models)]
    for sizes in (" ".join(map(str, sizes)) for sizes in MESHES):
        meshes = [one["meshes"][sizes] for one in models.values()]
        cells = (f"{error_of(mesh):.1e}{' float64' if 'float64' in mesh else ''}" for mesh in meshes)
        lines.append(f"{sizes:26}" + "".join(f"{cell:>20}" for cell in cells))
    return "\n".join(lines)


def main():
    """Runs the command; returns the exit code."""
    options = tyro.cli(Options, prog="python -m tests.training.on_all_meshes")
    if unknown := set(options.only) - set(MODELS):
        raise SystemExit(f"--only {', '.join(sorted(unknown))}: expected of {', '.join(MODELS)}")
    if options.child:
        found = on_gpus(options.only[0], jax.device_count()) if options.gpus else compared(options.only[0])
        print(json.dumps(found))
        return 0
    names = options.only or tuple(MODELS)
    path = FOLDER / ("gpu_meshes.json" if options.gpus else "all_meshes.json")
    rows, length = (GPU_ROWS, GPU_LENGTH) if options.gpus else (ROWS, LENGTH)
    record = {"axes": AXES, "rows": rows, "length": length, "bound": BOUND, "jax": jax.__version__}
    if options.gpus:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several processes share a GPU's memory
        record |= {
            "bound": GPU_BOUND,
            "environment": environment(command_line("tests.training.on_all_meshes"), options.commit),
        }
    models = json.loads(path.read_text())["models"] if path.exists() else {}
    with concurrent.futures.ThreadPoolExecutor(options.workers) as pool:
        running = {pool.submit(in_a_process, name, options.gpus): name for name in names}
        for done in concurrent.futures.as_completed(running):
            models[running[done]] = done.result()
            models = {name: models[name] for name in MODELS if name in models}
            path.write_text(json.dumps(record | {"models": models}, indent=1) + "\n")
    if options.gpus:
        print(gpu_table(models))
        return int(max(m["float32"]["error"] for one in models.values() for m in one["meshes"].values()) >= GPU_BOUND)
    print(table(models))
    errors = [error_of(mesh) for one in models.values() for mesh in one["meshes"].values()]
    print(f"{len(errors)} comparisons, the furthest {max(errors):.1e}, bound {BOUND:g}")
    return int(max(errors) >= BOUND)


if __name__ == "__main__":
    sys.exit(main())
