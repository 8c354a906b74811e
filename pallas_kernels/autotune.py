"""Measures and checks launch parameters on the GPU at hand and writes its table.

    python -m pallas_kernels.autotune                      # all variants, into delta_rule/tuned/
    python -m pallas_kernels.autotune --variants scalar --output table.json

Every candidate of every kernel is run on random inputs; one whose results differ from the safe default's by more than
rounding is dropped, however fast it is. The default itself, and the schedule that comes out, are checked end to end
against a token-by-token scan in float64: outputs, final states and all gradients. Times are the device's own, from a
profile. Nothing here runs at a user's first step: tables are files in the package.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import glob
import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.common.config import KernelConfig
from pallas_kernels.common.platform import device_kind, platform
from pallas_kernels.common.triton.backend import shared_memory
from pallas_kernels.common.triton.kernel_shape import KernelShape
from pallas_kernels.delta_rule.config import DeltaRuleConfig, default_config, splits, with_num_splits
from pallas_kernels.delta_rule.inputs import Inputs, crop_results, is_sum, kernel_shape_of, pad_inputs
from pallas_kernels.delta_rule.triton.bwd_dh import bwd_dh, bwd_dh_offsets
from pallas_kernels.delta_rule.triton.bwd_dqkg import bwd_dqkg
from pallas_kernels.delta_rule.triton.bwd_pairs import Saved, bwd_pairs
from pallas_kernels.delta_rule.triton.decode import decode
from pallas_kernels.delta_rule.triton.fwd import fwd_h, fwd_o
from pallas_kernels.delta_rule.triton.split_sequence import combine_splits, split_transitions
from pallas_kernels.delta_rule.triton.wy import wy_factors
from pallas_kernels.delta_rule.tuned_configs import table_name, variant_name
from pallas_kernels.delta_rule.vjp import Options, choose_pass
from pallas_kernels.linear_attention.triton import Places, rows_of, states_of_splits, sums
from pallas_kernels.linear_attention.vjp import linear_pass

_LOOPS = [
    *(KernelConfig(4, stages, 64) for stages in (1, 2, 3)),
    *(KernelConfig(8, stages, 128) for stages in (2, 3)),
    *(KernelConfig(4, stages, 32) for stages in (1, 2, 3)),
    *(KernelConfig(4, stages, 64, is_lean=True) for stages in (2, 3)),
    KernelConfig(8, 3, 128, is_lean=True),
]
_SUMS = [
    *(KernelConfig(4, stages, 64) for stages in (1, 2, 3)),
    *(KernelConfig(warps, stages, 128) for warps in (4, 8) for stages in (1, 2)),
    *(KernelConfig(4, stages, 32) for stages in (1, 2)),
    KernelConfig(4, 3, 64, is_lean=True),
]
CANDIDATES: dict[str, list[KernelConfig]] = {
    "prepare": [KernelConfig(warps, 1) for warps in (2, 4)],
    "maps": _LOOPS,
    "fold": [KernelConfig(4, stages, block) for stages in (2, 3) for block in (16, 32, 64)],
    "output": _LOOPS,
    "states": _LOOPS,
    "offsets": _LOOPS,
    "reverse": _LOOPS,
    "pair_gradients": [KernelConfig(4, stages, 64, inner) for stages in (2, 3) for inner in (32, 64)]
    + [KernelConfig(4, 1, 64, 128)],
    "gradients": [KernelConfig(4, 1, block, inner) for block in (32, 64) for inner in (32, 64, 128)]
    + [KernelConfig(4, 2, 64, 64), KernelConfig(4, 3, 64, 32), KernelConfig(4, 4, 64, 32)],
    "decode": [KernelConfig(warps, 1, block) for warps in (2, 4, 8) for block in (32, 64, 128)],
    "increments": [
        *(KernelConfig(4, stages, 64) for stages in (2, 3)),
        KernelConfig(4, 2, 128),
        KernelConfig(8, 3, 128),
    ],
    "scan": [KernelConfig(4, 1, 8, 8), KernelConfig(4, 1, 4, 16), KernelConfig(2, 1, 4, 16)],
    "sums": _SUMS,
    "gradient_sums": _SUMS,
}
# Largest relative difference of a candidate from the default, and of a schedule from the float64 scan.
_ROUNDING = {"bfloat16": 5e-3, "float32": 1e-5}
_ERROR = {"bfloat16": 1e-2, "float32": 1e-4}


def random_inputs(shape: tuple[int, ...], solve: str, decay: str, dtype: str, seed: int = 0) -> Inputs:
    """Unit queries and keys, sigmoid gates and mild decays of `[B, T, H]` tokens with K and V channels."""
    batch, length, heads, key_size, value_size = shape
    keys = jax.random.split(jax.random.key(seed), 8)

    def unit(key):
        x = jax.random.normal(key, (batch, length, heads, key_size))
        return (x / jnp.linalg.norm(x, axis=-1, keepdims=True)).astype(dtype)

    gate = jax.nn.sigmoid(jax.random.normal(keys[3], (batch, length, heads))).astype(dtype)
    channels = {"none": None, "scalar": (), "channel": (key_size,)}[decay]
    log_decay = None
    if channels is not None:
        log_decay = jax.nn.log_sigmoid(jax.random.normal(keys[4], (batch, length, heads, *channels)) + 3.0)
    return Inputs(
        q=unit(keys[0]),
        k=unit(keys[1]),
        v=jax.random.normal(keys[2], (batch, length, heads, value_size), jnp.float32).astype(dtype),
        write_key=unit(keys[6]) if solve == "delta+key" else None,
        erase=None if solve == "linear" else gate,
        write=gate,
        log_decay=log_decay,
        initial_state=jax.random.normal(keys[5], (batch, heads, key_size, value_size)),
    )


def scan(options: Options, inputs: Inputs) -> tuple[Array, Array]:
    """The recurrence token by token, in the inputs' precision: what everything is checked against."""

    def step(state, token):
        q, k, v, write_key, erase, write, log_decay = token
        if log_decay is not None:
            decay = jnp.exp(log_decay)
            state = state * (decay[..., None, None] if decay.ndim == 2 else decay[..., None])
        residual = v * write[..., None]
        if options.online:
            residual = residual - jnp.einsum("bhkv,bhk->bhv", state, k * erase[..., None])
        state = state + (k if write_key is None else write_key)[..., None] * residual[..., None, :]
        return state, options.scale * jnp.einsum("bhkv,bhk->bhv", state, q)

    x = inputs
    tokens = (x.q, x.k, x.v, x.write_key, x.erase, x.write, x.log_decay)
    tokens = jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), tokens)
    initial: Any = x.initial_state
    state, out = jax.lax.scan(step, initial, tokens)
    return jnp.moveaxis(out, 0, 1), state


