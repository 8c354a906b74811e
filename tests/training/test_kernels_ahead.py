"""Kernels that are compiled beside their program: which they are, and that XLA does not compile them again."""

import jax
import jax.numpy as jnp
import pytest

from experiments.kernel_benchmarks.offline.compiling import missing_packages
from rnnlib.training import kernels_ahead
from tests.described_card import output_of
from tests.training import kernels_on_described_card

LOWERED = jax.jit(jnp.sin).lower(1.0)


def test_a_program_without_such_kernels_has_none():
    assert kernels_ahead.mosaic_kernels(LOWERED) == []
    assert kernels_ahead.compile_kernels_ahead(LOWERED, "unused") == []


def test_an_error_is_left_to_the_program(monkeypatch):
    x = jax.ShapeDtypeStruct((2,), "float32")
    broken = kernels_ahead.Kernel((x,), (x,), {"kernel_hash": b"none"})  # a CPU knows no such call
    with pytest.raises(Exception, match="mosaic_gpu_v2"):
        broken.compile()
    monkeypatch.setattr(kernels_ahead, "mosaic_kernels", lambda _: [broken, broken])
    threads = kernels_ahead.compile_kernels_ahead(LOWERED, "ahead")
    assert [thread.name for thread in threads] == ["ahead_kernel_0", "ahead_kernel_1"]
    for thread in threads:  # an error would be a warning of pytest, which fails
        thread.join()


@pytest.mark.skipif(missing_packages() is not None, reason="XLA's plugin for CUDA is not installed")
def test_a_kernel_that_was_compiled_ahead_is_not_compiled_again():
    assert output_of(kernels_on_described_card.__name__).split() == ["2", "kernels,", "2", "compiled,", "then", "0"]
