"""How tests compile: `tests/conftest.py` has what holds for all of them, this the exceptions."""

import functools

import jax

# With all of XLA's emitters. Without the newest a program compiles in a third of the time, but each step of a loop
# copies the arrays that it writes to. For long loops (a scan of 200 tokens, or one that runs often) and for different
# programs that have to agree bit by bit.
LOOP_OPTIONS = {"xla_backend_extra_options": ""}
loop_jit = functools.partial(jax.jit, compiler_options=LOOP_OPTIONS)
