"""What is looked at in the site after it was built, and what its pages are made of."""

import importlib
import json
import pathlib
import sys

import pytest

CI = pathlib.Path(__file__).parents[1] / ".ci"


def ci_module(name, monkeypatch):
    monkeypatch.syspath_prepend(str(CI))
    yield importlib.import_module(name)
    sys.modules.pop(name, None)


@pytest.fixture
def check_site(monkeypatch):
    yield from ci_module("check_site", monkeypatch)


@pytest.fixture
def pages(monkeypatch):
    pytest.importorskip("latex2mathml", reason="the group `docs` is not installed")
    pytest.importorskip("nbconvert", reason="the group `docs` is not installed")
    yield from ci_module("pages", monkeypatch)


def test_dead_links_and_missing_names_are_found(check_site, tmp_path):
    (tmp_path / "api" / "lib").mkdir(parents=True)
    (tmp_path / "index.html").write_text(
        '<a href="api/lib/#lib.here">ok</a> <a href="api/lib/#lib.gone">anchor</a> <img src="no.png">'
        '<a href="#top" id="top">ok</a> <a href="https://example.org/x">ok</a> <a href="absent/">page</a>'
    )
    (tmp_path / "api" / "lib" / "index.html").write_text(
        '<h2 id="lib.here">here</h2><a href="../..">ok</a><blockquote>'
    )
    problems = check_site.problems_of_site(tmp_path, {"lib": ["here", "there"]})
    assert problems == [
        "index.html: the link 'api/lib/#lib.gone' leads nowhere",
        "index.html: the link 'no.png' leads nowhere",
        "index.html: the link 'absent/' leads nowhere",
        "lib.there has no entry in the reference",
        "lib: an example reads as a quote; its section is called Examples",
    ]


def test_mathematics_is_markup_and_code_stays(pages):
    text = "State $S_t$, cost $5 and `$x$`.\n\n$$a^2$$\n\n```\n$y$\n```\n"
    shown = pages.outside_of_code(text, pages.with_mathematics)
    assert shown.count("<math") == 2 and "`$x$`" in shown and "$y$" in shown and "cost $5 and" in shown
    assert "<span><math" in shown and 'display="block"' in shown


def test_a_function_is_found_where_a_folder_has_its_name(pages):
    page = pages.reference_page("rnnlib.ops", ["gated_delta_rule"], [])
    assert "\n::: rnnlib.ops.gated_delta_rule." in page and '<a id="rnnlib.ops.gated_delta_rule"></a>' in page
    assert "heading: gated_delta_rule" in page


def test_every_page_is_in_the_navigation(pages, tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "CONFIG", tmp_path / "mkdocs.yml")
    places = [*sorted(pages.site_pages().values()), "new.md"]
    pages.write_navigation(places, ["rnnlib.ops"])
    settings = json.loads((tmp_path / "mkdocs.yml").read_text())
    shown = json.dumps(settings["nav"]) + settings["not_in_nav"]
    assert [place for place in places if place not in shown] == []
    assert "new.md" in settings["nav"][1]["Guides"]
