"""A configuration as text for its fingerprint: options that came after the results do not change it by themselves."""

import dataclasses
from typing import Any


def config_text(value: Any, names: frozenset[str]) -> str:
    """`repr`, but a dataclass's field that is not among `names` counts only where it differs from its default.

    The default of an option that came later is what was before, so results from before stay valid.

    Args:
        value: a dataclass, or tuples of them; anything else is its `repr`.
        names: fields that there were when the first results were made, `"name"` of any class or `"Class.name"`.
    """
    if isinstance(value, tuple):
        inner = ", ".join(config_text(part, names) for part in value)
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if not dataclasses.is_dataclass(value):
        return repr(value)
    kind = type(value).__name__
    shown = {}
    for field in dataclasses.fields(value):
        part = getattr(value, field.name)
        if names & {field.name, f"{kind}.{field.name}"} or part != _default(field):
            shown[field.name] = config_text(part, names)
    return f"{kind}({', '.join(f'{name}={part}' for name, part in shown.items())})"


def _default(field: dataclasses.Field) -> Any:
    """A field's default; `MISSING`, which equals nothing, where it has none."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default
