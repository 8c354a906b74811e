"""Compiled training steps in a folder: a later process neither traces nor lowers a step that it finds there.

JAX's compilation cache knows a program by its text, for which a step must be traced and lowered. Here a step is known
by what makes that text: the source files, the packages, the settings, and the devices. Where any of them has changed,
nothing is found, and the step is made anew.
"""

import contextlib
import fcntl
import functools
import hashlib
import importlib
import importlib.util
import itertools
import json
import os
import pathlib
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

import jax
import numpy as np
from jax.experimental import serialize_executable

from rnnlib.files import write_atomically

# Whose files make the program, beside what pip says of the packages: somebody may have changed one of them.
_TRACING = ("jax", "jaxlib", "jax_plugins", "flax", "optax", "chex", "numpy")
_OWN = ("rnnlib", "pallas_kernels")
# Variables that XLA, CUDA, flax and kernels read, and where libraries are; JAX's are among its settings.
_VARIABLES = ("CUDA_", "FLAX_", "LD_LIBRARY_PATH", "LIBTPU_", "MOSAIC_", "NVIDIA_", "TF_", "TRITON_", "XLA_")
_DRIVER = pathlib.Path("/proc/driver/nvidia/version")
# Of the folder, in bytes: what was not used for longest goes first.
_LARGEST = 1_000_000_000
_UNFINISHED_SECONDS = 3600.0


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
    """The place in a folder of one compiled function, of one program or several.

    Its name is a hash of all that the program depends on. A folder is read only if it is this user's and others cannot
    write into it: who can, can have anything computed.

    A function may end the process, when it is read or when it is first called. So a process leaves a mark while it does
    either, and holds a lock on the mark. A mark without its lock is of a process that has ended there: then the
    function is not read again. Marks of processes that are at work say nothing.

    Attributes:
        path: the file.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        about: Mapping[str, Any],
        arguments: tuple[Any, ...],
        calls: Sequence[tuple[tuple[Any, ...], Any]],
    ):
        """Finds the place; reads nothing.

        Args:
            folder: of compiled steps.
            about: what the function is made from, in values that JSON or `repr` tells apart.
            arguments: of a call, with shapes, dtypes and shardings in place of arrays.
            calls: of each program a pytree of its arguments' structure, and one of its result's.
        """
        self._trees = [(jax.tree.structure((read, {})), jax.tree.structure(result)) for read, result in calls]
        arrays = [
            (jax.tree_util.keystr(path), str(x), bool(x.weak_type), str(x.sharding))
            for path, x in jax.tree_util.tree_leaves_with_path(arguments)
        ]
        made_from = {**_environment(), "about": about, "arguments": arrays}
        text = json.dumps(made_from, sort_keys=True, default=repr)
        self.path = folder / f"{_digest(text.encode())}.step"
        self._mark: tuple[pathlib.Path, IO[bytes]] | None = None  # a file of the folder, and the lock on it

    def load(self, devices: Sequence[Any]) -> list[Any] | None:
        """The compiled programs on these devices, or None where there are none that can be read."""
        try:
            if not _is_own(self.path.parent):
                return None
            if self._has_failed():
                self._remove()
                return None
            header, _, content = self.path.read_bytes().partition(b"\n")
            self.path.touch()  # used
            self.begin_trial()
        except OSError:  # there is none, or the folder cannot be written
            return None
        try:
            about = json.loads(header)
            if about["digest"] != _digest(content):
                raise ValueError("the file is damaged")
            _register(about["modules"])
            ends = list(itertools.accumulate(about["sizes"], initial=0))
            return [
                serialize_executable.deserialize_and_load(content[begin:end], *trees, devices[0].client, tuple(devices))
                for (begin, end), trees in zip(itertools.pairwise(ends), self._trees, strict=True)
            ]
        except Exception:  # cut off, or of a runtime that this one cannot read: it is written anew
            self._remove()
            return None
        finally:
            self.end_trial()

    def begin_trial(self) -> None:
        """Leaves the mark: if this process ends before `end_trial`, no later one reads the function.

        Raises:
            OSError: the folder cannot be written, or its files cannot be locked.
        """
        handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.stem}.", suffix=".mark")
        mark = os.fdopen(handle, "wb")
        try:
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path = pathlib.Path(name).with_suffix(".trial")
            os.rename(name, path)  # from here others look at it
        except OSError:
            mark.close()
            os.unlink(name)
            raise
        self._mark = path, mark

    def end_trial(self) -> None:
        """Takes the mark away: the function was read, or has run."""
        if self._mark is not None:
            path, file = self._mark
            with contextlib.suppress(OSError):
                path.unlink()
            file.close()
            self._mark = None

    def _has_failed(self) -> bool:
        for path in self._trials():
            with contextlib.suppress(OSError), path.open("rb") as file:  # it was taken away, or is another's
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # its process has ended
                if path.exists():
                    return True
        return False

    def _trials(self) -> Iterator[pathlib.Path]:
        return self.path.parent.glob(f".{self.path.stem}.*.trial")

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            for path in (self.path, *self._trials()):
                path.unlink(missing_ok=True)

    def save(self, compiled: Sequence[Any]) -> None:
        """Keeps programs that XLA has just made; what cannot be kept is compiled again the next time."""
        try:
            programs, *trees = zip(*map(serialize_executable.serialize, compiled), strict=True)
        except Exception:  # one calls functions of this process, or its runtime has no form for files
            return
        if list(zip(*trees, strict=True)) != self._trees:
            return
        content = b"".join(programs)
        header = {"digest": _digest(content), "sizes": list(map(len, programs)), "modules": sorted(_jax_modules())}
        with contextlib.suppress(OSError):  # a full disk, or a folder that cannot be written
            self.path.parent.parent.mkdir(parents=True, exist_ok=True)
            self.path.parent.mkdir(mode=0o700, exist_ok=True)
            write_atomically(self.path, json.dumps(header).encode() + b"\n" + content)
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


def _is_own(folder: pathlib.Path) -> bool:
    """Whether a folder is this user's, and no other can write into it."""
    about = folder.stat()
    return about.st_uid == os.getuid() and not about.st_mode & 0o022


def _keep_small(folder: pathlib.Path) -> None:
    left = _LARGEST
    for path in sorted(folder.glob("*.step"), key=lambda path: path.stat().st_mtime, reverse=True):
        left -= path.stat().st_size
        if left < 0:
            path.unlink(missing_ok=True)
    for path in folder.glob(".*.step-*"):  # of a process that was killed while it wrote
        if path.stat().st_mtime < time.time() - _UNFINISHED_SECONDS:
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
        "driver": _DRIVER.read_text() if _DRIVER.is_file() else "",
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
