"""`python -m experiments.recall`: see README.md."""

from experiments.sweep import main

if __name__ == "__main__":
    main("recall")
