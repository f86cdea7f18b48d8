"""The installer chooses the right torch build, says what is wrong, and repairs what it left half done."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
CUDA_REQUIRES = [
    "filelock",
    "sympy>=1.13.3",
    'cuda-toolkit[cublas,cudart]==13.0.3; platform_system == "Linux"',
    'nvidia-cudnn-cu13==9.20.0.48; platform_system == "Linux"',
    'triton==3.7.1; platform_system == "Linux" and python_version < "3.15"',
]
CPU_REQUIRES = ["filelock", "sympy>=1.13.3", 'optree>=0.13.0; extra == "optree"']


@pytest.fixture(scope="module")
def loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", ROOT / "scripts" / "install.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def install(loaded: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The installer, looking at an environment in a temporary folder."""
    venv = tmp_path / ".venv"
    for name, value in {
        "VENV": venv,
        "VENV_PYTHON": venv / "bin" / "python",
        "STAMP": venv / ".tackboard-stamp.json",
        "MARKER": venv / ".tackboard-installing",
        "LOG": venv / "install.log",
    }.items():
        monkeypatch.setattr(loaded, name, str(value))
    site = venv / "lib" / "python3.11" / "site-packages"
    site.mkdir(parents=True)
    (venv / "bin").mkdir()
    (venv / "bin" / "python").symlink_to(sys.executable)
    (venv / "bin" / "tackboard").touch()
    (venv / "pyvenv.cfg").write_text("home = /usr/bin\nversion = 3.11.7\n")
    (site / "numpy-2.4.6.dist-info").mkdir()
    monkeypatch.delenv("TACKBOARD_TORCH", raising=False)
    yield loaded


def report(version: str, requires: list[str], url: str = "https://files.example.org/torch.whl") -> dict[str, Any]:
    item = {
        "download_info": {"url": url},
        "metadata": {"name": "torch", "version": version, "requires_dist": requires},
    }
    return {"install": [item]}


@pytest.mark.parametrize(
    ("version", "requires", "build"),
    [
        ("2.13.0+cpu", CPU_REQUIRES, "cpu"),
        ("2.13.0+cpu.cxx11.abi", CUDA_REQUIRES, "cpu"),
        ("2.13.0", CPU_REQUIRES, "cpu"),
        ("2.13.0", CUDA_REQUIRES, "cuda"),
        ("2.13.0+cu130", CPU_REQUIRES, "cuda"),
        ("2.13.0+rocm7.0", CPU_REQUIRES, "cuda"),
    ],
)
def test_build_is_read_from_the_report(install: ModuleType, version: str, requires: list[str], build: str) -> None:
    choice = install.read_torch_report(report(version, requires))
    assert (choice.version, choice.build) == (version, build)
    assert install.read_torch_report({"install": []}) is None


def test_markers_of_other_platforms_do_not_count(install: ModuleType) -> None:
    assert install.torch_build("2.13.0", CUDA_REQUIRES, "Darwin", "arm64") == "cpu"
    assert install.torch_build("2.13.0", CUDA_REQUIRES, "Linux", "x86_64") == "cuda"
    assert not install.applies_here('nvidia-x; platform_machine == "x86_64"', "Linux", "aarch64")
    assert not install.applies_here('triton; extra == "gpu"', "Linux", "x86_64")


def test_source_is_named_without_credentials(install: ModuleType) -> None:
    folder = install.read_torch_report(report("2.13.0+cpu", [], "file:///wheels/torch-2.13.0%2Bcpu.whl"))
    assert folder.source == "the configured wheel folder /wheels"
    index = install.read_torch_report(report("2.13.0", [], "https://me:secret@mirror.example.org/x/torch.whl"))
    assert index.source == "the configured index (mirror.example.org)"
    public = install.read_torch_report(report("2.13.0+cpu", []), install.CPU_INDEX)
    assert install.CPU_INDEX in public.source


def choices(install: ModuleType) -> tuple[Any, Any, Any]:
    cpu = install.read_torch_report(report("2.13.0+cpu", []))
    cuda = install.read_torch_report(report("2.13.0", CUDA_REQUIRES))
    public = install.read_torch_report(report("2.13.0+cpu", []), install.CPU_INDEX)
    return cpu, cuda, public


