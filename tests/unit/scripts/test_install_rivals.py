"""The rivals' environment: exact pins, the package's own NumPy and Arrow, made once, and a sentence where it fails."""

import importlib.util
import re
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import lock

ROOT = Path(__file__).resolve().parents[3]


def pins(name: str) -> dict[str, str]:
    return {package: pin.version for package, pin in lock.read_lock(ROOT / "requirements" / name).items()}


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, looking at a temporary folder."""
    spec = importlib.util.spec_from_file_location("install_rivals", ROOT / "scripts" / "install_rivals.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "VENV", tmp_path / "venv")
    monkeypatch.setattr(module, "STAMP", tmp_path / "stamp")
    return module


@pytest.fixture
def commands(install: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Replaces what is run; returns the commands."""
    seen: list[list[str]] = []

    def run(command: list[str], **_keywords: Any) -> subprocess.CompletedProcess[str]:
        seen.append(command)
        (install.VENV / "bin").mkdir(parents=True, exist_ok=True)
        (install.VENV / "bin" / "python").touch()
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    return seen


def test_numpy_and_arrow_are_those_of_the_package() -> None:
    rivals, ours = pins("rivals.txt"), pins("core.txt") | pins("ray.txt")
    for name in ("numpy", "pyarrow", "tzdata"):
        assert rivals[name] == ours[name], name
    assert {"polars", "pandas", "feast", "datasets", "ray"} <= set(rivals)
    assert rivals["ray"] == ours["ray"]
    assert "torch" not in rivals


def test_rivals_are_never_dependencies() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    dependencies = text[text.index("dependencies") : text.index("[project.scripts]")]
    assert not re.search(r"polars|pandas|feast|datasets", dependencies)


def test_it_is_made_once(install: ModuleType, commands: list[list[str]]) -> None:
    assert install.main() == 0
    assert [command[1:3] for command in commands] == [["-m", "venv"], ["-I", "-m"], ["-I", "-c"]]
    assert {"--no-deps", "--require-hashes"} <= set(commands[1])
    assert all(name in commands[2][-1] for name in ("datasets", "ray", "torch"))
    assert install.main() == 0
    assert len(commands) == 3


def test_torch_is_lent_after_their_own_packages(install: ModuleType, commands: list[list[str]]) -> None:
    assert install.main() == 0
    (path,) = install.VENV.glob("lib/python*/site-packages/*.pth")
    folder = Path(path.read_text().strip())
    assert (folder / "torch").is_dir() and len(commands) == 3


def test_another_list_of_packages_makes_it_anew(
    install: ModuleType, commands: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert install.main() == 0
    (tmp_path / "rivals.txt").write_text("polars==9.9.9\n")
    monkeypatch.setattr(install, "REQUIREMENTS", tmp_path / "rivals.txt")
    assert install.main() == 0
    assert len(commands) == 6


def test_a_failure_is_three_lines_and_leaves_no_stamp(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "looking\nERROR: No matching distribution found for polars==2.1.0")
    monkeypatch.setattr(subprocess, "run", lambda *_args, **_keywords: failed)
    assert install.main() == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and "polars==2.1.0" in lines[0] and "make rivals" in lines[2]
    assert not install.STAMP.exists()
