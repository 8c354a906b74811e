"""Linear attention in Mosaic GPU, interpreted with races looked for, against the scan in float64."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels.common.kernel_shape import CHUNK
from pallas_kernels.delta_rule.inputs import crop_results, make_inputs, pad_inputs
from pallas_kernels.linear_attention import api, row_shards
from pallas_kernels.linear_attention.mosaic_gpu import vjp
from pallas_kernels.linear_attention.mosaic_gpu.decay import Factors, factors_of
from pallas_kernels.linear_attention.mosaic_gpu.decay_gradient import log_decay_gradient
from pallas_kernels.linear_attention.mosaic_gpu.increments import increments
from pallas_kernels.linear_attention.mosaic_gpu.sums import STATES_EVERY, Sums
from pallas_kernels.linear_attention.triton import scan_splits
from rnnlib import ops
from tests.pallas_kernels import mosaic_interpreter
from tests.pallas_kernels.cases import NO, Case, relative_error, scan, value_and_gradients
from tests.pallas_kernels.cases import make_inputs as make_arrays
from tests.pallas_kernels.test_lowering import H200
from tests.selection import mostly_slow

BASE: dict[str, Any] = {"online": False, "dtype": jnp.bfloat16}
CASES = {
    "gate_and_state": Case((1, 100, 1, 1, 128, 128), **BASE),
    "two_heads_a_key_in_parts": Case((1, 330, 1, 2, 128, 64), segments=3, **BASE),
    "documents_in_parts": Case((1, 330, 1, 1, 64, 128), segments=2, packed=True, **BASE),
    "no_decay_no_gate": Case((1, 200, 1, 1, 64, 64), decay=NO, write=NO, segments=2, **BASE),
    "hard_resets": Case((1, 600, 1, 1, 64, 64), extreme=True, **BASE),
    "mild_decay_over_ten_chunks": Case((1, 600, 1, 1, 64, 64), shift=4.0, write=NO, **BASE),
    "strong_decay": Case((1, 330, 1, 1, 64, 64), shift=-12.0, **BASE),
    "diagonal": Case((1, 200, 1, 2, 64, 64), segments=2, packed=True, diagonal=1, **BASE),
    "diagonal_of_four_rows": Case((1, 328, 1, 1, 64, 128), segments=2, diagonal=4, **BASE),
    "diagonal_alone": Case((1, 100, 1, 1, 64, 64), decay=NO, write=NO, diagonal=2, **BASE),
    "diagonal_and_gate": Case((1, 100, 1, 1, 64, 64), decay=NO, diagonal=1, **BASE),
    "narrow_heads": Case((2, 130, 2, 2, 48, 40), initial_state=False, **BASE),
}
WIDE = ("gate_and_state", "documents_in_parts")
"""Those whose programs have 128 value channels."""


def _found(case: Case, arrays: dict[str, jax.Array], ids: jax.Array | None, processors: int) -> Any:
    batch, _, _, value_heads, key_size, value_size = case.shape
    options = vjp.Options(key_size**-0.5, case.segments, processors, max(1, case.diagonal))

    def call(q, k, v, write=None, log_decay=None, initial_state=None, diagonal=None):
        inputs = make_inputs(q, k, v, None, None, write, log_decay, initial_state, ids, diagonal)
        out, state = crop_results(inputs, vjp.linear_pass(options, pad_inputs(inputs)))
        return out.astype(v.dtype), state

    shapes = arrays["v"].shape, (batch, value_heads, key_size, value_size)
    # Not compiled: the interpreter can't run two kernels at once, as a compiled program may.
    return value_and_gradients(call, arrays, *shapes, jit=lambda function: function)


@pytest.mark.parametrize("name", mostly_slow(CASES, ("documents_in_parts", "hard_resets", "diagonal_of_four_rows")))
def test_results_and_gradients_are_those_of_the_scan(name, capsys):
    mosaic_interpreter.install()
    case = CASES[name]
    arrays, ids = make_arrays(case)
    batch, _, _, value_heads, key_size, value_size = case.shape
    with jax.enable_x64(True):
        doubles = {key: x.astype(jnp.float64) for key, x in arrays.items()}
        shapes = arrays["v"].shape, (batch, value_heads, key_size, value_size)
        expected = jax.tree.map(np.asarray, value_and_gradients(lambda **x: scan(case, x, ids), doubles, *shapes))
    (out, state), gradients = _found(case, arrays, ids, 1 if name in WIDE else 1000)
    assert relative_error(out, expected[0][0]) < 4e-3
    assert relative_error(state, expected[0][1]) < 4e-3
    for key, x in gradients.items():
        assert relative_error(x, expected[1][key]) < 4e-3, key
    assert "RACE" not in "".join(capsys.readouterr())


def test_what_crosses_chunks_between_stored_states_is_found_from_reads_and_writes():
    """The product of state and gradient at each chunk, from that at every fourth, in float64's place."""
    random = np.random.default_rng(0)
    chunks, kept = 11, np.exp(-random.random((1, 1, 11)))
    kept[0, 0, 6] = 0.0
    added, read = random.standard_normal((2, chunks, 5, 5))
    states, gradients = np.zeros((chunks + 1, 5, 5)), np.zeros((chunks + 1, 5, 5))
    for n in range(chunks):
        states[n + 1] = kept[0, 0, n] * states[n] + added[n]
    for n in reversed(range(chunks)):
        gradients[n] = kept[0, 0, n] * gradients[n + 1] + read[n]
    crossed = np.array([kept[0, 0, n] * np.sum(states[n] * gradients[n + 1]) for n in range(chunks)])
    reads = [np.sum(read[n] * states[n]) for n in range(chunks)]
    writes = [np.sum(added[n] * gradients[n + 1]) for n in range(chunks)]
    stored = [np.sum(states[n] * gradients[n + 1]) for n in range(0, chunks, STATES_EVERY)]
    np.testing.assert_allclose(_crossed(reads, writes, stored, kept), crossed, atol=2e-5)


