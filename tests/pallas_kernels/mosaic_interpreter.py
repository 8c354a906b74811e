"""What JAX's interpreter of Mosaic GPU kernels lacks for products of values and for copies by threads; for tests alone.

The interpreter (jax 0.11) runs copies, barriers, loops and warpgroups, multiplies matrices in shared memory, and finds
races. It has no product of a value with a matrix in shared memory, no accumulator that begins with a value, no copy
that adds to what is there, no product of two values (`mma`) and no copy by threads (`cp.async`). `install` adds them,
and leaves out copies that took half of the interpreter's time. All of it leans on private names of jax: a new version
of jax may ask for changes here, and nowhere else.

A copy by threads is done as late as can be: when its thread waits for it. What is read before is what was there before,
and what is overwritten in global memory meanwhile is copied as it is then.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax._src import callback, source_info_util, state
from jax._src.pallas.mosaic.interpret import utils as interpret_utils
from jax._src.pallas.mosaic_gpu import core as gpu_core
from jax._src.pallas.mosaic_gpu import primitives as gpu_primitives
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret
from jax._src.pallas.mosaic_gpu.interpret import shared_memory as memory
from jax._src.state.discharge import run_state_p

TOKEN = gpu_callbacks.TOKEN_SHAPE_DTYPE
EMPTY = jax.tree.structure([])


def _buffer(key, transforms, thread, mesh_location, source_info):
    """A shared-memory buffer's content, and what is needed to store to it."""
    key = gpu_callbacks.HostAllocationKey.from_array(key)
    transforms = jax.tree.map(int, gpu_callbacks._remove_noop_transforms(transforms))
    shared = gpu_callbacks._get_shared_memory()
    info = memory.GPULoggingInfo(mesh_location, thread, source_info)
    access = shared.access(key, transforms)
    content, _, _ = shared.get_buffer_content(key, access, thread, logging_info=info)
    return content, functools.partial(shared.store_buffer_content, key, access, logging_info=info)


def _product_callback(*, token, mesh_location, thread, acc, acc_transforms, a, b, b_transforms, source_info):
    b, _ = _buffer(b, b_transforms, thread, mesh_location, source_info)
    old, store = _buffer(acc, acc_transforms, thread, mesh_location, source_info)
    new = old + np.matmul(np.asarray(a, np.float32), np.asarray(b, np.float32)).astype(old.dtype)
    store(new, thread)
    return token


def _or_adding(copy):
    """The interpreter's copy from shared to global memory, or one that adds, at once."""

    def run(*, reduction_op, **options):
        if reduction_op != "add":
            return copy(reduction_op=reduction_op, **options)
        thread, where, source = (options[key] for key in ("thread", "mesh_location", "source_info"))
        keys = "src_allocation_key_as_array", "dst_allocation_key_as_array"
        (added, _), (old, store) = (
            _buffer(options[key], options[transforms], thread, where, source)
            for key, transforms in zip(keys, ("src_transforms", "dst_transforms"))
        )
        store(old + added, thread)
        return options["token"]

    return run


def _store_callback(*, token, mesh_location, thread, acc, value, source_info):
    _, store = _buffer(acc, (), thread, mesh_location, source_info)
    store(np.asarray(value), thread)
    return token


_begun: dict[Any, list[Callable[[], None]]] = {}
"""Copies by threads that a warpgroup has begun and not awaited, in their order, by warpgroup."""


def _copy_by_threads_callback(*, token, mesh_location, thread, source, source_at, target, target_at, source_info):
    def copy():
        content, _ = _buffer(source, source_at, thread, mesh_location, source_info)
        _buffer(target, target_at, thread, mesh_location, source_info)[1](np.array(content), thread)

    _begun.setdefault(_place(thread), []).append(copy)
    return token


def _wait_callback(*, token, mesh_location, thread, running, source_info):
    copies = _begun.setdefault(_place(thread), [])
    ended = max(len(copies) - int(running), 0)
    for copy in copies[:ended]:
        copy()
    del copies[:ended]
    return token


def _place(thread) -> str:
    return str(thread)


def _io(self, function, token, eqn, result=TOKEN, **arguments):
    bound = functools.partial(function, source_info=eqn.source_info)
    return callback.io_callback(
        bound, result, token=token, mesh_location=self.mesh_location, thread=self.thread, **arguments
    )


def _product(self, eqn, token, invals):
    acc, a, b, *leaves = invals
    trees = (eqn.params[f"{x}_transforms_tree"] or EMPTY for x in ("acc", "a", "b"))
    acc_transforms, _, b_transforms = jax.tree.unflatten(jax.tree_util.treedef_tuple(trees), leaves)
    b, b_transforms = jaxpr_interpret.resolve_ref(eqn.invars[2].aval, b, b_transforms)
    operands = dict(acc=acc, acc_transforms=acc_transforms, a=a, b=b, b_transforms=b_transforms)
    return _io(self, _product_callback, token, eqn, **operands), []


def _mma(self, eqn, token, invals):
    total, left, right = invals
    return token, [total + jax.numpy.matmul(left.astype(total.dtype), right.astype(total.dtype))]


