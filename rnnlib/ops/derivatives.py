"""Derivatives that kernels lack.

A kernel has none, or one: its backward pass, which is a kernel too. Neither can be differentiated again. The same
function written in XLA can be differentiated any number of times.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import zero_from_primal

from pallas_kernels.common.vma import batch_alike

Tree = Any


def with_further_derivatives(
    kernel: Callable[..., Tree],
    keywords: Callable[..., dict[str, Any]],
    reference: Callable[..., Tree],
    *,
    vjp: Callable[..., tuple[Tree, Tree, Callable[..., Any]]] | None = None,
    name: str | None = None,
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
        vjp: the kernel's forward pass by parts, where results cost so much that a policy of `jax.checkpoint` may keep
            them. Called with the tuple of the differentiated arguments and the last one, it returns the results, what
            else is costly, and the pull-back, a pytree of arrays (`jax.tree_util.Partial`) that is called with both and
            with the results' cotangents. None is `jax.vjp` of the kernel.
        name: of these arrays to such a policy, which sees nothing of what is within a kernel's derivative.
    """
    parts = _whole_vjp(lambda *arguments: kernel(**keywords(*arguments))) if vjp is None else vjp
    structure: Any = None  # Structure of the kernel's pull-back, a pytree of which only the arrays can be residuals.

    @jax.custom_jvp
    def forward(arrays: Tree, segment_ids: Tree) -> tuple[Tree, Tree, list[Any]]:
        nonlocal structure
        results, costly, pull_back = parts(arrays, segment_ids)
        kept, structure = jax.tree.flatten(pull_back)
        return results, costly, kept

    @forward.defjvp
    def _(primals: tuple[Tree, ...], tangents: tuple[Tree, ...]) -> tuple[Tree, Tree]:
        (arrays, segment_ids), (d_arrays, _) = primals, tangents
        results, *saved = forward(*primals)
        # Taking the gradient first allows forward mode through functions that have a custom backward pass.
        _, d_results = jax.jvp(lambda arrays: _vjp(reference, arrays, segment_ids)[0], (arrays,), (d_arrays,))
        # The saved arrays are for `backward`; derivatives of `backward` do not go through them.
        return (results, *saved), (d_results, *zero_from_primal(saved))

    @jax.custom_jvp
    def backward(arrays: Tree, segment_ids: Tree, saved: tuple[Tree, Tree, list[Any]], cotangents: Tree) -> Tree:
        results, costly, kept = saved
        return jax.tree.unflatten(structure, kept)(results, costly, cotangents)

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
        results, costly, kept = forward(arrays, segment_ids)
        if name is not None:
            results, costly = jax.tree.map(lambda x: checkpoint_name(x, name), (results, costly))
        saved = (None if vjp is None else results), costly, kept
        return batch_alike(arguments, results), (arrays, segment_ids, saved)

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


def _whole_vjp(function: Callable[..., Tree]) -> Callable[..., tuple[Tree, Tree, Callable[..., Any]]]:
    """What `with_further_derivatives` takes as `vjp`, of a function that gives no parts."""

    def vjp(arrays: Tree, segment_ids: Tree) -> tuple[Tree, Tree, Callable[..., Any]]:
        results, pull_back = _vjp(function, arrays, segment_ids)
        return results, (), jax.tree_util.Partial(lambda pull_back, *given: pull_back(given[-1]), pull_back)

    return vjp


def _vjp(function: Callable[..., Tree], arrays: Tree, segment_ids: Tree) -> tuple[Tree, Callable[[Tree], Any]]:
    return jax.vjp(lambda *arrays: function(*arrays, segment_ids), *arrays)