def test_what_steps_between_stored_states_miss_is_shared_out_among_them():
    """Nothing read and nothing written: a line from one known product to the next, and no change after the last."""
    kept = np.ones((1, 1, 15))
    kept[..., 6], kept[..., 8] = 0.0, 0.0
    found = _crossed(np.zeros(15), np.zeros(15), [4.0, 8.0, 2.0, 5.0], kept)
    np.testing.assert_allclose(found, [4, 5, 6, 7, 8, 4, 0, 0, 0, 1.25, 2.5, 3.75, 5, 5, 5], atol=1e-6)


def _crossed(reads: Any, writes: Any, stored: Any, kept: np.ndarray) -> np.ndarray:
    """What crosses chunks, by the kernel of the decay's gradient, where first tokens read and last tokens write."""
    chunks = len(reads)
    far = np.zeros((2, 1, 1, 1, chunks, CHUNK), np.float32)
    far[0, ..., 0], far[1, ..., -1] = reads, writes
    found = np.zeros((1, 1, 1, len(stored), CHUNK), np.float32)
    found[..., 0] = stored
    q_far, k_far = jnp.asarray(far.reshape(2, 1, 1, 1, -1))
    none = jnp.zeros_like(q_far)
    inputs = make_inputs(
        *jnp.zeros((3, 1, chunks * CHUNK, 1, 64)), *[None] * 3, jnp.zeros((1, chunks * CHUNK, 1)), None, None
    )
    kernel_shape = vjp._kernel_shape(vjp.Options(1.0, 1, 132), inputs)
    back = Factors(None, (), jnp.asarray(kept, jnp.float32))
    d_q = Sums(none, None, none, none, q_far, None, None, None, None)
    d_k = Sums(none, None, None, None, k_far, None, None, None, jnp.asarray(found))
    gradient = log_decay_gradient(kernel_shape, inputs, back, d_q, d_k).reshape(chunks, CHUNK)
    np.testing.assert_allclose(gradient[:, 1:], np.repeat(gradient[:, 1:2], CHUNK - 1, 1), atol=2e-5)
    return np.asarray(gradient[:, 1])


@pytest.mark.parametrize("reverse", [False, True])
def test_pieces_of_parts_add_up_to_what_the_parts_add(reverse):
    mosaic_interpreter.install()
    random = np.random.default_rng(0)
    arrays = jnp.asarray(random.standard_normal((3, 1, 1024, 1, 64)), jnp.bfloat16)
    log_decay = -jnp.asarray(random.random((1, 1024, 1)), jnp.float32) / 64
    inputs = make_inputs(*arrays, None, None, None, log_decay, None, None)
    kernel_shape = vjp._kernel_shape(vjp.Options(1.0, 2, 132), inputs)
    factors = factors_of(kernel_shape, inputs, reverse=reverse)

    def states(processors):
        found = increments(
            *(kernel_shape, inputs.k, inputs.v, factors),
            reverse=reverse,
            num_compute_warpgroups=1,
            processors=processors,
        )
        return found[0].shape[2], scan_splits(kernel_shape, *found, None, vjp._SCAN, reverse=reverse)

    (one, expected), (two, found) = states(1), states(132)
    assert (one, two) == (1, 2)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("parts", mostly_slow([1, 2], [2]))
