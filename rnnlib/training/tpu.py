"""TPUs: what Google publishes of them, and described ones that programs compile for on a machine without any."""

import dataclasses
import importlib.util
import os
from typing import Any

import jax
from jax.experimental import topologies

_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class TPU:
    """A kind of TPU chip, from Google Cloud's page of it ("TPU v4", "TPU v5e", and so on).

    Attributes:
        device_kind: JAX's name of its devices.
        cores: devices of a chip.
        flops: bfloat16 operations a second of a device.
        memory: bytes of a device.
        dimensions: of the torus that its chips are connected in.
        most_chips: chips in the largest slice that is described here.
    """

    device_kind: str
    cores: int
    flops: float
    memory: int
    dimensions: int
    most_chips: int

    def sizes(self) -> list[int]:
        """Devices of the slices that are described: one chip, and powers of two from a host of four chips."""
        chips = [1, *(1 << n for n in range(2, self.most_chips.bit_length()))]
        return [self.cores * count for count in chips]


TPUS = {
    "v4": TPU("TPU v4", 1, 275e12, 32 * _GIB, 3, 4096),
    "v5e": TPU("TPU v5 lite", 1, 197e12, 16 * _GIB, 2, 256),
    "v5p": TPU("TPU v5", 1, 459e12, 95 * _GIB, 3, 4096),
    "v6e": TPU("TPU v6 lite", 1, 918e12, 32 * _GIB, 2, 256),
    "tpu7x": TPU("TPU7x", 2, 2307e12 / 2, 96 * _GIB, 3, 4096),
}
"""By the names that Google gives them."""


def missing_compiler() -> str | None:
    """Why programs cannot be compiled for TPUs here, or None."""
    return (
        None if importlib.util.find_spec("libtpu") else "libtpu is not installed: pip install 'rnnlib[tpu]', on Linux"
    )


def described_tpus(name: str, devices: int) -> list[jax.Device]:
    """Devices of a slice of TPUs, none of which has to be there: for `plan_step(compile_for=)`.

    Args:
        name: a key of `TPUS`.
        devices: how many; one of its `sizes()`.

    Raises:
        ValueError: there is no such TPU, or no such slice.
        ImportError: libtpu, the compiler, is not installed.
    """
    if name not in TPUS:
        raise ValueError(f"described_tpus: name is {name!r}, expected one of {', '.join(TPUS)}")
    chip = TPUS[name]
    if devices not in chip.sizes():
        raise ValueError(f"described_tpus: {name} with {devices} devices, expected one of {chip.sizes()}")
    if reason := missing_compiler():
        raise ImportError(reason)
    if jax.default_backend() != "tpu":  # nothing asks the network what machine this is, or locks TPUs
        for variable, value in {
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "TPU_ACCELERATOR_TYPE": "v6e-4",  # any: libtpu complains where it finds none
        }.items():
            os.environ.setdefault(variable, value)
    sides = _sides(devices // chip.cores, chip.dimensions)
    options: dict[str, Any] = {"chip_config_name": "megacore"} if name == "v4" else {}
    if devices == chip.cores:
        options["chips_per_host_bounds"] = (1, 1, 1)
    shape = "x".join(str(side) for side in sides)
    return list(topologies.get_topology_desc(platform="tpu", topology_name=f"{name}:{shape}", **options).devices)


def _sides(chips: int, dimensions: int) -> list[int]:
    """Sides of a torus of a power of two of chips, as equal as they can be; a host's four are 2 x 2."""
    power = chips.bit_length() - 1
    if power == 2:
        return [2, 2] + [1] * (dimensions - 2)
    return [1 << (power + i) // dimensions for i in range(dimensions)]
