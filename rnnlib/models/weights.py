"""Weights in one safetensors file with the configuration inside: for handing a model on, outside of checkpoints.

`rnnlib.hub` reads and writes the folders that other libraries have.
"""

import json
import math
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rnnlib.files import parse_json
from rnnlib.models.config import ModelConfig
from rnnlib.models.decoder import DecoderLM
from rnnlib.models.summary import abstract_model
from rnnlib.models.variables import assign_by_column, values_by_column, values_by_path
from rnnlib.safetensors_files import open_safetensors, write_safetensors

_DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int32": "I32"}
_NAMES = {code: name for name, code in _DTYPES.items()}
_CONFIG_KEY = "rnnlib.model_config"
_NUMBERS_OF_LAYERS = ("num_layers", "num_hidden_layers")
_SAVED = nnx.Not(nnx.RngState)


class Held(NamedTuple):
    """What weight files hold, to which a configuration's sizes are compared before a model of them is built.

    Attributes:
        arrays: how many arrays; a layer has one at least.
        numbers: how many numbers, all arrays together; no axis of an array is longer.
    """

    arrays: int
    numbers: int

    @classmethod
    def of(cls, shapes: Iterable[Sequence[int]]) -> "Held":
        """What files of arrays with these shapes hold."""
        sizes = [math.prod(shape) for shape in shapes]
        return cls(len(sizes), sum(sizes))

    def expect(self, where: str, name: str, value: Any) -> None:
        """ValueError if a setting is an integer larger than the files can serve; a mapping's entries count too."""
        if isinstance(value, Mapping):
            for key, entry in value.items():
                self.expect(where, f"{name}.{key}", entry)
        # Some settings are no axes of arrays, such as a window. Up to 2^20 none of them costs time or memory.
        limit = self.arrays if name in _NUMBERS_OF_LAYERS else max(self.numbers, 2**20)
        if isinstance(value, int) and value > limit:
            what = f"{self.arrays:,} arrays with {self.numbers:,} numbers"
            raise ValueError(f"{where}: {name} is {value}, expected what the weight files serve: they have {what}")


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
    arrays: dict[str, np.ndarray] = {}
    for name, array in sorted(values_by_column(model, _SAVED).items()):
        arrays[name] = np.asarray(jax.device_get(array))
        dtype = arrays[name].dtype.name
        if dtype not in _DTYPES:
            raise TypeError(f"{name} has dtype {dtype}: expected one of {', '.join(_DTYPES)}")
    wanted = values_by_column(abstract_model(model.config), _SAVED)
    _check_arrays("save_weights: the model's arrays", _kinds(arrays), _kinds(wanted))
    target = pathlib.Path(path)
    unfinished = target.with_name(target.name + ".unfinished")
    try:
        write_safetensors(unfinished, arrays, {_CONFIG_KEY: json.dumps(model.config.to_dict())})
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
    os.stat(path)  # a missing file is the system's own error
    try:
        file = open_safetensors(path)
        slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
        fields = parse_json((file.metadata() or {})[_CONFIG_KEY], "its configuration")
        held = Held.of(x.get_shape() for x in slices.values())
        for key, value in fields.items():
            held.expect("its configuration", key, value)
        config = ModelConfig.from_dict(fields)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{name}: expected a whole safetensors file that save_weights wrote ({error})") from error
    model = abstract_model(config)
    wanted = values_by_column(model, _SAVED)
    found = {key: _kind(_NAMES.get(x.get_dtype(), x.get_dtype()), x.get_shape()) for key, x in slices.items()}
    _check_arrays(f"{name}: its arrays", found, _kinds(wanted))
    if len(values_by_path(model, _SAVED)) != len(jax.tree.leaves(nnx.state(model))):
        model = DecoderLM(config, rngs=nnx.Rngs(0))  # what the file does not hold is built: streams, constants
    assign_by_column(model, _SAVED, {key: jnp.asarray(file.get_tensor(key)) for key in wanted})
    return model


def _kinds(arrays: Mapping[str, Any]) -> dict[str, str]:
    return {key: _kind(array.dtype, array.shape) for key, array in arrays.items()}


def _kind(dtype: Any, shape: Any) -> str:
    return f"{dtype} {list(shape)}"


def _check_arrays(what: str, given: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    """ValueError, naming the first few that differ, unless arrays have the names, dtypes and shapes of others."""
    wrong = [
        f"{key} is {given.get(key, 'missing')}, expected {wanted.get(key, 'no such array')}"
        for key in sorted(given.keys() | wanted.keys())
        if given.get(key) != wanted.get(key)
    ]
    if wrong:
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ValueError(f"{what} do not fit the configuration: {'; '.join(wrong[:3])}{more}")
