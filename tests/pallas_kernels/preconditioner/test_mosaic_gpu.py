"""The diagonal Gram in one pass, in Mosaic GPU: interpreted with races looked for, against the scan in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.preconditioner import api
from pallas_kernels.preconditioner.mosaic_gpu import turns
from pallas_kernels.preconditioner.readouts import Preconditioner, ShermanMorrisonKey
from rnnlib import ops
from tests.pallas_kernels import mosaic_interpreter
from tests.pallas_kernels.cases import relative_error
from tests.pallas_kernels.preconditioner.test_preconditioner import make_arguments
from tests.pallas_kernels.test_lowering import H200, distinct_kernels, lowered_text
from tests.selection import mostly_slow

# Shape, arguments left out, whether there are documents, dtype of the result's gradient, squash.
CASES = {
    "everything": ((1, 70, 2, 128), (), True, jnp.float32, "rational"),
    "fewer_chunks_than_warpgroups": ((2, 33, 1, 128), (), False, jnp.bfloat16, "tanh"),
    "more_chunks_than_slots": ((1, 520, 1, 128), ("initial_state",), False, jnp.float32, "rational"),
    "no_gates": ((1, 64, 1, 128), ("log_decay", "gain", "initial_state"), False, jnp.float32, "rational"),
    "documents_alone": ((1, 64, 1, 128), ("log_decay", "gain"), True, jnp.bfloat16, "rational"),
}


def _arguments(name):
    shape, absent, has_documents, dtype, squash = CASES[name]
    arguments = make_arguments(shape, jnp.bfloat16)
    arguments["center"] = arguments.pop("number")
    for key in absent:
        del arguments[key]
    ids = jnp.asarray(np.cumsum(np.random.default_rng(1).random(shape[:2]) < 0.05, axis=1), jnp.int32)
    options = {"squash": squash, "segment_ids": ids if has_documents else None}
    return arguments, options, dtype


def _results(function, arguments):
    """Results and gradients for them. Not compiled: the interpreter can't run two kernels at once."""
    results, pull = jax.vjp(lambda x: function(**x), arguments)
    random = np.random.default_rng(2)
    weights = [jnp.asarray(random.normal(size=x.shape), jnp.bfloat16).astype(x.dtype) for x in results]
    (gradients,) = pull(tuple(weights))
    return dict(zip(("key", "write_key", "final_state"), results)) | {f"d_{key}": x for key, x in gradients.items()}


@pytest.mark.parametrize("name", mostly_slow(CASES, ("everything", "more_chunks_than_slots")))
def test_results_and_gradients_are_those_of_the_scan(name, monkeypatch, capsys):
    mosaic_interpreter.install()
    monkeypatch.setattr(api, "is_hopper", lambda: True)
    arguments, options, dtype = _arguments(name)

    def call(implementation, dtype):
        return lambda **x: ops.precondition_key(**x, **options, implementation=implementation, write_key_dtype=dtype)

    with jax.enable_x64(True):
        doubles = jax.tree.map(lambda x: x.astype(jnp.float64), arguments)
        expected = jax.tree.map(np.asarray, _results(call("scan", jnp.float64), doubles))
    found = _results(call("mosaic", dtype), arguments)
    errors = {key: relative_error(x, expected[key]) for key, x in found.items()}
    rounded = {key for key, x in found.items() if x.dtype == jnp.bfloat16} | {"write_key"}
    assert all(error < (3e-3 if key in rounded else 1e-5) for key, error in errors.items()), errors
    assert "RACE" not in "".join(capsys.readouterr())


def test_what_it_does_not_serve_says_why(monkeypatch):
    k = jnp.zeros((1, 4, 1, 128), jnp.bfloat16)
    key = Preconditioner(1.5, 1e-6, "symmetric", "rational", times_row=True)
    given = {"readout": key, "stored": jnp.bfloat16, "backend": "mosaic"}
    assert "Hopper" in api.unsupported_reason(k, **given)
    monkeypatch.setattr(api, "is_hopper", lambda: True)
    assert api.unsupported_reason(k, **given) is None
    assert "float32" in api.unsupported_reason(k.astype(jnp.float32), **given)
    assert "stored" in api.unsupported_reason(k, **(given | {"stored": jnp.float32}))
    assert "key size 64" in api.unsupported_reason(k[..., :64], **given)
    assert "beside the key" in api.unsupported_reason(k, k, **given)
    assert "a channel" in api.unsupported_reason(k, log_decay=k, **given)
    assert "ShermanMorrisonKey" in api.unsupported_reason(k, **(given | {"readout": ShermanMorrisonKey()}))


def test_heads_that_fill_the_card_take_it():
    def is_chosen(batch, heads):
        return api.is_mosaic_faster(jax.ShapeDtypeStruct((batch, 4096, heads, 128), jnp.bfloat16))

    assert is_chosen(8, 8) and is_chosen(8, 16) and not is_chosen(1, 8) and not is_chosen(4, 8)


def test_it_lowers_to_a_kernel_in_each_direction():
    rows = (8, 4096, 16)
    shapes = {"log_decay": (rows, jnp.float32), "gain": (rows, jnp.bfloat16), "k": ((*rows, 128), jnp.bfloat16)}
    arguments = {key: jax.ShapeDtypeStruct(*x) for key, x in shapes.items()}

    def loss(x):
        return sum(jnp.sum(y.astype(jnp.float32)) for y in ops.precondition_key(**x, write_key_dtype=jnp.float32))

    with jax.sharding.use_abstract_mesh(H200):
        text = lowered_text(jax.grad(loss), arguments)
    assert len(distinct_kernels(text)) == 2 and "xla.gpu.triton" not in text


def test_warpgroups_have_no_more_registers_than_their_program_starts_with():
    for groups, (computing, copying) in turns._REGISTERS.items():
        at_start = 65536 // (128 * (groups + 1)) // 8 * 8
        assert copying <= at_start <= computing and groups * computing + copying <= (groups + 1) * at_start
