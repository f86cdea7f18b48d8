"""Checks the machine, the installed packages, and whether their versions fit together. Suggests repairs.

This module reads the versions of installed packages, the versions that the checkout pins, torch's own report, and the
machine's cores, memory and free disk space. It returns findings. The status of a finding is ok, absent (an optional
part is not installed), note (worth knowing) or broken. If a command can repair the problem, the finding names the
command.

Decided: collecting and judging are separate. `collect` looks at the machine; `examine` is a pure function of what was
collected, so a test can simulate every problem. A separate process imports torch, because a broken build may kill the
process that imports it. An optional part may be absent, but an installed part must work.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from tackboard.core.machine import has_nvidia_driver, total_memory_bytes, usable_cores
from tackboard.core.processes import ask, last_json_object

NEEDED = (
    "torch", "numpy", "pyarrow", "safetensors", "typer", "rich", "uvicorn", "httptools", "orjson", "prometheus-client",
    "tzdata",
)  # fmt: skip
"""The packages that the core needs. pyproject.toml has the same list."""

SUPPORTED_PYTHON = ((3, 11), (3, 12))
TORCH_MINORS = range(11, 14)
TRITON_OF_TORCH = {11: "3.6", 12: "3.7", 13: "3.7"}
"""Maps N to the version of Triton that torch 2.N is built against."""

MIN_MEMORY_BYTES = 4 * 2**30
MIN_FREE_DISK_BYTES = 2 * 2**30
TORCH_TIMEOUT_S = 120

REPAIR_CORE = "make install"
REPAIR_ANEW = "rm -rf .venv && make install"
REPAIR_DISTRIBUTED = "make distributed"

Status = Literal["ok", "absent", "note", "broken"]

TORCH_PROBE = """
import json, torch
cuda = torch.cuda.is_available()
print(json.dumps({
    "version": torch.__version__,
    "cuda": torch.version.cuda,
    "threads": torch.get_num_threads(),
    "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
}))
"""


@dataclass(frozen=True, kw_only=True)
class OptionalPart:
    """A part of the installation that the core can work without."""

    packages: tuple[str, ...]
    """The part is present if at least one of these packages is installed."""
    purpose: str
    """What the part is for, in a few words."""
    repair: str
    """The command that installs the part into this checkout."""


OPTIONAL = (
    OptionalPart(packages=("torchrec",), purpose="training on several processes", repair=REPAIR_DISTRIBUTED),
    OptionalPart(
        packages=("fbgemm-gpu-cpu", "fbgemm-gpu"), purpose="fused embedding tables", repair=REPAIR_DISTRIBUTED
    ),
    OptionalPart(packages=("triton",), purpose="GPU kernels", repair=".venv/bin/pip install triton==3.7.1"),
    OptionalPart(packages=("ray",), purpose="batches prepared on a cluster", repair="make install GROUP=ray"),
    OptionalPart(
        packages=("redis",), purpose="the sequence store on Redis", repair=".venv/bin/pip install redis==8.1.0"
    ),
    OptionalPart(packages=("tritonclient",), purpose="the client of the demo", repair="make install GROUP=demo"),
    OptionalPart(packages=("pytest",), purpose="tests and checks", repair="make install GROUP=dev"),
)


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """The facts that `collect` found on the machine. `examine` reads nothing else."""

    python: tuple[int, int, int]
    installed: Mapping[str, str]
    """Version of each installed package, by normalised name."""
    duplicates: tuple[str, ...] = ()
    """Packages that are recorded in the environment with more than one version."""
    pins: Mapping[str, str] = field(default_factory=dict)
    """Pinned version of each package, by normalised name; empty outside a checkout."""
    torch: Mapping[str, Any] = field(default_factory=dict)
    """torch's report: version, cuda, threads and devices. If torch cannot be imported, only `error` is set."""
    nvidia_driver: bool = False
    cores: int = 1
    memory_bytes: int = MIN_MEMORY_BYTES
    free_disk_bytes: int = MIN_FREE_DISK_BYTES


@dataclass(frozen=True)
class DoctorFinding:
    """One line of the report."""

    name: str
    status: Status
    value: str
    repair: str = ""


def collect(folder: Path) -> MachineFacts:
    """Collects the facts of this machine, with the free disk space at `folder`. Takes as long as importing torch."""
    installed, duplicates = installed_versions()
    return MachineFacts(
        python=(sys.version_info.major, sys.version_info.minor, sys.version_info.micro),
        installed=installed,
        duplicates=duplicates,
        pins=read_pins(checkout_root()),
        torch=ask_torch() if "torch" in installed else {},
        nvidia_driver=has_nvidia_driver(),
        cores=usable_cores(),
        memory_bytes=total_memory_bytes(),
        free_disk_bytes=shutil.disk_usage(folder).free,
    )


