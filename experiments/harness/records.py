"""A run of many records: lines of JSON that processes append, and the one file that is made of them.

It imports no framework: processes of PyTorch use it, too.
"""

import datetime
import importlib.metadata
import json
import pathlib
import shlex
import subprocess
import traceback
from collections.abc import Iterable, Mapping, Sequence
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


def checked_out_commit() -> str | None:
    """The commit of this checkout; None where it is none."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        run = subprocess.run(command, cwd=pathlib.Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.strip()


def now() -> str:
    """The date and time, as records have it."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def results_of(
    records: Sequence[Record],
    *,
    versions: Mapping[str, str],
    module: str,
    arguments: Sequence[str],
    commit: str | None,
    device: str | None = None,
    **more: Any,
) -> dict[str, Any]:
    """A run's one file: where, with what and by which command it was measured, and its records.

    Args:
        records: of the run.
        versions: of packages.
        module: whose command line it is.
        arguments: of the command line.
        commit: of the source; None is the checked-out one.
        device: what was measured on; None is the first that a record names.
        **more: what else the file has.
    """
    found = checked_out_commit()
    return {
        "device": device or next((record["device"] for record in records if record.get("device")), None),
        "versions": dict(versions),
        "commit": commit or (found and found[:12]),
        "command": shlex.join(["python", "-m", module, *arguments]),
        "date": now(),
        **more,
        "records": list(records),
    }
