"""Verdicts on the pages, and the index, are what the tables give today."""

import dataclasses
import json
import math
import re

import pytest

from experiments.claims import evidence
from experiments.claims.claim import Claim, Part
from experiments.claims.evidence import accuracy, bits, solved, solves, steps
from experiments.claims.pages import (
    BEGIN,
    CLAIMS,
    END,
    index,
    planned_index,
    verdict_text,
    write_planned,
    write_summary,
    write_verdict,
)
from experiments.claims.planned import HYPOTHESES, NOT_RUN, answers, judged
from experiments.harness.page import marks
from experiments.harness.tables import EXPERIMENTS, read_table, table_path
from experiments.harness.verdicts import Interval, Region, Verdict, above, below, equal
from experiments.queue.left import left_table

INDEX = (EXPERIMENTS / "README.md").read_text()


@pytest.mark.parametrize("study", sorted({claim.study for claim in CLAIMS}))
def test_verdicts_on_a_page_are_what_the_tables_give(study):
    page = (EXPERIMENTS / study / "README.md").read_text()
    for claim in CLAIMS:
        if claim.study == study:
            assert write_verdict(page, claim) == page, claim.title
    assert write_summary(page, study) == page
    with pytest.raises(ValueError, match="a_study: expected '<!-- verdicts"):
        write_summary("a page without marks", "a_study")


def test_a_page_with_claims_has_question_result_uncertainty_and_verdict_in_that_order_above_its_tables():
    for study in {claim.study for claim in CLAIMS}:
        page = (EXPERIMENTS / study / "README.md").read_text()
        places = [page.index(f"**{part}.**") for part in ("Question", "Setting", "Result", "Uncertainty", "Verdict")]
        assert places == sorted(places) and places[-1] < page.index("\n## "), study


@pytest.mark.parametrize("name, text", [("claims", index), ("hypotheses", planned_index), ("queue", left_table)])
def test_the_index_is_what_the_claims_and_hypotheses_give(name, text):
    begin, end = marks(name)
    assert INDEX.split(begin, 1)[1].split(end, 1)[0].lstrip("\n") == text()


def test_verdicts_of_plans_are_what_their_rules_give_today():
    studies = {hypothesis.study for hypothesis in HYPOTHESES}
    planned = {path.parent.name for path in EXPERIMENTS.glob("*/PLAN.md")}
    assert planned - studies == {"s_niah", "throughput"}, "additions to studies of papers' claims"
    for study in studies:
        page = (EXPERIMENTS / study / "README.md").read_text()
        assert write_planned(page, study) == page, study
        assert page.count("**Verdict.**") == 1, f"{study}: a verdict by hand"
    with pytest.raises(ValueError, match="a_study: expected '<!-- hypotheses"):
        write_planned("a page without marks", "a_study")


def test_a_hypothesis_waits_for_all_of_its_runs():
    yes, missing = (lambda: Interval(0.5, 0.3, 0.7)), (lambda: None)
    region = above(0.2)
    assert judged([("a", missing, region)])() == (NOT_RUN, Verdict.UNDECIDED)
    assert judged([("a", yes, region), ("b", yes, region)])()[1] is Verdict.AGREES
    assert judged([("a", yes, region), ("b", missing, region)])() == ("a: +50.0 % (+30.0 to +70.0)", Verdict.PARTLY)
    assert answers([]) == (NOT_RUN, Verdict.UNDECIDED)
    assert answers([("a", Verdict.AGREES), ("b", Verdict.DISAGREES)])[1] is Verdict.PARTLY


def test_every_section_of_claims_has_a_verdict_by_the_rule_and_none_by_hand():
    for page in EXPERIMENTS.glob("*/README.md"):
        text = page.read_text()
        written = {claim.title for claim in CLAIMS if claim.study == page.parent.name}
        sections = text.partition("\n## Claims")[2].split("\n### ")[1:]
        assert {section.partition("\n")[0] for section in sections} == written, page
        remarks = [line for line in text.splitlines() if line.startswith("**Remark.**")]
        assert not [line for line in remarks if re.search(r"agrees|decidable", line, re.IGNORECASE)], page
        assert text.count(BEGIN) == text.count(END) == len(written) and "**Verdict.**" not in "".join(sections)


def part(low: float, high: float, region: Region) -> Part:
    return Part("a part", lambda: Interval((low + high) / 2, low, high), region)


def claim(*parts: Part, untested: str = "") -> Claim:
    return Claim("A claim", "a_study", "a paper", "1", "2", parts, untested)


