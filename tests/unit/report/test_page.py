"""Pages: one file that loads nothing, with every text escaped and every table whole."""

import re
from html.parser import HTMLParser

import pytest

from tackboard.report.page import STYLE, Figure, Link, Page, Section
from tackboard.report.svg import Line, line_chart

VOID = {"meta", "br", "hr", "link", "img", "input"}


class Balance(HTMLParser):
    """Fails on a tag that is closed out of order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def full_page() -> str:
    page = Page("A <title>", "sub & title", footer="the end")
    page.lead.verdict("promised and kept", good=True)
    page.lead.figures([Figure(label="HR@10", value="0.24", note="better"), Figure(label="time", value="3 s")])
    section = page.section("Numbers")
    section.text("see https://example.org/x?a=1&b=2")
    section.table(["name", "value"], [["a", 1], ["b", "<2>"]], align=["left", "right"], strong_rows=[1], caption="two")
    section.facts([("machine", "a & b")])
    section.code("tackboard train demo\ntackboard export")
    line = Line(name="a", x=[0, 1], y=[0, 1])
    section.chart(line_chart([line], title="t", description="d", x_label="x", y_label="y"), "a line")
    page.section("Second")
    return page.render()


def test_page_is_well_formed() -> None:
    parser = Balance()
    parser.feed(full_page())
    assert parser.open == []
    assert {"h1", "h2", "table", "pre", "figure", "svg", "nav", "footer", "dl"} <= set(parser.seen)


def test_page_loads_nothing() -> None:
    html = full_page()
    assert re.findall(r"https?://", html) == []
    assert "<script" not in html
    assert re.findall(r'(?:src|href)="(?!#)', html) == []
    assert "url(" not in STYLE and "@import" not in STYLE
    assert "default-src 'none'" in html


def test_text_is_escaped_everywhere() -> None:
    html = full_page()
    assert "<h1>A &lt;title&gt;</h1>" in html
    assert "&lt;2&gt;" in html
    assert "sub &amp; title" in html
    assert '<th scope="row">machine</th><td>a &amp; b</td>' in html


def test_sections_are_linked_in_order() -> None:
    html = full_page()
    anchors = re.findall(r'<a href="#([^"]+)"', html)
    assert anchors == ["section-1", "section-2"]
    assert all(f'id="{anchor}"' in html for anchor in anchors)


def test_rows_and_code_are_kept() -> None:
    html = full_page()
    assert '<tr class="strong"><td class="left">b</td><td class="right">&lt;2&gt;</td></tr>' in html
    assert "<pre><code>tackboard train demo\ntackboard export</code></pre>" in html
    assert html == full_page(), "the same content gives the same bytes"


def test_entries_can_be_chosen_without_a_script() -> None:
    page = Page("t", "s")
    entries = [Section("one <b>", "one"), Section("two", "two")]
    entries[0].text("first")
    entries[1].facts([("see", (Link("<one>", "one"), "and more"))])
    page.section("all").entries(entries, [("odd & even", [1])])
    html = page.render()
    parser = Balance()
    parser.feed(html)
    assert parser.open == [] and "script" not in parser.seen
    assert '<div class="entry"><h3 id="one">one &lt;b&gt;</h3><p>first</p></div>' in html
    assert '<div class="entry filter-0"><h3 id="two">two</h3>' in html
    assert "main:has(#filter-0:checked) .entry:not(.filter-0) { display: none; }" in html
    assert '<input type="radio" name="filter" id="filter-0"> odd &amp; even' in html
    assert '<td><a href="#one">&lt;one&gt;</a>, and more</td>' in html


def test_a_row_of_another_width_is_refused() -> None:
    section = Page("t", "s").section("x")
    with pytest.raises(ValueError, match="3 cells in a table of 2 columns"):
        section.table(["a", "b"], [[1, 2, 3]])


def test_dark_mode_defines_every_light_colour() -> None:
    light, dark = STYLE.split("@media (prefers-color-scheme: dark)")[:2]
    names = re.findall(r"(--[a-z-]+):", light)
    assert names and names == re.findall(r"(--[a-z-]+):", dark)
