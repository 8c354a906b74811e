"""`python -m experiments.language_modelling`: see README.md."""

import sys

from experiments.language_modelling.command import main

if __name__ == "__main__":
    sys.exit(main("language_modelling"))
