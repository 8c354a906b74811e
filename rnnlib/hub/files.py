"""Weights in folders of published models: one safetensors file, or several shards with an index."""

import os
import pathlib
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rnnlib.files import expect_within, file_within, unfinished_folder
from rnnlib.hub.adapters import folder_adapter
from rnnlib.hub.config_reader import read_json, write_json
from rnnlib.hub.file_names import ADAPTER_CONFIG, WEIGHTS, WEIGHTS_INDEX
from rnnlib.safetensors_files import open_safetensors, write_safetensors

_NUMBERS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# Largest size of a new file. A model that was read keeps each array in the file that the array came from.
_SHARD_BYTES = 5 * 2**30
# Suffixes of weight files in any format. Such files are not copied from folder to folder.
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5", ".msgpack", ".npz")


def weight_files(folder: pathlib.Path) -> list[str]:
    """Names of a folder's weight files, and of their index, in any format."""
    return sorted(
        path.name for path in folder.iterdir() if path.suffix in _WEIGHT_SUFFIXES or path.name == WEIGHTS_INDEX
    )


class WeightFiles:
    """The arrays of a folder, by name. An array is read only when `read` is called.

    Attributes:
        folder: the folder.
        shards: the file of each array.
        shapes: the shape of each array.
    """

    def __init__(self, folder: pathlib.Path, adapter_folder: pathlib.Path | None = None):
        """Opens the folder's files.

        An adapter (`rnnlib.hub.adapters`) is added to the arrays when they are read.

        Args:
            folder: the folder of the model.
            adapter_folder: the folder that may have an adapter; None for the model's.

        Raises:
            ValueError: a file is missing or damaged, or the index and the files do not agree.
        """
        self.folder = folder
        self.adapter = folder_adapter(folder if adapter_folder is None else adapter_folder)
        index = folder / WEIGHTS_INDEX
        listed: dict[str, str] = {}
        if (folder / WEIGHTS).exists():
            names = [WEIGHTS]
        elif index.exists():
            listed = self._weight_map(index)
            names = sorted(set(listed.values()))
        else:
            found = weight_files(folder)
            instead = f", and not {found[0]}" if found else ""
            raise ValueError(f"{folder}: expected {WEIGHTS}, or shards and {WEIGHTS_INDEX}{instead}")
        self._stored_as: dict[str, str] = {}
        self._files = {name: open_safetensors(file_within(folder, name, index)) for name in names}
        self.shards = {array: name for name, file in self._files.items() for array in file.keys()}  # noqa: SIM118
        self.shapes = {array: tuple(self._slice(array).get_shape()) for array in self.shards}
        for array in sorted(listed.keys() | self.shards.keys()) if listed else ():
            if listed.get(array) != self.shards.get(array):
                raise ValueError(
                    f"{index}: {array} is in {self.shards.get(array, 'no file')}, expected it in "
                    f"{listed.get(array, 'none, as in the index')}"
                )

    def fit_adapter(self, prefixes: Sequence[str], tied: tuple[str, str] | None) -> None:
        """Fits the adapter to the names of the folder's arrays.

        An adapter changes the embedding or the head of a model that ties the two, and not the other: PEFT holds them
        apart then. The array that the files have once counts as both.

        Args:
            prefixes: of names, which stand for each other.
            tied: the names of embedding and head, of which a file may have one for both.

        Raises:
            ValueError: the adapter is not of this model.
        """
        if self.adapter is None:
            return
        self.adapter.rename(self.shapes, prefixes)
        for name, other in (tied, tied[::-1]) if tied else ():
            if name in self.shapes and other not in self.shapes and not self.adapter.names.isdisjoint(tied or ()):
                self._stored_as[other] = name
                self.shards[other], self.shapes[other] = self.shards[name], self.shapes[name]
        if strange := sorted(self.adapter.names - self.shapes.keys()):
            raise ValueError(f"{self.adapter.path}: it changes {strange[0]}, expected names of the model's arrays")

    @staticmethod
    def _weight_map(index: pathlib.Path) -> dict[str, str]:
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not shards or not all(isinstance(name, str) for name in shards.values()):
            raise ValueError(f"{index}: weight_map is {str(shards)[:80]}, expected the file of each array")
        for name in set(shards.values()):
            if not name.endswith(".safetensors"):
                raise ValueError(f"{index}: weight_map has {name[:80]!r}, expected names of safetensors files")
        return shards

    def dtype(self, name: str) -> str:
        """An array's dtype.

        Raises:
            ValueError: the dtype is not one of floating-point numbers of 16 bits or more.
        """
        code = self._slice(name).get_dtype()
        if code not in _NUMBERS:
            raise ValueError(
                f"{self.folder / self.shards[name]}: {name} has dtype {code}, expected one of {', '.join(_NUMBERS)}: "
                "quantised files are not read"
            )
        return _NUMBERS[code]

    def read(self, name: str) -> np.ndarray:
        """An array, in host memory."""
        array = self._files[self.shards[name]].get_tensor(self._stored_as.get(name, name))
        return array if self.adapter is None else self.adapter.apply(name, array)

    def _slice(self, name: str) -> Any:
        return self._files[self.shards[name]].get_slice(self._stored_as.get(name, name))


