"""Tables in Markdown, and in a page that a report writes, between marks."""

import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from experiments.harness.tables import write_text


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]], *, rule: str = " --- ") -> list[str]:
    """Lines of a table, each row's cells as they are."""
    lines = [_row(header), "|" + f"{rule}|" * len(header)]
    return [*lines, *map(_row, rows)]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def made_with(rows: Iterable[dict[str, Any]]) -> str:
    """What results were made with, for the last line of a table: devices, versions of jax, commits and dates of all.

    Args:
        rows: results; each has an `environment` (`experiments.harness.environment`).
    """
    environments = [row["environment"] for row in rows]
    devices = sorted({e["device"] for e in environments})
    versions = sorted({e["packages"]["jax"] for e in environments})
    commits = sorted({e["commit"][:7] for e in environments})
    dates = sorted({e["date"][:10] for e in environments})
    days = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    return f"{', '.join(devices)}, jax {', '.join(versions)}; commit {', '.join(commits)}; {days}"


def marks(setting: str) -> tuple[str, str]:
    """What stands before and after the table of a setting in a README."""
    return f"<!-- {setting} setting: written by the report, do not edit -->", f"<!-- end of the {setting} setting -->"


def write_between_marks(page: pathlib.Path, setting: str, text: str) -> None:
    """Puts a setting's table into a README, in place of the one that is there; does nothing where it has no marks."""
    if not page.exists():
        return
    content = page.read_text()
    begin, end = marks(setting)
    if begin in content and end in content:
        write_text(page, replaced(content, f"{begin}\n", end, text))


def replaced(page: str, begin: str, end: str, text: str) -> str:
    """A page with what stands between two marks replaced.

    Raises:
        ValueError: it has not both of them.
    """
    before, first, rest = page.partition(begin)
    _, last, after = rest.partition(end)
    if not first or not last:
        raise ValueError(f"expected {begin!r} and {end!r} in the page")
    return f"{before}{begin}{text}{end}{after}"
