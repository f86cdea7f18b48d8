"""A public class has a name of its own, and so has a file, unless its name means the same in every folder."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src" / "tackboard"
SAME_MEANING = {
    *("__init__", "config", "errors", "interface", "demo", "ablations"),
    *("data", "ours", "contender", "run", "report"),
}
"""The glossary says what these mean."""
FILES = sorted(SOURCE.rglob("*.py"))


def test_public_classes_have_one_definition() -> None:
    places = defaultdict(list)
    for path in FILES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(SOURCE)))
    twice = {name: where for name, where in places.items() if len(where) > 1}
    assert not twice, twice


def test_file_names_have_one_meaning() -> None:
    places = defaultdict(list)
    for path in FILES:
        if path.parent.name != "cli" and path.stem not in SAME_MEANING:
            places[path.stem].append(str(path.relative_to(SOURCE)))
    twice = {name: where for name, where in places.items() if len(where) > 1}
    assert not twice, twice
