"""`lm_eval`'s command with the model "rnnlib".

python -m rnnlib.eval run --model rnnlib --model_args checkpoint=runs/001 --tasks lambada_openai
"""

from lm_eval.__main__ import cli_evaluate

import rnnlib.eval  # noqa: F401 (registers the model)

if __name__ == "__main__":
    cli_evaluate()
