"""Checks of numbers, which a shape or a dtype does not show and only a run can make."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import checkify

# A user context is part of the cache key of `jax.jit`: a function that was compiled without checks is traced anew.
_ARE_CHECKED = jax.make_user_context(default_value=False)


def check_numerics[**Arguments, Result](function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """`function`, in which every operator checks the numbers that it is given and returns.

    An argument that is not finite is an error, and so is a `log_decay` that is above 0 or NaN (-inf is a hard reset),
    and a result that is not finite although the arguments were. The first such error of a call is raised. The checks
    are `jax.experimental.checkify`'s: they work in `jax.jit`, `jax.grad`, `jax.vmap`, `jax.lax.scan` and
    `jax.checkpoint`, and take time. A function that is not wrapped has none of them.

        rnnlib.check_numerics(jax.jit(jax.grad(loss)))(parameters)

    Args:
        function: takes and returns pytrees of arrays. What it closes over, such as a model, may be anything.

    Returns:
        The function of the same arguments and results.

    Raises:
        ValueError: when called; the message names the operator, the argument and the number.
    """

    def under_checks(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with _ARE_CHECKED(True):
            return function(*args, **kwargs)

    checked = checkify.checkify(under_checks, errors=checkify.user_checks)

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        error, result = checked(*args, **kwargs)
        message = error.get()
        if message:
            raise ValueError(message.removesuffix(" (`check` failed)"))
        return result

    return call


def are_checked() -> bool:
    """Whether the code that runs is that of a function which `check_numerics` wraps."""
    return bool(_ARE_CHECKED.value)


def call_with_checks[Result](operator: str, arguments: Mapping[str, Any], call: Callable[[], Result]) -> Result:
    """`call()` with checks of an operator's arguments, by name, before it and of its results after it."""
    for name, x in arguments.items():
        if not _is_floating(x):
            continue
        if name == "log_decay":
            largest = jnp.max(x, initial=-jnp.inf)
            text = (
                f"{operator}: log_decay is up to {{largest}}, expected at most 0: it is the decay's natural logarithm"
            )
            checkify.check(largest <= 0, text, largest=largest)
        else:
            _check_finite(operator, name, x, "")
    with _ARE_CHECKED(False):
        found = call()
    for n, x in enumerate(found if isinstance(found, tuple) else (found,)):
        if _is_floating(x):
            name = f"result {n}" if isinstance(found, tuple) else "the result"
            _check_finite(operator, name, x, ", although all arguments are")
    return found


def _is_floating(x: Any) -> bool:
    return isinstance(x, Array | np.ndarray) and jnp.issubdtype(x.dtype, jnp.floating)


def _check_finite(operator: str, name: str, x: Any, more: str) -> None:
    count = jnp.sum(~jnp.isfinite(x))
    text = f"{operator}: {name} has {{count}} numbers that are not finite{more}"
    checkify.check(count == 0, text, count=count)
