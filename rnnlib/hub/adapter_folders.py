"""Writing an adapter in PEFT's format: factors of a published family's matrices, under the names of its files."""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from rnnlib.hub.adapters import ADAPTER, ADAPTER_CONFIG, FACTOR_PREFIX
from rnnlib.hub.families import family_of
from rnnlib.hub.files import WeightFiles, replace_folder, write_file
from rnnlib.hub.keys import read_json, write_json
from rnnlib.hub.pretrained import CONFIG, family_for
from rnnlib.hub.table import SAVED, match_rows
from rnnlib.models.decoder import DecoderLM
from rnnlib.models.variables import values_by_column


def save_adapter(
    folder: str | os.PathLike[str],
    model: DecoderLM,
    factors: Mapping[str, tuple[Any, Any]],
    *,
    rank: int,
    alpha: float,
    rank_stabilized: bool = False,
    base: str | None = None,
    family: str | None = None,
) -> None:
    """Writes an adapter that PEFT and `load_pretrained` read, all at once or not at all.

    Where a matrix of the file is several of the model, such as queries and keys in one, its factors are theirs put
    together, of as many times the rank: its own `rank_pattern` and `alpha_pattern` keep the scale.

    Args:
        folder: the folder to write.
        model: the model that is adapted, of which shapes are read.
        factors: `A` `[in, rank]` and `B` `[rank, out]` by the paths of the model's matrices.
        rank: rank of each.
        alpha: the scale is `alpha / rank`.
        rank_stabilized: the scale is `alpha / sqrt(rank)`.
        base: the name or folder of the published model that is adapted. If it is a folder, the names of its arrays
            count; else those of a new folder of the family.
        family: the family to take the names of; None for that of `base`, or that of the model's mixers.

    Raises:
        ValueError: the model is of no family, or one of the matrices cannot be changed in its files.
    """
    present = None
    if base is not None and (pathlib.Path(base) / CONFIG).is_file() and family is None:
        where = pathlib.Path(base)
        known = family_of(read_json(where / CONFIG), str(where / CONFIG))
        present = WeightFiles(where).shapes
    else:
        known = family_for(model.config, family)[0]
    arrays: dict[str, np.ndarray] = {}
    ranks: dict[str, int] = {}
    left = dict(factors)
    for match in match_rows(known, model, present):
        chosen = [path for path in match.ours if path in factors]
        if match.copy or not chosen:
            continue
        if not all(name.endswith(".weight") for name in match.theirs):
            raise ValueError(f"save_adapter: {chosen[0]} is {match.theirs[0]} in a file, expected a matrix of a module")
        # The rows of B of each matrix stand for its inputs: the layout puts their outputs where those of the matrix go.
        shapes = values_by_column(model, SAVED).shapes()
        total, before = rank * len(chosen), 0
        stand_ins = []
        for path in match.ours:
            columns = jnp.zeros((total, shapes[path].shape[1]), jnp.float32)
            if path in factors:
                columns = columns.at[before : before + rank].set(factors[path][1])
                before += rank
            stand_ins.append(columns)
        down = np.concatenate([np.asarray(factors[path][0], np.float32).T for path in chosen])
        for name, up in zip(match.theirs, match.layout.write(stand_ins, match.part), strict=True):
            module = name.removesuffix(".weight")
            arrays[f"{FACTOR_PREFIX}{module}.lora_A.weight"] = down
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
        "lora_dropout": 0.0,
        "target_modules": sorted(ranks),
        "rank_pattern": several,
        "alpha_pattern": {module: alpha * (own / rank) ** root for module, own in several.items()},
    }

    def write(staged: pathlib.Path) -> None:
        write_file(staged / ADAPTER, arrays)
        write_json(staged / ADAPTER_CONFIG, settings)

    replace_folder(pathlib.Path(folder), write)
