"""How tests compile: `tests/conftest.py` has what holds for all of them, this the exceptions."""

import functools
import os

import jax

# With all of XLA's emitters. Without the newest a program compiles in a third of the time, but each step of a loop
# copies the arrays that it writes to. For long loops (a scan of 200 tokens, or one that runs often) and for different
# programs that have to agree bit by bit. On a GPU all programs compile as they do for users.
_OPTION = "xla_backend_extra_options"
LOOP_OPTIONS = {_OPTION: ""} if _OPTION in os.environ.get("XLA_FLAGS", "") else {}
loop_jit = functools.partial(jax.jit, compiler_options=LOOP_OPTIONS)
