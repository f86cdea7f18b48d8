"""The operator reference: every example gives what it says, and the page in docs is the one of this code."""

from __future__ import annotations

from pathlib import Path

import pytest

from tackboard.core.errors import DataError
from tackboard.features.operators import FAMILIES, REGISTRY, Example
from tackboard.features.reference import (
    BEGIN,
    END,
    parse_type,
    read_example,
    reference,
    refresh,
    types_of,
    with_reference,
)

PAGE = Path(__file__).resolve().parents[3] / "docs" / "features.md"


def test_the_page_is_up_to_date() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_reference(page), "run: tackboard features docs --reference --out docs/features.md"


def test_the_reference_has_a_row_for_each_operator() -> None:
    text = reference()
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) == len(REGISTRY)
    for row in rows:
        assert row.replace("\\|", "").count("|") == 5
    assert [line[4:] for line in text.splitlines() if line.startswith("### ")] == [f.capitalize() for f in FAMILIES]


@pytest.mark.parametrize(
    ("name", "types"),
    [
        ("add", "number, number → int or float"),
        ("floor_divide", "bool or int, bool or int → int?"),
        ("cross", "scalar except float, scalar except float, … → id"),
        ("is_in", "int or string or id or time → bool"),
        ("fill_missing", "scalar or vector or list → scalar or vector or list"),
        ("list_mean", "list[number] → float?"),
        ("has", "list, scalar → bool"),
        ("events", "→ events"),
        ("where", "events, bool → events"),
        ("decayed_sum", "events, number → float"),
        ("sequence", "list, list, … → sequence"),
    ],
)
def test_types_are_those_of_the_rule(name: str, types: str) -> None:
    assert types_of(REGISTRY[name]) == types


def test_a_stale_page_is_renewed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tackboard.features.reference.reference", lambda: "fresh text")
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nstale text\n{END}\nafter\n", encoding="utf-8")
    assert refresh(page)
    text = page.read_text(encoding="utf-8")
    assert (
        text.startswith("before\n") and text.endswith("after\n") and "stale text" not in text and "fresh text" in text
    )
    assert not refresh(page)


def test_a_page_without_markers_is_refused() -> None:
    with pytest.raises(DataError, match="no place for the reference"):
        with_reference(f"{END}\n{BEGIN}\n")


@pytest.mark.parametrize("text", ["bool", "float?", "vector[3]", "vector[3]?", "list[id]", "list[string]?"])
def test_types_are_read_as_they_are_written(text: str) -> None:
    assert str(parse_type(text)) == text


def test_what_is_no_example_is_refused() -> None:
    with pytest.raises(ValueError, match="is not a type"):
        parse_type("list[list[int]]?x")
    for code in ("x.__class__", "[y for y in x]", "lambda: 1"):
        with pytest.raises(ValueError, match="may not hold"):
            read_example(Example(code, [1], {"x": ("int", [1])}))
