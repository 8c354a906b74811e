"""Tables of names: the correspondence between arrays of a published file and variables of a `DecoderLM`.

A family's table is a list of rows, `Row(names in the file, names in the model, layout)`. One table serves all variants
of a family: a row counts for a model only if the model has the row's variables. Every variable of the model must appear
in a row that counts. Every array of the file must too, unless the family lists the array as unused.
"""

import dataclasses
import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax import Array

from rnnlib.hub.config_reader import ConfigKeys
from rnnlib.hub.weight_layouts import FILTER, SAME, TRANSPOSED, Layout
from rnnlib.layers.mixer import RecurrentMixer
from rnnlib.models.block import Block
from rnnlib.models.config import ModelConfig
from rnnlib.models.decoder import DecoderLM
from rnnlib.models.variables import values_by_column

# The variables that files contain: all except the state of random streams.
SAVED = nnx.Not(nnx.RngState)
EMBEDDING = "embedding"


class Row(NamedTuple):
    """A line of a table.

    Attributes:
        theirs: names in the file. A name with `*` stands for a list of names, with 0, 1, 2, ... in place of `*`: one
            for each entry of the model's array along its first axis.
        ours: paths of the model's variables, and of the columns of its input projections (`values_by_column`).
        layout: the conversion between the file's arrays and the model's.
        copy: whether this is a second name under which the file may contain the array again. If the file has both,
            they must be equal. The copy is read only if the file lacks the first name. It is written back if the file
            had it.
        unless: the row does not count if the file has an array of this name. This serves older files, in which the
            row's name has another meaning.
    """

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    layout: Layout = SAME
    copy: bool = False
    unless: str | None = None


def row(
    theirs: str | Sequence[str],
    ours: str | Sequence[str],
    layout: Layout = SAME,
    *,
    copy: bool = False,
    unless: str | None = None,
) -> Row:
    """A `Row`, with a single name or several on either side."""
    names = (theirs,) if isinstance(theirs, str) else tuple(theirs)
    paths = (ours,) if isinstance(ours, str) else tuple(ours)
    return Row(names, paths, layout, copy, unless)


def linear(theirs: str, ours: str) -> tuple[Row, Row]:
    """The rows of a linear map: its matrix, and its bias if the model has one."""
    return row(f"{theirs}.weight", f"{ours}.kernel", TRANSPOSED), row(f"{theirs}.bias", f"{ours}.bias")


def filter_(theirs: str, ours: str) -> tuple[Row, Row]:
    """The rows of a depthwise filter: its taps, and its bias if the model has one."""
    return row(f"{theirs}.weight", f"{ours}.kernel", FILTER), row(f"{theirs}.bias", f"{ours}.bias")


@dataclasses.dataclass(frozen=True)
class Family:
    """A kind of published model: its configuration and its arrays.

    Attributes:
        name: the family's name, for `save_pretrained`.
        mixers: presets of the models that `save_pretrained` writes as this family if none is named.
        architecture: the class named in published files.
        read: from the keys of config.json to the model's configuration.
        write: from a model's configuration to the keys of config.json. The keys are read again and compared, so a model
            that the keys cannot describe is rejected.
        rows: rows of arrays outside of layers; or a function from the model to these rows.
        layer_rows: rows of a layer's arrays, with names that lack the layer's prefix; or a function from the layer's
            block to these rows. If several rows give a variable, the first whose names and shapes are in the file
            counts.
        layer_prefix: the prefix of a layer's arrays in the file, with `{}` for the layer's number.
        blocks_per_layer: blocks of the model, one after another, whose arrays have the same prefix.
        prefixes: the prefix of names in the tables, and other prefixes that files may have in its place.
        unused: beginnings of names of arrays that a language model does not use, perhaps with `*`. `save_pretrained`
            copies these arrays.
        has_more_layers: whether files may have layers behind the model's last, which predict further tokens and are
            unused, too.
        matches: whether the values of a config.json are of this family; None is by their `model_type`, the name.
        defaults: the published class's values of sizes that a config.json may lack.
    """

    name: str
    mixers: tuple[str, ...]
    architecture: str
    read: Callable[[ConfigKeys], ModelConfig]
    write: Callable[[ModelConfig], dict[str, Any]]
    rows: tuple[Row, ...] | Callable[[DecoderLM], tuple[Row, ...]]
    layer_rows: tuple[Row, ...] | Callable[[Block], tuple[Row, ...]]
    layer_prefix: str = "model.layers.{}."
    blocks_per_layer: int = 1
    prefixes: tuple[str, ...] = ("model.",)
    unused: tuple[str, ...] = ()
    has_more_layers: bool = False
    matches: Callable[[Mapping[str, Any]], bool] | None = None
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def is_of(self, values: Mapping[str, Any]) -> bool:
        """Whether the values of a config.json are of this family."""
        return values.get("model_type") == self.name if self.matches is None else self.matches(values)

    def leaves_out(self, name: str, num_layers: int) -> bool:
        """Whether a language model of so many layers has no use for the array of this name."""
        if self.has_more_layers:
            before, _, behind = self.layer_prefix.partition("{}")
            number = name.removeprefix(before).partition(behind)[0]
            if name.startswith(before) and number.isdecimal() and int(number) >= num_layers:
                return True
        return any(fnmatch.fnmatchcase(name, f"{beginning}*") for beginning in self.unused)


