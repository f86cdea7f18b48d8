"""Every figure that the pages below claim stands in a result file that the same section links to.

A figure is, outside of code: a number below 1 with two or more decimals (`.371`, `0.371`), or a number with a unit
(`12.3 ms`, `95 seconds`, `2.2 MB`, `4.2×`, `42%`, `4.1 million events per second`). It stands in a result file if a
cell of a table or a number of a sentence there, rounded to as many decimals, is the same number with the same unit. The
unit of a cell may stand in the head of its column. Where and when a result was measured supports no figure. A section
is the text between two headings. A figure of which no result file was kept is marked: its paragraph links with the
words `log only` to the section of docs/log.md that has it. Some numbers are no measurements: NOT_MEASURED lists them,
each with its reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    *("README.md", "docs/dcat.md", "docs/distributed.md", "docs/finetuning.md"),
    *("docs/pretraining.md", "docs/pretraining-measured.md"),
)
LOG = ROOT / "docs" / "log.md"
RESULTS = ROOT / "benchmarks" / "results"

COMPUTED = "follows from the formula above the table"
CHOSEN = "a setting, not a measurement"
PUBLIC_CODE = "a setting of the public code of HSTU"
NOT_MEASURED: dict[str, dict[str, str]] = {
    "README.md": {},
    "docs/dcat.md": {},
    "docs/distributed.md": {"120 s": "the limit of the meeting", "600 s": CHOSEN},
    "docs/pretraining.md": {
        "0.07": CHOSEN,
        "0.25": CHOSEN,
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
    "docs/finetuning.md": {"95%": "the level of an interval"},
    "docs/pretraining-measured.md": {
        "0.05": PUBLIC_CODE,
        "0.98": PUBLIC_CODE,
        "0.09": PUBLIC_CODE,
        "0.14": "our standard deviation where the public code has another",
        "95%": "the level of an interval",
    },
}
"""Page → number that is no measurement → why."""

FENCE = re.compile(r"^( *)(`{3,})[^\n`]*\n.*?^\1\2 *$", re.MULTILINE | re.DOTALL)
UNITS = r"(?:ms|µs|s|seconds|minutes|hours|[KMGT]i?B|(?:million |thousand )?\w+ per second|times faster)\b|×(?! ?\d)|%"
FIGURE = re.compile(rf"(?<![\w.,/])(?<!\w-)(?:0?\.\d{{2,}}(?![\w.]*\d)|\d[\d,]*(?:\.\d+)?(?: ?(?:{UNITS})))")
NUMBER = re.compile(r"(?<![\w.,/])(?<!\d-)(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?![\w]*\d)(?!-\d)")
LOG_LINK = re.compile(r"\[log\s+only\]\((?:docs/)?log\.md#([^)\s]+)\)")
ABOUT_THE_RUN = ("Machine:", "`tackboard", "![", "# ")
"""How the lines of a result file begin that say where and when it was measured."""
SHORT = {"seconds": "s", "minutes": "min", "hours": "h"}
"""Unit in a sentence → the same unit in the head of a column."""
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


def unit_of(figure: str) -> str:
    found = NUMBER.search(figure)
    assert found is not None
    return figure[found.end() :].strip()


def numbers_of(text: str) -> Iterator[tuple[Decimal, str]]:
    """Yields each number of a result file's cells and sentences, with the words that may hold its unit.

    These words follow the number, or stand in the head of its column.
    """
    head: list[str] = []
    for line in text.split("\n"):
        if line.startswith(ABOUT_THE_RUN):
            continue
        is_row = line.startswith("|")
        cells = line.strip("|").split("|") if is_row else [line]
        head = (head or cells) if is_row else []
        for place, cell in enumerate(cells):
            column = head[place] if is_row and place < len(head) else ""
            for found in NUMBER.finditer(cell):
                yield Decimal(found.group().replace(",", "")), f"{cell[found.end() :].lstrip()}\n{column}"


def has_unit(unit: str, words: str) -> bool:
    """Whether the words after a number begin with the unit, or the head of its column has the unit as a word."""
    after, column = words.split("\n")
    names = {unit, SHORT.get(unit, unit)}
    return any(re.match(rf"{re.escape(name)}(?!\w)", after) for name in names) or bool(names & set(column.split()))


def stands_in(figure: str, text: str) -> bool:
    """Whether a number of a result file, rounded to the decimals of the figure, is the figure with its unit."""
    number, unit = number_of(figure), unit_of(figure)
    half = Decimal(1).scaleb(int(number.as_tuple().exponent)) / 2
    return any(abs(one - number) <= half and (not unit or has_unit(unit, words)) for one, words in numbers_of(text))


def log_section(anchor: str) -> str:
    """The section of docs/log.md with this anchor."""
    for _, text, _ in sections_of(LOG.read_text(encoding="utf-8")):
        heading = text.split("\n", 1)[0].lstrip("# ").lower()
        if re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") == anchor:
            return text
    return ""


def paragraph_at(text: str, line: int) -> str:
    """The paragraph or the item of a list that holds a line, which counts from 1."""
    lines = text.split("\n")

    def begins(number: int) -> bool:
        return number == 0 or not lines[number - 1].strip() or lines[number].startswith(("- ", "|", "#"))

    first = next(number for number in range(line - 1, -1, -1) if begins(number))
    last = next((number for number in range(line, len(lines)) if begins(number)), len(lines))
    return "\n".join(lines[first:last])


def unfounded(name: str, markdown: str, allowed: dict[str, str]) -> list[str]:
    """A line for each figure of a page that stands in no result file which its section links to."""
    wrong = []
    for begin, text, plain in sections_of(markdown):
        linked = [ROOT / file for file in RESULT_LINK.findall(text)]
        results = "\n\n".join(file.read_text(encoding="utf-8") for file in linked if file.is_file())
        for line, figure in figures_of(plain):
            logged = "\n\n".join(log_section(anchor) for anchor in LOG_LINK.findall(paragraph_at(text, line)))
            if figure not in allowed and not stands_in(figure, results) and not stands_in(figure, logged):
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
    assert stands_in("42%", "42.1% of users") and not stands_in("42%", "43%") and not stands_in("42%", "42 users")
    table = "| | steps | s | share |\n|---|--:|--:|--:|\n| a | 1,234 | 95.2 | 42% |"
    assert stands_in("95 s", table) and stands_in("95 seconds", table) and stands_in("42%", table)
    assert not stands_in("1,234 s", table) and not stands_in("1,234 s", "1234.4 steps")
    about = "# Quality, .371\n\n`tackboard bench --set a=.371`, 2026-11-18, commit 7c.371\nMachine: .371 GiB"
    assert not stands_in(".371", about) and not stands_in("18 s", "2026-11-18 s")


def test_a_figure_without_a_result_is_named() -> None:
    file = next(RESULTS.glob("quality-ml-1m-compare_h200_*.md"))
    link = f"[all](benchmarks/results/{file.name})"
    page = f"# A\nHR@10 .371 ({link}).\n\n```\n.999\n```\n.9998 here\n## B\n\n.371 again\n"
    assert unfounded("PAGE.md", page, {}) == [
        f"PAGE.md:7: .9998 stands in none of {file.name}",
        "PAGE.md:10: .371 stands without a result file",
    ]
    assert unfounded("PAGE.md", page, {".9998": "why", ".371": "why"}) == []


def test_a_figure_without_a_result_file_is_marked_in_its_paragraph() -> None:
    anchor = "2026-11-15-movielens-1m-the-first-sweep"
    link = f"([log only](log.md#{anchor}))"
    page = f"# A\nFirst .3848 {link}.\n\nThen .3848 again.\n- .9998 {link}"
    assert unfounded("PAGE.md", page, {}) == [
        "PAGE.md:4: .3848 stands without a result file",
        "PAGE.md:5: .9998 stands without a result file",
    ]
    assert unfounded("PAGE.md", page.replace("log only", "log"), {})[0].startswith("PAGE.md:2: .3848")


NO_RANKS = dict.fromkeys(
    (
        "quality-deskdrop-ablations_two-core-epyc_202611",
        "quality-deskdrop-transfer-hidden_two-core-epyc_202611",
        "quality-deskdrop-transfer_two-core-epyc_202611",
        "quality-kakao-brunch-compare_h200_202611",
        "quality-ml-1m-ablations_h200_202611",
        "quality-ml-1m-compare_h200_202611",
        "quality-ml-1m-reproduce_h200_202611",
    ),
    "measured before ranks were kept",
)
"""Result without kept ranks → why."""


def test_every_quality_table_keeps_what_recomputes_it() -> None:
    tables = {path.stem for path in RESULTS.glob("quality-*.md")}
    kept = {path.name.removesuffix("_ranks.npz") for path in RESULTS.glob("quality-*_ranks.npz")}
    assert kept <= tables, f"ranks without a table: {sorted(kept - tables)}"
    assert tables - kept <= set(NO_RANKS), f"run again with --results, which keeps ranks: {sorted(tables - kept)}"
    assert not set(NO_RANKS) & kept and set(NO_RANKS) <= tables, "take out of NO_RANKS what has ranks or is gone"
