"""What docs/architecture.md and CONTRIBUTING.md say of modules is true of the tree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "tackboard"
MAX_FILES_TO_TOUCH = 3


def table_rows(page: str, heading: str) -> list[list[str]]:
    """The cells of the table under a heading, without the line of its names."""
    section = (ROOT / page).read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return rows[2:]


WALK = [row[1].strip("`") for row in table_rows("docs/architecture.md", "One event, from a file to a served score")]
MODULE = re.compile(r"`([a-z_]+(?:/[a-z_<>]+)+\.py)`")
PLACES = {what: MODULE.findall(files) for what, files in table_rows("CONTRIBUTING.md", "Where to add what")}


def test_the_walk_of_an_event_names_no_module_twice() -> None:
    assert len(WALK) > 20
    assert len(set(WALK)) == len(WALK)
    assert [module for module in WALK if not (PACKAGE / module).is_file()] == []


@pytest.mark.parametrize("what", PLACES)
def test_an_addition_touches_at_most_three_files(what: str) -> None:
    files = PLACES[what]
    assert 1 <= len(files) <= MAX_FILES_TO_TOUCH
    for name in files:
        exists = (PACKAGE / name).parent.is_dir() if "<" in name else (PACKAGE / name).is_file()
        assert exists, name
