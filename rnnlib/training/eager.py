"""Evaluates a traced function as JAX does without `jax.jit`, with its programs compiled side by side.

Without `jax.jit` each operation is a program of its own, whose results do not depend on what XLA would make of several
together. JAX compiles such programs one after another, when it first comes to them. A trace says which they are.
"""

import concurrent.futures
import dataclasses
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Primitive, Var


@dataclasses.dataclass(frozen=True)
class Operation:
    """What operations of one program have in common.

    Attributes:
        primitive: JAX's.
        parameters: of the primitive, by name.
        arguments: shapes and dtypes.
    """

    primitive: Primitive
    parameters: tuple[tuple[str, Any], ...]
    arguments: tuple[Any, ...]

    @classmethod
    def of(cls, equation: JaxprEqn) -> "Operation":
        """That of an equation of a trace."""
        parameters = tuple(sorted(equation.params.items()))
        return cls(equation.primitive, parameters, tuple(each.aval for each in equation.invars))

    def compile(self) -> jax.stages.Compiled:
        """Its program: the arguments' values, constants too, are given in calls."""

        def bound(*values: Any) -> list[Any]:
            functions_and_parameters = self.primitive.get_bind_params(dict(self.parameters))
            found = self.primitive.bind(*values, **functions_and_parameters)
            return found if self.primitive.multiple_results else [found]

        bound.__name__ = dict(self.parameters).get("name", self.primitive.name)
        return jax.jit(bound).lower(*self.arguments).compile()


def evaluate(traced: ClosedJaxpr, *arguments: Any) -> list[Any]:
    """Results of a traced function, to the last bit those of the function itself without `jax.jit`.

    Args:
        traced: of `jax.make_jaxpr`; what it leaves out of sight (effects) there must not be.
        arguments: arrays, flat.

    Returns:
        The results, flat.
    """
    jaxpr = traced.jaxpr
    operations = list(map(Operation.of, jaxpr.eqns))
    last_use = {x: i for i, equation in enumerate(jaxpr.eqns) for x in equation.invars if isinstance(x, Var)}
    last_use |= dict.fromkeys((x for x in jaxpr.outvars if isinstance(x, Var)), len(operations))
    values: dict[Var, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*traced.consts, *arguments), strict=True))

    def value(x: Any) -> Any:
        return values[x] if isinstance(x, Var) else x.val  # a literal's

    with concurrent.futures.ThreadPoolExecutor() as pool:
        programs = {each: pool.submit(each.compile) for each in dict.fromkeys(operations)}
        for i, (operation, equation) in enumerate(zip(operations, jaxpr.eqns, strict=True)):
            found = programs[operation].result()(*map(value, equation.invars))
            values |= zip(equation.outvars, found, strict=True)
            for x in (*equation.invars, *equation.outvars):  # two models' arrays would not fit
                if isinstance(x, Var) and last_use.get(x, i) == i:
                    values.pop(x, None)
    return list(map(value, jaxpr.outvars))
