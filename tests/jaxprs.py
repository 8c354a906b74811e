"""What a traced function computes, however deep."""

from collections.abc import Iterator
from typing import Any

from jax.extend.core import jaxprs_in_params


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a jaxpr, those of inner jaxprs behind the one that has them."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)
