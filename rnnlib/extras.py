"""Optional parts of the package: what is said where one is used and its packages are not installed."""

import contextlib
from collections.abc import Iterator

_OURS = ("rnnlib", "pallas_kernels")


class MissingExtraError(ModuleNotFoundError):
    """A part of the package needs an extra that is not installed; the message is one line that names it."""


@contextlib.contextmanager
def from_extra(extra: str, needed_by: str) -> Iterator[None]:
    """Around imports of an extra's packages: a package that is missing becomes one line with the command to install it.

        with from_extra("hub", "save_pretrained"):
            import safetensors.numpy

    Args:
        extra: The extra's name in pyproject.toml, such as "train".
        needed_by: What cannot work without it, as the user knows it.

    Raises:
        MissingExtraError: If an import within the block finds no such package. Missing modules of this library itself
            keep their own error.
    """
    try:
        yield
    except MissingExtraError:
        raise
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if not package or package in _OURS:
            raise
        raise MissingExtraError(
            f"{needed_by} needs {package}, which is not installed: pip install 'rnnlib[{extra}]'", name=error.name
        ) from None
