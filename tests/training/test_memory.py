"""Memory of the process that trains."""

import subprocess
import sys

from rnnlib.training import keep_freed_memory

PROGRAM = """
import resource, sys
import numpy as np
from rnnlib.training import keep_freed_memory

kept = sys.argv[1] == "keep" and keep_freed_memory()
def faults():
    np.ones(1 << 24)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        np.ones(1 << 24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(kept, faults())
"""


def test_freed_memory_is_used_again(process_environment):
    """Pages of arrays of 134 MB that the system had to give: none once the process keeps them."""

    def run(how):
        command = [sys.executable, "-c", PROGRAM, how]
        done = subprocess.run(command, env=process_environment, capture_output=True, text=True, timeout=300, check=True)
        kept, faults = done.stdout.split()
        return kept == "True", int(faults)

    (_, before), (kept, after) = run("leave"), run("keep")
    assert before > 0
    assert not kept or after < before / 4


def test_other_c_libraries_are_left_alone(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr("ctypes.CDLL", missing)
    assert not keep_freed_memory()
