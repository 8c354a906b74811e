"""Derivatives that kernels lack.

A kernel has none, or one: its backward pass, which is a kernel too. Neither can be differentiated again. The same
function written in XLA can be differentiated any number of times.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.custom_derivatives import zero_from_primal

from pallas_kernels.common.vma import batch_alike

Tree = Any


def with_further_derivatives(
    kernel: Callable[..., Tree], keywords: Callable[..., dict[str, Any]], reference: Callable[..., Tree]
) -> Callable[..., Tree]:
    """`kernel(**keywords(*arguments))` as a function of the arguments, with all derivatives.

    The gradient is the kernel's own. Derivatives of the gradient are those of `reference`'s gradient.

    So `jax.grad` runs kernels only. A gradient of a gradient, `jax.jvp` of a gradient (a Hessian times a vector) and
    `jax.hessian` run `reference` as well.

    Args:
        kernel: a function of `pallas_kernels`; `jax.vjp` goes through it.
        keywords: from positional arguments to the kernel's. All but the last argument are differentiated; the last is
            an array of integers or None.
        reference: the same function of the positional arguments, which can be differentiated twice.
    """
    structure: Any = None  # Structure of the kernel's pull-back, a pytree of which only the arrays can be residuals.

    @jax.custom_jvp
    def forward(arrays: Tree, segment_ids: Tree) -> tuple[Tree, list[Any]]:
        nonlocal structure
        results, pull_back = _vjp(lambda *arguments: kernel(**keywords(*arguments)), arrays, segment_ids)
        kept, structure = jax.tree.flatten(pull_back)
        return results, kept

    @forward.defjvp
    def _(primals: tuple[Tree, ...], tangents: tuple[Tree, ...]) -> tuple[Tree, Tree]:
        (arrays, segment_ids), (d_arrays, _) = primals, tangents
        results, kept = forward(*primals)
        # Taking the gradient first allows forward mode through functions that have a custom backward pass.
        _, d_results = jax.jvp(lambda arrays: _vjp(reference, arrays, segment_ids)[0], (arrays,), (d_arrays,))
        # The saved arrays are for `backward`; derivatives of `backward` do not go through them.
        return (results, kept), (d_results, zero_from_primal(kept))

    @jax.custom_jvp
    def backward(arrays: Tree, segment_ids: Tree, kept: list[Any], cotangents: Tree) -> Tree:
        return jax.tree.unflatten(structure, kept)(cotangents)

    @backward.defjvp
    def _(primals: tuple[Tree, ...], tangents: tuple[Tree, ...]) -> tuple[Tree, Tree]:
        (arrays, segment_ids, _, cotangents), (d_arrays, _, _, d_cotangents) = primals, tangents
        _, d_gradients = jax.jvp(
            lambda arrays, cotangents: _vjp(reference, arrays, segment_ids)[1](cotangents),
            (arrays, cotangents),
            (d_arrays, d_cotangents),
        )
        return backward(*primals), d_gradients

    def run_forward(*arguments: Tree) -> tuple[Tree, Tree]:
        *arrays, segment_ids = arguments
        results, kept = forward(arrays, segment_ids)
        return batch_alike(arguments, results), (arrays, segment_ids, kept)

    def run_backward(residuals: Tree, cotangents: Tree) -> tuple[Tree, ...]:
        return (*backward(*residuals, cotangents), None)

    @jax.custom_vjp
    def run(*arguments: Tree) -> Tree:
        return batch_alike(arguments, kernel(**keywords(*arguments)))

    run.defvjp(run_forward, run_backward)
    return run


def with_derivatives_of(formula: Callable[..., Tree], kernel: Callable[..., Tree]) -> Callable[..., Tree]:
    """`kernel`, which has no derivative, with those of `formula`, the same function of the same arguments in XLA."""
    run = jax.custom_jvp(kernel)
    run.defjvp(lambda primals, tangents: (run(*primals), jax.jvp(formula, primals, tangents)[1]))
    return run


def _vjp(function: Callable[..., Tree], arrays: Tree, segment_ids: Tree) -> tuple[Tree, Callable[[Tree], Any]]:
    return jax.vjp(lambda *arrays: function(*arrays, segment_ids), *arrays)
