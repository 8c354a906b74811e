"""What the process of a test or of a program that it starts is set to before it imports JAX.

A test traces programs, compiles them and runs them for milliseconds. Two things that JAX does beside that take a fifth
of the time: Python's collection of cycles goes over all that was traced, again and again; and every operation of a
program gets the stack of calls that made it.
"""

import gc
import os

gc.set_threshold(200_000, 50, 100)
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