def test_a_claim_follows_from_its_parts_and_from_what_was_not_tested():
    yes, no, perhaps = (part(*ends, below(0.01)) for ends in ((-0.1, -0.05), (0.0, 0.1), (-0.1, 0.1)))
    assert claim().verdict() is Verdict.NEW
    assert claim(yes, yes).verdict() is Verdict.AGREES and claim(no, perhaps).verdict() is Verdict.DISAGREES
    assert claim(yes, no).verdict() is claim(yes, perhaps).verdict() is Verdict.PARTLY
    assert claim(yes, untested="seeds").verdict() is Verdict.PARTLY
    assert claim(no, untested="seeds").verdict() is Verdict.UNDECIDED
    assert claim(Part("not run", lambda: None, below(0.0))).verdict() is Verdict.UNDECIDED


def test_a_verdict_is_written_between_its_marks_alone():
    page = f"\n### Another\n\n{BEGIN}\n{END}\n\n### A claim\n\ntext\n\n{BEGIN}\nold\n{END}\n\nafter\n"
    own = claim(part(-0.1, -0.05, below(0.01)), untested="seeds")
    written = write_verdict(page, own)
    assert f"### A claim\n\ntext\n\n{BEGIN}\n{verdict_text(own)}\n{END}\n\nafter\n" in written
    assert "| a part | below -1 | -7.5 % (-10.0 to -5.0) | ✓ agrees |" in written and "Not tested: seeds." in written
    assert written.startswith(f"\n### Another\n\n{BEGIN}\n{END}\n")
    with pytest.raises(ValueError, match="a_study: expected a section 'A missing one'"):
        write_verdict(page, dataclasses.replace(own, title="A missing one"))


def test_differences_are_those_of_the_tables():
    rows = read_table(table_path("language_modelling", "real"))
    best = {
        label: min(
            (row for row in rows if row["mixer"]["label"] == label), key=lambda row: row["validation"]["bits_per_byte"]
        )["test"]["4096"]["bits_per_byte"]
        for label in ("KDA", "Mamba-2")
    }
    found = bits("real", "KDA", "Mamba-2")()
    assert found.estimate == pytest.approx(best["KDA"] / best["Mamba-2"] - 1) and found.high - found.low > 0.03
    cell = "MQAR T=128, 32 pairs, width 64, 4000 steps"
    share = solved("ablations", cell, "KLA", "GLA (KLA's independent gate)")()
    assert share.estimate == 1.0 and share.low < 0.5, "three seeds each"
    assert solves("ablations", cell, "KLA")().estimate == 0.0
    constant = accuracy("regbench_mad", "memorization", "32", "DeltaNet", 0.528)()
    assert constant.estimate == pytest.approx(0.472, abs=1e-3)
    assert -0.1 < steps("real_4096", ("PGDN", 4096), ("Gated DeltaNet", 4096))().estimate < -0.03
    assert steps("real_4096", ("PGDN", 64), ("Gated DeltaNet", 64))() is None


def test_regions_in_words():
    ends = ((below(0.01), "below -1"), (above(0.2), "above +20"), (equal(0.05), "-5 to +5"))
    for region, words in ends:
        assert f"| {words} |" in verdict_text(claim(part(0.0, 0.0, region)))
    assert math.isinf(above(0.0).high)


def test_times_are_compared_by_the_quantiles_of_their_calls(tmp_path, monkeypatch):
    monkeypatch.setattr(evidence, "EXPERIMENTS", tmp_path)
    (tmp_path / "kernel_benchmarks" / "results").mkdir(parents=True)
    what = {"kind": "time", "implementation": "ours"}
    records = [
        what
        | {"operator": name, "pass": run, "shape": [8, 4096, 16, size, size], "wall_ms": ms}
        | {"wall_ms_quantiles": [0.9 * ms, 1.1 * ms]}
        for size in (64, 128)
        for run in ("forward", "forward_backward")
        for name, ms in (("kda", 2.0), ("dplr", 4.0))
    ]
    beside = records[0] | {"beside": "dplr", "wall_ms": 9.0}
    (hypothesis,) = (one for one in HYPOTHESES if one.says.startswith("DPLR"))
    assert hypothesis.answer() == ("not run", Verdict.UNDECIDED)
    for size in (64, 128):
        path = tmp_path / "kernel_benchmarks" / "results" / f"dplr_{size}.json"
        path.write_text(json.dumps({"records": [beside, *records]}))
    told, verdict = hypothesis.answer()
    assert verdict is Verdict.AGREES and "128 channels, forward: +100.0 % (+63.6 to +144.4)" in told