def installed_versions() -> tuple[dict[str, str], tuple[str, ...]]:
    """Returns each installed package's version, by normalised name, and the names that have several versions."""
    versions: dict[str, str] = {}
    duplicates = set()
    for distribution in importlib.metadata.distributions():
        # A half-removed package can leave a record without a name.
        name = normalised(distribution.metadata["Name"] or "")
        if name in versions and versions[name] != distribution.version:
            duplicates.add(name)
        versions.setdefault(name, distribution.version)
    return versions, tuple(sorted(duplicates))


def checkout_root() -> Path | None:
    """Returns the checkout that this package runs from, or None if the package was installed as a wheel."""
    root = Path(__file__).resolve().parents[3]
    return root if (root / "requirements" / "torch.txt").is_file() else None


def read_pins(root: Path | None) -> dict[str, str]:
    """Returns the version that requirements/ pins for each package, by normalised name; empty without a checkout."""
    pins: dict[str, str] = {}
    for path in sorted((root / "requirements").glob("*.txt")) if root else ():
        if path.name == "rivals.txt":
            continue  # These packages go into another environment and may have other versions.
        for line in path.read_text(encoding="utf-8").splitlines():
            package, equals, version = line.partition("#")[0].strip().partition("==")
            if equals:
                pins[normalised(package)] = version.split()[0]
    return pins


def ask_torch() -> dict[str, Any]:
    """Imports torch in a separate process; returns its version, CUDA version, threads and devices, or `error`."""
    try:
        done = ask([sys.executable, "-c", TORCH_PROBE], timeout_s=TORCH_TIMEOUT_S)
    except TimeoutError:
        return {"error": f"importing torch took longer than {TORCH_TIMEOUT_S} s"}
    if done.code != 0:
        return {"error": done.reason}
    return last_json_object(done.output) or {"error": "torch gave no answer"}


def examine(facts: MachineFacts) -> list[DoctorFinding]:
    """Returns all findings, in the order of the report. This is a pure function."""
    return [
        _python(facts),
        *_torch(facts),
        *_needed_packages(facts),
        *_optional_parts(facts),
        *_pairings(facts),
        *_machine(facts),
    ]


def exit_code(findings: Iterable[DoctorFinding]) -> int:
    """Returns 0 if nothing is broken, else 2."""
    return 2 if any(finding.status == "broken" for finding in findings) else 0


def as_json(findings: Iterable[DoctorFinding]) -> str:
    """Returns one JSON object with `ok` and the list of findings."""
    rows = [asdict(finding) for finding in findings]
    return json.dumps({"ok": all(row["status"] != "broken" for row in rows), "findings": rows})


