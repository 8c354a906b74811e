"""`python -m experiments.s_niah`: see README.md."""

from experiments.sweep import main

if __name__ == "__main__":
    main("s_niah")
