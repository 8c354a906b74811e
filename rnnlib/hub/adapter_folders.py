"""Writing an adapter in PEFT's format: factors of a published family's matrices, under the names of its files."""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from rnnlib.hub.adapters import FACTOR_PREFIX
from rnnlib.hub.config_reader import read_json, write_json
from rnnlib.hub.families import family_of
from rnnlib.hub.file_names import ADAPTER_CONFIG, ADAPTER_WEIGHTS, CONFIG
from rnnlib.hub.files import WeightFiles, replace_folder
from rnnlib.hub.pretrained import family_for
from rnnlib.hub.weight_mapping import SAVED, Family, match_rows
from rnnlib.models.decoder import DecoderLM
from rnnlib.models.variables import values_by_column
from rnnlib.safetensors_files import write_safetensors


def published_modules(model: DecoderLM, base: str | None = None) -> dict[str, list[str]]:
    """The modules of a model's published files, with the paths of the matrices here that are in each.

    Args:
        model: the model, with or without values.
        base: the folder of the published model, whose family counts; None, or another name, for the family of the
            model's mixers.

    Returns:
        Paths by the names of modules, such as "model.layers.0.self_attn.q_proj"; empty for a model of no family.
    """
    found: dict[str, list[str]] = {}
    try:
        known, present = _family_and_shapes(model, base, None)
        matches = match_rows(known, model, present)
    except ValueError:
        return found
    for match in matches:
        for name in match.theirs:
            found.setdefault(name.removesuffix(".weight"), []).extend(match.ours)
    return found


def _shared_by_layers(model: DecoderLM) -> set[str]:
    """Paths of parameters that several layers share; each stands under the first of these layers."""
    once = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    of_blocks = [[path for path, _ in nnx.to_flat_state(nnx.state(block, nnx.Param))] for block in model.blocks]
    elsewhere = {path for i, paths in enumerate(of_blocks) for path in paths if ("blocks", i, *path) not in once}
    found = [("blocks", i, *path) for i, paths in enumerate(of_blocks) for path in paths if path in elsewhere]
    return {".".join(map(str, path)) for path in found if path in once}


def _family_and_shapes(
    model: DecoderLM, base: str | None, family: str | None
) -> tuple[Family, Mapping[str, tuple[int, ...]] | None]:
    """The family whose names count, and the shapes of the arrays of the folder `base` where it is one."""
    if base is not None and (pathlib.Path(base) / CONFIG).is_file() and family is None:
        where = pathlib.Path(base)
        return family_of(read_json(where / CONFIG), str(where / CONFIG)), WeightFiles(where).shapes
    return family_for(model.config, family)[0], None


def save_adapter(
    folder: str | os.PathLike[str],
    model: DecoderLM,
    factors: Mapping[str, tuple[Any, Any]],
    *,
    rank: int,
    alpha: float,
    rank_stabilized: bool = False,
    dropout: float = 0.0,
    base: str | None = None,
    family: str | None = None,
) -> None:
    """Writes an adapter that PEFT and `load_pretrained` read, all at once or not at all.

    Where a matrix of the file is several of the model, such as queries and keys in one, its factors are theirs put
    together, of as many times the rank: its own `rank_pattern` and `alpha_pattern` keep the scale.

    Args:
        folder: the folder to write.
        model: the model that is adapted, of which shapes are read.
        factors: `A` `[in, rank]` and `B` `[rank, out]` by the paths of the model's matrices; of experts `[E, in, rank]`
            and `[E, rank, out]`, where each expert's matrix is a module of its own in the file.
        rank: rank of each.
        alpha: the scale is `alpha / rank`.
        rank_stabilized: the scale is `alpha / sqrt(rank)`.
        dropout: of the adapters' inputs in training.
        base: the name or folder of the published model that is adapted. If it is a folder, the names of its arrays
            count; else those of a new folder of the family.
        family: the family to take the names of; None for that of `base`, or that of the model's mixers.

    Raises:
        ValueError: the model is of no family, or PEFT's format cannot say how one of the matrices is changed.
    """
    known, present = _family_and_shapes(model, base, family)
    shared = _shared_by_layers(model).intersection(factors)
    if shared:
        raise ValueError(
            f"save_adapter: {min(shared)} is shared by several layers, of which PEFT would change the first alone: "
            "write the merged model in place of the adapter"
        )
    arrays: dict[str, np.ndarray] = {}
    ranks: dict[str, int] = {}
    left = dict(factors)
    for match in match_rows(known, model, present):
        chosen = [path for path in match.ours if path in factors]
        if match.copy or not chosen:
            continue
        shapes = values_by_column(model, SAVED).shapes()
        are_matrices = all(len(shape) == 2 for shape in match.shapes(shapes))
        if not are_matrices or not all(name.endswith(".weight") for name in match.theirs):
            raise ValueError(
                f"save_adapter: {chosen[0]} is {match.theirs[0]} in a file, expected a matrix of a module: write the "
                "merged model in place of the adapter"
            )
        # The rows of B of each matrix stand for its inputs: the layout puts their outputs where those of the matrix go.
        total, before = rank * len(chosen), 0
        stand_ins = []
        for path in match.ours:
            *several, _, outputs = shapes[path].shape
            columns = jnp.zeros((*several, total, outputs), jnp.float32)
            if path in factors:
                columns = columns.at[..., before : before + rank, :].set(factors[path][1])
                before += rank
            stand_ins.append(columns)
        down = np.concatenate([np.swapaxes(np.asarray(factors[path][0], np.float32), -1, -2) for path in chosen], -2)
        downs = list(down) if down.ndim == 3 else [down] * len(match.theirs)  # of experts, or of all modules
        for name, own, up in zip(match.theirs, downs, match.layout.write(stand_ins, match.part), strict=True):
            module = name.removesuffix(".weight")
            arrays[f"{FACTOR_PREFIX}{module}.lora_A.weight"] = own
            arrays[f"{FACTOR_PREFIX}{module}.lora_B.weight"] = np.asarray(up)
            ranks[module] = total
        for path in chosen:
            del left[path]
    if left:
        raise ValueError(f"save_adapter: family {known.name!r} has no array for {next(iter(left))}")
    several = {module: own for module, own in ranks.items() if own != rank}
    root = 0.5 if rank_stabilized else 1.0
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "bias": "none",
        "r": rank,
        "lora_alpha": alpha,
        "use_rslora": rank_stabilized,
        "lora_dropout": dropout,
        "target_modules": sorted(ranks),
        "rank_pattern": several,
        "alpha_pattern": {module: alpha * (own / rank) ** root for module, own in several.items()},
    }

    def write(staged: pathlib.Path) -> None:
        write_safetensors(staged / ADAPTER_WEIGHTS, arrays, {"format": "pt"})
        write_json(staged / ADAPTER_CONFIG, settings)

    replace_folder(pathlib.Path(folder), write)
