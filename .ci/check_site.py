"""Looks at the site that was built: links within it lead somewhere, and each public name has its entry."""

import html.parser
import os
import pathlib
import re
from collections.abc import Mapping, Sequence


class _Page(html.parser.HTMLParser):
    """Anchors and links of a page, and whether it quotes: an example without its section looks so."""

    def __init__(self, text: str):
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.has_quotes = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Notes an element's anchor and where it leads."""
        values = dict(attrs)
        self.has_quotes |= tag == "blockquote"
        self.anchors |= {values[name] or "" for name in ("id", "name") if name in values}
        self.links += [values[name] or "" for name in ("href", "src") if name in values]


def problems_of_site(site: pathlib.Path, public: Mapping[str, Sequence[str]]) -> list[str]:
    """What is wrong with a built site, a line each.

    Args:
        site: its folder.
        public: public names by module; each must have the anchor `module.name` in `api/module/`.
    """
    pages = {path: _Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    problems = []
    for path, page in pages.items():
        for link in page.links:
            target, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:|//", link) or path.name == "404.html":
                continue
            found = pathlib.Path(os.path.normpath(path.parent / target.partition("?")[0])) if target else path
            found = found / "index.html" if found.is_dir() else found
            if not found.exists() or (anchor and found in pages and anchor not in pages[found].anchors):
                problems.append(f"{path.relative_to(site)}: the link {link!r} leads nowhere")
    for module, names in public.items():
        page = pages.get(site / "api" / module / "index.html", _Page(""))
        problems += [
            f"{module}.{n} has no entry in the reference" for n in names if f"{module}.{n}" not in page.anchors
        ]
        if page.has_quotes:
            problems.append(f"{module}: an example reads as a quote; its section is called Examples")
    return problems
