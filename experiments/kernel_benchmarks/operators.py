"""The operators that are measured. A new operator is one more entry here, and its peers' calls in `peers.py`."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array

from experiments.kernel_benchmarks.inputs import LEAST_LOG_DECAY
from rnnlib import ops

Arrays = Mapping[str, Array]
Run = Callable[..., tuple[Array, Array]]

# Names under which `inputs.py` draws arrays, by the argument of the operator that they become.
ARGUMENTS = {
    "q": "q",
    "k": "k",
    "v": "v",
    "beta": "beta",
    "erase": "erase",
    "write": "write",
    "write_key": "write_key",
    "a": "a",
    "b": "b",
    "head_decay": "log_decay",
    "channel_decay": "log_decay",
    "bounded_decay": "log_decay",
    "gram_decay": "gram_decay",
    "gram_gain": "gram_gain",
}
CENTER = -0.2
"""Center of the preconditioners: what it starts at in the paper's code."""


@dataclass(frozen=True)
class Operator:
    """An operator of `rnnlib.ops` with a choice of gates.

    Attributes:
        title: its name in tables.
        arrays: the arrays that it takes, as `inputs.py` names them; all are differentiated.
        function: `(q, k, v, **arguments) -> (out, final state)`.
        online: whether it is a delta rule (which inverts a triangle a chunk) or only adds.
        baseline: the operator that it should cost hardly more than, where a mark says so.
        allowance: by what factor it may exceed `baseline`, forward + backward.
        prepare: what is done to the arguments before `function`, from arguments by name to arguments by name; takes
            `implementation` and `segment_ids`. None: nothing.
    """

    title: str
    arrays: tuple[str, ...]
    function: Run
    online: bool = True
    baseline: str | None = None
    allowance: float = 1.0
    prepare: Callable[..., dict[str, Array]] | None = None

    @property
    def all_arrays(self) -> tuple[str, ...]:
        """Arrays of the operator and cotangents of its results."""
        return (*self.arrays, "d_out", "d_state")

    def prepared(
        self, arrays: Arrays, implementation: str | None, segment_ids: Array | None = None
    ) -> dict[str, Array]:
        """The arguments of `function`, by name, from arrays named as in `arrays`."""
        given = {ARGUMENTS[name]: arrays[name] for name in self.arrays}
        if self.prepare is None:
            return given
        return self.prepare(given, implementation=_chosen(implementation), segment_ids=segment_ids)

    def apply(self, given: Arrays, implementation: str | None, **others: Array | None) -> tuple[Array, Array]:
        """Calls `function` on what `prepared` gave; `others` are passed on (initial_state, segment_ids)."""
        rest = {name: x for name, x in given.items() if name not in ("q", "k", "v")}
        return self.function(
            given["q"], given["k"], given["v"], **rest, **others, implementation=_chosen(implementation)
        )

    def run(self, arrays: Arrays, implementation: str | None, **others: Array | None) -> tuple[Array, Array]:
        """Prepares and calls."""
        given = self.prepared(arrays, implementation, others.get("segment_ids"))
        return self.apply(given, implementation, **others)


def _chosen(implementation: str | None) -> str | None:
    """The implementation that the operator is asked for; None, its own choice, for "ours"."""
    return None if implementation == "ours" else implementation


def precondition(given: Arrays, **options: Any) -> dict[str, Array]:
    """Replaces the preconditioner's gates by the write key that it makes.

    A single token is left to the implementation that the operator takes by itself: it has no kernel of its own for it.
    """
    if given["k"].shape[1] == 1 and options.get("implementation") == "triton":
        options["implementation"] = None
    rest = {name: x for name, x in given.items() if not name.startswith("gram_")}
    k, write_key, _ = ops.precondition_key(
        given["k"],
        log_decay=given["gram_decay"],
        gain=given["gram_gain"],
        center=CENTER,
        write_key_dtype=jnp.promote_types(given["k"].dtype, jnp.float32),
        **options,
    )
    return {**rest, "k": k, "write_key": write_key}


OPERATORS = {
    "linear_attention": Operator("Linear attention", ("q", "k", "v"), ops.linear_attention, online=False),
    "simple_gla": Operator("Simple GLA", ("q", "k", "v", "head_decay"), ops.linear_attention, online=False),
    "gla": Operator("GLA", ("q", "k", "v", "channel_decay"), ops.linear_attention, online=False),
    "deltanet": Operator("DeltaNet", ("q", "k", "v", "beta"), ops.gated_delta_rule),
    "gated_deltanet": Operator("Gated DeltaNet", ("q", "k", "v", "beta", "head_decay"), ops.gated_delta_rule),
    "kda": Operator(
        "KDA",
        ("q", "k", "v", "beta", "channel_decay"),
        ops.gated_delta_rule,
        baseline="gated_deltanet",
        allowance=1.3,
    ),
    "dplr": Operator(
        "DPLR",
        ("q", "k", "v", "a", "b", "bounded_decay"),
        functools.partial(ops.dplr, least_log_decay=LEAST_LOG_DECAY),
        baseline="kda",
        allowance=3.0,
    ),
    "gated_deltanet2": Operator(
        "Gated DeltaNet-2",
        ("q", "k", "v", "erase", "write", "channel_decay"),
        ops.gated_delta_rule,
        baseline="gated_deltanet",
        allowance=1.3,
    ),
    "write_key": Operator(
        "GDN + write key",
        ("q", "k", "v", "beta", "head_decay", "write_key"),
        ops.gated_delta_rule,
        baseline="gated_deltanet",
        allowance=1.03,
    ),
    "pdn": Operator(
        "PDN",
        ("q", "k", "v", "beta", "gram_decay", "gram_gain"),
        ops.gated_delta_rule,
        baseline="deltanet",
        allowance=1.1,
        prepare=precondition,
    ),
    "pgdn": Operator(
        "PGDN",
        ("q", "k", "v", "beta", "head_decay", "gram_decay", "gram_gain"),
        ops.gated_delta_rule,
        baseline="gated_deltanet",
        allowance=1.1,
        prepare=precondition,
    ),
    "pkda": Operator(
        "PKDA",
        ("q", "k", "v", "beta", "channel_decay", "gram_decay", "gram_gain"),
        ops.gated_delta_rule,
        baseline="kda",
        allowance=1.1,
        prepare=precondition,
    ),
}
