"""Adapters in the format of PEFT: low-rank changes (LoRA) of a published model's matrices, added when these are read.

A folder's adapter is adapter_config.json and adapter_model.safetensors. For each of its modules, `lora_A`
`[rank, in]` and `lora_B` `[out, rank]` change the matrix `W` `[out, in]` to `W + scale B A`. The scale is
`lora_alpha / rank`, or `lora_alpha / sqrt(rank)` with `use_rslora`; a bias of `lora_B` has the same scale. Modules of
`modules_to_save`, biases that were trained (`bias`) and embeddings beside their factors are stored whole.
"""

import math
import pathlib
import re
from collections.abc import Container, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rnnlib.fields import PositiveInteger
from rnnlib.hub.config_reader import ConfigKeys, read_json
from rnnlib.hub.file_names import ADAPTER_CONFIG, ADAPTER_WEIGHTS, CONFIG
from rnnlib.hub.names import local_folder
from rnnlib.safetensors_files import open_safetensors

FACTOR_PREFIX = "base_model.model."
_FACTOR = re.compile(r"(?P<module>.*)\.lora_(?P<embedding>embedding_)?(?P<side>[AB])(?:\.weight)?$")
_FACTOR_BIAS = ".lora_B.bias"

# Keys that say how an adapter was trained, or which of a model's modules it has. Its arrays say the latter, too.
_WITHOUT_EFFECT = (
    "base_model_name_or_path",
    "revision",
    "task_type",
    "inference_mode",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "lora_dropout",
    "modules_to_save",
    "peft_version",
    "auto_mapping",
    "megatron_config",
    "megatron_core",
    "loftq_config",
    "eva_config",
    "corda_config",
    "runtime_config",
    "qalora_group_size",
    "ensure_weight_tying",
    "bias",
    "lora_bias",
)


class Adapter:
    """The adapter of a folder.

    Attributes:
        path: its file of arrays.
    """

    def __init__(self, folder: pathlib.Path):
        """Reads the configuration and opens the arrays.

        Raises:
            ValueError: a file is missing or damaged, or the adapter is of another kind. The message is one line that
                names the file, and the key or array.
        """
        where = folder / ADAPTER_CONFIG
        keys = ConfigKeys(read_json(where), str(where))
        keys.ignore(*_WITHOUT_EFFECT)
        keys.only("peft_type", "LORA")
        # Other ways to begin change the model's matrices, so that the adapter alone is not the difference.
        keys.only("init_lora_weights", True, False, None, "gaussian", "orthogonal", "eva")
        self._rank: int = keys.take("r", PositiveInteger)
        self._alpha = keys.number("lora_alpha")
        self._has_root_scale = keys.flag("use_rslora", False)
        self._ranks = _pattern(keys, "rank_pattern")
        self._alphas = _pattern(keys, "alpha_pattern")
        keys.finish()
        self.path = folder / ADAPTER_WEIGHTS
        self._arrays = open_safetensors(self.path)
        self._factors: dict[str, dict[str, str]] = {}
        self._whole: dict[str, str] = {}
        self._biases: dict[str, str] = {}
        for name in self._arrays.keys():  # noqa: SIM118 (not a mapping)
            if not name.startswith(FACTOR_PREFIX):
                raise ValueError(f"{self.path}: {name} is there, expected names that begin with {FACTOR_PREFIX}")
            target = name.removeprefix(FACTOR_PREFIX)
            found = _FACTOR.match(target)
            if found is not None:
                self._factors.setdefault(f"{found['module']}.weight", {})[found["side"]] = name
            elif target.endswith(_FACTOR_BIAS):
                self._biases[target.removesuffix(_FACTOR_BIAS) + ".bias"] = name
            else:
                module, _, variable = target.rpartition(".")
                self._whole[f"{module.removesuffix('.base_layer')}.{variable}"] = name
        for target, factors in self._factors.items():
            if len(factors) < 2:
                raise ValueError(
                    f"{self.path}: {target} has {next(iter(factors.values()))} alone, expected two factors"
                )

    @property
    def names(self) -> frozenset[str]:
        """The names of the model's arrays that it changes."""
        return frozenset(self._factors) | frozenset(self._whole) | frozenset(self._biases)

    def rename(self, present: Container[str], prefixes: Sequence[str]) -> None:
        """Takes other prefixes for arrays that are not present under the adapter's.

        Args:
            present: names of the model's arrays.
            prefixes: that stand for each other: modules in memory may be called otherwise than arrays in files.
        """
        kinds: tuple[dict[str, Any], ...] = (self._factors, self._whole, self._biases)
        for targets in kinds:
            for target in [target for target in targets if target not in present]:
                rest = [target.removeprefix(prefix) for prefix in prefixes if target.startswith(prefix)]
                names = (prefix + ending for ending in rest for prefix in prefixes)
                name = next((name for name in names if name in present), target)
                targets[name] = targets.pop(target)

    def apply(self, name: str, array: np.ndarray) -> np.ndarray:
        """The model's array of this name with its change, in the same dtype.

        Raises:
            ValueError: the change is not of the array's shape.
        """
        if name in self._whole:
            whole = self._arrays.get_tensor(self._whole[name])
            array = self._of_shape(name, whole, array).astype(array.dtype)
        if name in self._biases:
            change = self._of_shape(name, self._arrays.get_tensor(self._biases[name]), array).astype(np.float32)
            weight = f"{name.removesuffix('.bias')}.weight"
            if weight not in self._factors:
                raise ValueError(f"{self.path}: {self._biases[name]} is alone, expected factors of {weight}")
            rank = self._arrays.get_slice(self._factors[weight]["A"]).get_shape()[0]
            array = (array.astype(np.float32) + self._scale(self._biases[name], rank) * change).astype(array.dtype)
        if name not in self._factors:
            return array
        # The factors of an embedding [V, D] are A [rank, V] and B [D, rank]: its change is transposed.
        factors = {side: self._arrays.get_tensor(stored) for side, stored in self._factors[name].items()}
        is_embedding = ".lora_embedding_" in self._factors[name]["A"]
        left, right = factors["B"].astype(np.float32), factors["A"].astype(np.float32)
        if left.ndim != 2 or right.ndim != 2 or left.shape[1] != right.shape[0]:
            shapes = f"{list(factors['A'].shape)} and {list(factors['B'].shape)}"
            raise ValueError(f"{self.path}: the factors of {name} have shapes {shapes}, expected [r, in] and [out, r]")
        if is_embedding:
            left, right = right.T, left.T
        self._of_shape(name, np.broadcast_to(0, (left.shape[0], right.shape[1])), array)
        return with_low_rank(array, left, right, self._scale(self._factors[name]["A"], left.shape[1]))

    def _of_shape(self, name: str, change: np.ndarray, array: np.ndarray) -> np.ndarray:
        if change.shape != array.shape:
            raise ValueError(f"{self.path}: {name} has shape {list(change.shape)}, expected {list(array.shape)}")
        return change

    def _scale(self, stored: str, rank: int) -> float:
        """The factor of a change, from the name of one of its arrays in the adapter's file."""
        module = stored.removeprefix(FACTOR_PREFIX).rpartition(".lora_")[0]
        expected = _of_pattern(self._ranks, module, self._rank)
        if rank != expected:
            raise ValueError(f"{self.path}: {module} has rank {rank}, expected {expected} as {ADAPTER_CONFIG} says")
        alpha = _of_pattern(self._alphas, module, self._alpha)
        return alpha / (math.sqrt(rank) if self._has_root_scale else rank)


