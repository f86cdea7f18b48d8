"""What is written is run.

Every fenced block of bash or python carries a second word: `run` (executed as it stands), `dry` (executed too; it must
ask for --dry-run or --help) or `shown` (not executed; counted below, so that the number only grows on purpose). The
blocks of one page run from top to bottom in one shell and one empty folder, as a reader would type them. A page that
takes long says so with `<!-- docs: slow -->` and runs in `make test-slow`.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
SLOW = "<!-- docs: slow -->"
MARKS = ("run", "dry", "shown")
OTHER_SPELLINGS = {"sh", "shell", "console", "zsh", "py", "python3", "pycon"}
LIMIT_S = {"quick": 240, "slow": 1200}

# Blocks that are only shown, by page. Raise a number only for a command that cannot run in an empty folder.
SHOWN: dict[str, int] = {
    "CONTRIBUTING.md": 1,
    "README.md": 2,
    "docs/choosing.md": 1,
    "docs/data.md": 1,
    "docs/distributed.md": 5,
    "docs/pretraining.md": 4,
    "docs/serving.md": 6,
}

FENCE = re.compile(r"^( *)(`{3,})([^\n`]*)\n(.*?)^\1\2 *$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, its mark, its text, and the line it starts on."""

    language: str
    mark: str
    text: str
    line: int


def blocks_of(markdown: str) -> list[Block]:
    blocks = []
    for found in FENCE.finditer(markdown):
        words = found.group(3).split()
        indent = found.group(1)
        text = "\n".join(line.removeprefix(indent) for line in found.group(4).splitlines())
        blocks.append(
            Block(
                language=words[0] if words else "",
                mark=words[1] if len(words) > 1 else "",
                text=text,
                line=markdown.count("\n", 0, found.start()) + 1,
            )
        )
    return blocks


def script_of(blocks: list[Block]) -> str:
    """One bash script of all blocks that are executed; a line before each tells where a failure was."""
    lines = ["set -euo pipefail"]
    for block in blocks:
        if block.mark not in ("run", "dry"):
            continue
        lines.append(f"echo '== block at line {block.line}'")
        text = block.text
        if block.language == "python":
            text = f"python - <<'END_OF_PYTHON_BLOCK'\n{text}\nEND_OF_PYTHON_BLOCK"
        lines.append(text)
    return "\n".join(lines) + "\n"


def page_name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def pages_with_commands() -> list[object]:
    parameters = []
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        if any(block.mark in ("run", "dry") for block in blocks_of(text)):
            pace = "slow" if SLOW in text else "quick"
            marks = [pytest.mark.timeout(LIMIT_S[pace] + 30), *([pytest.mark.slow] if pace == "slow" else [])]
            parameters.append(pytest.param(path, marks=marks, id=page_name(path)))
    return parameters


def test_every_command_is_marked() -> None:
    wrong = []
    for path in PAGES:
        for block in blocks_of(path.read_text(encoding="utf-8")):
            where = f"{page_name(path)}:{block.line}"
            if block.language in OTHER_SPELLINGS:
                wrong.append(f"{where}: write bash or python")
            if block.language not in ("bash", "python"):
                continue
            if block.mark not in MARKS:
                wrong.append(f"{where}: the second word must be one of {MARKS}")
            if block.mark == "dry" and "--dry-run" not in block.text and "--help" not in block.text:
                wrong.append(f"{where}: dry, but without --dry-run or --help")
    assert not wrong, "\n".join(wrong)


def test_shown_blocks_are_counted() -> None:
    counts = {
        page_name(path): sum(block.mark == "shown" for block in blocks_of(path.read_text(encoding="utf-8")))
        for path in PAGES
    }
    counts = {name: count for name, count in counts.items() if count}
    print(f"{sum(counts.values())} blocks are shown and not run: {counts}")
    assert counts == SHOWN


@pytest.mark.parametrize("path", pages_with_commands())
def test_commands_of_a_page_run(path: Path, tmp_path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    if (ROOT / "examples").is_dir():
        (workspace / "examples").symlink_to(ROOT / "examples")
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
    }
    log = tmp_path / "log.txt"
    with log.open("w") as output:
        process = subprocess.Popen(
            ["bash", "-c", script_of(blocks_of(text))],
            cwd=workspace,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=LIMIT_S["slow" if SLOW in text else "quick"])
        finally:
            # Servers that a page left running must not outlive it.
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                process.poll()
            process.wait()
    assert code == 0, f"{page_name(path)} exited with {code}:\n" + log.read_text()[-4000:]


def heading_anchors(markdown: str) -> set[str]:
    """The anchors that GitHub gives to headings."""
    plain = FENCE.sub("", markdown)
    headings = re.findall(r"^#{1,6} +(.+?) *#*$", plain, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def leads_nowhere(page: Path, target: str) -> bool:
    """Whether a relative link of a page names no file, or no heading of it."""
    name, _, anchor = target.partition("#")
    file = (page.parent / name).resolve() if name else page
    if not file.exists():
        return True
    return bool(anchor) and file.suffix == ".md" and anchor not in heading_anchors(file.read_text(encoding="utf-8"))


def test_relative_links_resolve() -> None:
    wrong = [
        f"{page_name(path)} links to {target}"
        for path in PAGES
        for target in map("".join, LINK.findall(FENCE.sub("", path.read_text(encoding="utf-8"))))
        if not re.match(r"[a-z]+:", target) and leads_nowhere(path, target)
    ]
    assert not wrong, "\n".join(wrong)


def is_missing(file: str, name: str) -> bool:
    path = ROOT / file
    return not path.is_file() or (bool(name) and f"def {name}(" not in path.read_text(encoding="utf-8"))


def test_tests_that_pages_name_exist() -> None:
    """A promise names its test; the log may name tests that are gone."""
    wrong = [
        f"{page_name(path)} names {file}::{name}"
        for path in PAGES
        for file, name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", path.read_text(encoding="utf-8"))
        if path.name != "log.md" and is_missing(file, name)
    ]
    assert not wrong, "\n".join(wrong)


def test_blocks_are_read_as_markdown_means_them() -> None:
    page = "a\n```bash run\necho 1\n```\n- b\n  ```python dry\n  print(2)\n  ```\n````text\n```bash\n```\n````\n"
    blocks = blocks_of(page)
    assert [(block.language, block.mark, block.text) for block in blocks] == [
        ("bash", "run", "echo 1"),
        ("python", "dry", "print(2)"),
        ("text", "", "```bash\n```"),
    ]
    script = script_of(blocks)
    assert script.startswith("set -euo pipefail\n")
    assert subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.count("==") == 2
