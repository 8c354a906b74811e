"""Reading a published model from a folder, and writing a model in a published format."""

import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rnnlib.hub.adapters import base_folder
from rnnlib.hub.config_equivalence import difference
from rnnlib.hub.config_reader import ConfigKeys, read_json, write_json
from rnnlib.hub.families import FAMILIES, family_of
from rnnlib.hub.file_names import CONFIG, TOKENIZER, TOKENIZER_CONFIG, WEIGHTS_INDEX
from rnnlib.hub.files import WeightFiles, other_files, replace_folder, shard_names, weight_files, write_arrays
from rnnlib.hub.names import local_folder
from rnnlib.hub.special_tokens import copy_templates, folder_tokenizer
from rnnlib.hub.weight_mapping import EMBEDDING, SAVED, Family, Match, match_rows, stored_twice, tied_names
from rnnlib.models.config import DtypeName, ModelConfig
from rnnlib.models.decoder import DecoderLM
from rnnlib.models.mixers import ATTENTION
from rnnlib.models.summary import abstract_model
from rnnlib.models.variables import assign_values, by_variable, values_by_column, values_by_path
from rnnlib.models.weights import Held
from rnnlib.tokenizers import FileTokenizer, Tokenizer


class Source(NamedTuple):
    """Where a model was read from, and what `save_pretrained` needs beside the model's values to write it back.

    Attributes:
        folder: the folder's absolute path; files and arrays that the model does not use are copied from it.
        family: name of the family.
        config: keys of config.json.
        shards: the file of each array.
        shapes: the shape of each array.
        dtypes: the dtype of each array that the model uses.
        ignored: keys of config.json that the caller asked to ignore.
        untied: whether the file has a head that differs from the embedding, though config.json says that they are tied.
    """

    folder: pathlib.Path
    family: str
    config: Mapping[str, Any]
    shards: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]
    ignored: tuple[str, ...] = ()
    untied: bool = False


class Pretrained(NamedTuple):
    """A published model.

    Attributes:
        model: the language model.
        tokenizer: the tokenizer of the folder's tokenizer.json; None if there is no such file.
        source: what `save_pretrained` needs to write the model back; None for a model that was not read from a folder.
    """

    model: DecoderLM
    tokenizer: Tokenizer | None = None
    source: Source | None = None


def load_pretrained(
    folder: str | os.PathLike[str],
    *,
    dtype: DtypeName | None = None,
    param_dtype: DtypeName | None = None,
    sharding: Callable[[jax.ShapeDtypeStruct], jax.sharding.Sharding] | None = None,
    ignore_keys: Sequence[str] = (),
) -> Pretrained:
    """Reads a published model: config.json, safetensors files, and tokenizer.json if there is one.

    `rnnlib.hub.FAMILIES` lists the families. Arrays are read onto the device one at a time, so host memory never holds
    the whole model.

    Args:
        folder: a folder in the Hugging Face format, or `hf://owner/name`, perhaps with `@revision`. A folder may also
            have an adapter alone, which names its model.
        dtype: dtype of activations and products; None for the file's.
        param_dtype: dtype of the parameters; None keeps each array's dtype in the file. The decays' `A_log` and
            `dt_bias` are at least float32 in any case.
        sharding: from a parameter's shape and dtype to its sharding, such as `lambda x: NamedSharding(mesh,
            parameter_spec(x.shape, mesh))` with `rnnlib.training.mesh`; None for the default device.
        ignore_keys: keys of config.json that rnnlib does not know and that, to your knowledge, have no effect on the
            model's outputs.

    Returns:
        Model, tokenizer and source.

    Raises:
        ValueError: the folder is of no known family; a key is missing, unknown or has an unsupported value; files are
            missing, damaged or quantised; arrays are missing, surplus or of another shape. The message is one line that
            names the file, the key or array, and what was expected.
    """
    folder = local_folder(folder)
    for name, value in (("dtype", dtype), ("param_dtype", param_dtype)):
        if value is not None and value not in get_args(DtypeName):
            raise ValueError(f"load_pretrained: {name} is {value!r}, expected one of {', '.join(get_args(DtypeName))}")
    family, values, config, files, untied = _read_folder(folder, ignore_keys)
    config = config.replace(dtype=dtype or config.dtype, param_dtype=param_dtype or config.param_dtype)

    model = abstract_model(config)
    variables = values_by_column(model, SAVED)
    try:
        matches = match_rows(family, model, files.shapes)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    _check(family, files, matches, variables, config.num_layers)
    if len(values_by_path(model, SAVED)) != len(jax.tree.leaves(nnx.state(model))):
        model = DecoderLM(config, rngs=nnx.Rngs(0))  # creates constants and random streams, which files lack

    def converted() -> Iterator[tuple[str, jax.Array]]:
        for match in matches:
            if match.copy:
                continue
            arrays = [jnp.asarray(files.read(name)) for name in match.theirs]
            for path, array in zip(match.ours, match.read(arrays, variables), strict=True):
                target = jnp.dtype(variables[path].dtype)
                if param_dtype is None:
                    # Keep the file's dtype where the model's dtype would round the array.
                    target = jnp.promote_types(target, array.dtype)
                yield path, array.astype(target)

    read: dict[str, jax.Array] = {}
    for path, array in by_variable(model, SAVED, converted()):
        like = jax.ShapeDtypeStruct(array.shape, array.dtype)
        read[path] = array if sharding is None else jax.device_put(array, sharding(like))
    assign_values(model, SAVED, read)
    used = [name for match in matches for name in match.theirs]
    source = Source(
        folder=files.folder.resolve(),
        family=family.name,
        config=values,
        shards=dict(files.shards),
        shapes=dict(files.shapes),
        dtypes={name: files.dtype(name) for name in used},
        ignored=tuple(ignore_keys),
        untied=untied,
    )
    return Pretrained(model, folder_tokenizer(tokenizer_folder(folder)), source)


