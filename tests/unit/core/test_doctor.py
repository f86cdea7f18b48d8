"""Planted problems are found, and each comes with the line that repairs it."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tackboard.core import doctor

ROOT = Path(__file__).resolve().parents[3]
PINS = doctor.read_pins(ROOT)
HEALTHY = doctor.MachineFacts(
    python=(3, 11, 7),
    installed={**{name: PINS[name] for name in doctor.NEEDED}, "torch": "2.13.0+cpu"},
    pins=PINS,
    torch={"version": "2.13.0+cpu", "cuda": None, "threads": 2, "devices": []},
    cores=2,
    memory_bytes=8 * 2**30,
    free_disk_bytes=50 * 2**30,
)


def examined(**changes: Any) -> dict[str, doctor.DoctorFinding]:
    """Findings by name after changing facts; `installed` is merged, None removes a package."""
    installed = {**HEALTHY.installed, **changes.pop("installed", {})}
    kept = {name: version for name, version in installed.items() if version is not None}
    findings = doctor.examine(dataclasses.replace(HEALTHY, installed=kept, **changes))
    return {finding.name: finding for finding in findings if finding.status != "ok"} | {
        finding.name: finding for finding in findings if finding.status == "ok" and "+" in finding.name
    }


def test_healthy_core_is_fine_without_optional_parts() -> None:
    findings = doctor.examine(HEALTHY)
    assert doctor.exit_code(findings) == 0
    absent = {finding.name: finding.repair for finding in findings if finding.status == "absent"}
    assert absent["torchrec"] == absent["fbgemm-gpu-cpu"] == "make distributed"
    assert absent["tritonclient"] == "make install GROUP=demo"
    torch = next(finding for finding in findings if finding.name == "torch")
    assert torch.value == "2.13.0+cpu, CPU build, 2 threads"


@pytest.mark.parametrize("name", doctor.NEEDED)
def test_missing_package_is_broken(name: str) -> None:
    finding = examined(installed={name: None})[name]
    assert (finding.status, finding.repair) == ("broken", "make install")


@pytest.mark.parametrize(
    ("torch", "fbgemm", "status"),
    [
        ("2.13.0+cpu", "1.8.0", "ok"),
        ("2.13.0+cpu", "1.7.0", "broken"),
        ("2.13.0+cpu", "1.9.0", "broken"),
        ("2.11.0", "1.6.0", "ok"),
        ("2.12.0", "1.8.0", "broken"),
    ],
)
def test_fbgemm_goes_with_its_torch(torch: str, fbgemm: str, status: str) -> None:
    finding = examined(installed={"torch": torch, "fbgemm-gpu-cpu": fbgemm})["torch + fbgemm"]
    assert finding.status == status
    if status == "broken":
        assert finding.repair == "make distributed"


def test_other_pairings() -> None:
    found = examined(installed={"torchrec": "1.8.0"})["torch + torchrec"]
    assert (found.status, found.value) == ("broken", "torchrec is installed without fbgemm")
    found = examined(installed={"torchrec": "1.6.1", "fbgemm-gpu-cpu": "1.8.0"})["torch + torchrec"]
    assert found.status == "broken"
    found = examined(installed={"fbgemm-gpu": "1.8.0", "fbgemm-gpu-cpu": "1.8.0"})["torch + fbgemm"]
    assert "overwrite each other" in found.value
    found = examined(installed={"triton": "3.9.0"})["torch + triton"]
    assert (found.status, found.repair) == ("broken", ".venv/bin/pip install 'triton==3.7.*'")
    assert examined(installed={"triton": "3.7.1"})["torch + triton"].status == "ok"


@pytest.mark.parametrize(
    ("changes", "name", "status"),
    [
        ({"python": (3, 10, 1)}, "python", "broken"),
        ({"installed": {"torch": "2.14.0"}}, "torch", "broken"),
        ({"installed": {"torch": "2.12.0"}}, "torch pin", "note"),
        ({"duplicates": ("torch",)}, "torch", "broken"),
        ({"torch": {"error": "OSError: libgomp.so.1"}}, "torch", "broken"),
        ({"installed": {"numpy": "2.3.0"}}, "numpy", "note"),
        ({"installed": {"tritonclient": "2.41.0"}}, "tritonclient", "note"),
        ({"nvidia_driver": True}, "devices", "note"),
        ({"memory_bytes": 2**30}, "memory", "note"),
        ({"free_disk_bytes": 2**20}, "disk", "note"),
    ],
)
def test_planted_problems(changes: dict[str, Any], name: str, status: str) -> None:
    assert examined(**changes)[name].status == status


def test_broken_findings_and_only_they_change_the_exit_code() -> None:
    broken = doctor.examine(dataclasses.replace(HEALTHY, python=(3, 9, 0)))
    noted = doctor.examine(dataclasses.replace(HEALTHY, memory_bytes=2**30))
    assert (doctor.exit_code(broken), doctor.exit_code(noted)) == (2, 0)
    assert all(finding.repair for finding in broken if finding.status == "broken")
    answer = json.loads(doctor.as_json(broken))
    assert answer["ok"] is False
    assert {"name", "status", "value", "repair"} == set(answer["findings"][0])


def test_devices_of_a_cuda_build_are_named() -> None:
    facts = dataclasses.replace(
        HEALTHY, nvidia_driver=True, torch={"cuda": "13.0", "threads": 8, "devices": ["NVIDIA H200"]}
    )
    values = {finding.name: finding.value for finding in doctor.examine(facts)}
    assert values["devices"] == "NVIDIA H200"
    assert "CUDA 13.0 build" in values["torch"]


def test_needed_packages_are_those_of_the_project() -> None:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert [re.split(r"[><=\[]", line)[0] for line in dependencies] == list(doctor.NEEDED)


def test_triton_lines_agree_with_the_pin() -> None:
    pins = doctor.read_pins(ROOT)
    line = next(part.repair for part in doctor.OPTIONAL if part.packages == ("triton",))
    assert line.endswith(f"triton=={pins['triton']}")
    minor = int(pins["torch"].split(".")[1])
    assert pins["triton"].startswith(doctor.TRITON_OF_TORCH[minor] + ".")
    assert pins["fbgemm-gpu"].startswith(f"1.{minor - 5}.")


def test_every_make_line_names_a_target() -> None:
    source = Path(doctor.__file__).read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)", source)) <= targets


def test_this_environment_is_collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "TORCH_PROBE", "import json; print(json.dumps({'threads': 1}))")
    facts = doctor.collect(tmp_path)
    assert facts.python == sys.version_info[:3]
    assert facts.installed["numpy"]
    assert facts.torch == {"threads": 1}
    assert facts.cores >= 1 and facts.memory_bytes > 0 and facts.free_disk_bytes > 0


def test_torch_that_cannot_be_imported_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "TORCH_PROBE", "raise OSError('libtorch.so: undefined symbol')")
    assert "undefined symbol" in doctor.ask_torch()["error"]
    monkeypatch.setattr(doctor, "TORCH_PROBE", "print('torch is here')")
    assert doctor.ask_torch() == {"error": "torch gave no answer"}
    monkeypatch.setattr(doctor, "TORCH_PROBE", "import time; time.sleep(60)")
    monkeypatch.setattr(doctor, "TORCH_TIMEOUT_S", 0.1)
    assert "took longer" in doctor.ask_torch()["error"]
