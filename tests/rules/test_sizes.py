"""Small stays small: no file over 600 lines, no function over 80."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 80
FILES = sorted(path for folder in ("src", "scripts", "benchmarks") for path in (ROOT / folder).rglob("*.py"))


def test_files_and_functions_are_short() -> None:
    long = []
    for path in FILES:
        text, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT)
        if (num_lines := len(text.splitlines())) > MAX_FILE_LINES:
            long.append(f"{name} has {num_lines} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                num_lines = node.end_lineno - node.lineno + 1
                if num_lines > MAX_FUNCTION_LINES:
                    long.append(f"{name}: {node.name} has {num_lines} lines")
    assert not long, "\n".join(long)