def tokenizer_folder(folder: pathlib.Path) -> pathlib.Path:
    """The folder whose tokenizer is a model's: of an adapter without its model perhaps the model's folder."""
    return folder if (folder / TOKENIZER).exists() else base_folder(folder)


def pretrained_config(folder: str | os.PathLike[str], *, ignore_keys: Sequence[str] = ()) -> ModelConfig:
    """The configuration of a published model, without reading its arrays.

    Args:
        folder: as in `load_pretrained`; or a folder with a config.json and no weights, for a new model.
        ignore_keys: as in `load_pretrained`.

    Raises:
        ValueError: as in `load_pretrained`, except that arrays are not checked.
    """
    folder = local_folder(folder)
    if (folder / CONFIG).is_file() and not weight_files(folder):
        values = read_json(folder / CONFIG)
        return read_config(family_of(values, str(folder / CONFIG)), values, str(folder / CONFIG), ignore_keys)
    return _read_folder(folder, ignore_keys)[2]


def _read_folder(
    folder: pathlib.Path, ignore_keys: Sequence[str]
) -> tuple[Family, dict[str, Any], ModelConfig, WeightFiles, bool]:
    """The family, config.json, the model's configuration in the file's dtype, the weight files, and `Source.untied`."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: there is no such folder, expected one with {CONFIG} and safetensors files")
    given, folder = folder, base_folder(folder)
    values = read_json(folder / CONFIG)
    family = family_of(values, str(folder / CONFIG))
    files = WeightFiles(folder, given)
    held = Held.of(files.shapes.values())
    config = read_config(family, values, str(folder / CONFIG), ignore_keys, held=held)
    if files.adapter is not None:
        files.fit_adapter(family.prefixes, tied_names(family, abstract_model(config), files.shapes))
    untied = _has_head_of_its_own(family, config, files)
    stored = _stored_dtype(values, files)
    config = config.replace(dtype=stored, param_dtype=stored, tie_embeddings=config.tie_embeddings and not untied)
    return family, values, config, files, untied


def _has_head_of_its_own(family: Family, config: ModelConfig, files: WeightFiles) -> bool:
    """Whether the file has a head that differs from the embedding, in a model whose config.json ties the two.

    Such a model is untied, as in transformers.

    Raises:
        ValueError: other arrays of the file that must be equal differ.
    """
    untied = False
    for path, name, other in stored_twice(family, abstract_model(config), files.shapes):
        if _are_equal(files, name, other):
            continue
        if path != EMBEDDING:
            raise ValueError(
                f"{files.folder / files.shards[other]}: {other} differs from {name}, expected equal arrays: {CONFIG} "
                "says that they are one"
            )
        untied = True
    return untied


def _are_equal(files: WeightFiles, name: str, other: str) -> bool:
    """Whether two arrays of a file have the same shape and numbers, perhaps in other dtypes."""
    if files.shapes[name] != files.shapes[other]:
        return False
    a, b = files.read(name), files.read(other)
    common = jnp.promote_types(jnp.promote_types(a.dtype, b.dtype), jnp.float32)
    a, b = np.atleast_1d(a), np.atleast_1d(b)
    rows = range(0, len(a), 4096)  # a part at a time: the copies in a common dtype stay small
    return all(np.array_equal(a[i : i + 4096].astype(common), b[i : i + 4096].astype(common)) for i in rows)


def save_pretrained(
    pretrained: Pretrained | DecoderLM,
    folder: str | os.PathLike[str],
    *,
    family: str | None = None,
) -> None:
    """Writes a model as a folder in the Hugging Face format, all at once or not at all.

    A model read by `load_pretrained` is written back in the layout of its source: the same files, config.json and
    tokenizer files, and arrays of the same names, dtypes and shapes, including arrays that the model does not use.
    Unchanged values give bit-identical arrays. A model without a source, or one that is written as another family, gets
    a new config.json, arrays in the model's `param_dtype`, and the tokenizer.

    Args:
        pretrained: the result of `load_pretrained`, perhaps with new values in its model; or a model.
        folder: the folder to write. In an existing folder the model's files are replaced and other files stay.
        family: the family to write as; None for the source's family, or else the family of the model's mixers.

    Raises:
        ValueError: the model is of no family or not of `family`, the source's folder is gone, or the model's
            configuration differs from the source's config.json. The message is one line.
    """
    target = pathlib.Path(folder)
    model = pretrained if isinstance(pretrained, DecoderLM) else pretrained.model
    source = None if isinstance(pretrained, DecoderLM) else pretrained.source
    if source is not None and family in (None, source.family):
        known = FAMILIES[source.family]
        where = str(source.folder / CONFIG)
        said = read_config(known, source.config, where, source.ignored)
        said = said.replace(tie_embeddings=said.tie_embeddings and not source.untied)
        changed = difference(model.config, said)
        if changed is not None:
            raise ValueError(f"save_pretrained: the model is not what {where} says: {changed}")
        if not source.folder.is_dir():
            raise ValueError(f"save_pretrained: {source.folder} is gone, expected the folder that the model is from")
        replace_folder(target, lambda staged: _write_back(staged, model, source, known))
        return
    known, values = family_for(model.config, family)
    tokenizer = None if isinstance(pretrained, DecoderLM) else pretrained.tokenizer
    replace_folder(target, lambda staged: _write_new(staged, model, known, values, tokenizer))


def read_config(
    family: Family, values: Mapping[str, Any], where: str, ignored: Sequence[str] = (), *, held: Held | None = None
) -> ModelConfig:
    """The model's configuration from config.json. Unknown keys are rejected.

    Args:
        family: the family of the file.
        values: the keys of the file.
        where: the file's name, for error messages.
        ignored: keys that may be unknown.
        held: what the weight files hold, for which no size may be too large; None where there are none.

    Raises:
        ValueError: a key is missing, unknown or has an unsupported value.
    """
    keys = ConfigKeys(values, where, ignored, held=held, defaults=family.defaults)
    try:
        config = family.read(keys)
        abstract_model(config)
    except (ValueError, OverflowError) as error:
        raise error if str(error).startswith(where) else ValueError(f"{where}: {error}") from None
    keys.finish()
    return config


def _write_back(staged: pathlib.Path, model: DecoderLM, source: Source, family: Family) -> None:
    files = WeightFiles(source.folder)
    matches = match_rows(family, model, source.shapes)
    variables = values_by_column(model, SAVED)

    def arrays_of(names: list[str]) -> dict[str, np.ndarray]:
        found = _arrays(matches, variables, set(names))
        used = {name: array.astype(source.dtypes[name]) for name, array in found.items()}
        return {name: used[name] if name in used else files.read(name) for name in names}

    write_arrays(staged, source.shards, arrays_of, index=source.folder / WEIGHTS_INDEX)
    for path in other_files(source.folder):
        shutil.copyfile(path, staged / path.name)
    copy_templates(source.folder, staged)


def _write_new(
    staged: pathlib.Path, model: DecoderLM, family: Family, values: Mapping[str, Any], tokenizer: Tokenizer | None
) -> None:
    variables = values_by_column(model, SAVED)
    matches = match_rows(family, model)
    sizes = {
        name: int(np.prod(shape)) * variables[match.ours[0]].dtype.itemsize
        for match in matches
        for name, shape in zip(match.theirs, match.shapes(variables), strict=True)
    }
    write_arrays(staged, shard_names(sizes), lambda names: _arrays(matches, variables, set(names)))
    # Without these keys, transformers would use the family's default ids, which this vocabulary may not have.
    ends = {"bos_token_id": None, "eos_token_id": tokenizer and tokenizer.end_of_document, "pad_token_id": None}
    write_json(staged / CONFIG, {**values, **ends})
    if isinstance(tokenizer, FileTokenizer):
        tokenizer.save(staged / TOKENIZER)
        options = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokenizer.end_token}
        write_json(staged / TOKENIZER_CONFIG, options)


def _arrays(matches: Sequence[Match], variables: Mapping[str, jax.Array], names: set[str]) -> dict[str, np.ndarray]:
    """The file's arrays with the given names, in host memory."""
    found: dict[str, np.ndarray] = {}
    for match in matches:
        if names.intersection(match.theirs):
            written = zip(match.theirs, match.write(variables), strict=True)
            found |= {name: np.asarray(jax.device_get(array)) for name, array in written if name in names}
    return found


