"""Tables in a page that a report writes, between marks."""

import pathlib

from experiments.harness.tables import write_text


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
        before, rest = content.split(begin, 1)
        write_text(page, f"{before}{begin}\n{text}{end}{rest.split(end, 1)[1]}")
