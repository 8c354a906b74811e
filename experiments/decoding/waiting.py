"""`python -m experiments.decoding.waiting`: the step of one token where writes to the state wait, and where none does.

Both in one process: the kernel in a loop over tokens and layers. On a GPU its time is that of a profile: between
kernels of a loop pass 10 to 30 microseconds where XLA makes no CUDA graph of it.
"""

import dataclasses
import functools
import itertools
import json
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import tyro
from jax import Array, lax

from experiments.harness.command import errors_as_lines
from experiments.harness.environment import command_line, environment
from experiments.harness.tables import write_text
from experiments.throughput.profiling import profile
from pallas_kernels import operators
from pallas_kernels.common.config import KernelConfig
from pallas_kernels.delta_rule.api import gated_delta_rule
from pallas_kernels.delta_rule.delayed_state import PERIOD, DelayedState, without_pending
from pallas_kernels.delta_rule.delayed_update import delayed_token, flush

Step = Callable[[Array, dict[str, Any], Any], tuple[Array, Any]]


@dataclasses.dataclass(frozen=True)
class Options:
    """Times a token's step with states that are stored each time, and with writes that wait."""

    output: pathlib.Path
    """JSON file of the numbers."""
    texts: tuple[int, ...] = (16, 32, 64, 256)
    heads: int = 8
    channels: int = 128
    """K and V, a power of two."""
    tokens: int = 64
    """Of a timed loop."""
    gigabytes: float = 0.8
    """Of all layers' states in a loop: more than a card's cache."""
    decays: tuple[Literal["none", "scalar", "channel"], ...] = ("none", "scalar", "channel")
    """Kinds of decay that the kernel is timed with."""
    blocks: tuple[int, ...] = ()
    """Value channels of a program to time besides the schedule's, each with all `warps`."""
    warps: tuple[int, ...] = (1, 2, 4)
    """Warps of a program with these `blocks`."""
    commit: str | None = None
    """Commit to record where there is no git repository."""


def draw_token(decay: str, texts: int, heads: int, channels: int) -> dict[str, Any]:
    """A token of the delta rule in bfloat16, whose one gate erases and writes; `decay` is none, scalar or channel."""
    keys = jax.random.split(jax.random.key(0), 5)
    shape = (texts, 1, heads, channels)
    q, k, v = (jax.random.normal(key, shape) for key in keys[:3])
    token = {"q": q / jnp.linalg.norm(q, axis=-1, keepdims=True), "k": k / jnp.linalg.norm(k, axis=-1, keepdims=True)}
    token = {name: x.astype(jnp.bfloat16) for name, x in (token | {"v": v}).items()}
    gate = jax.nn.sigmoid(jax.random.normal(keys[3], shape[:3]))
    token |= {"erase": gate, "write": gate}
    if decay != "none":
        logits = jax.random.normal(keys[4], shape if decay == "channel" else shape[:3])
        token["log_decay"] = -0.1 * jax.nn.softplus(logits)
    return token


def in_a_loop(step: Step, token: dict[str, Any], tokens: int, states: list) -> tuple[list, Array]:
    """Gives every layer the token, whose value moves by the output of the layer before it."""

    def body(t: Array, carry: tuple[list, Array]) -> tuple[list, Array]:
        states, out = carry
        after = []
        for state in states:
            out, state = step(t, token | {"v": token["v"] + 1e-3 * out}, state)
            after.append(state)
        return after, out

    return lax.fori_loop(0, tokens, body, (states, token["v"]))


def stored_each_time(token: dict[str, Any], tokens: int, states: list) -> tuple[list, Array]:
    """The loop whose steps store the states."""

    def step(t: Array, token: dict[str, Any], state: Array) -> tuple[Array, Any]:
        return gated_delta_rule(**token, initial_state=state)

    return in_a_loop(step, token, tokens, states)


