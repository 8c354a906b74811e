"""Loop-invariant code motion: what every turn of a loop computes from the same arguments is computed before the loop.

Parts of a training step compute with the same parameters. Each would round them to the dtype of matmuls again, or find
their largest magnitudes and round them to float8: XLA leaves that in the loop (jax 0.11.2).

The function of a turn is traced, and its equations are split. Those of fixed arguments alone go before the loop, also
out of nested `jax.jit`, and the others are handed what they read of them. What takes more memory than the arguments
that it comes from, or only moves numbers, stays in the loop.
"""

import dataclasses
import math
from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from typing import Any

import jax
from jax.extend import core

_MOVES = frozenset(
    {"broadcast_in_dim", "copy", "dynamic_slice", "gather", "pad", "reshape", "rev", "slice", "split", "squeeze"}
    | {"transpose"}
)
"""Primitives that only move numbers."""

_Key = Hashable
"""Of a value: a variable of a jaxpr, or what stands for one of a nested jaxpr."""


def hoist(
    function: Callable[..., Any], fixed: Any, *varying: Any
) -> tuple[Callable[[Any], list[jax.Array]], Callable[..., Any]]:
    """Splits a function in what depends on its first argument alone, and the rest.

    Args:
        function: of `fixed` and `varying`, pytrees of arrays. Arrays that it closes over count as fixed.
        fixed: what is the same in all turns of a loop.
        *varying: the other arguments, or their shapes and dtypes.

    Returns:
        `before` and `turn`: `turn(before(fixed), fixed, *varying)` is `function(fixed, *varying)`, by the same
        equations.
    """
    traced, shapes = jax.make_jaxpr(function, return_shape=True)(fixed, *varying)
    jaxpr, consts, structure = traced.jaxpr, traced.consts, jax.tree.structure(shapes)
    invars = (*jaxpr.constvars, *jaxpr.invars)
    halves = _Splitter().split(jaxpr, invars[: len(consts) + len(jax.tree.leaves(fixed))])

    def before(fixed: Any) -> list[jax.Array]:
        return halves.before(dict(zip(invars, [*consts, *jax.tree.leaves(fixed)])))

    def turn(values: list[jax.Array], fixed: Any, *varying: Any) -> Any:
        known: dict[_Key, Any] = dict(zip(invars, [*consts, *jax.tree.leaves((fixed, *varying))]))
        return jax.tree.unflatten(structure, halves.turn(known, values, jaxpr.outvars))

    return before, turn


@dataclasses.dataclass(frozen=True)
class _Step:
    """What computes the values of `writes` from those of `reads`: an equation, or a half of one."""

    compute: Callable[..., Iterable[Any]]
    reads: tuple[_Key, ...]
    writes: tuple[_Key, ...]


@dataclasses.dataclass(frozen=True)
class _Halves:
    """A jaxpr in two: `first` is computed before the loop, `second` in each turn, from `values` among others."""

    first: list[_Step]
    second: list[_Step]
    values: list[_Key]

    def before(self, known: dict[_Key, Any]) -> list[Any]:
        """The values, from the fixed arguments."""
        _run(self.first, known)
        return [known[key] for key in self.values]

    def turn(self, known: dict[_Key, Any], values: Sequence[Any], results: Iterable[Any]) -> list[Any]:
        """Results of a turn, from all arguments and the values."""
        known = known | dict(zip(self.values, values))
        _run(self.second, known)
        return [_value(x, known) for x in results]


def _run(steps: Iterable[_Step], known: dict[_Key, Any]) -> None:
    for step in steps:
        known.update(zip(step.writes, step.compute(*(known[key] for key in step.reads))))


def _value(x: Any, known: dict[_Key, Any]) -> Any:
    return x.val if isinstance(x, core.Literal) else known[x]


def _variables(atoms: Iterable[Any]) -> tuple[Any, ...]:
    """Those of an equation's arguments or results that have a value to be computed, each once."""
    return tuple(dict.fromkeys(x for x in atoms if not isinstance(x, core.Literal | core.DropVar)))


def _bytes(variables: Iterable[Any]) -> int:
    return sum(math.prod(x.aval.shape) * x.aval.dtype.itemsize for x in variables)


def _only_moves(equation: Any) -> bool:
    """Whether an equation moves numbers and computes none."""
    if equation.primitive.name == "jit":
        return all(map(_only_moves, equation.params["jaxpr"].eqns))
    return equation.primitive.name in _MOVES


def _equation(jaxpr: Any, equation: Any) -> _Step:
    reads, writes = _variables(equation.invars), _variables(equation.outvars)
    alone = jaxpr.replace(constvars=(), invars=reads, outvars=writes, eqns=[equation], effects=equation.effects)
    return _Step(core.jaxpr_as_fun(core.ClosedJaxpr(alone, ())), reads, writes)


def _needed(steps: Sequence[_Step], wanted: Iterable[_Key], given: Container[_Key]) -> tuple[list[_Step], set[_Key]]:
    """The steps that compute what is wanted and not given; and what is wanted, and all that they read."""
    found, chosen = set(wanted), []
    for step in reversed(steps):
        if any(key in found and key not in given for key in step.writes):
            chosen.append(step)
            found.update(step.reads)
    return chosen[::-1], found


