"""`python -m experiments.mqar_sizes`: see README.md."""

from experiments.sweep import main

if __name__ == "__main__":
    main("mqar_sizes")
