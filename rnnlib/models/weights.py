"""Weights in one safetensors file with the configuration inside: for handing a model on, outside of checkpoints.

The format (https://github.com/huggingface/safetensors): eight bytes of header length, little endian; a JSON header that
names each array's dtype, shape and byte range; the arrays, row-major.
"""

import json
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rnnlib.models.config import ModelConfig
from rnnlib.models.decoder import DecoderLM
from rnnlib.models.summary import abstract_model

_DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int32": "I32"}
_CONFIG_KEY = "rnnlib.model_config"


def save_weights(model: DecoderLM, path: str | os.PathLike[str]) -> None:
    """Writes a model's parameters and configuration to a `.safetensors` file, whole or not at all.

    Args:
        model: the model.
        path: file to write; replaced where it exists.
    """
    header: dict[str, Any] = {"__metadata__": {_CONFIG_KEY: json.dumps(model.config.to_dict())}}
    arrays = []
    offset = 0
    for name, array in sorted(_parameters(model).items()):
        values = np.ascontiguousarray(jax.device_get(array))
        if values.dtype.name not in _DTYPES:
            raise TypeError(f"{name} has dtype {values.dtype.name}: expected one of {', '.join(_DTYPES)}")
        header[name] = {
            "dtype": _DTYPES[values.dtype.name],
            "shape": list(values.shape),
            "data_offsets": [offset, offset + values.nbytes],
        }
        offset += values.nbytes
        arrays.append(values)
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # keeps the arrays aligned
    target = pathlib.Path(path)
    unfinished = target.with_name(target.name + ".unfinished")
    with open(unfinished, "wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for values in arrays:
            file.write(values.reshape(-1).view(np.uint8).data)
    os.replace(unfinished, target)


def load_weights(path: str | os.PathLike[str]) -> DecoderLM:
    """Reads what `save_weights` wrote.

    Args:
        path: the file.

    Returns:
        The model.

    Raises:
        ValueError: where the file is no such file, or its arrays do not fit the configuration in it.
    """
    data = np.memmap(path, np.uint8, mode="r")
    length = int.from_bytes(data[:8].tobytes(), "little")
    try:
        header = json.loads(data[8 : 8 + length].tobytes())
        config = ModelConfig.from_dict(json.loads(header.pop("__metadata__")[_CONFIG_KEY]))
    except (ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"{os.fspath(path)}: expected a safetensors file that save_weights wrote ({error})") from error
    model = abstract_model(config)
    expected = {name: (leaf.shape, leaf.dtype.name) for name, leaf in _parameters(model).items()}
    found = {name: (tuple(entry["shape"]), _named(entry["dtype"])) for name, entry in header.items()}
    if expected != found:
        names = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
        raise ValueError(f"{os.fspath(path)}: arrays do not fit the configuration in it: {', '.join(names)}")

    def read(keys: tuple[Any, ...], shape: jax.ShapeDtypeStruct) -> jax.Array:
        begin, end = header[_name(keys)]["data_offsets"]
        return jnp.array(data[8 + length + begin : 8 + length + end].view(shape.dtype).reshape(shape.shape))

    leaves = nnx.to_flat_state(nnx.state(model))
    nnx.update(
        model, nnx.from_flat_state([(keys, leaf.replace(read(keys, leaf.get_value()))) for keys, leaf in leaves])
    )
    return model


def _named(code: str) -> str:
    return next((name for name, other in _DTYPES.items() if other == code), code)


def _name(keys: tuple[Any, ...]) -> str:
    return ".".join(map(str, keys))


def _parameters(model: DecoderLM) -> dict[str, Any]:
    return {_name(keys): leaf.get_value() for keys, leaf in nnx.to_flat_state(nnx.state(model))}
