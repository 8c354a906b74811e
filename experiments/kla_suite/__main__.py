"""`python -m experiments.kla_suite`: see README.md."""

from experiments.sweep import main

if __name__ == "__main__":
    main("kla_suite")
