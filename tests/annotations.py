"""Every call of the packages' functions keeps to the types, dtypes and shapes of its annotations, or fails.

jaxtyping's import hook decorates each function and dataclass. Its own decorator binds the arguments of a call by
`inspect.signature`, and checks them again with the result. Tests make millions of such calls while jax traces, and
half of some files' time was that. This one checks the same values, each once.
"""

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import beartype
import jaxtyping

_ORIGINAL = jaxtyping.jaxtyped
_CHECK = beartype.beartype(conf=beartype.BeartypeConf(violation_type=jaxtyping.TypeCheckError))


def install(packages: list[str]) -> None:
    """Checks the annotations of packages that are imported from here on."""
    jaxtyping.jaxtyped = lambda *, typechecker: _checked
    jaxtyping.install_import_hook(packages, "beartype.beartype")


def _checked(target: Any) -> Any:
    """What the hook's decorator makes of a function, a class or a descriptor."""
    if inspect.isclass(target):
        # An inherited constructor is checked already, and so is one that stands in the class.
        written = vars(target).get("__init__")
        if "__dataclass_fields__" in vars(target) and written and not hasattr(written, "__wrapped__"):
            target.__init__ = _function(written)
        return target
    if isinstance(target, classmethod | staticmethod):
        return type(target)(_function(target.__func__))
    if isinstance(target, property):
        return property(*(method and _function(method) for method in (target.fget, target.fset, target.fdel)))
    return _function(target)


_nested: dict[types.CodeType, tuple[dict[str, Any], types.FunctionType]] = {}
"""Annotations of functions within functions, and what checks them: tracing makes these functions anew each time."""


def _checking(function: Callable[..., Any]) -> Callable[..., Any]:
    """What beartype makes of a function; of a nested one, what it has made of that code before, around this one."""
    if "<locals>" not in function.__qualname__:
        return _CHECK(function)
    annotations, made = _nested.get(function.__code__, (None, None))
    if made is None or annotations != function.__annotations__:
        made = _CHECK(function)
        if made is not function:  # there is something to check
            _nested[function.__code__] = function.__annotations__, made
        return made
    again = types.FunctionType(made.__code__, made.__globals__, made.__name__, made.__defaults__, made.__closure__)
    again.__kwdefaults__ = made.__kwdefaults__ | {"__beartype_func": function}  # by this name beartype's code calls it
    return again


def _function(function: Callable[..., Any]) -> Callable[..., Any]:
    if inspect.isgeneratorfunction(function):
        return _ORIGINAL(function, typechecker=_CHECK)
    written = function.__annotations__
    # A name in quotes is not checked: it may be one that only a type checker imports.
    annotations = {name: kind for name, kind in written.items() if not isinstance(kind, str)}
    if not annotations:
        return function
    function.__annotations__ = annotations
    checking = _checking(function)
    function.__annotations__ = written

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if jaxtyping.config.jaxtyping_disable:
            return function(*args, **kwargs)
        with _CONTEXT:
            return checking(*args, **kwargs)

    return call


# The sizes of named axes hold for one call with its result; entering this begins with none.
_CONTEXT = _ORIGINAL("context")
