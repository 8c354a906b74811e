"""Strictness shared by all tests: shapes and dtypes of public functions are checked at every call."""

import contextlib
import importlib
import os
import pathlib
import sys

CACHE = pathlib.Path(__file__).parents[1] / ".pytest_cache"
# Where no bytecode may be written beside the sources, each process would compile jax and all else for seconds.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    os.environ["PYTHONPYCACHEPREFIX"] = str(CACHE / "bytecode")
    sys.dont_write_bytecode, sys.pycache_prefix = False, os.environ["PYTHONPYCACHEPREFIX"]
# Two workers begin at the same time. The second one imports first what the first one imports last: of a new checkout,
# each compiles the sources of half of the packages and reads the bytecode of the others.
if os.environ.get("PYTEST_XDIST_WORKER") == "gw1":
    for name in ("lm_eval.tasks", "scipy.stats", "matplotlib.pyplot"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)

import jaxtyping  # noqa: E402
import pytest  # noqa: E402

from tests import annotations  # noqa: E402

# Before any import of the packages, so that their annotations are checked under pytest.
annotations.install(["rnnlib", "pallas_kernels"])

import jax  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

from tests import interpreting  # noqa: E402

interpreting.install()


def pytest_configure(config: pytest.Config) -> None:
    """Environment of the workers and of the processes that tests start."""
    # On a CPU most of the tests' time is compilation, which is twice as fast without LLVM's optimizations, and three
    # times as fast again without the emitters that set up MLIR for each fusion (tests/compiling.py: what that costs).
    # Programs are small and processors few: compiled whole, not in 32 parts, these tests take a tenth less.
    if "not gpu" in (config.getoption("markexpr") or ""):
        quick = "--xla_backend_optimization_level=0 --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
        quick += " --xla_cpu_parallel_codegen_split_count=1"
        os.environ["XLA_FLAGS"] = f"{quick} {os.environ.get('XLA_FLAGS', '')}".strip()
        # JAX looks for a GPU otherwise, and writes to stderr what its plugin lacks on a machine without one.
        platforms = os.environ.setdefault("JAX_PLATFORMS", "cpu")
        jax.config.update("jax_platforms", platforms)
    # XLA's pool of threads, which has as many as there are processors: the interpreter of Mosaic GPU kernels runs each
    # warpgroup in a thread of it, and they wait for one another.
    os.environ.setdefault("NPROC", "16")


# Compiled functions are kept between runs, for the same reason.
jax.config.update("jax_compilation_cache_dir", str(CACHE / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)

settings.register_profile(
    "rnnlib",
    deadline=None,  # the first example of each shape compiles
    print_blob=True,
    derandomize=True,  # the same examples on every machine
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
# Other examples each time: pytest --hypothesis-profile=random
settings.register_profile("random", settings.get_profile("rnnlib"), derandomize=False)
settings.load_profile("rnnlib")


@pytest.fixture
def unchecked_shapes():
    """Turns annotation checks off, for tests of the library's own error messages."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def x64():
    """Runs a test with 64-bit arrays enabled."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module", autouse=True)
def clear_compiled_functions():
    """Compiled functions of a finished module are dropped: memory on a small machine is short."""
    yield
    jax.clear_caches()