def waiting(token: dict[str, Any], tokens: int, states: list, **how: Any) -> tuple[list, Array]:
    """The same loop with writes that wait; the states are settled after it. `how` is passed to `delayed_token`."""

    def step(t: Array, token: dict[str, Any], state: DelayedState) -> tuple[Array, Any]:
        return delayed_token(**token, delayed=state._replace(num_pending=t % PERIOD), **how)

    start = [without_pending(state, token["k"], token.get("log_decay")) for state in states]
    after, out = in_a_loop(step, token, tokens, start)
    return [flush(x._replace(num_pending=jnp.int32(tokens % PERIOD))) for x in after], out


def time_kernels(options: Options, decay: str, texts: int) -> dict[str, Any]:
    """Microseconds of a token and layer, and whether both loops' states and outputs have the same bits."""
    shape = (texts, options.heads, options.channels, options.channels)
    size = 4 * texts * options.heads * options.channels**2
    layers = min(24, max(2, round(options.gigabytes * 1e9 / size)))
    states = [0.1 * jax.random.normal(jax.random.key(i), shape) for i in range(layers)]
    token = draw_token(decay, texts, options.heads, options.channels)
    record: dict[str, Any] = {"decay": decay, "texts": texts, "heads": options.heads, "layers": layers}
    loops: dict[str, Callable[..., tuple[list, Array]]] = {
        "stored_each_time_us": stored_each_time,
        "waiting_us": waiting,
    }
    if operators.delayed_update.unsupported_reason(token["q"], token["k"], token["v"], backend="mosaic") is None:
        loops["waiting_in_mosaic_us"] = functools.partial(waiting, backend="mosaic")
    for block, warps in itertools.product(options.blocks, options.warps):
        launch = KernelConfig(num_warps=warps, num_stages=1, block=block)
        loops[f"waiting_{block}_channels_{warps}_warps_us"] = functools.partial(waiting, launch=launch)
    results = {}
    for name, loop in loops.items():
        run = jax.jit(functools.partial(loop, token, options.tokens))
        results[name] = jax.tree.leaves(jax.block_until_ready(run(states)))
        record[name] = round(_seconds(functools.partial(run, states)) / (options.tokens * layers) * 1e6, 2)
    # Other launches, and Mosaic's kernel, add up in another order.
    stored = results["stored_each_time_us"]
    record["same_bits"] = all(bool((x == y).all()) for x, y in zip(results["waiting_us"], stored, strict=True))
    if "waiting_in_mosaic_us" in results:  # the last array is the output
        record["states_error_in_mosaic"] = max(map(_error, results["waiting_in_mosaic_us"][:-1], stored[:-1]))
    return record


def _error(x: Array, y: Array) -> float:
    """Of `x`, relative to the largest number of `y`."""
    return float(jnp.abs(x.astype(jnp.float32) - y.astype(jnp.float32)).max() / jnp.abs(y.astype(jnp.float32)).max())


def _seconds(run: Callable[[], Any]) -> float:
    """What the step's kernels take on a GPU, in a profile of one call; elsewhere the fastest call as a whole."""
    if jax.default_backend() == "gpu":
        operations = profile(lambda: jax.block_until_ready(run()), "")
        return sum(x.milliseconds for x in operations if x.kernel.startswith("delta_decode")) / 1e3
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def main(argv: Sequence[str] | None = None) -> None:
    """Times what the options say and writes it."""
    options = tyro.cli(Options, args=argv, prog="python -m experiments.decoding.waiting")
    where = environment(command_line("experiments.decoding.waiting"), options.commit)
    with errors_as_lines():
        kernels = []
        for decay in options.decays:
            for texts in options.texts:
                kernels.append(time_kernels(options, decay, texts))
                print(json.dumps(kernels[-1]), flush=True)
        write_text(options.output, json.dumps({"kernels": kernels, "environment": where}, indent=1) + "\n")


if __name__ == "__main__":
    main()
