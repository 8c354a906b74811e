"""`python -m experiments.mesanet_stability`: see PLAN.md."""

import sys

from experiments.language_modelling.command import main

if __name__ == "__main__":
    sys.exit(main("mesanet_stability"))
