"""The platform that a computation is traced for. Kernels, and the choice between implementations, depend on it."""

import jax


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
