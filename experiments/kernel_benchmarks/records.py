"""Records of a run: lines of JSON that workers append, and the one file that is made of them."""

import importlib.metadata
import json
import pathlib
import subprocess
import traceback
from collections.abc import Iterable, Mapping
from typing import Any

Record = dict[str, Any]


class RecordWriter:
    """Appends records to a file, each line whole as soon as it is measured: a worker that crashes loses nothing."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path

    def __call__(self, record: Record) -> None:
        """Appends a record."""
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")


def read_records(path: pathlib.Path) -> list[Record]:
    """Records that a worker has written so far."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def write_results(path: pathlib.Path, results: dict[str, Any]) -> None:
    """Writes results with a record a line, so that versions of the file can be compared."""
    head = {key: value for key, value in results.items() if key != "records"}
    lines = ",\n".join("  " + json.dumps(record) for record in results["records"])
    text = json.dumps(head, indent=1)[:-2] + ',\n "records": [\n' + lines + "\n ]\n}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def by_short_name(kernels: Mapping[str, float], length: int = 60) -> dict[str, float]:
    """Milliseconds by the first characters of kernels' names, the longest first; kernels that share these add up."""
    totals: dict[str, float] = {}
    for name, milliseconds in kernels.items():
        totals[name[:length]] = totals.get(name[:length], 0.0) + milliseconds
    return {name: round(ms, 4) for name, ms in sorted(totals.items(), key=lambda item: -item[1])}


def describe(error: BaseException) -> str:
    """An error as a record keeps it."""
    return "".join(traceback.format_exception_only(error)).strip()[:400]


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Versions by distribution, of those that are installed."""
    found = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The checked-out commit, if this is a checkout."""
    try:
        result = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"],
            cwd=pathlib.Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return result.stdout.strip()
