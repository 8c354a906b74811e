"""Compiled programs that are kept between runs, by JAX's persistent compilation cache."""

import hashlib
import importlib.util
import os
import pathlib
import platform
from typing import Annotated

import tyro

from rnnlib.cli.errors import CommandError

CompilationCache = Annotated[
    str | None,
    tyro.conf.arg(
        help="Folder that keeps compiled programs for the next time; left out, one in the user's cache directory, or "
        'JAX_COMPILATION_CACHE_DIR; "off" keeps none.'
    ),
]

# Of the folder, in bytes: what was not used for longest goes first.
_LARGEST = 4_000_000_000


def default_folder() -> pathlib.Path:
    """Where compiled programs are kept: those of this kind of machine, since programs for CPUs use all that one has."""
    parent = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(parent) / "rnnlib" / f"compiled-{_machine()}"


def _machine() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    # x86 has the instructions in a line "flags", ARM in "Features".
    instructions = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return f"{platform.machine()}-{hashlib.blake2b(instructions.encode(), digest_size=4).hexdigest()}"


def keep_compiled_programs(folder: str | None) -> pathlib.Path | None:
    """Turns the cache on before anything is compiled; a folder that JAX was told otherwise stays.

    Args:
        folder: As `CompilationCache` says.

    Returns:
        A folder for compiled training steps (`Trainer`), in that of the cache; None where nothing is kept.

    Raises:
        CommandError: The folder was named and cannot be made.
    """
    import jax

    if folder == "off":
        jax.config.update("jax_enable_compilation_cache", False)
        return None
    if folder is None and jax.config.jax_compilation_cache_dir is not None:
        return _steps_in(pathlib.Path(jax.config.jax_compilation_cache_dir))
    path = default_folder() if folder is None else pathlib.Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if folder is None:  # a machine without a home: it is compiled anew
            return None
        raise CommandError(f"--compilation-cache {folder}: {error.strerror}, expected a folder or off") from error
    jax.config.update("jax_compilation_cache_dir", str(path))
    # Short ones, too: the first parameters of a model are dozens of small programs.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    if importlib.util.find_spec("filelock") is not None:  # without it JAX cannot keep the folder small
        jax.config.update("jax_compilation_cache_max_size", _LARGEST)
    return _steps_in(path)


def _steps_in(folder: pathlib.Path) -> pathlib.Path:
    return folder / f"steps-{_machine()}"