class Match(NamedTuple):
    """A row with full names, which include the layer's prefix.

    Attributes:
        theirs: names of arrays in the file.
        ours: paths of the model's variables.
        layout: the conversion between these arrays and variables.
        part: the block that the variables belong to, or the model, without values.
        copy: as in `Row`.
    """

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    layout: Layout
    part: Any
    copy: bool

    def read(self, arrays: Sequence[Array], variables: Mapping[str, Any]) -> list[Array]:
        """The model's arrays."""
        return self.layout.read(arrays, [variables[path] for path in self.ours], self.part)

    def write(self, variables: Mapping[str, Any]) -> list[Array]:
        """The file's arrays."""
        return self.layout.write([variables[path] for path in self.ours], self.part)

    def shapes(self, variables: Mapping[str, Any]) -> list[tuple[int, ...]]:
        """Shapes of the file's arrays."""
        like = [jax.ShapeDtypeStruct(variables[path].shape, variables[path].dtype) for path in self.ours]
        return [array.shape for array in jax.eval_shape(lambda arrays: self.layout.write(arrays, self.part), like)]


def by_mixer(
    shared: Sequence[Row], recurrent: Sequence[Row], attention: Sequence[Row]
) -> Callable[[Block], tuple[Row, ...]]:
    """A family's `layer_rows` where recurrent layers and attention have columns of the same names.

    Args:
        shared: rows of every layer.
        recurrent: rows of recurrent layers.
        attention: rows of all others.
    """
    return lambda block: (*shared, *(recurrent if isinstance(block.mixer, RecurrentMixer) else attention))


def match_rows(family: Family, model: DecoderLM, present: Mapping[str, tuple[int, ...]] | None = None) -> list[Match]:
    """The rows of a family's table that count for a model.

    Args:
        family: the family, with its tables.
        model: the model, with or without values.
        present: shapes of the file's arrays by name; None for a new file, in which the first row of a variable counts.

    Returns:
        Matches. Copies aside, they have each variable of the model exactly once.

    Raises:
        ValueError: a variable of the model is in no row, or the file lacks its array.
    """
    variables = values_by_column(model, SAVED).shapes()
    names = None if present is None else set(present)
    prefix = _prefix(family, names)
    matches: list[Match] = []
    copies: list[Match] = []
    covered: dict[str, Match] = {}
    lacking: dict[str, str] = {}
    misfits: dict[str, Match] = {}
    for candidate in _full_rows(family, model, variables, prefix, names):
        if any(path not in variables for path in candidate.ours):
            continue
        found = names is None or all(name in names for name in candidate.theirs)
        if candidate.copy:
            if names is not None and found:
                copies.append(candidate)
        elif any(path in covered for path in candidate.ours):
            continue
        elif found and present is not None and not _fits(candidate, variables, present):
            for path in candidate.ours:
                misfits.setdefault(path, candidate)
        elif found:
            matches.append(candidate)
            covered |= dict.fromkeys(candidate.ours, candidate)
        else:
            missing = next(name for name in candidate.theirs if names is not None and name not in names)
            for path in candidate.ours:
                lacking.setdefault(path, missing)
    used = {name for match in matches for name in match.theirs}
    for copy in copies:
        if used.isdisjoint(copy.theirs) and not any(path in covered or path in misfits for path in copy.ours):
            matches.append(copy._replace(copy=False))
            covered |= dict.fromkeys(copy.ours, copy)
    for path, variable in variables.items():
        if path in covered:
            continue
        if path in misfits and covered.keys().isdisjoint(misfits[path].ours):
            # The caller checks shapes, and raises an error that names the array.
            matches.append(misfits[path])
            covered |= dict.fromkeys(misfits[path].ours, misfits[path])
        elif path in lacking:
            raise ValueError(f"{lacking[path]} is missing, expected an array that gives {path} {list(variable.shape)}")
        else:
            raise ValueError(f"{path}: family {family.name!r} has no array for this part of the model")
    used = {name for match in matches for name in match.theirs}
    return matches + [match for match in copies if used.isdisjoint(match.theirs)]


