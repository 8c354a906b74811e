"""Packages become documents: markup, Perl's documentation, packed files."""

import gzip

import pytest

from experiments.second_register.__main__ import unpack
from experiments.second_register.packages import PACKAGES, Package, text_as_it_is, text_of_markup, text_of_pod


def test_markup_is_text_a_line_a_block():
    page = (
        "<html><head><title>T</title><style>p {}</style></head><body><nav>Home</nav><h1>One &amp; two</h1>"
        "<p>A <b>bold</b>\n   word.</p><pre>x = 1\n  y</pre><script>a < b</script><ul><li>last</ul></body></html>"
    )
    assert text_of_markup(page) == "One & two\nA bold word.\nx = 1\n  y\nlast\n"
    mallard = "<page><info><credit><name>N</name></credit></info><title>T</title><p>Text<br/>more</p></page>"
    assert text_of_markup(mallard) == "T\nText\nmore\n"


def test_pod_has_no_codes():
    assert (
        text_of_pod("See L<perlre>, B<I<this>> and 1 E<lt> 2; C<< a->b >>") == "See perlre, this and 1 < 2; C<< a->b >>"
    )


def test_documents_of_a_package(tmp_path):
    for name, content in (
        ("b.txt", b"second"),
        ("a.txt.gz", gzip.compress(b"first")),
        ("c.txt", b"\xff"),
        ("d.md", b"no"),
    ):
        (tmp_path / "doc" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "doc" / name).write_bytes(content)
    package = Package("p", "doc/*.txt", text_as_it_is)
    assert list(package.documents(tmp_path)) == ["first", "second"]
    with pytest.raises(ValueError, match=r"p_\*.deb|apt-get"):
        unpack(package, tmp_path, tmp_path / "files")
    assert len({package.name for package in PACKAGES}) == len(PACKAGES) >= 8