def sum_stages(options: Options, inputs: Inputs) -> dict[str, tuple[Callable[[KernelConfig], Callable], Any]]:
    """`stages` of linear attention."""
    x, config = inputs, options.config
    p = kernel_shape_of(KernelShape, x, online=False, scale=options.scale, num_splits=config.num_splits)
    places, rows = Places(x.q, x.k, x.v), jax.jit(lambda x: rows_of(p, x))(x)

    def starts_of(l: KernelConfig, other: KernelConfig):
        return lambda x: states_of_splits(p, x, rows, x.k, x.v, x.initial_state, (l, other))

    split_states = jax.jit(starts_of(config.increments, config.scan))(x)
    found: dict[str, tuple[Callable[[KernelConfig], Callable], Any]] = {
        "sums": (lambda l: lambda x, s, y: sums(p, x, rows, y, s, l), (x, split_states, places)),
        "gradient_sums": (lambda l: lambda x, s, y: sums(p, x, rows, y, s, l, reverse=True), (x, split_states, places)),
    }
    if p.num_splits > 1:
        found["increments"] = lambda l: starts_of(l, config.scan), (x,)
        found["scan"] = lambda l: starts_of(config.increments, l), (x,)
    return found


def stages(options: Options, inputs: Inputs) -> dict[str, tuple[Callable[[KernelConfig], Callable], Any]]:
    """For each kernel, what makes a function of its arguments from a launch, and its arguments from the default run."""
    if is_sum(inputs, options.online):
        return sum_stages(options, inputs)
    x, config = inputs, options.config
    p = kernel_shape_of(KernelShape, x, online=options.online, scale=options.scale, num_splits=config.num_splits)
    prepared = jax.jit(lambda x: wy_factors(p, x, config.prepare))(x)
    ends = None
    maps = None
    if p.num_splits > 1:
        maps = jax.jit(lambda x, y: split_transitions(p, x, y, config.maps))(x, prepared)
    split_states = jax.jit(lambda m: combine_splits(p, m, x.initial_state, config.fold))(maps)
    states, residuals = jax.jit(lambda x, y, z: fwd_h(p, x, y, z, config.states))(x, prepared, split_states)
    if maps is not None:
        offset = jax.jit(lambda x, y, d: bwd_dh_offsets(p, x, y, d, config.offsets))(x, prepared, x.v)
        adjoint = maps._replace(offset=offset)
        ends = jax.jit(lambda m: combine_splits(p, m, None, config.fold, reverse=True))(adjoint)
    back = jax.jit(lambda x, y, e: bwd_dh(p, x, y, x.v, None, e, config.reverse))(x, prepared, ends)
    saved = Saved(states, residuals, back)
    pairs = jax.jit(lambda x, s: bwd_pairs(p, x, x.v, s, config.pair_gradients))(x, saved)
    found: dict[str, tuple[Callable[[KernelConfig], Callable], Any]] = {
        "prepare": (lambda l: lambda x: wy_factors(p, x, l), (x,)),
        "output": (lambda l: lambda x, y, z: fwd_o(p, x, y, z, l), (x, prepared, split_states)),
        "states": (lambda l: lambda x, y, z: fwd_h(p, x, y, z, l), (x, prepared, split_states)),
        "reverse": (lambda l: lambda x, y, e: bwd_dh(p, x, y, x.v, None, e, l), (x, prepared, ends)),
        "pair_gradients": (lambda l: lambda x, s: bwd_pairs(p, x, x.v, s, l), (x, saved)),
        "gradients": (
            lambda l: lambda x, s, d: bwd_dqkg(p, x, x.v, s, d, prepared, l),
            (x, saved, pairs),
        ),
    }
    if maps is not None:
        found |= {
            "maps": (lambda l: lambda x, y: split_transitions(p, x, y, l), (x, prepared)),
            "fold": (lambda l: lambda m: combine_splits(p, m, None, l), (maps,)),
            "offsets": (lambda l: lambda x, y, d: bwd_dh_offsets(p, x, y, d, l), (x, prepared, x.v)),
        }
    return found


