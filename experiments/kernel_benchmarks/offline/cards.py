"""Cards that kernels are compiled for, by their figures.

XLA's CUDA plugin compiles for a card that is described (openxla/xla, `xla/backends/gpu/target_config/specs`); figures
are those of NVIDIA's CUDA programming guide, "compute capabilities", and of its data sheets.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh, NamedSharding

KIB = 1024


@dataclass(frozen=True)
class Card:
    """A card.

    Attributes:
        kind: its name, as jax has it in `device_kind`.
        capability: compute capability.
        processors: multiprocessors.
        shared_memory: bytes of it that one program can have.
        shared_by_processor: bytes of it that a multiprocessor has.
        threads: that a multiprocessor holds.
        like: other cards with the same capability and shared memory, for which this one stands.
    """

    kind: str
    capability: tuple[int, int]
    processors: int
    shared_memory: int
    shared_by_processor: int
    threads: int
    like: tuple[str, ...] = ()

    @property
    def is_hopper(self) -> bool:
        """Whether the Mosaic GPU kernels with wgmma run there."""
        return self.capability == (9, 0)

    @property
    def takes_mma(self) -> bool:
        """Whether those by `mma.sync` are compiled for it: for all but Blackwell cards of data centres."""
        return self.capability[0] != 10

    def devices(self, count: int = 1, *, memory: int = 24 * KIB**3) -> list[Any]:
        """Devices that are such cards, to compile for.

        The process needs the variables of `compiling.environment`, set before jax is imported.

        Args:
            count: of cards in one host.
            memory: bytes that each has.
        """
        from jax.experimental import topologies

        major, minor = self.capability
        topology = topologies.get_topology_desc(
            topology_name=f"sm_{major}{minor}",
            platform="cuda",
            target_config=self.describe(memory),
            topology=f"1x{count}x1",
        )
        return list(topology.devices)

    def alone(self) -> "tuple[NamedSharding, AbstractMesh]":
        """Where arrays of a program for one such card lie, and the mesh within which it is traced."""
        import numpy as np
        from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

        @dataclass(frozen=True)
        class Described(AbstractDevice):
            """Says for which card Mosaic GPU kernels are lowered: without it, for a Hopper card."""

            compute_capability: str

        capability = ".".join(str(number) for number in self.capability)
        device = Described(device_kind=self.kind, num_cores=None, platform="gpu", compute_capability=capability)
        mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
        return NamedSharding(Mesh(np.array(self.devices()), ("x",)), PartitionSpec()), mesh

    def describe(self, memory: int = 24 * KIB**3) -> str:
        """The target that XLA compiles for.

        It grants a program 1 MiB of shared memory, so that a kernel that takes more than the card has compiles and says
        how much it takes; whoever reads the report compares.

        Args:
            memory: bytes that the card has.
        """
        major, minor = self.capability
        special = " feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""  # sm_90a: with wgmma
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {self.threads}
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {KIB * KIB}
  shared_memory_per_core: {self.shared_by_processor}
  core_count: {self.processors} fpus_per_core: {64 if self.capability == (8, 0) else 128}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: 1000000000000 l2_cache_size: 41943040 clock_rate_ghz: 1.7 device_memory_size: {memory}
  cuda_compute_capability {{ major: {major} minor: {minor}{special} }}
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} runtime_version {{ major: 13 minor: 0 }}
device_description_str: "{self.kind}"
"""


CARDS = {
    "sm_80": Card("NVIDIA A100", (8, 0), 108, 163 * KIB, 164 * KIB, 2048, ("A30",)),
    "sm_86": Card("NVIDIA A10", (8, 6), 72, 99 * KIB, 100 * KIB, 1536, ("A40", "RTX 3090", "RTX A6000")),
    "sm_89": Card("NVIDIA GeForce RTX 4090", (8, 9), 128, 99 * KIB, 100 * KIB, 1536, ("L4", "L40S", "RTX 6000 Ada")),
    "sm_90": Card("NVIDIA H200", (9, 0), 132, 227 * KIB, 228 * KIB, 2048, ("H100",)),
    "sm_100": Card("NVIDIA B200", (10, 0), 148, 227 * KIB, 228 * KIB, 2048),
    "sm_120": Card("NVIDIA RTX PRO 6000", (12, 0), 188, 99 * KIB, 100 * KIB, 1536, ("RTX 5090",)),
}
"""Cards by what code is compiled for; of each, one that jax knows by name, so that kernels are lowered for it."""