def family_for(config: ModelConfig, name: str | None) -> tuple[Family, dict[str, Any]]:
    """The family to write a model as, and the keys of its config.json."""
    if name is not None and name not in FAMILIES:
        raise ValueError(f"save_pretrained: family is {name!r}, expected one of {', '.join(FAMILIES)}")
    presets = {mixer.partition("/")[0] for mixer in config.layer_mixers}
    recurrent = presets - set(ATTENTION) or presets
    candidates = [FAMILIES[name]] if name else [known for known in FAMILIES.values() if recurrent & set(known.mixers)]
    if not candidates:
        served = sorted({mixer for known in FAMILIES.values() for mixer in known.mixers})
        raise ValueError(
            f"save_pretrained: no family has the mixers {', '.join(sorted(recurrent))}, expected {', '.join(served)}"
        )
    problem: ValueError | None = None
    for family in candidates:
        try:
            return family, _written_config(family, config)
        except ValueError as error:
            problem = problem or error
    assert problem is not None
    raise problem


def _written_config(family: Family, config: ModelConfig) -> dict[str, Any]:
    """The keys of config.json for a model; raises ValueError if the family cannot describe its computation."""
    try:
        values = family.write(config)
        values |= {"architectures": [family.architecture], "dtype": config.param_dtype}
        changed = difference(config, read_config(family, values, CONFIG))
    except ValueError as error:
        raise ValueError(f"save_pretrained: the model is not of family {family.name!r}: {error}") from None
    if changed is not None:
        raise ValueError(f"save_pretrained: the model is not of family {family.name!r}: {changed}")
    return values


