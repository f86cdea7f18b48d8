"""Makes one self-contained HTML page of sections with text, figures, tables, code and charts.

The page loads nothing: style is inline, there is no script, and a content security policy forbids scripts and requests.
All text is escaped. Only an `Svg`, which `report.svg` makes, is inserted as markup. "://" in a text is written as an
entity. So a search for "://" finds nothing in the page, which shows that the page loads no address.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from tackboard.report.svg import Svg, clean

Align = Literal["left", "right"]

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #ffffff; --panel: #f6f8fa; --ink: #1b1f24; --muted: #5c6773; --grid: #e3e7eb; --line: #d5dbe1;
  --good: #00704f; --good-paper: #e3f5ee; --bad: #a8380b; --bad-paper: #fdeee6;
  --chart-accent: #0072b2; --chart-second: #e69f00; --chart-third: #009e73;
  --chart-strong: #6b7785; --chart-soft: #b4bdc7; --chart-raw: #b5d8ee;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14181d; --panel: #1c2229; --ink: #e8ecf0; --muted: #9aa5b1; --grid: #2a323b; --line: #36404a;
    --good: #52d0a4; --good-paper: #123328; --bad: #ff9a6b; --bad-paper: #3b2118;
    --chart-accent: #56b4e9; --chart-second: #e69f00; --chart-third: #2ec4a0;
    --chart-strong: #8794a1; --chart-soft: #525d68; --chart-raw: #3a6d8c;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, Helvetica, Arial, sans-serif;
}
main { max-width: 960px; margin: 0 auto; padding: 48px 24px 72px; }
header { margin-bottom: 28px; }
h1 { font-size: 30px; line-height: 1.2; margin: 0 0 6px; letter-spacing: -0.015em; }
h2 { font-size: 20px; line-height: 1.3; margin: 52px 0 8px; letter-spacing: -0.01em; }
p { margin: 0 0 14px; max-width: 76ch; }
.subtitle, figcaption, .note { color: var(--muted); }
.subtitle { font-size: 17px; }
nav { font-size: 14px; margin: 22px 0 0; }
nav a { color: var(--muted); margin-right: 18px; white-space: nowrap; }
.figures {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin: 24px 0; padding: 0;
}
.figures div { background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: 14px 14px; }
.figures dt { color: var(--muted); font-size: 13px; line-height: 1.35; }
.figures dd {
  margin: 2px 0 0; font-size: 20px; line-height: 1.4; font-weight: 650; font-variant-numeric: tabular-nums;
}
.figures dd.note { font-size: 13px; font-weight: 400; line-height: 1.4; }
.verdict { border-left: 4px solid; border-radius: 4px; padding: 10px 16px; margin: 20px 0; max-width: none; }
.verdict.good { border-color: var(--good); background: var(--good-paper); }
.verdict.bad { border-color: var(--bad); background: var(--bad-paper); }
figure { margin: 18px 0 22px; }
figure svg { display: block; width: 100%; height: auto; font-variant-numeric: tabular-nums; }
figcaption { font-size: 14px; margin-top: 6px; }
figure { overflow-x: auto; }
h3 { font-size: 16.5px; line-height: 1.35; margin: 34px 0 4px; overflow-wrap: anywhere; }
td a { color: inherit; text-decoration-color: var(--muted); }
.filter { font-size: 14px; margin: 14px 0; color: var(--muted); }
.filter label { display: inline-block; margin-right: 14px; white-space: nowrap; }
.scroll { overflow-x: auto; margin: 14px 0 20px; }
table { border-collapse: collapse; width: 100%; font-size: 14.5px; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--muted); font-size: 14px; padding-bottom: 6px; }
th { text-align: left; color: var(--muted); font-weight: 600; border-bottom: 2px solid var(--line); }
th, td { padding: 6px 14px 6px 0; vertical-align: top; }
td { border-bottom: 1px solid var(--grid); overflow-wrap: anywhere; }
th.right, td.right { text-align: right; white-space: nowrap; }
th.right:last-child, td.right:last-child { padding-right: 0; }
td:first-child { white-space: nowrap; }
tbody th { border-bottom: 1px solid var(--grid); white-space: nowrap; width: 9em; }
tr.strong td { font-weight: 650; }
pre {
  background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: 14px 16px; overflow-x: auto;
  font: 13.5px/1.6 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; margin: 12px 0 20px;
}
footer { margin-top: 56px; padding-top: 16px; border-top: 1px solid var(--line); color: var(--muted); font-size: 14px; }
@media print {
  main { max-width: none; padding: 0; }
  figure, table, pre, .figures { break-inside: avoid; }
  nav { display: none; }
}
"""


