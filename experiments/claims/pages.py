"""Verdicts on the studies' pages, and the index of all claims."""

import collections
import math
import pathlib
import re

from experiments.claims.claim import Claim, Part
from experiments.claims.language import CLAIMS as LANGUAGE
from experiments.claims.planned import HYPOTHESES, NOT_RUN
from experiments.claims.recall import CLAIMS as RECALL
from experiments.claims.speed import CLAIMS as SPEED
from experiments.harness.page import markdown_table, replaced, write_between_marks
from experiments.harness.tables import EXPERIMENTS, write_text
from experiments.harness.verdicts import Region, Verdict
from experiments.queue.left import left_table

CLAIMS: tuple[Claim, ...] = (*RECALL, *LANGUAGE, *SPEED)
BEGIN = "<!-- verdict: written by `python -m experiments.claims`, do not edit -->"
END = "<!-- end of the verdict -->"
SUMMARY_BEGIN = "<!-- verdicts: written by `python -m experiments.claims`, do not edit -->"
SUMMARY_END = "<!-- end of the verdicts -->"
PLANNED_BEGIN = "<!-- hypotheses: written by `python -m experiments.claims`, do not edit -->"
PLANNED_END = "<!-- end of the hypotheses -->"


def _place(region: Region) -> str:
    """A region in words."""
    ends = [f"{100 * end:+.0f}" if end else "0" for end in (region.low, region.high) if math.isfinite(end)]
    if math.isinf(region.low):
        return f"below {ends[0]}"
    if math.isinf(region.high):
        return f"above {ends[0]}"
    return f"{ends[0]} to {ends[1]}"


def _row(part: Part) -> str:
    interval = part.measure()
    found = "not measured" if interval is None else str(interval)
    return f"| {part.says} | {_place(part.region)} | {found} | {part.verdict().value} |"


def verdict_text(claim: Claim) -> str:
    """What stands on a claim's page, between the marks."""
    lines = [f"**Verdict: {claim.verdict().value}.**" + (f" Not tested: {claim.untested}." if claim.untested else "")]
    if claim.parts:
        header = "| the claim | says, % | ours, % (95 %) | |"
        lines += ["", header, "| --- | --- | --- | --- |", *map(_row, claim.parts)]
    return "\n".join(lines)


def write_verdict(page: str, claim: Claim) -> str:
    """A page with a claim's verdict in its section.

    Raises:
        ValueError: the page has no such section, or no marks in it.
    """
    pattern = rf"(\n### {re.escape(claim.title)}\n(?:(?!\n### ).)*?{re.escape(BEGIN)}\n).*?({re.escape(END)})"
    found = re.search(pattern, page, re.DOTALL)
    if not found:
        raise ValueError(f"{claim.study}: expected a section {claim.title!r} with {BEGIN!r} and {END!r}")
    return f"{page[: found.end(1)]}{verdict_text(claim)}\n{page[found.start(2) :]}"


def summary(study: str) -> str:
    """The verdicts on all claims of a study's page, in one line."""
    counts = collections.Counter(claim.verdict() for claim in CLAIMS if claim.study == study)
    found = ", ".join(f"{counts[verdict]} {verdict.value}" for verdict in Verdict if counts[verdict])
    return f"**Verdict.** [Claims](#claims) of papers that this page tests: {found}."


def write_summary(page: str, study: str) -> str:
    """A study's page with `summary` between its marks.

    Raises:
        ValueError: the page has no such marks.
    """
    try:
        return replaced(page, f"{SUMMARY_BEGIN}\n", SUMMARY_END, f"{summary(study)}\n")
    except ValueError as error:
        raise ValueError(f"{study}: {error}") from None


def planned_text(study: str) -> str:
    """The verdicts on all hypotheses of a study's plan."""
    own = [(hypothesis.says, *hypothesis.answer()) for hypothesis in HYPOTHESES if hypothesis.study == study]
    lines = [f"{number}. {says}: {verdict.value} ({found})." for number, (says, found, verdict) in enumerate(own, 1)]
    has_claims = any(claim.study == study for claim in CLAIMS)
    first = "Hypotheses of the plan, by its" if has_claims else "**Verdict.** By the plan's"
    return "\n".join([f"{first} rules ([code](../claims/planned.py)):", "", *lines]) + "\n"


def write_planned(page: str, study: str) -> str:
    """A planned study's page with `planned_text` between its marks.

    Raises:
        ValueError: the page has no such marks.
    """
    try:
        return replaced(page, f"{PLANNED_BEGIN}\n", PLANNED_END, planned_text(study))
    except ValueError as error:
        raise ValueError(f"{study}: {error}") from None


def planned_index() -> str:
    """The table of all hypotheses that were run, and how many wait, Markdown."""
    rows, waiting = [], 0
    for hypothesis in HYPOTHESES:
        found, verdict = hypothesis.answer()
        waiting += found == NOT_RUN
        if found != NOT_RUN:
            link = f"[{hypothesis.study}]({hypothesis.study}/README.md)"
            rows.append((hypothesis.says, found, verdict.value, link))
    header = ("hypothesis", "found", "verdict", "detail")
    return "\n".join([*markdown_table(header, rows), "", f"{waiting} more wait for their runs."]) + "\n"


def index() -> str:
    """The table of all claims, Markdown."""
    rows = []
    for claim in CLAIMS:
        link = f"[{claim.study}]({claim.study}/README.md#{claim.anchor})"
        rows.append((claim.title, claim.source, claim.theirs, claim.ours, claim.verdict().value, link))
    header = ("claim", "paper", "paper's number", "ours", "verdict", "detail")
    return "\n".join(markdown_table(header, rows)) + "\n"


def write_pages(experiments: pathlib.Path = EXPERIMENTS) -> None:
    """Writes every verdict and the indexes."""
    for study in dict.fromkeys(hypothesis.study for hypothesis in HYPOTHESES):
        page = experiments / study / "README.md"
        write_text(page, write_planned(page.read_text(), study))
    for study in dict.fromkeys(claim.study for claim in CLAIMS):
        page = experiments / study / "README.md"
        text = write_summary(page.read_text(), study)
        for claim in CLAIMS:
            if claim.study == study:
                text = write_verdict(text, claim)
        write_text(page, text)
    write_between_marks(experiments / "README.md", "claims", index())
    write_between_marks(experiments / "README.md", "hypotheses", planned_index())
    write_between_marks(experiments / "README.md", "queue", left_table())
