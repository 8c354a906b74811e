"""`python -m experiments.axis_combinations`: see README.md."""

from experiments.sweep import main

if __name__ == "__main__":
    main("axis_combinations")