def normalised(name: str) -> str:
    """Returns a package name as pip normalises it before it compares names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def public(version: str) -> str:
    """Returns a version without its local suffix: 2.13.0+cpu becomes 2.13.0."""
    return version.partition("+")[0]


def _minor(version: str) -> int:
    found = re.match(r"\d+\.(\d+)", version)
    return int(found.group(1)) if found else -1


def _python(facts: MachineFacts) -> DoctorFinding:
    version = ".".join(str(part) for part in facts.python)
    if facts.python[:2] in SUPPORTED_PYTHON:
        return DoctorFinding("python", "ok", version)
    return DoctorFinding("python", "broken", f"{version}, needed: 3.11 or 3.12", f"{REPAIR_ANEW} PYTHON=python3.12")


def _torch(facts: MachineFacts) -> list[DoctorFinding]:
    version = facts.installed.get("torch")
    if version is None:
        return []  # Another check reports missing packages.
    if "torch" in facts.duplicates:
        return [DoctorFinding("torch", "broken", "installed more than once in this environment", REPAIR_ANEW)]
    if "error" in facts.torch:
        return [DoctorFinding("torch", "broken", f"{version} cannot be imported: {facts.torch['error']}", REPAIR_ANEW)]
    if _minor(version) not in TORCH_MINORS or not version.startswith("2."):
        allowed = f"2.{TORCH_MINORS.start} to 2.{TORCH_MINORS.stop - 1}"
        return [DoctorFinding("torch", "broken", f"{version}, needed: {allowed}", REPAIR_CORE)]
    cuda = facts.torch.get("cuda")
    build = f"CUDA {cuda} build" if cuda else "CPU build"
    findings = [DoctorFinding("torch", "ok", f"{version}, {build}, {facts.torch.get('threads', '?')} threads")]
    pin = facts.pins.get("torch", public(version))
    if public(version) != pin:
        findings.append(DoctorFinding("torch pin", "note", f"{version} is installed, {pin} is pinned", REPAIR_CORE))
    devices = facts.torch.get("devices", [])
    if devices:
        findings.append(DoctorFinding("devices", "ok", ", ".join(devices)))
    elif facts.nvidia_driver and not cuda:
        value = "an NVIDIA driver is loaded, but torch is a CPU build"
        findings.append(DoctorFinding("devices", "note", value, "rm -rf .venv && TACKBOARD_TORCH=cuda make install"))
    elif facts.nvidia_driver:
        findings.append(
            DoctorFinding("devices", "note", "an NVIDIA driver is loaded, but torch sees no GPU", "nvidia-smi")
        )
    else:
        findings.append(DoctorFinding("devices", "ok", "cpu"))
    return findings


def _needed_packages(facts: MachineFacts) -> list[DoctorFinding]:
    findings = []
    for name in NEEDED:
        if name not in facts.installed:
            findings.append(DoctorFinding(name, "broken", "not installed", REPAIR_CORE))
        elif name != "torch":  # A separate check judges torch.
            findings.append(_installed(facts, name, REPAIR_CORE))
    return findings


def _installed(facts: MachineFacts, name: str, repair: str) -> DoctorFinding:
    version, pin = facts.installed[name], facts.pins.get(name)
    if pin is not None and public(version) != pin:
        return DoctorFinding(name, "note", f"{version} is installed, {pin} is pinned", repair)
    return DoctorFinding(name, "ok", version)


def _optional_parts(facts: MachineFacts) -> list[DoctorFinding]:
    findings = []
    for part in OPTIONAL:
        present = [name for name in part.packages if name in facts.installed]
        if not present:
            findings.append(DoctorFinding(part.packages[0], "absent", part.purpose, part.repair))
        findings += [_installed(facts, name, part.repair) for name in present]
    return findings


def _pairings(facts: MachineFacts) -> list[DoctorFinding]:
    """Checks compiled extensions, which load only with the version of torch that they were built for."""
    torch_version = facts.installed.get("torch")
    if torch_version is None:
        return []
    torch_minor = _minor(torch_version)
    findings = []
    fbgemm = [name for name in ("fbgemm-gpu-cpu", "fbgemm-gpu") if name in facts.installed]
    if len(fbgemm) == 2:
        value = "fbgemm-gpu and fbgemm-gpu-cpu overwrite each other"
        repair = f".venv/bin/pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu && {REPAIR_DISTRIBUTED}"
        findings.append(DoctorFinding("torch + fbgemm", "broken", value, repair))
    elif fbgemm:
        findings.append(_pair("fbgemm", facts.installed[fbgemm[0]], f"1.{torch_minor - 5}", torch_version))
    if "torchrec" in facts.installed and not fbgemm:
        value = "torchrec is installed without fbgemm"
        findings.append(DoctorFinding("torch + torchrec", "broken", value, REPAIR_DISTRIBUTED))
    elif "torchrec" in facts.installed:
        findings.append(_pair("torchrec", facts.installed["torchrec"], f"1.{torch_minor - 5}", torch_version))
    if "triton" in facts.installed and torch_minor in TRITON_OF_TORCH:
        triton = facts.installed["triton"]
        repair = f".venv/bin/pip install 'triton=={TRITON_OF_TORCH[torch_minor]}.*'"
        findings.append(_pair("triton", triton, TRITON_OF_TORCH[torch_minor], torch_version, repair))
    return findings


def _pair(name: str, version: str, wanted: str, torch_version: str, repair: str = REPAIR_DISTRIBUTED) -> DoctorFinding:
    title = f"torch + {name}"
    if version == wanted or version.startswith(wanted + "."):
        return DoctorFinding(title, "ok", f"{public(torch_version)} with {version}")
    value = f"{name} {version} does not go with torch {public(torch_version)}, needed: {name} {wanted}.*"
    return DoctorFinding(title, "broken", value, repair)


def _machine(facts: MachineFacts) -> list[DoctorFinding]:
    memory = f"{facts.memory_bytes / 2**30:.1f} GiB"
    disk = f"{facts.free_disk_bytes / 2**30:.1f} GiB free"
    found_memory, found_disk = DoctorFinding("memory", "ok", memory), DoctorFinding("disk", "ok", disk)
    if facts.memory_bytes < MIN_MEMORY_BYTES:
        found_memory = DoctorFinding("memory", "note", f"{memory}; the demo needs {MIN_MEMORY_BYTES >> 30} GiB")
    if facts.free_disk_bytes < MIN_FREE_DISK_BYTES:
        found_disk = DoctorFinding("disk", "note", f"{disk}; runs need {MIN_FREE_DISK_BYTES >> 30} GiB", "make clean")
    return [DoctorFinding("cores", "ok", str(facts.cores)), found_memory, found_disk]
