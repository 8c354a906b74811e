"""Compiled training steps in a folder: a later process neither traces nor lowers a step that it finds there.

JAX's compilation cache knows a program by its text, for which a step must be traced and lowered. Here a step is known
by what makes that text: the source files, the packages, the settings, and the devices. Where any of them has changed,
nothing is found, and the step is made anew.
"""

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import json
import os
import pathlib
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import serialize_executable

from rnnlib.files import write_atomically

# Whose files make the program, beside what pip says of the packages: somebody may have changed one of them.
_TRACING = ("jax", "jaxlib", "jax_plugins", "flax", "optax", "chex", "numpy")
_OWN = ("rnnlib", "pallas_kernels")
# Variables that XLA, CUDA, flax and kernels read; JAX's are among its settings.
_VARIABLES = ("CUDA_", "FLAX_", "LIBTPU_", "NVIDIA_", "TF_", "TRITON_", "XLA_")
# Of the folder, in bytes: what was not used for longest goes first.
_LARGEST = 1_000_000_000


_written = threading.local()


def _count_written(event: str, **_: str | int) -> None:
    """JAX records this event, in the thread that compiles, when it writes what XLA has made into its cache."""
    if event == "/jax/compilation_cache/cache_misses":
        _written.count = _programs_written() + 1


def _programs_written() -> int:
    return getattr(_written, "count", 0)


jax.monitoring.register_event_listener(_count_written)


def compiled_and_whether_new(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, bool]:
    """A compiled program, and whether XLA has made it now: one of JAX's cache cannot be written once more.

    (On CPUs it could not be run from the second file: jax 0.11.2, "Function ... not found".)
    """
    before = _programs_written()
    compiled = lowered.compile()
    has_cache = jax.config.jax_enable_compilation_cache and jax.config.jax_compilation_cache_dir is not None
    return compiled, not has_cache or _programs_written() > before


class StoredStep:
    """The place of one compiled function in a folder.

    Its name is a hash of all that the program depends on. The folder must be as safe as the code itself: who can write
    into it can have anything computed.

    Attributes:
        path: the file.
    """

    def __init__(self, folder: pathlib.Path, about: Mapping[str, Any], arguments: tuple[Any, ...], result: Any):
        """Finds the place; reads nothing.

        Args:
            folder: of compiled steps.
            about: what the function is made from, in values that JSON or `repr` tells apart.
            arguments: of a call, with shapes, dtypes and shardings in place of arrays.
            result: a pytree of the result's structure.
        """
        self._in_tree = jax.tree.structure((arguments, {}))
        self._out_tree = jax.tree.structure(result)
        arrays = [
            (jax.tree_util.keystr(path), str(x), bool(x.weak_type), str(x.sharding))
            for path, x in jax.tree_util.tree_leaves_with_path(arguments)
        ]
        made_from = {**_environment(), "about": about, "arguments": arrays}
        text = json.dumps(made_from, sort_keys=True, default=repr)
        self.path = folder / f"{_digest(text.encode())}.step"
        self._unproven = self.path.with_suffix(".unproven")

    def load(self, devices: Sequence[Any]) -> Any:
        """The compiled function on these devices, or None where there is none that can be read."""
        try:
            if self._unproven.exists():  # it was read and then no step was done: whatever the reason, not again
                self.path.unlink(missing_ok=True)
                self._unproven.unlink(missing_ok=True)
                return None
            header, _, program = self.path.read_bytes().partition(b"\n")
            self.path.touch()  # used
            self._unproven.touch()
        except OSError:
            return None
        try:
            about = json.loads(header)
            if about["digest"] != _digest(program):
                raise ValueError("the file is damaged")
            _register(about["modules"])
            return serialize_executable.deserialize_and_load(
                program, self._in_tree, self._out_tree, devices[0].client, tuple(devices)
            )
        except Exception:  # cut off, or of a runtime that this one cannot read: it is written anew
            with contextlib.suppress(OSError):
                self.path.unlink(missing_ok=True)
                self._unproven.unlink(missing_ok=True)
            return None

    def prove(self) -> None:
        """Says that the function has run: the next process may read it, too."""
        with contextlib.suppress(OSError):  # a folder that cannot be written
            self._unproven.unlink(missing_ok=True)

    def save(self, compiled: Any) -> None:
        """Keeps a compiled function that XLA has just made; one that cannot be kept is compiled again the next time."""
        try:
            program, in_tree, out_tree = serialize_executable.serialize(compiled)
        except Exception:  # it calls functions of this process, or its runtime has no form for files
            return
        if (in_tree, out_tree) != (self._in_tree, self._out_tree):
            return
        header = {"digest": _digest(program), "modules": sorted(_jax_modules())}
        with contextlib.suppress(OSError):  # a full disk, or a folder that cannot be written
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, json.dumps(header).encode() + b"\n" + program)
            _keep_small(self.path.parent)


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=20).hexdigest()


