"""Memory: what devices have, what a compiled step takes, and whether a model can fit at all."""

import ctypes
import os
from typing import Any

import jax

from rnnlib.layers import RecurrentMixerConfig
from rnnlib.layers.parallel import SIDE_BY_SIDE
from rnnlib.models import ModelConfig
from rnnlib.models.config import NONE
from rnnlib.models.mixers import mixer_config

_STATE_BYTES = 8  # of a parameter in float32: itself and at least one moment


def least_parameters(config: ModelConfig) -> int:
    """A lower bound on a model's parameters: the matrices whose sizes the configuration gives."""
    width = config.width
    count = config.vocabulary_size * width * (1 if config.tie_embeddings else 2)
    hidden = config.feed_forward_width
    for kind in config.layer_feed_forwards:
        if kind != NONE:
            count += 3 * width * hidden if isinstance(kind, str) else kind.least_parameters(width, hidden)
    names = [part for name in config.layer_mixers if name != NONE for part in name.split(SIDE_BY_SIDE)]
    for name in names:
        mixer = mixer_config(config, name)
        if isinstance(mixer, RecurrentMixerConfig):
            shape = mixer.shape(width, config.num_heads)
            channels = 2 * shape.key_heads * shape.mimo_rank * shape.key_size + shape.value_heads * shape.value_size
            count += width * channels
    return count


def device_bytes() -> int | None:
    """Memory of one device that has its own; None for a CPU, and where it is not known."""
    device = jax.local_devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    return stats.get("bytes_limit") if stats else None


def memory_bytes() -> int:
    """Memory of all devices together; of CPUs, which share it, that of the machine."""
    one = device_bytes()
    if one is not None:
        return jax.device_count() * one
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * jax.process_count()


def bytes_of_each_device() -> int:
    """Memory of one device; of a CPU its share of the machine's, where several stand for one."""
    return device_bytes() or memory_bytes() // jax.device_count()


def planned_bytes(compiled: Any) -> int | None:
    """What a compiled function takes on each device by XLA's plan: arguments, results and what is held between.

    Donated arguments, whose memory results take over, count once. None where the backend does not say.

    Args:
        compiled: from `jax.jit(function).lower(...).compile()`.
    """
    plan = compiled.memory_analysis()
    if plan is None:
        return None
    held = plan.argument_size_in_bytes + plan.output_size_in_bytes - plan.alias_size_in_bytes
    return int(held + plan.temp_size_in_bytes)


# Options of glibc's mallopt (malloc.h), and the largest values that they take.
_ARENA_MAX, _MMAP_THRESHOLD, _TRIM_THRESHOLD = -8, -3, -1
_LARGEST = 2**31 - 1


def keep_freed_memory() -> bool:
    """Lets this process keep the host memory that it frees, for the next arrays; whether the C library can.

    For a process that trains on CPUs. XLA allocates a step's temporary arrays in every step. glibc takes large ones
    from the system and gives them back, and the system clears each page again: that was a third of the time of a small
    model's step. Memory that was once taken stays with the process until it ends. `rnnlib train` calls it; a script of
    your own should do so before JAX computes anything. Where the C library is not glibc, nothing changes.
    """
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    # One heap for all threads: those of threads of their own are too small for large arrays.
    options = {_ARENA_MAX: 1, _MMAP_THRESHOLD: _LARGEST, _TRIM_THRESHOLD: _LARGEST}
    return all([mallopt(option, value) == 1 for option, value in options.items()])


def check_fits(config: ModelConfig) -> None:
    """ValueError where a model's training state cannot fit however it is spread over the devices.

    It is asked before anything is traced: tracing a model of a width of millions takes minutes.
    """
    needed, there = least_parameters(config) * _STATE_BYTES, memory_bytes()
    if needed > there:
        raise ValueError(
            f"a model of width {config.width}, {config.num_layers} layers and vocabulary {config.vocabulary_size} has "
            f"at least {least_parameters(config):,} parameters, which take {needed / 1e9:,.0f} GB to train; expected "
            f"at most the {there / 1e9:,.0f} GB that are there"
        )
