"""Every figure that README.md and docs/pretraining.md claim stands in a result file that the same section links to.

A figure is, outside of code: a number below 1 with two or more decimals (`.371`, `0.371`), or a number with a unit
(`12.3 ms`, `95 seconds`, `2.2 MB`, `4.2×`, `42%`, `4.1 million events per second`). It stands in a result file if a
number there, rounded to as many decimals, is the same. A section is the text between two headings. Some numbers are no
measurements: NOT_MEASURED lists them, each with its reason.
"""

from __future__ import annotations

import re
from decimal import Decimal
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "docs/pretraining.md")
RESULTS = ROOT / "benchmarks" / "results"

COMPUTED = "follows from the formula above the table"
CHOSEN = "a setting, not a measurement"
NOT_MEASURED: dict[str, dict[str, str]] = {
    "README.md": {},
    "docs/pretraining.md": {
        "0.07": CHOSEN,
        "0.25": CHOSEN,
        "0.03": CHOSEN,
        "2.2 MB": COMPUTED,
        "1.2 MB": COMPUTED,
        "285 MB": COMPUTED,
        "151 MB": COMPUTED,
        "10.6 GB": COMPUTED,
        "5.4 GB": COMPUTED,
        "84.5 GB": COMPUTED,
        "43.5 GB": COMPUTED,
        "128 MiB": "the size of 2²⁵ numbers of fp32",
        "512 MiB": "the size of 2²⁷ numbers of fp32",
        "80 GB": "the size of a GPU",
        "64 GB": "the size of a machine's memory",
        "2%": "the margin of the verdict `agree`: SAME_SHARE in verdict.py",
    },
}
"""Page → number that is no measurement → why."""

FENCE = re.compile(r"^( *)(`{3,})[^\n`]*\n.*?^\1\2 *$", re.MULTILINE | re.DOTALL)
UNITS = r"(?:ms|µs|s|seconds|minutes|hours|[KMGT]i?B|(?:million |thousand )?\w+ per second|times faster)\b|×(?! ?\d)|%"
FIGURE = re.compile(rf"(?<![\w.,/])(?<!\w-)(?:0?\.\d{{2,}}(?![\w.]*\d)|\d[\d,]*(?:\.\d+)?(?: ?(?:{UNITS})))")
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?|\.\d+")
RESULT_LINK = re.compile(r"\]\((?:\.\./)?(benchmarks/results/[^)\s]+\.md)\)")


def without_code(markdown: str) -> str:
    """The same text with code, comments and link targets blanked, and with every line where it was."""

    def blank(found: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", found.group())

    text = FENCE.sub(blank, markdown)
    return re.sub(r"`[^`]*`|<!--.*?-->|(?<=\])\([^)\s]*\)", blank, text, flags=re.DOTALL)


def sections_of(markdown: str) -> list[tuple[int, str, str]]:
    """(number of the line before it, text, text without code) of each section."""
    plain = without_code(markdown).split("\n")
    lines = markdown.split("\n")
    starts = [0, *(number for number, line in enumerate(plain) if line.startswith("#") and number)]
    ends = [*starts[1:], len(lines)]
    places = zip(starts, ends, strict=True)
    return [(begin, "\n".join(lines[begin:end]), "\n".join(plain[begin:end])) for begin, end in places]


def figures_of(plain: str) -> list[tuple[int, str]]:
    """(line, figure) of each figure of a text without code. The line counts from 1."""
    return [(plain.count("\n", 0, found.start()) + 1, found.group()) for found in FIGURE.finditer(plain)]


def number_of(figure: str) -> Decimal:
    found = NUMBER.search(figure)
    assert found is not None
    return Decimal(found.group().replace(",", ""))


def stands_in(figure: str, text: str) -> bool:
    """Whether a number of the text, rounded to the decimals of the figure, is the figure."""
    number = number_of(figure)
    half = Decimal(1).scaleb(int(number.as_tuple().exponent)) / 2
    return any(abs(number_of(found.group()) - number) <= half for found in NUMBER.finditer(text))


def unfounded(name: str, markdown: str, allowed: dict[str, str]) -> list[str]:
    """A line for each figure of a page that stands in no result file which its section links to."""
    wrong = []
    for begin, text, plain in sections_of(markdown):
        linked = [ROOT / file for file in RESULT_LINK.findall(text)]
        results = "\n".join(file.read_text(encoding="utf-8") for file in linked if file.is_file())
        for line, figure in figures_of(plain):
            if figure not in allowed and not stands_in(figure, results):
                where = f"in none of {', '.join(file.name for file in linked)}" if linked else "without a result file"
                wrong.append(f"{name}:{begin + line}: {figure} stands {where}")
    return wrong


def test_every_figure_stands_in_a_result_file_that_its_section_names() -> None:
    wrong = [
        line
        for page in PAGES
        for line in unfounded(page, (ROOT / page).read_text(encoding="utf-8"), NOT_MEASURED[page])
    ]
    assert not wrong, "\n".join([*wrong, "Link to the file of benchmarks/results/ that holds it, or take it back."])


def test_no_exception_is_left_over() -> None:
    for page, allowed in NOT_MEASURED.items():
        found = {figure for _, figure in figures_of(without_code((ROOT / page).read_text(encoding="utf-8")))}
        assert set(allowed) <= found, f"{page} no longer has {sorted(set(allowed) - found)}: remove them here"


def test_what_a_figure_is() -> None:
    text = (
        "HR@10 .371, 0.224 and -.015; 12.3 ms, 4.2× and 42% (1,234 s), 4.1 million events per second. "
        "No figures: 8 × 32, 0.3, Python 3.11, 1,000 users, 2026-11-18, `0.25`, [x](a.35), 3.5, top-10, 2e-3."
    )
    found = [figure for _, figure in figures_of(without_code(text))]
    assert found == [".371", "0.224", ".015", "12.3 ms", "4.2×", "42%", "1,234 s", "4.1 million events per second"]
    assert stands_in(".371", "| 0.3710 |") and stands_in(".371", "0.3714") and not stands_in(".371", "0.3716 371")
    assert stands_in("1,234 s", "1234.4") and stands_in("42%", "42.1% of users") and not stands_in("42%", "43")


def test_a_figure_without_a_result_is_named() -> None:
    file = next(RESULTS.glob("quality-ml-1m-compare_h200_*.md"))
    link = f"[all](benchmarks/results/{file.name})"
    page = f"# A\nHR@10 .371 ({link}).\n\n```\n.999\n```\n.9998 here\n## B\n\n.371 again\n"
    assert unfounded("PAGE.md", page, {}) == [
        f"PAGE.md:7: .9998 stands in none of {file.name}",
        "PAGE.md:10: .371 stands without a result file",
    ]
    assert unfounded("PAGE.md", page, {".9998": "why", ".371": "why"}) == []