def decode_stage(options: Options, inputs: Inputs) -> dict[str, tuple[Callable[[KernelConfig], Callable], Any]]:
    """The same for the kernel of a single token."""
    p = kernel_shape_of(KernelShape, inputs, online=options.online, scale=options.scale)
    return {"decode": (lambda l: lambda x: decode(p, x, l), (inputs,))}


def difference(results: Any, reference: Any) -> float:
    """Largest `||x - reference|| / ||reference||` over the arrays of two trees; NaN counts as infinite."""
    worst = 0.0
    for x, y in zip(jax.tree.leaves(results), jax.tree.leaves(reference)):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        error = np.linalg.norm(x - y) / max(np.linalg.norm(y), 1e-30)
        worst = max(worst, error if np.isfinite(error) else np.inf)
    return float(worst)


@jax.jit
def device_difference(results: Any, reference: Any) -> Array:
    """The same on the device, in float32."""
    errors = [jnp.zeros(())]
    for x, y in zip(jax.tree.leaves(results), jax.tree.leaves(reference)):
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        error = jnp.linalg.norm((x - y).ravel()) / jnp.maximum(jnp.linalg.norm(y.ravel()), 1e-30)
        errors.append(jnp.where(jnp.isfinite(error), error, jnp.inf))
    return jnp.max(jnp.stack(errors))


