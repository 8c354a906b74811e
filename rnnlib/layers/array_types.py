"""The arrays that a mixer's parts pass to each other, with shapes and dtypes.

B rows of T tokens; D is the model's width, H key heads of K channels, HV value heads of V channels.
"""

from typing import NamedTuple

from jax import Array
from jaxtyping import Float, Int

# The input of a mixer.
Inputs = Float[Array, "B T D"]
# Queries or keys.
KeyHeads = Float[Array, "B T H K"]
# Values, or the output of a recurrence.
ValueHeads = Float[Array, "B T HV V"]
# Ids of the documents that are packed into a row; a state restarts where the id changes.
SegmentIds = Int[Array, "B T"]


class Gates(NamedTuple):
    """Erase and write gates, float32; a gate left out is 1.

    Attributes:
        beta: `[B, T, HV]`, short for `erase = write = beta`.
        erase: `[B, T, HV]` or `[B, T, HV, K]`.
        write: `[B, T, HV]` or `[B, T, HV, V]`.
        previous: `[B, T, HV]`, a gate on the previous token's key and value, which are written again, before this
            token's decay; None writes none.
    """

    beta: Array | None = None
    erase: Array | None = None
    write: Array | None = None
    previous: Array | None = None