def _check(
    family: Family, files: WeightFiles, matches: Sequence[Match], variables: Mapping[str, Any], num_layers: int
) -> None:
    """Raises ValueError if an array is surplus, or has the wrong shape or an unsupported dtype."""
    used = {name for match in matches for name in match.theirs}
    for name, file in files.shards.items():
        if name not in used and not family.leaves_out(name, num_layers):
            raise ValueError(
                f"{files.folder / file}: {name} {list(files.shapes[name])} is surplus, expected no such array for "
                f"the model in {CONFIG}"
            )
    for match in matches:
        for name, shape in zip(match.theirs, match.shapes(variables), strict=True):
            files.dtype(name)
            if files.shapes[name] != shape:
                where = files.folder / files.shards[name]
                raise ValueError(f"{where}: {name} has shape {list(files.shapes[name])}, expected {list(shape)}")


def _stored_dtype(values: Mapping[str, Any], files: WeightFiles) -> Any:
    """The dtype that config.json names, or else the dtype of the file's largest array."""
    text = values.get("text_config")
    for keys in (text if isinstance(text, Mapping) else {}, values):
        for name in ("dtype", "torch_dtype"):
            said = str(keys.get(name, "")).removeprefix("torch.")
            if said in get_args(DtypeName):
                return said
    return files.dtype(max(files.shards, key=lambda name: int(np.prod(files.shapes[name]))))
