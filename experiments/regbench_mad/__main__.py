"""`python -m experiments.regbench_mad`: see README.md."""

from experiments.sweep import main

if __name__ == "__main__":
    main("regbench_mad")
