"""Child processes are started, signalled and reaped in one module."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "tackboard"
HOME = PACKAGE / "core" / "processes.py"
STARTS = {
    "subprocess",
    "pty",
    "multiprocessing",
    "concurrent.futures.process",
    "concurrent.futures.ProcessPoolExecutor",
}
# The two ends of a socket, in serve/parser_process.py: nothing is started by it.
HARMLESS = ("multiprocessing.connection",)
CALLS = re.compile(
    r"os\.(fork\w*|exec\w+|spawn\w+|posix_spawnp?|system|popen|kill|killpg|wait\w*)|asyncio\.create_subprocess_\w+"
)


def names_of(tree: ast.AST) -> Iterator[str]:
    """What a module imports, and the names with a dot that it uses."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield f"{node.value.id}.{node.attr}"


def processes_in(source: str) -> list[str]:
    return sorted(
        name
        for name in names_of(ast.parse(source))
        if CALLS.fullmatch(name)
        or (any(f"{name}.".startswith(f"{start}.") for start in STARTS) and not name.startswith(HARMLESS))
    )


def test_only_one_module_handles_child_processes() -> None:
    found = {path: processes_in(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
    assert found.pop(HOME)
    others = {str(path.relative_to(PACKAGE)): names for path, names in found.items() if names}
    assert not others, f"use tackboard.core.processes: {others}"


@pytest.mark.parametrize(
    "source",
    [
        "import subprocess",
        "import subprocess as s",
        "from subprocess import run",
        "import multiprocessing",
        "from multiprocessing import Process",
        "import multiprocessing.pool",
        "from concurrent.futures import ProcessPoolExecutor",
        "import os\nos.fork()",
        "import os\nos.kill(1, 2)",
        "from os import killpg",
        "import asyncio\nasyncio.create_subprocess_exec('ls')",
    ],
)
def test_the_rule_finds(source: str) -> None:
    assert processes_in(source)
    assert not processes_in("import os\nos.getpid()\nfrom multiprocessing.connection import Connection")
