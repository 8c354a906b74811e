"""What lets a command start sooner: the GPU is opened beside the imports, and garbage is looked for less often."""

import contextlib
import gc
import os
import pathlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

# Variables of launchers that start several processes (`rnnlib.training.distributed`). These meet before they compute.
_OF_LAUNCHERS = (
    "JAX_COORDINATOR_ADDRESS",
    "JAX_NUM_PROCESSES",
    "JAX_PROCESS_ID",
    "KUBERNETES_SERVICE_HOST",
    "OMPI_COMM_WORLD_SIZE",
    "SLURM_STEP_NODELIST",
    "TPU_PROCESS_ADDRESSES",
    "TPU_WORKER_HOSTNAMES",
)
_DRIVER = pathlib.Path("/dev/nvidiactl")


def should_open(arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether a command with these arguments is the only process of its run, computes, and finds a GPU."""
    if {"-h", "--help"} & set(arguments) or any(each.startswith("--distributed") for each in arguments):
        return False
    if any(environment.get(name) for name in _OF_LAUNCHERS):
        return False
    # On CPUs there is nothing to wait for, and `keep_freed_memory` must come first.
    asked = environment.get("JAX_PLATFORMS", "")
    return (not asked or "cuda" in asked or "gpu" in asked) and _DRIVER.exists()


class Opening(threading.Thread):
    """Opens JAX's devices.

    Attributes:
        seconds: that it took; 0 before it is done.
    """

    # No daemon: a process that ends while CUDA is opened would crash.
    def __init__(self) -> None:
        """Begins."""
        super().__init__(name="rnnlib-devices", daemon=False)
        self.seconds = 0.0
        self.start()

    def run(self) -> None:
        """Opens them; an error is left to whoever asks for them next, who gets it, too."""
        start = time.perf_counter()
        with contextlib.suppress(Exception):
            import jax
            import numpy as np

            # The first array has JAX take a GPU's memory, which takes as long again as opening it.
            for device in jax.local_devices():
                jax.block_until_ready(jax.device_put(np.zeros(1, np.int32), device))
        self.seconds = time.perf_counter() - start


def open_early(arguments: Sequence[str]) -> Opening | None:
    """Begins to open the GPU where `should_open`, or else None; whoever asks JAX for its devices waits for it.

    CUDA takes as long as the imports that run meanwhile.
    """
    return Opening() if should_open(arguments, os.environ) else None


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Looks for cyclic garbage seldom within; for imports and traces, whose many objects nearly all stay.

    Looking through them again and again took a sixth of their time. A training step must not run within: cycles may
    hold a device's arrays.
    """
    before = gc.get_threshold()
    gc.set_threshold(*map(max, before, (50_000, 20, 20)))
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextlib.contextmanager
def kept_objects() -> Iterator[None]:
    """Looks for cyclic garbage only among objects that are made within; for a run, beside which a start's all stay.

    Looking through those of a start is a pause of a quarter of a second for a model of 24 layers.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