def check_config(options: Options, variant: tuple[str, str, str], sizes: tuple[int, int]) -> float:
    """Largest relative error of output, final state and gradients against the scan in float64."""
    inputs = random_inputs((1, 448, 2, *sizes), *variant, seed=1)
    weights = jax.random.normal(jax.random.key(7), inputs.v.shape)

    def loss(function, inputs):
        out, state = function(inputs)
        return jnp.sum(out.astype(weights.dtype) * weights) + jnp.sum(state), (out, state)

    def run(function, inputs):
        return jax.jit(jax.value_and_grad(functools.partial(loss, function), has_aux=True))(inputs)

    def apply(inputs):
        pass_over = linear_pass if is_sum(inputs, options.online) else choose_pass()
        return crop_results(inputs, pass_over(options, pad_inputs(inputs)))

    (_, results), gradients = run(apply, inputs)
    with jax.enable_x64(True):
        doubles = jax.tree.map(lambda a: a.astype(jnp.float64), inputs)
        (_, reference), d_reference = run(functools.partial(scan, options), doubles)
        return difference((results, gradients), (reference, d_reference))


def device_times(runs: Iterable[tuple[Any, Any, Any]], repeats: int = 5) -> dict[Any, float]:
    """Median device time in ms that each run (key, compiled function, arguments) spends in kernels of this package."""
    runs = list(runs)
    counts = [function.as_text().count('"__gpu$xla.gpu.triton"') for _, function, _ in runs]
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _, function, arguments in runs:
                for _ in range(repeats):
                    result = function(*arguments)
                jax.block_until_ready(result)
        (file,) = glob.glob(folder + "/**/*.xplane.pb", recursive=True)
        events = [
            (event.start_ns, event.duration_ns / 1e6)
            for plane in jax.profiler.ProfileData.from_file(file).planes
            if "GPU" in plane.name
            for line in plane.lines
            if line.name.startswith("Stream")
            for event in line.events
            if event.name.startswith(("delta_", "linear_"))
        ]
    if len(events) != sum(counts) * repeats:
        raise RuntimeError(f"the profile has {len(events)} kernels, expected {sum(counts) * repeats}")
    durations = iter([duration for _, duration in sorted(events)])
    return {
        key: float(np.median([sum(next(durations) for _ in range(count)) for _ in range(repeats)]))
        for count, (key, _, _) in zip(counts, runs)
    }


def short_name(launch: KernelConfig) -> str:
    """A launch in a few characters."""
    return f"w{launch.num_warps}s{launch.num_stages}b{launch.block}i{launch.inner}" + "l" * launch.is_lean


def best_launches(
    table: dict[str, tuple[Callable, Any]], dtype: str, default: DeltaRuleConfig
) -> dict[str, KernelConfig]:
    """The fastest candidate of each kernel among those that compile and agree with the default."""
    jobs = {(stage, launch): table[stage] for stage in table for launch in CANDIDATES[stage]}
    jobs |= {(stage, getattr(default, stage)): table[stage] for stage in table}

    def compile_one(job):
        (stage, launch), (make, arguments) = job
        try:
            return (stage, launch), jax.jit(make(launch)).lower(*arguments).compile(), arguments
        except Exception as error:  # a candidate may ask for more shared memory than there is
            print(f"  {stage} {short_name(launch)}: {str(error).splitlines()[0][:100]}")
            return None

    with concurrent.futures.ThreadPoolExecutor() as pool:
        compiled = [run for run in pool.map(compile_one, jobs.items()) if run is not None]
    by_key = {key: (function, arguments) for key, function, arguments in compiled}
    sound = []
    for (stage, launch), function, arguments in compiled:
        reference, reference_arguments = by_key[stage, getattr(default, stage)]
        found = float(device_difference(function(*arguments), reference(*reference_arguments)))
        if found <= _ROUNDING[dtype]:
            sound.append(((stage, launch), function, arguments))
        else:
            print(f"  {stage} {short_name(launch)}: differs from the default by {found:.1e}, dropped")
    times = device_times(sound)
    best = {}
    for stage in table:
        launch = min((launch for s, launch in times if s == stage), key=lambda l: times[stage, l])
        best[stage] = launch
        print(
            f"  {stage}: {times[stage, launch]:.4f} ms, default {times[stage, getattr(default, stage)]:.4f}: {launch}"
        )
    return best


