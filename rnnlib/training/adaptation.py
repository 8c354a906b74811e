"""What a run trains of a model: all parameters, all but some that are frozen, or low-rank changes (LoRA) of matrices.

An `Adaptation` divides a model's parameters into those that are trained and those that stay. Within a step it puts
them together to the parameters that the model computes with, and takes the gradient of these back to what is trained.
So no layer and no kernel knows of it. Of LoRA `W + scale A B` is computed once a step, a product of rank r for each
matrix; the forward and backward passes then are those of training the whole. The other way, `x W + scale (x A) B` in
every layer, would not need the gradients of the matrices, which this one holds for the length of a step. But each layer
and each kernel with a matmul of its own would have to know of it, and fused projections would come apart.
"""

import abc
import dataclasses
import difflib
import fnmatch
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from rnnlib.fields import PositiveInteger, PositiveNumber, Range, check_fields
from rnnlib.hub.adapter_folders import published_modules
from rnnlib.hub.adapters import with_low_rank
from rnnlib.models.decoder import DecoderLM
from rnnlib.training.mesh import SHARDED_AXIS
from rnnlib.training.optimizer import muon_mask

Path = tuple[Any, ...]

# What tells keys of dropout from those of the first factors.
_DROPOUT = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Low-rank adaptation (arXiv 2106.09685): of a model that stays, `W + scale A B` with trained A and B."""

    rank: PositiveInteger | None = None
    """Rank of each matrix's change; left out, the model itself is trained."""
    alpha: PositiveNumber | None = None
    """The scale is alpha / rank; left out, 1."""
    targets: tuple[str, ...] = ()
    """Matrices that are changed: parts of their paths such as query, or patterns such as 'blocks.*.mixer', or else the
    names that they have in published files, such as q_proj. Left out, all matrices of the blocks that are larger than
    the rank, but those of experts."""
    dropout: Annotated[float, Range(at_least=0, below=1)] = 0.0
    """Part of the inputs that each adapter is given as 0, drawn in each step for all its tokens."""
    rank_stabilized: bool = False
    """The scale is alpha / sqrt(rank) (arXiv 2312.03732)."""
    base: str | None = None
    """Name of the adapted model in a published adapter; left out, that of the model that training began with."""

    def __post_init__(self):
        """Checks every value."""
        check_fields(self)
        if self.rank is None and (self.alpha is not None or self.targets or self.rank_stabilized or self.dropout):
            raise ValueError("lora.rank is left out, expected the rank of what the other settings of lora are for")

    @property
    def scale(self) -> float:
        """The factor of each change."""
        if self.rank is None or self.alpha is None:
            return 1.0
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)


class Part(NamedTuple):
    """An array of a model that has a name: a variable, or columns of one.

    Attributes:
        variable: the variable's path.
        own: the path that it has where it is a variable of its own.
        columns: its first column and their number; None for the whole variable.
    """

    variable: Path
    own: Path
    columns: tuple[int, int] | None

    @property
    def name(self) -> str:
        """The path for people."""
        return ".".join(map(str, self.own))

    def of(self, array: Any) -> Any:
        """The part of the variable's array."""
        if self.columns is None:
            return array
        first, size = self.columns
        if isinstance(array, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct((*array.shape[:-1], size), array.dtype)
        return array[..., first : first + size]


def parts_of(parameters: Any) -> list[Part]:
    """The named arrays of a model's parameters, an `nnx.State`; of input projections each column is one."""
    found = []
    for path, variable in nnx.to_flat_state(parameters):
        columns = variable.get_metadata().get("columns", ())
        if not columns:
            found.append(Part(path, path, None))
        found += [Part(path, (*path[:-1], *name.split("."), "kernel"), (first, n)) for name, first, n in columns]
    return found


def matching(patterns: Iterable[str], names: Collection[str], setting: str) -> set[str]:
    """The names that patterns mean.

    A pattern with points is compared with the beginning of a name ("blocks.*.feed_forward"), one without with each of
    its components ("query", "*norm").

    Raises:
        ValueError: a pattern matches no name; the message has near ones.
    """
    found: set[str] = set()
    for pattern in patterns:
        own = {name for name in names if _matches(pattern, name)}
        if not own:
            raise ValueError(f"{setting} has {pattern!r}, which matches no parameter{_near(pattern, names)}")
        found |= own
    return found


def _matches(pattern: str, name: str) -> bool:
    if "." not in pattern:
        return any(fnmatch.fnmatchcase(part, pattern) for part in name.split("."))
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"{pattern}.*")


