"""The platform and card that a computation is traced for: kernels, and the choice between them, depend on it."""

import re

import jax

HOPPER = ("H100", "H200", "H800", "H20", "GH200")
"""Words that name a Hopper card."""


def platform() -> str:
    """`"gpu"`, `"cpu"` and so on: an abstract device's platform if one is set, else the default device's."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    default = jax.config.jax_default_device
    if abstract is not None and abstract.platform is not None:
        name = abstract.platform
    elif default is not None:
        name = default if isinstance(default, str) else default.platform
    else:
        name = jax.default_backend()
    return "gpu" if name == "cuda" else name


def device_kind() -> str:
    """The name of the device that is being traced for, such as `NVIDIA H200`."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None and abstract.device_kind is not None:
        return abstract.device_kind
    return jax.devices()[0].device_kind


def card_words() -> list[str]:
    """The words of that name."""
    return re.split(r"[^A-Za-z0-9]+", device_kind())


def is_hopper() -> bool:
    """Whether the device that is being traced for is a Hopper card, known by its name."""
    return platform() == "gpu" and any(word in HOPPER for word in card_words())
