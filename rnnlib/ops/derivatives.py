"""Derivatives of kernels beyond the first.

A kernel comes with one derivative, backwards, which is a kernel too: neither can be differentiated. The same function
in XLA can, as often as one likes.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Tree = Any


def with_further_derivatives(
    kernel: Callable[[Tree, Tree], Tree], reference: Callable[[Tree, Tree], Tree]
) -> Callable[[Tree, Tree], Tree]:
    """`kernel`, whose gradient is its own, and whose gradient's derivatives are those of `reference`'s gradient.

    So `jax.grad` runs kernels alone, and the gradient of a gradient, `jax.jvp` of one (a Hessian times a vector) and
    `jax.hessian` run `reference` besides.

    Args:
        kernel: from differentiable arrays and others (of integers) to arrays; `jax.vjp` goes through it.
        reference: the same function, which can be differentiated twice.
    """
    tree: list[Any] = []  # of the kernel's pull-back, of which the arrays are passed on

    @jax.custom_jvp
    def forward(arrays: Tree, others: Tree) -> tuple[Tree, list[Any]]:
        results, pull_back = _vjp(kernel, arrays, others)
        kept, tree[:] = _flatten(pull_back)
        return results, kept

    @forward.defjvp
    def _(primals: tuple[Tree, ...], tangents: tuple[Tree, ...]) -> tuple[Tree, Tree]:
        (arrays, others), (d_arrays, _) = primals, tangents
        results, kept = forward(arrays, others)
        # By way of its gradient, what has a backward of its own can be differentiated forwards.
        _, d_results = jax.jvp(lambda arrays: _vjp(reference, arrays, others)[0], (arrays,), (d_arrays,))
        # What is kept serves `backward`, whose derivatives do not go through it.
        return (results, kept), (d_results, [_zero_tangent(x) for x in kept])

    @jax.custom_jvp
    def backward(arrays: Tree, others: Tree, kept: list[Any], cotangents: Tree) -> Tree:
        (gradient,) = jax.tree.unflatten(tree[0], kept)(cotangents)
        return gradient

    @backward.defjvp
    def _(primals: tuple[Tree, ...], tangents: tuple[Tree, ...]) -> tuple[Tree, Tree]:
        (arrays, others, _, cotangents), (d_arrays, _, _, d_cotangents) = primals, tangents
        _, d_gradient = jax.jvp(
            lambda arrays, cotangents: _vjp(reference, arrays, others)[1](cotangents)[0],
            (arrays, cotangents),
            (d_arrays, d_cotangents),
        )
        return backward(*primals), d_gradient

    @jax.custom_vjp
    def run(arrays: Tree, others: Tree) -> Tree:
        return kernel(arrays, others)

    def run_forward(arrays: Tree, others: Tree) -> tuple[Tree, Tree]:
        results, kept = forward(arrays, others)
        return results, (arrays, others, kept)

    def run_backward(residuals: Tree, cotangents: Tree) -> tuple[Tree, None]:
        return backward(*residuals, cotangents), None

    run.defvjp(run_forward, run_backward)
    return run


def _vjp(function: Callable[[Tree, Tree], Tree], arrays: Tree, others: Tree) -> tuple[Tree, Callable[[Tree], Any]]:
    return jax.vjp(lambda arrays: function(arrays, others), arrays)


def _flatten(pull_back: Any) -> tuple[list[Any], list[Any]]:
    leaves, tree = jax.tree.flatten(pull_back)
    return leaves, [tree]


def _zero_tangent(x: Any) -> Any:
    return jnp.zeros_like(x) if jnp.issubdtype(x.dtype, jnp.inexact) else np.zeros(x.shape, jax.dtypes.float0)