@dataclass(frozen=True)
class Figure:
    """One headline number."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Link:
    """A table cell that links to another place of the page."""

    text: str
    anchor: str


@dataclass
class Section:
    """A heading and the blocks under it, in the order in which they were added."""

    title: str
    anchor: str
    blocks: list[str] = field(default_factory=list)

    def text(self, text: str) -> None:
        self.blocks.append(f"<p>{clean(text)}</p>")

    def verdict(self, text: str, *, good: bool) -> None:
        """Adds a sentence that says whether a promise holds. The words must be clear without the colour."""
        self.blocks.append(f'<p class="verdict {"good" if good else "bad"}">{clean(text)}</p>')

    def figures(self, figures: Sequence[Figure]) -> None:
        cells = []
        for figure in figures:
            note = f'<dd class="note">{clean(figure.note)}</dd>' if figure.note else ""
            cells.append(f"<div><dt>{clean(figure.label)}</dt><dd>{clean(figure.value)}</dd>{note}</div>")
        self.blocks.append(f'<dl class="figures">{"".join(cells)}</dl>')

    def chart(self, svg: Svg, caption: str = "") -> None:
        words = f"<figcaption>{clean(caption)}</figcaption>" if caption else ""
        self.blocks.append(f"<figure>{svg.markup}{words}</figure>")

    def table(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[object]],
        *,
        caption: str = "",
        align: Sequence[Align] | None = None,
        strong_rows: Sequence[int] = (),
    ) -> None:
        """Adds a table. `align` has one side per column (default: left). Raises ValueError if `align` or a row
        does not have one entry per column."""
        sides = list(align or ["left"] * len(columns))
        for row in [sides, *rows]:
            if len(row) != len(columns):
                raise ValueError(f"a row has {len(row)} cells in a table of {len(columns)} columns: {list(row)}")
        head = "".join(
            f'<th scope="col" class="{side}">{clean(name)}</th>' for name, side in zip(columns, sides, strict=True)
        )
        body = []
        for index, row in enumerate(rows):
            cells = "".join(f'<td class="{side}">{_cell(cell)}</td>' for side, cell in zip(sides, row, strict=True))
            mark = ' class="strong"' if index in strong_rows else ""
            body.append(f"<tr{mark}>{cells}</tr>")
        words = f"<caption>{clean(caption)}</caption>" if caption else ""
        self.blocks.append(
            f'<div class="scroll"><table>{words}<thead><tr>{head}</tr></thead>'
            f"<tbody>{''.join(body)}</tbody></table></div>"
        )

    def facts(self, facts: Sequence[tuple[str, object]]) -> None:
        """Adds names and values, one pair per line."""
        lines = [f'<tr><th scope="row">{clean(name)}</th><td>{_cell(value)}</td></tr>' for name, value in facts]
        self.blocks.append(f'<div class="scroll"><table><tbody>{"".join(lines)}</tbody></table></div>')

    def code(self, text: str) -> None:
        """Adds text that readers may copy, in a fixed-width font, with its line breaks."""
        self.blocks.append(f"<pre><code>{clean(text)}</code></pre>")

    def entries(self, entries: Sequence["Section"], groups: Sequence[tuple[str, Sequence[int]]] = ()) -> None:
        """Adds smaller sections, each under its own heading. If there are groups, adds a filter, which needs no script.

        A group is a name and the positions of its entries. Choosing a group hides all other entries.
        """
        rules, labels = [], ['<label><input type="radio" name="filter" checked> all</label>']
        for number, (name, _) in enumerate(groups):
            mark = f"filter-{number}"
            rules.append(f"main:has(#{mark}:checked) .entry:not(.{mark}) {{ display: none; }}")
            labels.append(f'<label><input type="radio" name="filter" id="{mark}"> {clean(name)}</label>')
        if groups:
            self.blocks.append(f'<style>{" ".join(rules)}</style><p class="filter">Show: {"".join(labels)}</p>')
        for position, entry in enumerate(entries):
            marks = "".join(f" filter-{number}" for number, (_, chosen) in enumerate(groups) if position in chosen)
            heading = f'<h3 id="{entry.anchor}">{clean(entry.title)}</h3>'
            self.blocks.append(f'<div class="entry{marks}">{heading}{"".join(entry.blocks)}</div>')


def _cell(value: object) -> str:
    """Returns a value (a text or a link) as the content of a table cell. A tuple of values is joined with commas."""
    if isinstance(value, tuple):
        return ", ".join(_cell(one) for one in value)
    if isinstance(value, Link):
        return f'<a href="#{clean(value.anchor)}">{clean(value.text)}</a>'
    return clean(str(value))


class Page:
    """A page with a title, a subtitle, sections, and a last line. `render` returns the whole file."""

    def __init__(self, title: str, subtitle: str, *, footer: str = "") -> None:
        self.title = title
        self.subtitle = subtitle
        self.footer = footer
        self.lead = Section("", "top")
        self.sections: list[Section] = []

    def section(self, title: str) -> Section:
        section = Section(title, f"section-{len(self.sections) + 1}")
        self.sections.append(section)
        return section

    def render(self) -> str:
        """Returns the page as one HTML document, which ends with a line break."""
        links = "".join(f'<a href="#{section.anchor}">{clean(section.title)}</a>' for section in self.sections)
        bodies = "\n".join(
            f'<section aria-labelledby="{section.anchor}"><h2 id="{section.anchor}">{clean(section.title)}</h2>\n'
            + "\n".join(section.blocks)
            + "</section>"
            for section in self.sections
        )
        lead = "\n".join(self.lead.blocks)
        footer = f"<footer>{clean(self.footer)}</footer>" if self.footer else ""
        return (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{clean(self.title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
            f'<header><h1>{clean(self.title)}</h1>\n<p class="subtitle">{clean(self.subtitle)}</p>\n'
            f'<nav aria-label="Sections">{links}</nav></header>\n'
            f"{lead}\n{bodies}\n{footer}\n</main>\n</body>\n</html>\n"
        )
