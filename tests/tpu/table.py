"""The page's table of what was compiled: `python -m tests.tpu.table` writes it from `results.jsonl`."""

import json
import pathlib
from typing import Any

from tests.tpu.compiling import CHIPS, names

RESULTS = pathlib.Path(__file__).parent / "results.jsonl"
PAGE = pathlib.Path(__file__).parents[2] / "docs" / "tpu.md"
_FIRST = "| program |"  # begins the table


def table(results: list[dict[str, Any]]) -> str:
    """A row for each case that was compiled: for each chip temporary MiB, MiB moved, and seconds of processor time."""
    found = {(entry["case"], entry["chip"]): entry for entry in results}

    def cell(case: str, chip: str) -> str:
        entry = found.get((case, chip))
        if entry is None:
            return "not compiled yet"
        moved = f"{entry['moved'] / 2**20:.1f}" if entry["moved"] else "-"
        return f"{entry['temporary'] / 2**20:.1f} / {moved} / {entry['seconds']:.0f}"

    rows = [[case, *(cell(case, chip) for chip in CHIPS)] for case in names() if any((case, c) in found for c in CHIPS)]
    lines = [["program", *CHIPS], ["---"] * (1 + len(CHIPS)), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)


def main() -> None:
    """Replaces the page's table."""
    results = [json.loads(text) for text in RESULTS.read_text().splitlines()]
    text = PAGE.read_text()
    before, rest = text[: text.index(_FIRST)], text[text.index(_FIRST) :]
    after = rest[rest.index("\n\n") :] if "\n\n" in rest else "\n"
    PAGE.write_text(before + table(results) + after)


if __name__ == "__main__":
    main()
