"""The tables in the studies' pages are those of the results in the repository, and so are numbers in their text."""

import pathlib
import re

import pytest

from experiments.__main__ import STUDIES
from experiments.harness.page import marks
from experiments.harness.study import SETTINGS
from experiments.harness.tables import EXPERIMENTS, read_table
from experiments.recall.study import MIXERS as RECALL_MIXERS
from experiments.sweep.command import SweepOptions, load_study, places
from experiments.sweep.report import table
from experiments.throughput.report import read_results
from experiments.throughput.report import table as throughput_table
from experiments.throughput.study import study as throughput_study

CLAIMS = (EXPERIMENTS / "README.md").read_text()
MEAN_AND_SPREAD = r"\d+\.\d ± \d+\.\d|\d+(?: · \d+)+"  # or each seed
BITS_PER_BYTE = r"(?<![\d.])[0-2]\.\d{3}(?![\d%M])"


def parts(page: str) -> tuple[str, str]:
    """What the report wrote into a page, and the rest."""
    written = r"<!-- \w+ setting: written by the report.*?<!-- end of the \w+ setting -->"
    return "\n".join(re.findall(written, page, re.DOTALL)), re.sub(written, "", page, flags=re.DOTALL)


@pytest.mark.parametrize("name", STUDIES)
def test_a_page_shows_what_the_results_say(name):
    shown = 0
    for setting in SETTINGS:
        options = SweepOptions(setting=setting)
        folder, results = places(name, options)
        page = (folder / "README.md").read_text()
        begin, end = marks(setting)
        if begin in page:
            assert page.split(begin, 1)[1].split(end, 1)[0].lstrip("\n") == table(load_study(name, options), results)
            assert table(load_study(name, options), results) == "No results yet.\n" or (
                f"figures/{setting}.png" in page and (folder / "figures" / f"{setting}.png").exists()
            )
            shown += 1
    assert shown


@pytest.mark.parametrize("name", sorted(path.parent.name for path in EXPERIMENTS.glob("*/README.md")))
def test_a_study_s_page_begins_with_question_plan_result_uncertainty_verdict(name):
    screen = "\n".join((EXPERIMENTS / name / "README.md").read_text().splitlines()[:30])
    found = re.findall(r"^\*\*(Question|Plan|Setting|Result|Uncertainty|Verdict)\b", screen, re.MULTILINE)
    assert [word.replace("Setting", "Plan") for word in found] == [
        "Question",
        "Plan",
        "Result",
        "Uncertainty",
        "Verdict",
    ]


def test_the_throughput_page_shows_what_the_results_say():
    folder = EXPERIMENTS / "throughput"
    begin, end = marks("real")
    shown = (folder / "README.md").read_text().split(begin, 1)[1].split(end, 1)[0].lstrip("\n")
    assert shown == throughput_table(throughput_study("real"), read_results(folder / "results" / "real.jsonl"))


def test_means_and_spreads_in_the_text_are_in_a_table():
    """Of some study: pages compare with each other's mixers."""
    pages = [parts((EXPERIMENTS / name / "README.md").read_text()) for name in STUDIES]
    measured = {number for written, _ in pages for number in re.findall(MEAN_AND_SPREAD, written)}
    told = {number for text in (CLAIMS, *(text for _, text in pages)) for number in re.findall(MEAN_AND_SPREAD, text)}
    assert len(told) > 50 and not told - measured


def test_the_page_of_recall_says_what_its_first_part_gave():
    """160 runs of eight mixers that choose a rate, of which two are not right in 90 % of the test."""
    rows = read_table(EXPERIMENTS / "recall" / "results" / "real.jsonl")
    first = [mixer.label for mixer in RECALL_MIXERS[:8]]
    part = [row for row in rows if row["cell"]["name"] == "32 pairs, T=128" and row["seed"] in (0, 2, 4, 6, 8)]
    part = [row for row in part if row["mixer"]["label"] in first]
    failed = {
        (row["mixer"]["label"], row["learning_rate"]) for row in part if row["test"]["128"]["token_accuracy"] < 0.9
    }
    assert len(part) == 160 and failed == {("KLA, long keys", 4e-3), ("KLA without key norm, long keys", 4e-3)}


def test_bits_per_byte_in_the_text_are_those_of_some_run():
    folder: pathlib.Path = EXPERIMENTS / "language_modelling"
    measured = set()
    for run in (row for path in folder.glob("results/*.jsonl") for row in read_table(path)):
        measured |= {f"{entry['bits_per_byte']:.3f}" for entry in (run["validation"], *run["test"].values())}
    claims = "\n".join(line for line in CLAIMS.splitlines() if "language_modelling" in line or "erplexity" in line)
    told = set(re.findall(BITS_PER_BYTE, parts((folder / "README.md").read_text())[1] + claims))
    assert len(told) > 40 and not told - measured


def test_a_claim_is_one_line_that_leads_to_its_heading():
    table = CLAIMS.split("\n## Claims\n", 1)[1].split("\n| claim |", 1)[1].split("\n<!--", 1)[0]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()[2:]]
    assert len(rows) > 30
    for claim, _, _, ours, verdict, link in rows:
        assert len(claim) + len(ours) < 160 and verdict.split()[0] in "✓◐✗?★"
        page = re.search(r"\]\(([\w/]+\.md)#", link)
        assert page and f"\n### {claim}\n" in (EXPERIMENTS / page[1]).read_text()
