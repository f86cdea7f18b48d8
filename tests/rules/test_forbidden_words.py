"""No notes to self, no paths of one machine, and no format that runs code when it is read."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT_SUFFIXES = {".py", ".md", ".toml", ".txt", ".json", ".cfg", ".yml", ".yaml", ".sh"}
FOLDERS = ("src", "tests", "scripts", "docs", "requirements", "examples", "benchmarks", ".ci")
# Put together from pieces, so that this file does not find itself.
NOTES = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "X" + "XX")) + r")\b")
MACHINE_PATHS = re.compile(r"(?<![\w.~-])/(?:wo" + r"rk|o" + r"pt|ro" + r"ot)/|\.\./sha" + "red")
CODE_RUNNING_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
# module: why it may read or write such a format, or run code
ALLOWED: dict[str, str] = {
    "core/user_code.py": "runs the file that the user named, compiled from the bytes that were hashed"
}


def texts() -> list[Path]:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    files += [path for path in ROOT.iterdir() if path.is_file()]
    return sorted(path for path in files if path.suffix in TEXT_SUFFIXES or path.name in ("Makefile", "run", "NOTICE"))


@pytest.mark.parametrize("pattern", [NOTES, MACHINE_PATHS], ids=["notes", "paths"])
def test_texts_are_clean(pattern: re.Pattern[str]) -> None:
    hits = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in texts()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if pattern.search(line)
    ]
    assert not hits, "\n".join(hits)


def code_running(tree: ast.AST) -> list[str]:
    """What in a module reads or writes a format that can run code."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.partition(".")[0] in CODE_RUNNING_MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in CODE_RUNNING_MODULES:
            found.append(node.module or "")
        elif isinstance(node, ast.Call):
            has_keyword = any(keyword.arg == "allow_pickle" for keyword in node.keywords)
            name = ast.unparse(node.func) if has_keyword or isinstance(node.func, ast.Name | ast.Attribute) else ""
            if name in ("torch.load", "torch.save", "eval", "exec"):
                found.append(name)
            found += [f"{name}(allow_pickle)" for keyword in node.keywords if keyword.arg == "allow_pickle"
                      and not (isinstance(keyword.value, ast.Constant) and keyword.value.value is False)]  # fmt: skip
    return found


def test_no_format_that_runs_code() -> None:
    hits = [
        f"{path.relative_to(ROOT)}: {what}"
        for path in sorted((ROOT / "src").rglob("*.py"))
        if str(path.relative_to(ROOT / "src" / "tackboard")) not in ALLOWED
        for what in code_running(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not hits, "\n".join(hits)


def test_the_search_finds_what_it_should() -> None:
    planted = "import pickle\nfrom dill import loads\ntorch.load(p)\nnp.load(p, allow_pickle=True)\nmodel.eval()\n"
    assert code_running(ast.parse(planted)) == ["pickle", "dill", "torch.load", "np.load(allow_pickle)"]
    assert NOTES.search("# TO" + "DO later")
    assert MACHINE_PATHS.search('"/wo' + 'rk/main"')
    assert not MACHINE_PATHS.search("runs/wo" + "rk/x")
