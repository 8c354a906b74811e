"""A training step as two programs, the gradients' and the optimizer's, which XLA compiles side by side.

What goes from one to the other is the gradients. A product's gradient is often rounded to bfloat16 and then converted
to the parameter's float32. Within one program XLA puts the conversion into what reads the gradient. Here the gradient
goes over as it is before the conversion, which loses nothing, and the optimizer's program converts it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

# Primitives whose results are those of the one function that they call.
_CALLS = ("jit", "pjit", "closed_call", "checkpoint", "remat2", "custom_jvp_call", "custom_vjp_call")


@dataclasses.dataclass(frozen=True)
class SeparateStep:
    """A training step of two programs; calling it takes a step, as a program of both would.

    Attributes:
        gradients: `(state without the optimizer's, batch) -> StepGradients`.
        update: `(state, StepGradients) -> (state, metrics)`; its state is donated.
    """

    gradients: Any
    update: Any

    def __call__(self, state: Any, batch: Any) -> tuple[Any, Any]:
        """The new state and the metrics."""
        return self.update(state, self.gradients(without_optimizer(state), batch))


def without_optimizer(state: Any) -> Any:
    """What the gradients are computed from."""
    return dataclasses.replace(state, optimizer=None)


def before_conversion(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with each floating-point result in the smaller dtype that it has just been converted from, if any.

    Args:
        function: of arrays, that can be traced.
    """

    @functools.wraps(function)
    def converted_back(*arguments: Any) -> Any:
        traced, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        values = jaxpr_as_fun(traced)(*jax.tree.leaves(arguments))
        dtypes = [_dtype_before(traced.jaxpr, result) for result in traced.jaxpr.outvars]
        return jax.tree.unflatten(jax.tree.structure(shapes), list(map(jnp.astype, values, dtypes)))

    return converted_back


def _dtype_before(jaxpr: Any, result: Any) -> Any:
    """Of a function's result, the dtype that its last operation has converted to a larger one; or its own."""
    dtype = result.aval.dtype
    while not isinstance(result, Literal):
        equation = next((each for each in jaxpr.eqns if result in each.outvars), None)
        if equation is None:
            break
        if equation.primitive.name == "convert_element_type":
            before = equation.invars[0].aval.dtype
            is_smaller = jnp.issubdtype(before, jnp.floating) and jnp.promote_types(before, dtype) == dtype
            return before if is_smaller else dtype
        called = [x for x in equation.params.values() if isinstance(x, Jaxpr | ClosedJaxpr)]
        if equation.primitive.name not in _CALLS or len(called) != 1:
            break
        inner = called[0].jaxpr if isinstance(called[0], ClosedJaxpr) else called[0]
        jaxpr, result = inner, inner.outvars[equation.outvars.index(result)]
    return dtype