def with_low_rank(matrix: Any, left: Any, right: Any, scale: float) -> Any:
    """A matrix and its low-rank change, `matrix + scale left right`, summed in float32 at least.

    Args:
        matrix: `[M, N]`, NumPy's or JAX's.
        left: `[M, r]`.
        right: `[r, N]`.
        scale: the factor of the change.

    Returns:
        `[M, N]` in the matrix's dtype.
    """
    if isinstance(matrix, np.ndarray) and isinstance(left, np.ndarray):
        return (matrix.astype(np.float32) + scale * (left @ right)).astype(matrix.dtype)
    wide = jnp.promote_types(matrix.dtype, jnp.float32)
    change = jnp.matmul(left, right, precision=jax.lax.Precision.HIGHEST, preferred_element_type=wide)
    return (matrix.astype(wide) + scale * change).astype(matrix.dtype)


def _pattern(keys: ConfigKeys, name: str) -> dict[str, Any]:
    """Numbers by the ends of modules' names; the regular expressions that PEFT takes in their place are not served."""
    given = keys.take(name, dict | None, None) or {}
    for key, value in given.items():
        if (
            not re.fullmatch(r"[\w.]+", key)
            or isinstance(value, bool)
            or not isinstance(value, int | float)
            or value <= 0
        ):
            raise ValueError(
                f"{keys.where}: {name} has {key!r}: {value!r}, expected positive numbers by modules' names"
            )
    return given


def _of_pattern(pattern: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value of the first key that is the module's name or its end."""
    return next((value for key, value in pattern.items() if f".{module}".endswith(f".{key}")), default)


def base_folder(folder: pathlib.Path) -> pathlib.Path:
    """The folder of the model: the folder itself, or that of an adapter's model where the adapter is alone.

    Args:
        folder: a folder with config.json, or with adapter_config.json alone, whose `base_model_name_or_path` names the
            model: a folder, or `owner/name` of the Hugging Face hub.

    Raises:
        ValueError: the adapter names no model, or one that is not found.
    """
    if (folder / CONFIG).exists() or not (folder / ADAPTER_CONFIG).exists():
        return folder
    keys = read_json(folder / ADAPTER_CONFIG)
    name, revision = keys.get("base_model_name_or_path"), keys.get("revision")
    if not isinstance(name, str) or not name or not isinstance(revision, str | None):
        raise ValueError(
            f"{folder / ADAPTER_CONFIG}: base_model_name_or_path is {name!r}, expected the adapter's model, a folder "
            "or owner/name, as there is no config.json"
        )
    for place in (pathlib.Path(name), folder / name):
        if (place / CONFIG).is_file():
            return place
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise ValueError(f"{folder / ADAPTER_CONFIG}: base_model_name_or_path is {name}, where no model is found")
    return local_folder(f"hf://{name}" + (f"@{revision}" if revision else ""))


def folder_adapter(folder: pathlib.Path) -> Adapter | None:
    """The adapter of a folder; None if it has no adapter_config.json.

    Raises:
        ValueError: as in `Adapter`.
    """
    return Adapter(folder) if (folder / ADAPTER_CONFIG).exists() else None
