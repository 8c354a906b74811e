"""Files of arrays in the format of safetensors."""

import pathlib
from typing import Any

from rnnlib.extras import from_extra
from rnnlib.files import open_regular

with from_extra("hub", "rnnlib.hub"):
    import safetensors


def open_safetensors(path: pathlib.Path) -> Any:
    """A safetensors file, whose arrays are read when they are asked for.

    Raises:
        ValueError: the file is missing or damaged.
    """
    try:
        open_regular(path).close()
        return safetensors.safe_open(path, framework="np")
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such file") from None
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path}: expected a whole safetensors file ({error})") from error
