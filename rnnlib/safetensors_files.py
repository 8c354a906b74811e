"""Files of arrays in the format of safetensors, by its library, which is loaded when a file is read or written."""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from rnnlib.extras import from_extra
from rnnlib.files import open_regular


def _library() -> Any:
    with from_extra("hub", "a safetensors file"):
        import safetensors.numpy
    return safetensors


def open_safetensors(path: str | os.PathLike[str]) -> Any:
    """A safetensors file, whose arrays are read when they are asked for.

    Raises:
        ValueError: the file is missing or damaged.
    """
    safetensors = _library()
    try:
        open_regular(path).close()
        return safetensors.safe_open(path, framework="np")
    except FileNotFoundError:
        raise ValueError(f"{os.fspath(path)}: there is no such file") from None
    except safetensors.SafetensorError as error:
        raise ValueError(f"{os.fspath(path)}: expected a whole safetensors file ({error})") from error


def write_safetensors(path: pathlib.Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Writes arrays and texts about them into one file.

    Raises:
        OSError: it cannot be written.
    """
    safetensors = _library()
    contiguous = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    try:
        safetensors.numpy.save_file(contiguous, path, metadata=dict(metadata))
    except safetensors.SafetensorError as error:  # a full disk, among others
        raise OSError(f"{path} cannot be written: {error}") from error
