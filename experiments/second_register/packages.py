"""Which packages the text is from, and how their files become documents."""

import dataclasses
import gzip
import html
import html.parser
import pathlib
import re
from collections.abc import Callable, Iterator

# What a page says beside its text. A `<pre>` keeps its lines.
_NO_TEXT = {"script", "style", "head", "nav", "header", "footer", "info"}
_HEADINGS = {f"h{level}" for level in range(1, 7)} | {"title"}
_BLOCKS = {"p", "div", "li", "dt", "dd", "tr", "table", "ul", "ol", "dl", "pre", "blockquote", "br", "hr"}
_BLOCKS |= _HEADINGS | {"section", "item", "steps", "note"}


class _Text(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._silent = self._verbatim = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._silent += tag in _NO_TEXT
        self._verbatim += tag == "pre"
        if tag in _BLOCKS:
            self.parts.append("\n")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _BLOCKS:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self._silent = max(self._silent - (tag in _NO_TEXT), 0)
        self._verbatim = max(self._verbatim - (tag == "pre"), 0)
        if tag in _BLOCKS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self._silent:
            self.parts.append(data if self._verbatim else re.sub(r"\s+", " ", data))


def text_of_markup(source: str) -> str:
    """The text of an HTML or Mallard page: a line a block, no empty lines."""
    reader = _Text()
    reader.feed(source)
    reader.close()
    lines = "".join(reader.parts).split("\n")
    return "\n".join(line.rstrip() for line in lines if line.strip()) + "\n"


def text_of_pod(source: str) -> str:
    """Perl's documentation without its formatting codes, `C<...>` and the like."""
    for _ in range(3):  # codes stand within codes
        source = re.sub(r"\b[BCFILSXZ]<(?!<)([^<>]*)>", r"\1", source)
    return re.sub(r"\bE<(\w+)>", lambda found: html.unescape(f"&{found[1]};"), source)


def text_as_it_is(source: str) -> str:
    """The file."""
    return source


@dataclasses.dataclass(frozen=True)
class Package:
    """A package of Debian's that brings text.

    Attributes:
        name: as the distribution calls it.
        files: which of its files are read; `.gz` behind a name is read too.
        text: makes a document of a file.
    """

    name: str
    files: str
    text: Callable[[str], str]

    def documents(self, folder: pathlib.Path) -> Iterator[str]:
        """Documents of an unpacked package, by their files' names; a file that is no UTF-8 is passed over."""
        for path in sorted({*folder.glob(self.files), *folder.glob(self.files + ".gz")}):
            content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            try:
                yield self.text(content.decode())
            except UnicodeDecodeError:
                continue


PACKAGES = (
    Package("linux-doc-6.1", "usr/share/doc/linux-doc-6.1/Documentation/**/*.rst", text_as_it_is),
    Package("python3.11-doc", "usr/share/doc/python3.11/html/_sources/**/*.rst.txt", text_as_it_is),
    Package("postgresql-doc-15", "usr/share/doc/postgresql-doc-15/html/*.html", text_of_markup),
    Package("perl-doc", "usr/share/perl/*/**/*.pod", text_of_pod),
    Package("debian-handbook", "usr/share/doc/debian-handbook/html/en-US/*.html", text_of_markup),
    Package("gnome-user-docs", "usr/share/help/C/**/*.page", text_of_markup),
    Package("libreoffice-help-en-us", "usr/share/libreoffice/help/en-US/text/**/*.html", text_of_markup),
    Package("anarchism", "usr/share/doc/anarchism/html/*.html", text_of_markup),
)
