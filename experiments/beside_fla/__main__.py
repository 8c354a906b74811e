"""`python -m experiments.beside_fla`: see PLAN.md."""

import sys

from experiments.beside_fla.command import main

if __name__ == "__main__":
    sys.exit(main())
