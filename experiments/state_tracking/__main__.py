"""`python -m experiments.state_tracking`: see README.md."""

from experiments.sweep import main

if __name__ == "__main__":
    main("state_tracking")
