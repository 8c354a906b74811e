"""How much of every study in the queue is done, and what is left of it, for experiments/README.md."""

import pathlib
from collections.abc import Iterable, Sequence

from experiments.harness.jobs import Job
from experiments.harness.page import markdown_table
from experiments.harness.tables import EXPERIMENTS
from experiments.queue.order import ORDER, Entry

NOWHERE = pathlib.Path("a folder that no study writes to")


def hours(jobs: Iterable[Job]) -> tuple[float, float]:
    """GPU-hours of jobs, and of the runs that can be named only once they have chosen a rate."""
    found = list(jobs)
    later = sum(job.seconds / job.runs * job.later for job in found)
    return sum(job.seconds * job.devices for job in found) / 3600, later / 3600


def told(first: float, later: float) -> str:
    """Hours in words."""
    return f"{first:.1f}" + (f", then {later:.1f}" if later else "")


def left_table(output: pathlib.Path = EXPERIMENTS) -> str:
    """Every study of the queue, in its order: what it decides, which part is there, what the rest takes. Markdown."""

    def jobs(entry: Entry, tables: Sequence[pathlib.Path]) -> list[Job]:
        return entry.jobs(entry.study, entry.setting, tables)

    rows = []
    totals = [0.0, 0.0]
    for entry in ORDER:
        left, every = jobs(entry, [output]), jobs(entry, [output / NOWHERE])
        rest = hours(left)
        totals = [total + part for total, part in zip(totals, rest, strict=True)]
        missing, whole = (round(sum(job.runs + job.later for job in some)) for some in (left, every))
        done = f"{whole - missing} of {whole}"
        run = "" if entry.run is None else str(entry.run)
        link = f"[{entry.name}]({entry.study}/README.md)"
        rows.append([run, link, entry.why, done, "-" if not left else told(*rest)])
    rows.append(["", "all", "", "", told(*totals)])
    return "\n".join(markdown_table(["run", "study", "what it decides", "runs done", "GPU-hours left"], rows)) + "\n"
