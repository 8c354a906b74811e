"""Programs compile for TPUs; the page of what the compiler says has the committed results."""

import json

import pytest

from tests.tpu import table
from tests.tpu.compiling import CHIPS, compile_case, missing_package, names


def test_the_page_has_the_results():
    results = [json.loads(text) for text in table.RESULTS.read_text().splitlines()]
    assert {entry["case"] for entry in results} <= set(names()) and {entry["chip"] for entry in results} <= set(CHIPS)
    assert table.table(results) in table.PAGE.read_text(), "run `python -m tests.tpu.table`"


@pytest.mark.tpu
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("case", names())
def test_compiles(case, chip):
    if reason := missing_package():
        pytest.skip(reason)
    assert compile_case(case, chip).temporary >= 0
