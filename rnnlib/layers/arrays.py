"""Names of the arrays that a mixer's parts pass to each other, with shapes and dtypes.

B rows of T tokens; D is the model's width, H key heads of K channels, HV value heads of V channels.
"""

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
