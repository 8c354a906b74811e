"""The tables in the studies' pages are those of the results in the repository."""

import pytest

from experiments.__main__ import STUDIES
from experiments.sweep.command import SweepOptions, folders, load_study
from experiments.sweep.report import marks, table
from experiments.sweep.study import SETTINGS


@pytest.mark.parametrize("name", STUDIES)
def test_a_page_shows_what_the_results_say(name):
    shown = 0
    for setting in SETTINGS:
        options = SweepOptions(setting=setting)
        folder, results = folders(name, options)
        page = (folder / "README.md").read_text()
        begin, end = marks(setting)
        if begin in page:
            assert page.split(begin, 1)[1].split(end, 1)[0].lstrip("\n") == table(load_study(name, options), results)
            assert f"figures/{setting}.png" in page and (folder / "figures" / f"{setting}.png").exists()
            shown += 1
    assert shown
