"""Programs that compile for a described card: each is a process of its own, with variables of the environment."""

import os
import subprocess
import sys

from experiments.kernel_benchmarks.offline.compiling import environment


def output_of(module: str) -> str:
    """What `python -m module` prints, where it can compile for a described card; a failure shows its errors."""
    result = subprocess.run(
        [sys.executable, "-m", module], env=os.environ | environment(), capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout
