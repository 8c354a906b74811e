"""Run by `test_files.py` in a process of its own, which has four devices: the memory that loading takes, JSON."""

import json
import math
import os
import sys
import weakref

if __name__ == "__main__":  # before jax is imported
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from rnnlib.hub import load_pretrained
from rnnlib.hub.files import WeightFiles
from rnnlib.training import MeshConfig, make_mesh
from rnnlib.training.mesh import parameter_spec


def bytes_of_devices():
    held = dict.fromkeys(jax.devices(), 0)
    for array in jax.live_arrays():
        share = math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        for device in array.sharding.device_set:
            held[device] += share
    return held


def main(folder):
    mesh = make_mesh(4, MeshConfig(fsdp=4))
    of_host, of_device, largest, read = [], [], [], []
    original = WeightFiles.read

    def watched(self, name):
        array = original(self, name)
        read.append(weakref.ref(array))
        largest.append(array.nbytes)
        of_host.append(sum(x.nbytes for x in (ref() for ref in read) if x is not None))
        of_device.append(max(bytes_of_devices().values()))
        return array

    WeightFiles.read = watched
    model = load_pretrained(folder, sharding=lambda x: NamedSharding(mesh, parameter_spec(x.shape, mesh))).model
    WeightFiles.read = original
    shares = bytes_of_devices()
    whole = load_pretrained(folder).model
    leaves, wanted = (jax.tree.leaves(nnx.state(m)) for m in (model, whole))
    for leaf, array in zip(leaves, wanted, strict=True):
        np.testing.assert_array_equal(leaf, array)
    result = {
        "model": sum(leaf.nbytes for leaf in leaves),
        "sharded": sum("fsdp" in tuple(leaf.sharding.spec) for leaf in leaves),
        "matrices": sum(leaf.ndim > 1 for leaf in leaves),
        "largest array": max(largest),
        "most on the host": max(of_host),
        "most on a device": max(of_device),
        "share of a device": max(shares.values()),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