def test_two_shards_of_rows_are_the_whole_rows(parts, monkeypatch):
    """One after another on one device: what is exchanged is kept from the shard that found it."""
    mosaic_interpreter.install()
    random, half = np.random.default_rng(0), 4 * CHUNK
    q, k, v, d_out = jnp.asarray(random.standard_normal((4, 1, 2 * half, 1, 64)), jnp.bfloat16)
    log_decay, write = -jnp.asarray(random.random((2, 1, 2 * half, 1)), jnp.float32) / 256
    state, d_state = jnp.asarray(random.standard_normal((2, 1, 1, 64, 64)), jnp.float32)

    def call(axis, q, k, v, write, log_decay, state):
        options = vjp.Options(0.125, parts, 132, context_axis=axis)
        return vjp.linear_pass(options, make_inputs(q, k, v, None, None, write, log_decay, state, None))

    tokens = q, k, v, -write, log_decay
    (out, final), pull_back = jax.vjp(functools.partial(call, None), *tokens, state)
    expected = out, final, *pull_back((d_out, d_state))

    maps: dict[tuple[int, bool], Any] = {}
    shard = 0

    def entering(transition, offset, boundary, product, axis, *, reverse=False):
        maps[shard, reverse] = transition, offset
        if shard == (1 if reverse else 0):
            return boundary
        before, added = maps[1 - shard, reverse]
        return product(before, boundary) + added

    monkeypatch.setattr(row_shards, "entering", entering)
    monkeypatch.setattr(row_shards, "of_first_shard", lambda x, axis: x if shard == 0 else jnp.zeros_like(x))
    outs, pulls = [], []
    for shard in range(2):
        own = (x[:, shard * half : (shard + 1) * half] for x in tokens)
        (out, final), pull = jax.vjp(functools.partial(call, "rows"), *own, state)
        outs.append(out)
        pulls.append(pull)
    gradients = {}
    for shard in (1, 0):
        d_final = d_state if shard == 1 else jnp.zeros_like(d_state)
        gradients[shard] = pulls[shard]((d_out[:, shard * half : (shard + 1) * half], d_final))
    joined = [jnp.concatenate(pair, axis=1) for pair in zip(gradients[0][:-1], gradients[1][:-1], strict=True)]
    found = jnp.concatenate(outs, axis=1), final, *joined, gradients[0][-1] + gradients[1][-1]
    for x, right in zip(found, expected, strict=True):
        assert relative_error(x, right) < 3e-3


def test_a_shard_of_rows_runs_its_operator_once():
    """Increments and sums and, for the gradient, increments and three sums."""
    mesh = AbstractMesh((2,), ("x",), axis_types=(AxisType.Auto,), abstract_device=H200.abstract_device)
    x = dict.fromkeys(("q", "k", "v"), jax.ShapeDtypeStruct((1, 16384, 8, 128), jnp.bfloat16))
    x["log_decay"] = x["write"] = jax.ShapeDtypeStruct((1, 16384, 8), jnp.float32)

    def split_loss(x):
        with ops.context_axis("x"):
            return jax.lax.psum(jnp.sum(ops.linear_attention(**x)[0].astype(jnp.float32)), "x")

    spec = P(None, "x")
    both = jax.value_and_grad(split_loss)
    gradient = jax.shard_map(both, mesh=mesh, in_specs=spec, out_specs=(P(), spec))
    with jax.sharding.use_abstract_mesh(mesh):
        text = jax.jit(gradient).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2") == 6


@pytest.mark.parametrize("by_channel", [False, True])
def test_parts_of_a_wide_head_are_heads_that_share_a_key(by_channel):
    random = np.random.default_rng(0)
    q, k = jnp.asarray(random.standard_normal((2, 2, 7, 2, 8)), jnp.float32)
    v, write = jnp.asarray(random.standard_normal((2, 2, 7, 4, 256)), jnp.float32)
    write = write if by_channel else write[..., 0]
    log_decay = -jnp.asarray(random.random((2, 7, 4, 8) if by_channel else (2, 7, 4)), jnp.float32)
    state = jnp.asarray(random.standard_normal((2, 4, 8, 256)), jnp.float32)
    run = functools.partial(ops.linear_attention, q, k, implementation="scan")
    expected = run(v, log_decay=log_decay, write=write, initial_state=state)
    values, decay, (gate,), first = api._narrow_heads(v, log_decay, (write,), state)
    assert values.shape == (2, 7, 8, 128)
    found = api._wide_heads(*run(values, log_decay=decay, write=gate, initial_state=first), v)
    for x, right in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, right, rtol=1e-5, atol=1e-5)


def test_a_call_of_few_chunks_takes_them_by_itself_and_little_else():
    def launches(length):
        """Kernels of Mosaic GPU and of Triton."""
        x = dict.fromkeys(("q", "k", "v"), jax.ShapeDtypeStruct((1, length, 8, 128), jnp.bfloat16))
        x["log_decay"] = jax.ShapeDtypeStruct((1, length, 8), jnp.float32)
        with jax.sharding.use_abstract_mesh(H200):
            traced = jax.jit(lambda x: ops.linear_attention(**x)[0]).trace(x)
        lowered = traced.lower(lowering_platforms=("cuda",)).as_text()
        return tuple(lowered.count(target) for target in ("@mosaic_gpu_v2", "@__gpu$xla.gpu.triton"))

    assert launches(2047) == (0, 4)
    # Increments and sums; the decay's numbers and the scan over parts.
    assert launches(2048) == launches(8192) == (2, 2)


def test_programs_share_tiles_where_there_are_more_than_processors():
    kernel_shape = vjp._kernel_shape(
        vjp.Options(1.0, 1, 132), make_inputs(*jnp.zeros((3, 8, 64, 16, 128)), *[None] * 6)
    )
    assert vjp._groups(kernel_shape, vjp.Options(1.0, 1, 132)) == 2
    assert vjp._groups(dataclasses.replace(kernel_shape, batch=4), vjp.Options(1.0, 1, 132)) == 1
