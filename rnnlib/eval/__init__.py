"""Standard evaluations: a language model of this library in lm-evaluation-harness, and the papers' lists of tasks.

Importing this registers the model as "rnnlib" with `lm_eval`. `rnnlib lm-eval FOLDER --tasks ...` runs tasks, and
`python -m rnnlib.eval ...` is `lm_eval`'s own command that knows the model.
"""

import os

from rnnlib.extras import from_extra

# For error bars lm_eval forks, which after JAX has started its threads may hang.
os.environ.setdefault("DISABLE_MULTIPROC", "1")
with from_extra("eval", "rnnlib.eval"):
    import lm_eval  # noqa: F401

from rnnlib.eval.harness import HarnessModel
from rnnlib.eval.tasks import TASK_LISTS, evaluate_tasks, task_names

__all__ = ["TASK_LISTS", "HarnessModel", "evaluate_tasks", "task_names"]