def _near(pattern: str, names: Collection[str]) -> str:
    """Paths and components of paths that are nearly a pattern, for messages."""
    known: dict[str, None] = {}
    for name in names:
        # Layers are alike: each path is named once.
        parts = ["*" if part.isdecimal() else part for part in name.split(".")]
        if "." in pattern:
            known |= dict.fromkeys(".".join(parts[: i + 1]) for i in range(len(parts)))
        else:
            known |= dict.fromkeys(part for part in parts if part != "*")
    near = difflib.get_close_matches(pattern, known, n=4, cutoff=0.5) or list(known)[:8]
    return f"; near ones are {', '.join(near)}" if near else ""


class Adaptation(abc.ABC):
    """How the parameters of a model come from what is trained and what stays.

    Attributes:
        changed: paths of the model's variables that depend on what is trained.
    """

    changed: frozenset[Path]

    @abc.abstractmethod
    def split(self, parameters: Any) -> tuple[Any, Any]:
        """What is trained and what stays, of a model before its training."""

    @abc.abstractmethod
    def changed_variables(self, trained: Any, frozen: Any, step: Array | None = None) -> Any:
        """The model's variables in `changed`, as a function of what is trained.

        Args:
            trained: what is trained.
            frozen: what stays.
            step: number of the training step, which decides what is dropped; None drops nothing.
        """

    def parameters(self, trained: Any, frozen: Any) -> Any:
        """All parameters of the model."""
        return join(self.changed_variables(trained, frozen), self.unchanged_variables(frozen))

    def unchanged_variables(self, frozen: Any) -> Any:
        """The model's variables that are not in `changed`."""
        return pick(frozen, lambda path: path not in self.changed)

    @abc.abstractmethod
    def saved(self, trained: Any, frozen: Any) -> Any:
        """What a checkpoint holds of both."""

    @abc.abstractmethod
    def restored(self, saved: Any, frozen: Any) -> tuple[Any, Any]:
        """What is trained and what stays, from what `saved` gave and, where that has it not, what stays."""


def pick(state: Any, wanted: Any) -> Any:
    """The variables of an `nnx.State` whose paths are wanted."""
    return nnx.from_flat_state([(path, leaf) for path, leaf in nnx.to_flat_state(state) if wanted(path)])


def join(*states: Any) -> Any:
    """The variables of all."""
    return nnx.from_flat_state(sorted((pair for state in states for pair in nnx.to_flat_state(state)), key=_order))


def _order(pair: tuple[Path, Any]) -> tuple[tuple[bool, Any], ...]:
    return tuple((isinstance(part, str), part) for part in pair[0])