def test_the_driver_and_the_wish_decide_the_build(install: ModuleType) -> None:
    cpu, cuda, public = choices(install)
    assert install.choose_torch(cpu, None, has_driver=False) is cpu
    assert install.choose_torch(cuda, public, has_driver=False) is public
    assert install.choose_torch(None, public, has_driver=False) is public
    assert install.choose_torch(cuda, None, has_driver=False) is cuda
    assert install.choose_torch(None, None, has_driver=False) is None
    assert install.choose_torch(cuda, None, has_driver=True) is cuda
    assert install.choose_torch(cpu, None, has_driver=True) is cpu
    assert install.choose_torch(cuda, public, has_driver=True, wanted="cpu") is public
    assert install.choose_torch(cuda, public, has_driver=False, wanted="cuda") is cuda


def fake_pip(install: ModuleType, monkeypatch: pytest.MonkeyPatch, answers: dict[str | None, Any]) -> list[list[str]]:
    """Replaces pip: `answers` gives torch by index; returns the installations that were asked for."""
    calls: list[list[str]] = []
    unreachable = "WARNING: Retrying: NewConnectionError('Connection refused')\nERROR: No matching distribution"
    monkeypatch.setattr(install, "ask_torch", lambda pin, index_url=None: (answers.get(index_url), unreachable))
    monkeypatch.setattr(install, "must_pip", lambda stage, arguments, show=False: calls.append(arguments))
    monkeypatch.setattr(install, "configured_index", lambda: "https://index.example.org/simple")
    monkeypatch.setattr(install, "has_nvidia_driver", lambda: False)
    return calls


