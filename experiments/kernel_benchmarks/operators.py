"""The operators that are measured. A new operator is one more entry here, and its peers' calls in `peers.py`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jax import Array

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
    "head_decay": "log_decay",
    "channel_decay": "log_decay",
}


@dataclass(frozen=True)
class Operator:
    """An operator of `rnnlib.ops` with a choice of gates.

    Attributes:
        title: its name in tables.
        arrays: the arrays that it takes, as `inputs.py` names them; all are differentiated.
        function: `(q, k, v, **arguments) -> (out, final state)`.
        online: whether it is a delta rule (which inverts a triangle a chunk) or only adds.
        baseline: the operator that it should cost hardly more than, where a mark says so.
        allowance: by what factor it may exceed `baseline`.
    """

    title: str
    arrays: tuple[str, ...]
    function: Run
    online: bool = True
    baseline: str | None = None
    allowance: float = 1.0

    def run(self, arrays: Arrays, implementation: str | None, **others: Array | None) -> tuple[Array, Array]:
        """Calls the operator on arrays named as in `arrays`; `others` are passed on (initial_state, segment_ids)."""
        given = {ARGUMENTS[name]: arrays[name] for name in self.arrays}
        q, k, v = given.pop("q"), given.pop("k"), given.pop("v")
        return self.function(q, k, v, **given, **others, implementation=implementation)


OPERATORS = {
    "linear_attention": Operator("Linear attention", ("q", "k", "v"), ops.linear_attention, online=False),
    "deltanet": Operator("DeltaNet", ("q", "k", "v", "beta"), ops.gated_delta_rule),
    "gated_deltanet": Operator("Gated DeltaNet", ("q", "k", "v", "beta", "head_decay"), ops.gated_delta_rule),
    "kda": Operator(
        "KDA",
        ("q", "k", "v", "beta", "channel_decay"),
        ops.gated_delta_rule,
        baseline="gated_deltanet",
        allowance=1.3,
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
}
