"""How a call is refused that no kernel serves, or that names a backend which there is not."""

_NAMES = {"triton": "Triton", "mosaic": "Mosaic GPU", "mosaic_mma": "mma"}


def refuse(operator: str, reason: str | None, backend: str = "triton") -> None:
    """Raises an error if there is a reason why a backend can't serve a call.

    Args:
        operator: the public function's name, which begins the message.
        reason: a noun phrase, as `unsupported_reason` of each operator gives it; None if there is none.
        backend: whose kernels can't.

    Raises:
        NotImplementedError: there is a reason.
    """
    if reason is not None:
        raise NotImplementedError(f"{operator}: the {_NAMES[backend]} kernels do not support {reason}")


def expect_backend(operator: str, backend: str, *known: str) -> None:
    """Raises ValueError, naming the operator, unless a backend is one of those that it has."""
    if backend not in known:
        names = [repr(name) for name in known]
        raise ValueError(f"{operator}: backend is {backend!r}, expected {', '.join(names[:-1])} or {names[-1]}")
