"""Writes `results.jsonl`, what the compiler says of each case and chip: `python -m tests.tpu [CHIP ...]`.

Cases of these chips that are in the file already are kept; delete the file to compile all again.
"""

import json
import pathlib
import sys

import jax

from rnnlib.training.tpu import missing_compiler
from tests.tpu.compiling import CHIPS, compile_case, line, names

RESULTS = pathlib.Path(__file__).parent / "results.jsonl"


def main(chips: list[str]) -> None:
    """Compiles what is missing."""
    if reason := missing_compiler():
        sys.exit(reason)
    known = [json.loads(text) for text in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    done = {(entry["case"], entry["chip"]) for entry in known}
    for chip in chips or list(CHIPS):
        for case in names():
            if (case, chip) not in done:
                try:
                    text = line(compile_case(case, chip))
                except Exception as error:
                    print(f"{chip}, {case}: {type(error).__name__}: {str(error)[:400]}", file=sys.stderr)
                    continue
                with RESULTS.open("a") as file:
                    file.write(text + "\n")
                print(text, flush=True)
                jax.clear_caches()


if __name__ == "__main__":
    main(sys.argv[1:])
