"""`python -m experiments.long_context`: see README.md."""

import sys

from experiments.language_modelling.command import main

if __name__ == "__main__":
    sys.exit(main("long_context"))