def tune_variant(solve: str, decay: str, dtype: str, sizes: tuple[int, int]) -> tuple[str, dict[str, Any]]:
    """Table entry of one variant."""
    few, many = (2, 16) if splits(sizes[0]) else (1, 1)
    if solve == "linear" and decay != "channel":
        few, many = 2, 8 if decay == "none" else 16
    default = _checked_default((solve, decay, dtype), sizes, few)
    inputs = random_inputs((1, 8192, 8, *sizes), solve, decay, dtype)
    options = dataclasses.replace(default, config=with_num_splits(default.config, many))
    best = best_launches(stages(options, inputs), dtype, default.config)
    best |= best_launches(
        decode_stage(options, random_inputs((64, 1, 8, *sizes), solve, decay, dtype)), dtype, default.config
    )
    return variant_name(inputs, solve != "linear"), _checked_entry(default, (solve, decay, dtype), sizes, best)


def tune_underfilled(solve: str, decay: str, dtype: str, sizes: tuple[int, int]) -> tuple[str, dict[str, Any]]:
    """What the passes over chunks take where each processor runs one program at most (see `table_launches`)."""
    num_splits = 2 if splits(sizes[0]) else 1
    default = _checked_default((solve, decay, dtype), sizes, num_splits)
    rows = max(1, 16 // (num_splits * max(1, sizes[1] // 64)))  # 128 programs
    inputs = random_inputs((rows, 2048, 8, *sizes), solve, decay, dtype)
    passes = {name: stage for name, stage in stages(default, inputs).items() if CANDIDATES[name] is _LOOPS}
    best = best_launches(passes, dtype, default.config)
    return variant_name(inputs, solve != "linear"), _checked_entry(default, (solve, decay, dtype), sizes, best)


def _checked_default(variant: tuple[str, str, str], sizes: tuple[int, int], num_splits: int) -> Options:
    solve, _, dtype = variant
    config = default_config(sizes[0], dtype, num_splits=num_splits, shared_memory=shared_memory())
    default = Options(solve != "linear", sizes[0] ** -0.5, config)
    error = check_config(default, variant, sizes)
    if not error < _ERROR[dtype]:
        raise RuntimeError(f"the default schedule's error is {error:.1e} for {variant} {sizes}")
    return default


def _checked_entry(
    default: Options, variant: tuple[str, str, str], sizes: tuple[int, int], best: dict[str, KernelConfig]
) -> dict[str, dict[str, int]]:
    """`best` as the table has it, if the results with it are right."""
    launches: dict[str, Any] = dict(best)
    error = check_config(
        dataclasses.replace(default, config=dataclasses.replace(default.config, **launches)), variant, sizes
    )
    if not error < _ERROR[variant[2]]:
        raise RuntimeError(f"the schedule found has an error of {error:.1e} for {variant} {sizes}")
    print(f"{variant} {sizes}: error against the float64 scan {error:.1e}", flush=True)
    return {stage: dataclasses.asdict(launch) for stage, launch in best.items()}


def main() -> None:
    """Entry point of `python -m pallas_kernels.autotune`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", default=["none", "scalar", "channel"], help="kinds of decay")
    parser.add_argument("--solves", nargs="+", default=["delta", "delta+key", "linear"])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"])
    parser.add_argument("--sizes", nargs="+", default=["128x128"], help="key size x value size")
    parser.add_argument("--output", type=Path, help="default: the device's table in the package, updated")
    arguments = parser.parse_args()
    if platform() == "cpu":
        raise SystemExit("tuning needs a GPU")
    path = arguments.output or Path(__file__).parent / "delta_rule" / "tuned" / table_name(device_kind())
    table: dict[str, Any] = (
        json.loads(path.read_text()) if path.is_file() else {"device": device_kind(), "variants": {}}
    )
    table["processors"] = jax.devices()[0].core_count
    table["jax"] = jax.__version__
    for dtype in arguments.dtypes:
        for size in arguments.sizes:
            key_size, value_size = (int(n) for n in size.split("x"))
            for solve in arguments.solves:
                for decay in arguments.variants:
                    name, entry = tune_variant(solve, decay, dtype, (key_size, value_size))
                    table["variants"][name] = entry
                    if solve != "linear" or decay == "channel":  # else no pass over chunks
                        name, entry = tune_underfilled(solve, decay, dtype, (key_size, value_size))
                        table.setdefault("underfilled", {})[name] = entry
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    print(f"written: {path}")


if __name__ == "__main__":
    main()