def stored_twice(
    family: Family, model: DecoderLM, present: Mapping[str, tuple[int, ...]]
) -> list[tuple[str, str, str]]:
    """Variables that a file has under two names.

    Args:
        family: the family, with its tables.
        model: the model, with or without values.
        present: shapes of the file's arrays by name.

    Returns:
        For each, its path in the model, the name of its array, and the name of the copy.
    """
    variables, names = values_by_column(model, SAVED), set(present)
    first: dict[str, str] = {}
    found: list[tuple[str, str, str]] = []
    for candidate in _full_rows(family, model, variables, _prefix(family, names), names):
        if not names.issuperset(candidate.theirs):
            continue
        for path, name in zip(candidate.ours, candidate.theirs):
            if path not in variables:
                continue
            if candidate.copy and first.get(path, name) != name:
                found.append((path, first[path], name))
            elif not candidate.copy:
                first.setdefault(path, name)
    return found


def tied_names(family: Family, model: DecoderLM, present: Mapping[str, Any]) -> tuple[str, str] | None:
    """The names of the embedding and of the head, for a model whose file may have both for one variable."""
    names = set(present)
    rows = list(_full_rows(family, model, {}, _prefix(family, names), names))
    for copy in (given for given in rows if given.copy and len(given.ours) == 1):
        for given in rows:
            if not given.copy and given.ours == copy.ours == (EMBEDDING,) and given.theirs[0] in names:
                return given.theirs[0], copy.theirs[0]
    return None


def _fits(match: Match, variables: Mapping[str, Any], present: Mapping[str, tuple[int, ...]]) -> bool:
    return match.shapes(variables) == [present[name] for name in match.theirs]


def _prefix(family: Family, names: set[str] | None) -> str:
    first = family.prefixes[0]
    if names is None:
        return first
    found = [prefix for prefix in family.prefixes if any(name.startswith(prefix) for name in names)]
    return max(found, key=len, default=first)


def _full_rows(
    family: Family, model: DecoderLM, variables: Mapping[str, Any], prefix: str, names: set[str] | None
) -> Iterable[Match]:
    parts: list[tuple[str, str, Any, tuple[Row, ...]]] = [
        ("", "", model, family.rows(model) if callable(family.rows) else family.rows)
    ]
    given_rows = family.layer_rows
    parts += [
        (
            family.layer_prefix.format(i // family.blocks_per_layer),
            f"blocks.{i}.",
            block,
            given_rows(block) if callable(given_rows) else given_rows,
        )
        for i, block in enumerate(model.blocks)
    ]
    for theirs_prefix, ours_prefix, part, rows in parts:
        for given in rows:
            # Rows with `unless` are for older files: new files do not use their names.
            if given.unless is not None and (names is None or theirs_prefix + given.unless in names):
                continue
            ours = tuple(ours_prefix + path for path in given.ours)
            theirs: list[str] = []
            for name in (theirs_prefix + name for name in given.theirs):
                if name.startswith(family.prefixes[0]):
                    name = prefix + name.removeprefix(family.prefixes[0])
                if "*" in name:
                    entries = variables[ours[0]].shape[0] if ours[0] in variables else 0
                    if names is not None:
                        entries = min(entries, len(names) + 1)  # one of so many is missing
                    theirs += [name.replace("*", str(i)) for i in range(entries)]
                else:
                    theirs.append(name)
            yield Match(tuple(theirs), ours, given.layout, part, given.copy)