class Frozen(Adaptation):
    """All parameters are trained but those that are named. Columns of one kernel may be of both kinds."""

    def __init__(self, patterns: Iterable[str], parameters: Any):
        """Chooses what is frozen.

        Args:
            patterns: as in `matching`.
            parameters: the model's, or their shapes.

        Raises:
            ValueError: a pattern matches no parameter, or nothing is left to train.
        """
        parts = parts_of(parameters)
        frozen = matching(patterns, [part.name for part in parts], "freeze")
        if len(frozen) == len(parts):
            raise ValueError(f"freeze has {' '.join(patterns)}, which is every parameter, expected some to train")
        self._by_variable: dict[Path, list[tuple[Part, bool]]] = {}
        for part in parts:
            self._by_variable.setdefault(part.variable, []).append((part, part.name in frozen))
        self.changed = frozenset(
            path for path, own in self._by_variable.items() if not all(is_frozen for _, is_frozen in own)
        )

    def split(self, parameters: Any) -> tuple[Any, Any]:
        """The parameters that are trained, and those that are frozen."""
        sides: tuple[list[Any], list[Any]] = ([], [])
        for path, variable in nnx.to_flat_state(parameters):
            own = self._by_variable[path]
            kinds = {is_frozen for _, is_frozen in own}
            if len(kinds) == 1:
                sides[kinds.pop()].append((path, variable))
                continue
            for part, is_frozen in own:
                if not is_frozen:
                    value = variable.replace(part.of(variable.get_raw_value()), columns=())
                    sides[False].append((part.own, value))
            sides[True].append((path, variable))
        return nnx.from_flat_state(sides[False]), nnx.from_flat_state(sides[True])

    def changed_variables(self, trained: Any, frozen: Any, step: Array | None = None) -> Any:
        """The variables that are trained, and kernels some of whose columns are."""
        own, rest = dict(nnx.to_flat_state(trained)), dict(nnx.to_flat_state(frozen))
        found = []
        for path in self.changed:
            if path in own:
                found.append((path, own[path]))
                continue
            kernel = rest[path].get_raw_value()
            for part, is_frozen in self._by_variable[path]:
                if not is_frozen:
                    first, size = part.columns or (0, kernel.shape[-1])
                    kernel = kernel.at[..., first : first + size].set(own[part.own].get_raw_value())
            found.append((path, rest[path].replace(kernel)))
        return join(nnx.from_flat_state(found))

    def saved(self, trained: Any, frozen: Any) -> Any:
        """The whole model, as without anything frozen."""
        return self.parameters(trained, frozen)

    def restored(self, saved: Any, frozen: Any) -> tuple[Any, Any]:
        """Both parts of the whole model."""
        return self.split(saved)

    def unchanged_variables(self, frozen: Any) -> Any:
        """The variables that are frozen whole."""
        return pick(frozen, lambda path: path in self._by_variable and path not in self.changed)


