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
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

# Primitives whose results are those of the one function that they call.
_CALLS = ("jit", "pjit", "closed_call", "checkpoint", "remat2", "custom_jvp_call", "custom_vjp_call")


@dataclasses.dataclass(frozen=True)
class SeparateStep:
    """A training step of two programs; calling it takes a step, as a program of both would.

    Every call writes its gradients where the call before has written its own. XLA keeps the launches of a program's
    kernels on a GPU as a graph, with the addresses of the arrays in it, and the host records each launch whose arrays
    have moved again before it runs. New gradients in each step would be such arrays, and would have others move.

    Attributes:
        gradients: `(state without the optimizer's, batch, gradients) -> StepGradients`; the gradients that it is given
            are donated, and their values not read.
        update: `(state, StepGradients) -> (state, metrics)`; its state is donated.
        found: `(state without the optimizer's, batch) -> StepGradients`, which `gradients` calls; None where that is
            compiled.
        last: the gradients that the next call is given, or nothing before the first one.
    """

    gradients: Any
    update: Any
    found: Any = None
    last: list[Any] = dataclasses.field(default_factory=list)

    def __call__(self, state: Any, batch: Any) -> tuple[Any, Any]:
        """The new state and the metrics."""
        read = without_optimizer(state), batch
        if not self.last:
            self.last.append(zeros_like(jax.eval_shape(self.found, *read).gradients))
        found = self.gradients(*read, self.last.pop())
        result = self.update(state, found)
        self.last.append(found.gradients)
        return result


def zeros_like(shapes: Any) -> Any:
    """Arrays of zeros, by way of the host: on a device each shape would be a program to compile.

    Args:
        shapes: pytree of what has a shape and a dtype.
    """
    return jax.device_put(jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes))


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