def _jax_modules() -> set[str]:
    return {name for name in list(sys.modules) if name.split(".")[0] in ("jax", "jaxlib")}


def _register(modules: Sequence[str]) -> None:
    """Does what tracing and lowering have done for XLA beside the program: they register functions that it calls."""
    for name in modules:
        if name not in sys.modules:
            importlib.import_module(name)
    if jax.default_backend() == "cpu":  # LAPACK's are set when one is first lowered
        jax.jit(jax.lax.linalg.cholesky).lower(jax.ShapeDtypeStruct((1, 1), np.float32))


def _keep_small(folder: pathlib.Path) -> None:
    left = _LARGEST
    for path in sorted(folder.glob("*.step"), key=lambda path: path.stat().st_mtime, reverse=True):
        left -= path.stat().st_size
        if left < 0:
            path.unlink(missing_ok=True)


def _environment() -> dict[str, Any]:
    """All that a program depends on beside its own settings: code, packages, JAX's settings and devices."""
    device = jax.local_devices()[0]
    settings = {name: value for name, value in jax.config.values.items() if name != "jax_compilation_cache_dir"}
    return {
        "python": sys.version,
        "sources": _source_digest(),
        "settings": settings,
        "variables": {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)},
        "device": [device.platform, device.device_kind, device.client.platform_version],
        "devices": [jax.device_count(), jax.process_count()],
    }


@functools.cache
def _source_digest() -> str:
    """Of the contents of our files and the user's, of the files of packages, and of the names of what is installed."""
    digest = hashlib.blake2b(digest_size=20)
    for path in sorted({*_files(_OWN), *_users_files()}):
        digest.update(f"{path}\n".encode())
        digest.update(path.read_bytes())
    for path in sorted(_files(_TRACING)):
        about = path.stat()
        digest.update(f"{path} {about.st_size} {about.st_mtime_ns}\n".encode())
    folders = [pathlib.Path(entry) for entry in sys.path if entry]
    installed = {p.name for folder in folders if folder.is_dir() for p in folder.glob("*-info")}
    digest.update(repr(sorted(installed)).encode())
    return digest.hexdigest()


def _files(packages: Sequence[str]) -> Iterator[pathlib.Path]:
    """All files of packages, but for Python's bytecode."""
    for name in packages:
        spec = importlib.util.find_spec(name)
        for top in (spec.submodule_search_locations or ()) if spec is not None else ():
            for folder, folders, names in os.walk(top):
                folders[:] = [each for each in folders if each != "__pycache__"]
                yield from (pathlib.Path(folder, each) for each in names)


def _users_files() -> set[pathlib.Path]:
    """Files of imported modules that were not installed: a mixer of the user's own may be in one."""
    library = os.path.dirname(os.__file__)
    paths = {str(getattr(module, "__file__", None)) for module in list(sys.modules.values())}
    users = {path for path in paths if path.endswith(".py") and "site-packages" not in path}
    return {pathlib.Path(path) for path in users if not path.startswith(library) and os.path.exists(path)}
