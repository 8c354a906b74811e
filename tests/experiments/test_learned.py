"""The numbers in the sentences on top of experiments/README.md are those of the tables."""

import pytest

from experiments.claims.evidence import outcome
from experiments.harness.tables import EXPERIMENTS, read_table, table_path
from experiments.language_modelling.report import by_rate, chosen
from experiments.language_modelling.study import WIDTHS, study
from experiments.sweep.command import whole_study
from experiments.sweep.outcomes import SOLVED

SENTENCES = (EXPERIMENTS / "README.md").read_text().split("## What was learned\n")[1].split("\nCosts:")[0]
FORGETTING = ("Gated DeltaNet", "PGDN", "KDA", "PKDA", "Gated DeltaNet-2", "KLA", "Comba")
KEEPING = ("DeltaNet", "PDN", "Longhorn", "EFLA", "NLMS")
ADDITIVE = ("Mamba-2", "GLA", "RetNet", "linear attention", "Mamba-3")


def told(words: str) -> bool:
    return " ".join(words.split()) in " ".join(SENTENCES.split())


@pytest.fixture(scope="module")
def bits() -> list[dict[str, float]]:
    """Bits per byte at the trained length by mixer, at both widths."""
    found = []
    for setting in WIDTHS:
        plan = study(setting)
        runs = chosen(plan, table_path("language_modelling", setting))
        length = str(plan.train.data.sequence_length)
        found.append({label: own[0]["test"][length]["bits_per_byte"] for label, own in runs.items()})
    return found


def ends(values: list[float]) -> str:
    return f"{100 * min(values):.0f} to {100 * max(values):.0f} %"


def test_erasing_and_forgetting(bits):
    against = {o: ends([1 - b["Gated DeltaNet"] / b[o] for b in bits]) for o in ("Mamba-2", "DeltaNet")}
    assert told(f"Gated DeltaNet has {against['Mamba-2']} fewer bits per byte than Mamba-2")
    assert told(f"{against['DeltaNet']} fewer than DeltaNet")
    alike = [[b[label] for label in ("Gated DeltaNet", "KDA", "KLA", "Comba")] for b in bits]
    apart = [f"{100 * (max(own) / min(own) - 1):.0f} %" for own in alike]
    assert told(f"within {apart[0]} of each other at width 384 and {apart[1]} at 768")


def test_decays_by_channel(bits):
    narrow, wide = ([f"{b[label]:.3f}" for label in ("KDA", "Gated DeltaNet-2", "Gated DeltaNet")] for b in bits)
    assert told(f"{narrow[0]} and {narrow[1]} for {narrow[2]} bits per byte, {wide[0]} and {wide[1]} for {wide[2]}")


def test_learning_rates():
    better = models = 0
    most = []
    for setting in WIDTHS:
        plan = study(setting)
        length = str(plan.train.data.sequence_length)
        pairs = [own for own in by_rate(plan, table_path("language_modelling", setting)).values() if len(own) == 2]
        models += len(pairs)
        higher = [[own[rate][0]["validation"]["bits_per_byte"] for rate in sorted(own)] for own in pairs]
        better += sum(last < first for first, last in higher)
        moved = [[own[rate][0]["test"][length]["bits_per_byte"] for rate in sorted(own)] for own in pairs]
        most.append(max(abs(last / first - 1) for first, last in moved))
    assert told(f"by up to {100 * most[0]:.1f} % at width 384 and {100 * most[1]:.1f} % at 768")
    assert told(f"better for {better} of {models} models")


def test_the_convolution(bits):
    assert told(f"by {ends([1 - b['Gated DeltaNet'] / b['Gated DeltaNet, no convolution'] for b in bits])}; without it")
    assert all(abs(b["Gated DeltaNet, no convolution"] / b["Transformer++"] - 1) < 0.01 for b in bits), "level"


def test_recall():
    plan = whole_study("mqar_sizes", "real")
    half = "T=128, 32 pairs, width 32"
    cells = [cell.name for cell in plan.cells if cell.name != half]

    def solved(label: str) -> int:
        return sum(outcome("mqar_sizes", cell, label).solved[0] for cell in cells)

    assert {solved(label) for label in KEEPING} == {3 * len(cells)} and told(f"every one of {3 * len(cells)} seeds")
    for labels, words in ((FORGETTING, "those that forget with {} to {}"), (ADDITIVE, "additive rules with {} to {}")):
        counts = [solved(label) for label in labels]
        assert told(words.format(min(counts), max(counts))), counts
    few = sum(outcome("mqar_sizes", half, mixer.label).solved[0] for mixer in plan.mixers)
    assert told(f"with half as many {few} of {3 * len(plan.mixers)} seeds of all mixers do")


def test_recall_of_more_pairs_than_channels():
    """Of the runs that both sides have; the repeats are of the same seeds on other machines."""

    def solved(rows: list, label: str, seeds: tuple[int, ...] = (0, 2, 4)) -> str:
        own = [r for r in rows if (r["mixer"]["label"], r["cell"]["name"]) == (label, "64 pairs, T=256")]
        passed = [r["validation"]["token_accuracy"] >= SOLVED for r in own if r["seed"] in seeds]
        return f"{sum(passed)} of {len(passed)}"

    first, again = (list(read_table(table_path("recall", name))) for name in ("real", "repeats"))
    control, ours = solved(first, "DeltaNet's layer, additive"), solved(first, "DeltaNet")
    assert told(f"as pairs in {control} runs, DeltaNet in {ours.split()[0]} of them")
    repeats = [solved([r for r in again if r["repeat"] == number], "DeltaNet") for number in (2, 3)]
    assert {one.split()[2] for one in (control, ours, *repeats)} == {"12"}
    assert told(f"the same runs made again gave {' and '.join(one.split()[0] for one in repeats)}")
    page = (EXPERIMENTS / "recall" / "README.md").read_text()
    assert f"({solved(first, 'DeltaNet', (0, 2, 4, 6))} with a fourth seed)" in page