class _Splitter:
    """Splits jaxprs, a nested one once for all equations that call it: blocks of a model share one."""

    def __init__(self) -> None:
        self._calls: dict[Any, _Call] = {}

    def split(self, jaxpr: Any, fixed: Iterable[Any]) -> _Halves:
        """Halves of a jaxpr, by those of its arguments that are fixed."""
        origins: dict[_Key, frozenset[Any]] = {x: frozenset([x]) for x in fixed}  # of what depends on no other argument
        stored = set[_Key]()
        early: list[_Step] = []
        late: list[_Step] = []

        def add_early(step: _Step) -> frozenset[Any]:
            early.append(step)
            own = frozenset[Any]().union(*(origins[x] for x in step.reads))
            origins.update(dict.fromkeys(step.writes, own))
            return own

        for equation in jaxpr.eqns:
            step = _equation(jaxpr, equation)
            if not equation.effects and all(x in origins for x in step.reads):
                own = add_early(step)
                late.append(step)  # for what is not handed over
                if own and not _only_moves(equation):
                    stored.update(x for x in step.writes if _bytes([x]) <= _bytes(own))
            elif call := self._call(equation, origins):
                first, second = call.steps(equation)
                add_early(first)
                stored.update(first.writes)
                late.append(second)
            else:
                late.append(step)
        second_half, found = _needed(late, _variables(jaxpr.outvars), stored)
        values = [key for step in early for key in step.writes if key in stored and key in found]
        return _Halves(_needed(early, values, ())[0], second_half, values)

    def _call(self, equation: Any, origins: dict[_Key, frozenset[Any]]) -> "_Call | None":
        """A call of a nested `jax.jit` that has something to compute before the loop."""
        if equation.primitive.name != "jit" or equation.params["jaxpr"].consts:
            return None
        jaxpr = equation.params["jaxpr"].jaxpr
        is_fixed = tuple(isinstance(x, core.Literal) or bool(origins.get(x)) for x in equation.invars)
        key = id(jaxpr), is_fixed
        if key not in self._calls:  # it keeps the jaxpr, so that no other one gets its id
            halves = self.split(jaxpr, [x for x, own in zip(jaxpr.invars, is_fixed) if own])
            self._calls[key] = _Call(jaxpr, halves, equation.params["name"])
        return self._calls[key] if self._calls[key].halves.values else None


class _Call:
    """The halves of a nested jaxpr, which stay calls in the program.

    Each takes the arguments of the whole, with None for those that it does not read.
    """

    def __init__(self, jaxpr: Any, halves: _Halves, name: str):
        self._jaxpr = jaxpr
        self.halves = halves

        def before(*arguments: Any) -> list[Any]:
            return halves.before(dict(zip(jaxpr.invars, arguments)))

        def turn(values: list[Any], *arguments: Any) -> list[Any]:
            others = [x for x in jaxpr.outvars if x not in halves.values]
            return halves.turn(dict(zip(jaxpr.invars, arguments)), values, others)

        before.__name__ = turn.__name__ = name
        self._before, self._turn = jax.jit(before), jax.jit(turn)

    def steps(self, equation: Any) -> tuple[_Step, _Step]:
        """The halves as steps of the jaxpr that calls this one."""
        values, results = self.halves.values, list(zip(self._jaxpr.outvars, equation.outvars))
        # A value is known by the variables that the call gives it to, or by the call and its position.
        keys: list[list[_Key]] = [
            [outer for x, outer in results if x is value and not isinstance(outer, core.DropVar)] or [(id(equation), i)]
            for i, value in enumerate(values)
        ]
        early, late = self._read(self.halves.first, equation), self._read(self.halves.second, equation)

        def before(*read: Any) -> list[Any]:
            computed = self._before(*early.arguments(read))
            return [x for x, own in zip(computed, keys) for _ in own]

        def turn(*read: Any) -> list[Any]:
            return self._turn(list(read[: len(values)]), *late.arguments(read[len(values) :]))

        others = tuple(outer for x, outer in results if x not in values)
        return (
            _Step(before, early.keys, tuple(key for own in keys for key in own)),
            _Step(turn, (*(own[0] for own in keys), *late.keys), others),
        )

    def _read(self, steps: Iterable[_Step], equation: Any) -> "_Arguments":
        read = {key for step in steps for key in step.reads} | set(_variables(self._jaxpr.outvars))
        return _Arguments([x if inner in read else None for x, inner in zip(equation.invars, self._jaxpr.invars)])


@dataclasses.dataclass(frozen=True)
class _Arguments:
    """What a half reads of a call's arguments: None for the others."""

    atoms: Sequence[Any]

    @property
    def keys(self) -> tuple[_Key, ...]:
        return _variables(x for x in self.atoms if x is not None)

    def arguments(self, values: Iterable[Any]) -> list[Any]:
        known = dict(zip(self.keys, values))
        return [None if x is None else _value(x, known) for x in self.atoms]