def test_cuda_build_without_a_gpu_is_announced_with_its_size(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = fake_pip(install, monkeypatch, {None: choices(install)[1]})
    assert install.ensure_torch("2.13.0") == "cuda"
    output = capsys.readouterr().out
    assert "torch 2.13.0: CUDA build from the configured index (files.example.org) (no NVIDIA driver)" in output
    assert "0.5 GB" in output
    assert calls == [["install", "--no-deps", "torch==2.13.0"]]


def test_what_has_no_hash_is_torch_and_what_its_builds_bring_along(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fake_pip(install, monkeypatch, {})
    for group, build in (("dev", "cpu"), ("distributed", "cpu"), ("distributed", "cuda")):
        install.install_packages(group, build, "2.13.0")
    hashed = [call[4].rpartition("/")[2] for call in calls if call[1] == "--require-hashes"]
    assert hashed == ["dev.txt", "core.txt", "distributed-cpu.txt", "core.txt", "distributed.txt"]
    assert all(call[2:4] == ["--no-deps", "-r"] for call in calls if call[1] == "--require-hashes")
    triton, torch, fbgemm = (call for call in calls if call[1] != "--require-hashes")
    pins = install.requirement_file("torch")
    assert triton == ["install", "--no-deps", "-c", pins, "triton"]
    assert torch == ["install", "-c", pins, "torch==2.13.0"]
    assert fbgemm == ["install", "--no-deps", "-c", pins, "fbgemm-gpu"]


def test_public_cpu_index_serves_torch_alone(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, cuda, public = choices(install)
    calls = fake_pip(install, monkeypatch, {None: cuda, install.CPU_INDEX: public})
    assert install.ensure_torch("2.13.0") == "cpu"
    assert calls == [["install", "--no-deps", "torch==2.13.0", "--index-url", install.CPU_INDEX]]
    assert "warning" not in capsys.readouterr().out


def test_unreachable_index_is_explained(install: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(install, monkeypatch, {})
    with pytest.raises(install.InstallError) as caught:
        install.ensure_torch("2.13.0")
    message = str(caught.value)
    assert "https://index.example.org/simple cannot be reached" in message
    assert "PIP_INDEX_URL" in message and "PIP_FIND_LINKS" in message
    assert len(message.splitlines()) == 3


def test_unknown_wish_is_refused(install: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TACKBOARD_TORCH", "rocm")
    with pytest.raises(install.InstallError, match="allowed: cpu, cuda"):
        install.ensure_torch("2.13.0")


def test_other_failures_are_explained(install: ModuleType) -> None:
    missing = install.explain_failure("installing x", "ERROR: No matching distribution found for x==1", "https://i")
    assert "No matching distribution found for x==1" in missing and "https://i" in missing
    full = install.explain_failure("installing x", "ERROR: [Errno 28] No space left on device", "https://i")
    assert "no space left on the disk" in full
    assert "no reason" in install.explain_failure("installing x", "", "https://i")


@pytest.mark.parametrize("version", [(3, 8, 18), (3, 10, 13), (3, 13, 0)])
def test_wrong_python_gets_a_sentence(install: ModuleType, version: tuple[int, ...]) -> None:
    message = install.unsupported_python(version, "/usr/bin/python3", "make demo", "python3.11")
    assert "Python " + ".".join(map(str, version)) in message
    assert "allowed: Python 3.11 or 3.12" in message
    assert message.endswith("make demo PYTHON=python3.11")
    nothing_found = install.unsupported_python(version, "/usr/bin/python3", "make demo", None)
    assert nothing_found.endswith("install Python 3.12, then make demo PYTHON=python3.12")
    assert len(message.splitlines()) == 3
    for right in ((3, 11, 0), (3, 12, 9)):
        assert install.unsupported_python(right, "/usr/bin/python3", "make demo", None) is None


def test_old_pythons_can_parse_the_installer() -> None:
    tree = ast.parse((ROOT / "scripts" / "install.py").read_text(), feature_version=(3, 7))
    assert any(isinstance(node, ast.FunctionDef) and node.name == "unsupported_python" for node in tree.body)


def test_stamp_holds_until_something_changes(install: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not install.is_up_to_date("demo")
    Path(install.MARKER).touch()
    install.write_stamp("demo", "cpu")
    assert install.is_up_to_date("demo")
    assert not install.is_up_to_date("dev")

    monkeypatch.setenv("TACKBOARD_TORCH", "cuda")
    assert not install.is_up_to_date("demo")
    monkeypatch.delenv("TACKBOARD_TORCH")

    Path(install.MARKER).touch()
    assert not install.is_up_to_date("demo"), "an unfinished run must be repaired"
    os.remove(install.MARKER)

    record = Path(install.VENV, "lib", "python3.11", "site-packages", "numpy-2.4.6.dist-info")
    record.rename(record.with_name("numpy-2.5.0.dist-info"))
    assert not install.is_up_to_date("demo"), "a package that changed must be put back"


def test_damaged_stamp_counts_as_none(install: ModuleType) -> None:
    Path(install.STAMP).write_text("{")
    assert install.read_stamp() == {}
    Path(install.STAMP).write_text(json.dumps([1]))
    assert install.read_stamp() == {}
    assert not install.is_up_to_date("demo")


def test_exactly_one_pinned_torch_is_demanded(install: ModuleType) -> None:
    assert install.torch_problem(["2.13.0+cpu"], "2.13.0") is None
    assert "0 installations" in install.torch_problem([], "2.13.0")
    assert "2 installations" in install.torch_problem(["2.12.0", "2.13.0"], "2.13.0")
    assert "2.12.0 is installed, 2.13.0 is pinned" in install.torch_problem(["2.12.0"], "2.13.0")


def test_environment_for_pip_keeps_packages_in_place(install: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_TARGET", "/elsewhere")
    monkeypatch.setenv("PIP_INDEX_URL", "https://index.example.org")
    environment = install.clean_environment()
    assert "PIP_TARGET" not in environment
    assert environment["PIP_INDEX_URL"] == "https://index.example.org"


def test_pins_carry_no_local_suffix(install: ModuleType) -> None:
    for path in (ROOT / "requirements").iterdir():
        pins = install.read_pins(path.read_text())
        assert pins and not [version for version in pins.values() if "+" in version or not version[0].isdigit()]
