"""Weights in one safetensors file with the configuration inside: for handing a model on, outside of checkpoints.

The format (https://github.com/huggingface/safetensors): eight bytes of header length, little endian; a JSON header that
names each array's dtype, shape and byte range; the arrays, row-major.
"""

import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rnnlib.models.config import ModelConfig
from rnnlib.models.decoder import DecoderLM
from rnnlib.models.summary import abstract_model
from rnnlib.models.variables import assign_values, values_by_path

_DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int32": "I32"}
_CONFIG_KEY = "rnnlib.model_config"
_SAVED = nnx.Not(nnx.RngState)


class _Entry(NamedTuple):
    """An array of the file: its bytes are counted from the header's end."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def save_weights(model: DecoderLM, path: str | os.PathLike[str]) -> None:
    """Writes a model's parameters and configuration to a `.safetensors` file, whole or not at all.

    Statistics that parts of your own have go with the parameters; random streams and constants do not.

    A model whose arrays were cast is not what its configuration says, and is refused. To store, or compute, in another
    dtype is another configuration, for which values are cast:

        half = DecoderLM(model.config.replace(dtype="bfloat16", param_dtype="bfloat16"), rngs=nnx.Rngs(0))
        to, given = nnx.state(half, nnx.Param), nnx.state(model, nnx.Param)
        nnx.update(half, jax.tree.map(lambda x, y: y.astype(x.dtype), to, given))

    With `dtype` alone only the computation changes, and `nnx.update(half, given)` is enough.

    Args:
        model: the model.
        path: file to write; replaced where it exists.

    Raises:
        ValueError: an array is not of the shape and dtype that the configuration gives it.
        TypeError: the configuration gives an array a dtype that files cannot hold.
    """
    header: dict[str, Any] = {"__metadata__": {_CONFIG_KEY: json.dumps(model.config.to_dict())}}
    arrays: dict[str, np.ndarray] = {}
    offset = 0
    for name, array in sorted(values_by_path(model, _SAVED).items()):
        values = np.asarray(jax.device_get(array), order="C")
        if values.dtype.name not in _DTYPES:
            raise TypeError(f"{name} has dtype {values.dtype.name}: expected one of {', '.join(_DTYPES)}")
        header[name] = {
            "dtype": _DTYPES[values.dtype.name],
            "shape": list(values.shape),
            "data_offsets": [offset, offset + values.nbytes],
        }
        offset += values.nbytes
        arrays[name] = values
    _check_arrays("save_weights: the model's arrays", arrays, values_by_path(abstract_model(model.config), _SAVED))
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # keeps the arrays aligned
    target = pathlib.Path(path)
    unfinished = target.with_name(target.name + ".unfinished")
    try:
        with open(unfinished, "wb") as file:
            file.write(len(encoded).to_bytes(8, "little") + encoded)
            for values in arrays.values():
                file.write(values.reshape(-1).view(np.uint8).data)
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)  # of a full disk


def load_weights(path: str | os.PathLike[str]) -> DecoderLM:
    """Reads what `save_weights` wrote.

    Args:
        path: the file.

    Returns:
        The model.

    Raises:
        ValueError: where the file is no such file, is not whole, or its arrays do not fit the configuration in it.
    """
    name = os.fspath(path)
    try:
        data = np.memmap(path, np.uint8, mode="r")
        begin = 8 + int.from_bytes(data[:8].tobytes(), "little")
        header = json.loads(data[8:begin].tobytes())
        config = ModelConfig.from_dict(json.loads(header.pop("__metadata__")[_CONFIG_KEY]))
        entries = {key: _Entry(_named(e["dtype"]), tuple(e["shape"]), *e["data_offsets"]) for key, e in header.items()}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{name}: expected a safetensors file that save_weights wrote ({error})") from error
    model = abstract_model(config)
    if len(values_by_path(model, _SAVED)) != len(jax.tree.leaves(nnx.state(model))):
        model = DecoderLM(config, rngs=nnx.Rngs(0))  # what the file does not hold is built: streams, constants
    wanted = values_by_path(model, _SAVED)
    _check_arrays(f"{name}: its arrays", entries, wanted)
    arrays, end = data[begin:], 0
    for key, entry in sorted(entries.items(), key=lambda item: item[1].begin):
        size = math.prod(entry.shape) * jnp.dtype(entry.dtype).itemsize
        if (entry.begin, entry.end) != (end, end + size):
            raise ValueError(f"{name}: {key} is at bytes {entry.begin} to {entry.end}, expected {end} to {end + size}")
        end = entry.end
    if len(arrays) != end:
        raise ValueError(f"{name}: has {len(arrays)} bytes of arrays, expected {end}: it was cut off or added to")

    def read(key: str, shape: jax.ShapeDtypeStruct | jax.Array) -> jax.Array:
        entry = entries[key]
        return jnp.array(arrays[entry.begin : entry.end].view(shape.dtype).reshape(shape.shape))

    assign_values(model, _SAVED, {key: read(key, leaf) for key, leaf in wanted.items()})
    return model


def _check_arrays(what: str, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """ValueError, naming the first few that differ, unless arrays have the names, dtypes and shapes of others."""
    given, wanted = (
        {key: f"{array.dtype} {list(array.shape)}" for key, array in arrays.items()} for arrays in (found, expected)
    )
    wrong = [
        f"{key} is {given.get(key, 'missing')}, expected {wanted.get(key, 'no such array')}"
        for key in sorted(given.keys() | wanted.keys())
        if given.get(key) != wanted.get(key)
    ]
    if wrong:
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ValueError(f"{what} do not fit the configuration: {'; '.join(wrong[:3])}{more}")


def _named(code: str) -> str:
    return next((name for name, other in _DTYPES.items() if other == code), code)
