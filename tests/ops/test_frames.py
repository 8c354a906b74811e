"""The way from an operator to a kernel is short enough to read in a traceback."""

import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.experimental import pallas

import pallas_kernels
import rnnlib
from rnnlib import ops

PACKAGES = tuple(str(Path(package.__file__).parent) for package in (rnnlib, pallas_kernels))


def test_eight_frames_at_most_from_the_delta_rule_to_its_kernels(monkeypatch):
    frames, pallas_call = {}, pallas.pallas_call

    def count(*args, name, **options):
        frames[name] = [f"{f.filename}:{f.name}" for f in traceback.extract_stack() if f.filename.startswith(PACKAGES)]
        return pallas_call(*args, name=name, **options)

    monkeypatch.setattr(pallas, "pallas_call", count)
    x, beta = jnp.ones((1, 192, 1, 16)), jnp.ones((1, 192, 1))
    jax.make_jaxpr(lambda x: ops.gated_delta_rule(x, x, x, beta=beta, implementation="triton"))(x)
    assert list(frames) == ["delta_prepare", "delta_segment_maps", "delta_fold_segments", "delta_output"]
    for name, path in frames.items():
        assert len(path) <= 8, (name, path)
    documented = [line.split()[:2] for line in ops.__doc__.partition("one frame of a traceback:")[2].splitlines()[2:10]]
    for (file, function), frame in zip(documented, frames["delta_prepare"], strict=True):
        assert frame.endswith(f"/{file}:{function}")