def _copy_by_threads(self, eqn, token, invals):
    source, target, *leaves = invals
    trees = jax.tree_util.treedef_tuple((eqn.params["src_transforms_treedef"], eqn.params["dst_transforms_treedef"]))
    source_at, target_at = jax.tree.unflatten(trees, leaves)
    source, source_at = jaxpr_interpret.resolve_ref(eqn.invars[0].aval, source, source_at)
    target, target_at = jaxpr_interpret.resolve_ref(eqn.invars[1].aval, target, target_at)
    places = dict(source=source, source_at=source_at, target=target, target_at=target_at)
    return _io(self, _copy_by_threads_callback, token, eqn, **places), []


def _wait(self, eqn, token, invals):
    return _io(self, _wait_callback, token, eqn, running=eqn.params["n"]), []


def _store(self, eqn, token, invals):
    acc, value = invals
    return _io(self, _store_callback, token, eqn, acc=acc, value=value), [value]


def _run_state(self, eqn, token, invals):
    body, arguments = eqn.params["jaxpr"], []  # refs of an outer scope pass through; values become buffers
    are_values = [not isinstance(getattr(v, "aval", None), state.AbstractRef) for v in eqn.invars]
    for value, is_value in zip(invals, are_values, strict=True):
        if is_value:
            token, request = gpu_callbacks.call_make_allocation_request_array(
                token=token,
                compute_unit=self.thread,
                memory_space_id=memory.get_memory_space_idx(gpu_core.MemorySpace.REGS),
                initial_ref_count=1,
            )
            token, key = gpu_callbacks.call_allocate_buffer(
                token=token,
                mesh_location=self.mesh_location,
                thread=self.thread,
                allocation_request_as_array=request,
                value=value,
                source_info=eqn.source_info,
            )
            value = key
        arguments.append(value)
    token, _ = self.interpret(body, token, *arguments)
    out = []
    for var, key, is_value in zip(body.invars, arguments, are_values, strict=True):
        if not is_value:
            out.append(key)
            continue
        inner = jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)
        deref = functools.partial(gpu_callbacks.wgmma_accumulator_deref, wait_n=0)
        token, value = _io(self, deref, token, eqn, (TOKEN, inner), acc_allocation_key_as_array=key)
        token = gpu_callbacks.call_deallocate_buffer(
            token=token,
            mesh_location=self.mesh_location,
            thread=self.thread,
            allocation_key_as_array=key,
            source_info=eqn.source_info,
        )
        out.append(value)
    return token, out


def _call_with_numpy(*args, callback, **unused):
    """What `io_callback` runs, but numbers stay in NumPy: arrays of JAX took half of the interpreter's time."""
    return jax.tree.map(np.asarray, callback(*(np.array(x) for x in args)))


def install() -> None:
    """Adds to the interpreter, once."""
    cls = jaxpr_interpret.JaxprInterpreter
    if hasattr(cls, "_plain_interpret"):
        return
    callback.io_callback_impl = _call_with_numpy
    gpu_callbacks.copy_smem_to_gmem = _or_adding(gpu_callbacks.copy_smem_to_gmem)
    memory._to_int = lambda x: x if isinstance(x, jax.core.Tracer) else int(x)
    cls._plain_interpret = cls.interpret

    def interpret(self, jaxpr, token, *args):
        def special(eqn):
            if eqn.primitive is run_state_p:
                return _run_state
            if eqn.primitive is gpu_primitives.wgmma_accumulator_store_p:
                return _store
            if eqn.primitive is gpu_primitives.wgmma_ref_p and not isinstance(eqn.invars[1].aval, state.AbstractRef):
                return _product
            if eqn.primitive is gpu_primitives.mma_p:
                return _mma
            if eqn.primitive is gpu_primitives.copy_gmem_to_smem_p and not eqn.params["has_barrier"]:
                return _copy_by_threads
            if eqn.primitive is gpu_primitives.wait_gmem_to_smem_p:
                return _wait
            return None

        if not any(special(eqn) for eqn in jaxpr.eqns):
            return self._plain_interpret(jaxpr, token, *args)
        env = interpret_utils.JaxprEnv(
            vars=jaxpr.constvars + jaxpr.invars, values=args, sentinel_for_floating_point_values=None
        )
        for eqn in jaxpr.eqns:
            handler = special(eqn)
            with source_info_util.user_context(eqn.source_info.traceback, name_stack=eqn.source_info.name_stack):
                if handler is not None:
                    token, out = handler(self, eqn, token, env.read_many(eqn.invars))
                else:
                    inputs = list(dict.fromkeys(v for v in eqn.invars if not isinstance(v, jax.extend.core.Literal)))
                    alone = jaxpr.replace(constvars=[], invars=inputs, outvars=list(eqn.outvars), eqns=[eqn])
                    token, out = self._plain_interpret(alone, token, *env.read_many(inputs))
                env.write_many(eqn.outvars, out)
        return token, env.read_many(jaxpr.outvars)

    cls.interpret = interpret
