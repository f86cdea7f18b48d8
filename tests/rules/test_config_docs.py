"""Every field of every config is explained where it is defined, and configs are frozen and keyword-only."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "tackboard"


def configs(text: str) -> list[ast.ClassDef]:
    return [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef) and node.name.endswith("Config") and dataclass_options(node) is not None
    ]


def dataclass_options(node: ast.ClassDef) -> dict[str, str] | None:
    """The arguments of the dataclass decorator, or None if there is no such decorator."""
    for decorator in node.decorator_list:
        call = decorator.func if isinstance(decorator, ast.Call) else decorator
        if ast.unparse(call).endswith("dataclass"):
            keywords = decorator.keywords if isinstance(decorator, ast.Call) else []
            return {keyword.arg or "": ast.unparse(keyword.value) for keyword in keywords}
    return None


def undocumented(node: ast.ClassDef) -> list[str]:
    """Fields that no string literal follows."""
    missing = []
    for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(statement, ast.AnnAssign) or "ClassVar" in ast.unparse(statement.annotation):
            continue
        is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        if not (is_text and isinstance(following.value.value, str)):  # type: ignore[union-attr]
            missing.append(ast.unparse(statement.target))
    return missing


FOUND = [
    (f"{path.relative_to(PACKAGE)}:{node.name}", node)
    for path in sorted(PACKAGE.rglob("*.py"))
    for node in configs(path.read_text(encoding="utf-8"))
]


def test_configs_are_explained_frozen_and_keyword_only() -> None:
    assert len(FOUND) > 20
    wrong = [f"{name}: {field} has no docstring" for name, node in FOUND for field in undocumented(node)]
    for name, node in FOUND:
        options = dataclass_options(node) or {}
        wrong += [f"{name} is not {option}" for option in ("frozen", "kw_only") if options.get(option) != "True"]
    assert not wrong, "\n".join(wrong)


def test_a_bare_field_is_found() -> None:
    text = '@dataclass(frozen=True)\nclass XConfig:\n    """X."""\n    a: int = 1\n    """A count."""\n    b: int = 2\n'
    assert undocumented(configs(text)[0]) == ["b"]
