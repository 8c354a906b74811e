"""`python -m experiments.float8`: see PLAN.md."""

import sys

from experiments.language_modelling.command import main

if __name__ == "__main__":
    sys.exit(main("float8"))