def shard_names(sizes: Mapping[str, int]) -> dict[str, str]:
    """Assigns each array to a file: one file, or several of at most 5 GiB, as published models have.

    Args:
        sizes: the size of each array in bytes.
    """
    groups: list[list[str]] = [[]]
    taken = 0
    for name, size in sizes.items():
        if groups[-1] and taken + size > _SHARD_BYTES:
            groups.append([])
            taken = 0
        groups[-1].append(name)
        taken += size
    if len(groups) == 1:
        return dict.fromkeys(groups[0], WEIGHTS)
    files = [f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))]
    return {name: file for file, names in zip(files, groups) for name in names}


def write_arrays(
    folder: pathlib.Path,
    shards: Mapping[str, str],
    arrays_of: Callable[[list[str]], Mapping[str, np.ndarray]],
    *,
    index: pathlib.Path | None = None,
) -> None:
    """Writes arrays into a folder, a file at a time, and an index where there are several files.

    Args:
        folder: the folder to write into.
        shards: the file of each array.
        arrays_of: from names to arrays; called once for each file.
        index: an existing index, which is copied if it is of the same arrays in the same files; None to write one.
    """
    total = 0
    for file in sorted(set(shards.values())):
        arrays = dict(arrays_of([name for name, shard in shards.items() if shard == file]))
        total += sum(array.nbytes for array in arrays.values())
        write_safetensors(folder / file, arrays, {"format": "pt"})
    if index is not None and index.exists() and read_json(index).get("weight_map") == shards:
        shutil.copyfile(index, folder / WEIGHTS_INDEX)
    elif set(shards.values()) != {WEIGHTS}:
        write_json(folder / WEIGHTS_INDEX, {"metadata": {"total_size": total}, "weight_map": dict(shards)})


def other_files(folder: pathlib.Path) -> Iterable[pathlib.Path]:
    """A folder's files except its weights, their index and adapter: configuration, tokenizer, licence.

    Raises:
        ValueError: one of them is a link that leads out of the folder.
    """
    for path in sorted(folder.iterdir()):
        is_weights = path.suffix in _WEIGHT_SUFFIXES or path.name.endswith(".index.json") or path.name == ADAPTER_CONFIG
        if path.is_file() and not is_weights:
            expect_within(folder, path)
            yield path


def replace_folder(folder: pathlib.Path, write: Callable[[pathlib.Path], None]) -> None:
    """Replaces a folder's contents, all at once or not at all.

    Old safetensors files, their index and adapter_config.json are removed. Other old files stay, unless a new one has
    the same name.

    Args:
        folder: the folder, which may exist.
        write: a function that writes the new files into the empty folder it is given.

    Raises:
        ValueError: the path is that of a file.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder}: expected a folder, not a file")
    folder = folder.resolve()
    with unfinished_folder(folder) as staged:
        staged.chmod(0o755)
        write(staged)
        if not folder.exists():
            os.replace(staged, folder)
            return
        for path in folder.iterdir():
            stale = path.is_file() and (path.suffix == ".safetensors" or path.name in (WEIGHTS_INDEX, ADAPTER_CONFIG))
            if stale or (staged / path.name).exists():
                continue
            if path.is_dir():
                shutil.copytree(path, staged / path.name, symlinks=True)
            else:
                shutil.copy2(path, staged / path.name, follow_symlinks=False)
        before = staged.with_name(staged.name + "-before")
        os.replace(folder, before)
        os.replace(staged, folder)
        shutil.rmtree(before)