class Lora(Adaptation):
    """Low-rank changes of matrices, all else stays.

    Attributes:
        config: rank, scale and targets.
        targets: the matrices that are changed.
    """

    def __init__(self, config: LoraConfig, parameters: Any, *, seed: int = 0, model: DecoderLM | None = None):
        """Chooses the matrices.

        Args:
            config: rank, scale and targets.
            parameters: the model's, or their shapes.
            seed: of the factors.
            model: the model, with or without values, for the names that its matrices have in published files.

        Raises:
            ValueError: a target matches no matrix.
        """
        assert config.rank is not None
        self.config, self._seed = config, seed
        variables = dict(nnx.to_flat_state(parameters))
        masks = dict(nnx.to_flat_state(muon_mask(parameters)))
        matrices = {
            part.name: part
            for part in parts_of(parameters)
            if len(variables[part.variable].shape) in (2, 3) and masks[part.variable].get_raw_value()
        }
        if config.targets:
            chosen = self._named(matrices, model)
        else:
            chosen = {
                name
                for name, part in matrices.items()
                if len(variables[part.variable].shape) == 2
                and min(self._shape(variables, part)) > config.rank
                and "router" not in part.own
            }
        if not chosen:
            raise ValueError(f"lora.rank is {config.rank}, expected less than a side of some matrix of the blocks")
        # In an order, and so with random factors, that does not depend on how columns are stored.
        self.targets = {name: matrices[name] for name in sorted(chosen)}
        self.changed = frozenset(part.variable for part in self.targets.values())

    def _named(self, matrices: Collection[str], model: DecoderLM | None) -> set[str]:
        """The matrices that the targets name, by their paths or else by their names in published files.

        Raises:
            ValueError: a target names none.
        """
        chosen: set[str] = set()
        published: Mapping[str, list[str]] | None = None
        for pattern in self.config.targets:
            own = {name for name in matrices if _matches(pattern, name)}
            if not own:
                if published is None:
                    published = {} if model is None else published_modules(model, self.config.base)
                found = [paths for module, paths in published.items() if _matches(pattern, module)]
                own = {path for paths in found for path in paths}.intersection(matrices)
            # Without any, this raises the error with near names.
            chosen |= own or matching((pattern,), [*matrices, *(published or ())], "lora.targets")
        return chosen

    @staticmethod
    def _shape(variables: Mapping[Path, Any], part: Part) -> tuple[int, int]:
        """Rows and columns of a matrix, or of each of an array of them."""
        rows, columns = variables[part.variable].shape[-2:]
        return rows, columns if part.columns is None else part.columns[1]

    @staticmethod
    def _place(part: Part) -> Path:
        """Where a matrix's factors stand: beside a kernel, or under the variable's name."""
        return part.own[:-1] if part.own[-1] == "kernel" else part.own

    def split(self, parameters: Any) -> tuple[Any, Any]:
        """New factors, whose product is 0, and the model's parameters."""
        variables = dict(nnx.to_flat_state(parameters))
        key, rank = jax.random.key(self._seed), self.config.rank or 0
        factors = []
        for number, part in enumerate(self.targets.values()):
            rows, columns = self._shape(variables, part)
            dtype = jnp.promote_types(variables[part.variable].dtype, jnp.float32)
            bound, several = 1 / math.sqrt(rows), variables[part.variable].shape[:-2]
            a = jax.random.uniform(jax.random.fold_in(key, number), (*several, rows, rank), dtype, -bound, bound)
            # Replicated over "tensor": see `rnnlib.training.mesh.parameter_specs`.
            whole = {SHARDED_AXIS: None} if SHARDED_AXIS in variables[part.variable].get_metadata() else {}
            for name, value in (("lora_a", a), ("lora_b", jnp.zeros((*several, rank, columns), dtype))):
                factors.append(((*self._place(part), name), nnx.LoRAParam(value, **whole)))
        return nnx.from_flat_state(factors), parameters

    def changed_variables(self, trained: Any, frozen: Any, step: Array | None = None) -> Any:
        """The matrices with their changes.

        Dropped is a row of A, the adapter's reading of an input channel, and the others are larger for it. Where
        adapters are layers of their own, as in PEFT, each token drops channels of its own; the mean is the same.
        """
        factors, variables = self.factors(trained), dict(nnx.to_flat_state(frozen))
        if self.config.dropout and step is not None:
            factors = {
                name: (self._without_some(a, number, step), b) for number, (name, (a, b)) in enumerate(factors.items())
            }
        found: dict[Path, Any] = {path: variables[path].get_raw_value() for path in self.changed}
        for name, part in self.targets.items():
            a, b = factors[name]
            changed = with_low_rank(part.of(found[part.variable]), a, b, self.config.scale)
            if part.columns is None:
                found[part.variable] = changed
            else:
                first, size = part.columns
                found[part.variable] = found[part.variable].at[..., first : first + size].set(changed)
        return join(nnx.from_flat_state([(path, variables[path].replace(value)) for path, value in found.items()]))

    def _without_some(self, a: Array, number: int, step: Array) -> Array:
        """`A` of a matrix of this number, with some rows 0 in this step."""
        # Apart from the keys of the first factors, which have only a number.
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(self._seed), _DROPOUT), step)
        kept = 1 - self.config.dropout
        mask = jax.random.bernoulli(jax.random.fold_in(key, number), kept, (*a.shape[:-1], 1))
        return jnp.where(mask, a / kept, 0)

    def saved(self, trained: Any, frozen: Any) -> Any:
        """The factors alone."""
        return trained

    def restored(self, saved: Any, frozen: Any) -> tuple[Any, Any]:
        """The factors, and the model."""
        return saved, frozen

    def factors(self, trained: Any) -> dict[str, tuple[Any, Any]]:
        """`A` `[in, rank]` and `B` `[rank, out]` of each matrix by its name; of experts `[E, in, rank]` and so on."""
        own = {path: leaf.get_raw_value() for path, leaf in nnx.to_flat_state(trained)}
        return {
            name: (own[(*self._place(part), "lora_a")], own[(*self._place(part), "lora_b")])
            for name, part in self.targets.items()
        }


def make_adaptation(
    freeze: tuple[str, ...], lora: LoraConfig, parameters: Any, *, seed: int = 0, model: DecoderLM | None = None
) -> Adaptation | None:
    """What of a model is trained; None for all of it.

    Args:
        freeze: patterns of what is frozen.
        lora: low-rank changes in place of the model.
        parameters: the model's, or their shapes.
        seed: of what is new.
        model: the model, with or without values, for the published names of matrices.

    Raises:
        ValueError: a pattern matches nothing.
    """
    if lora.rank is not None:
        return Lora(lora, parameters, seed=seed, model=model)
    return Frozen(freeze, parameters) if freeze else None
