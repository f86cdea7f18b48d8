"""What is installed is what the lock names: complete, with hashes, and refused where a file is another one."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import itertools
import re
import site
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

import audit
import lock

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / "requirements"
LOCKS = [REQUIREMENTS / f"{name}.txt" for name in (*lock.RESOLVED, *lock.BY_HAND)]
OF_TORCH = re.compile(r"torch|triton|fbgemm-gpu|nvidia-.+|cuda-.+")
PLATFORMS = [("linux", "Linux", "x86_64"), ("linux", "Linux", "aarch64"), ("darwin", "Darwin", "arm64")]


def environments() -> list[dict[str, str]]:
    return [
        {
            "python_version": python,
            "python_full_version": f"{python}.7",
            "sys_platform": name,
            "platform_system": system,
            "platform_machine": machine,
            "os_name": "posix",
        }
        for python, (name, system, machine) in itertools.product(("3.11", "3.12"), PLATFORMS)
    ]


def closure(requirements: list[str], environment: dict[str, str]) -> set[str]:
    """The names that these requirements bring in, by the metadata of what is installed here."""
    waiting = [Requirement(line) for line in requirements]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        asked = waiting.pop()
        key = (lock.normalised(asked.name), frozenset(asked.extras))
        if key in seen or key[0] == "fbgemm-gpu":
            continue  # torchrec names the CUDA package; the installer takes the one of the machine
        seen.add(key)
        for line in importlib.metadata.requires(asked.name) or []:
            found = Requirement(line)
            extras = {"", *asked.extras}
            if found.marker is None or any(found.marker.evaluate({**environment, "extra": e}) for e in extras):
                waiting.append(found)
    return {name for name, _ in seen}


def locked_names(group: str) -> set[str]:
    return {name for path in lock.included(REQUIREMENTS / f"{group}.txt") for name in lock.read_lock(path)}


@pytest.mark.parametrize("group", lock.RESOLVED)
def test_lock_is_the_closure_of_what_pyproject_asks_for(group: str) -> None:
    """On Linux and macOS, with Python 3.11 and 3.12: no package less, and none that nobody asked for."""
    if group == "ray" and importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed: make install GROUP=ray")
    unhashed = set(lock.read_lock(lock.WITHOUT_HASHES))
    for environment in environments():
        wanted = closure(lock.group_requirements(group), environment)
        assert wanted - unhashed == locked_names(group), environment


def test_list_of_the_distributed_part_is_complete() -> None:
    if importlib.util.find_spec("torchrec") is None:
        pytest.skip("torchrec is not installed: make distributed")
    names = locked_names("distributed-cpu") | locked_names("core") | set(lock.read_lock(lock.WITHOUT_HASHES))
    for environment in environments():
        assert closure(["torchrec", "fbgemm-gpu-cpu"], environment) <= names, environment


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.stem)
def test_every_package_of_a_lock_has_hashes(path: Path) -> None:
    pins = lock.read_lock(path)
    for name, pin in pins.items():
        assert pin.hashes and all(re.fullmatch(r"[0-9a-f]{64}", digest) for digest in pin.hashes), name
    # The lock says what, never from where.
    assert "://" not in path.read_text()


def test_hashes_of_other_platforms_are_there() -> None:
    """A compiled package has a wheel for each Python and platform; one hash would be one machine's."""
    core = lock.read_lock(REQUIREMENTS / "core.txt")
    assert len(core["numpy"].hashes) > 10 and len(core["pyarrow"].hashes) > 10 and len(core["orjson"].hashes) > 10
    assert len(core["rich"].hashes) == 2, "a wheel and a source archive"


def test_only_builds_of_torch_go_without_a_hash() -> None:
    pins = lock.read_lock(lock.WITHOUT_HASHES)
    assert [name for name in pins if not OF_TORCH.fullmatch(name)] == []
    assert {path.name for path in REQUIREMENTS.iterdir()} == {path.name for path in [*LOCKS, lock.WITHOUT_HASHES]}


def test_groups_agree_on_every_version() -> None:
    versions: dict[str, str] = {}
    for path in [path for path in LOCKS if path.stem != "rivals"]:
        for name, pin in lock.read_lock(path).items():
            assert versions.setdefault(name, pin.version) == pin.version, name


def test_licences_of_all_locked_packages_are_listed_and_allowed() -> None:
    rows = re.findall(r"^\| (\S+) \| (\S+) \| (.+) \|$", audit.TABLE.read_text(), re.MULTILINE)
    listed = {name: (version, licence) for name, version, licence in rows if name != "package"}
    wanted = {name: pin.version for name, pin in audit.read_locks().items() if pin.hashes or name == "torch"}
    assert {name: version for name, (version, _) in listed.items()} == wanted
    assert [name for name, (_, licence) in listed.items() if not audit.is_allowed(licence)] == []
    assert audit.outdated_rows(audit.installed_packages()) == []


# ---- the installer, with the real pip and packages made here; no network ----


def make_wheel(folder: Path, name: str, requires: str = "", version: str = "1.0") -> str:
    """Writes a wheel; returns its SHA-256."""
    record = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": "answer = 42\n",
        f"{record}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}",
        f"{record}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    path = folder / f"{name}-{version}-py3-none-any.whl"
    rows = [f"{file},,{len(text)}\n" for file, text in files.items()]
    files[f"{record}/RECORD"] = "".join([*rows, f"{record}/RECORD,,\n"])
    with zipfile.ZipFile(path, "w") as wheel:
        for file, text in files.items():
            wheel.writestr(zipfile.ZipInfo(file), text)
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The installer over a checkout with an environment and a wheel folder of its own."""
    spec = importlib.util.spec_from_file_location("install", ROOT / "scripts" / "install.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    venv = tmp_path / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    # The pip that runs elsewhere here is lent: installing it would take longer than the test.
    folder = venv / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    (folder / "pip").symlink_to(Path(site.getsitepackages()[0], "pip"))
    (tmp_path / "requirements").mkdir()
    (tmp_path / "wheels").mkdir()
    for name, value in {
        "ROOT": tmp_path,
        "VENV": venv,
        "VENV_PYTHON": venv / "bin" / "python",
        "LOG": venv / "install.log",
    }.items():
        monkeypatch.setattr(module, name, str(value))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    return module


def records(install: ModuleType) -> list[str]:
    return [name for name in install.installed_records() if not name.startswith("pip-")]


def test_a_wheel_with_another_hash_is_refused_and_the_message_says_what_to_do(
    install: ModuleType, tmp_path: Path
) -> None:
    digest = make_wheel(tmp_path / "wheels", "tack")
    core = tmp_path / "requirements" / "core.txt"
    core.write_text(f"tack==1.0 \\\n    --hash=sha256:{'0' * 64}\n")
    with pytest.raises(install.InstallError) as caught:
        install.install_packages("core", "cpu", "2.13.0")
    first, second, third = str(caught.value).splitlines()
    assert first.startswith("installing the core packages failed: tack==1.0 from ")
    assert first.endswith("tack-1.0-py3-none-any.whl is refused: its hash is none of those in requirements/")
    assert "damaged" in second and "tampered" in second
    assert third.startswith("fix: ") and "PIP_INDEX_URL" in third and "run again" in third
    assert records(install) == []

    # The right hash among others, as of other platforms, is accepted.
    core.write_text(f"tack==1.0 \\\n    --hash=sha256:{'0' * 64} \\\n    --hash=sha256:{digest}\n")
    install.install_packages("core", "cpu", "2.13.0")
    assert records(install) == ["tack-1.0.dist-info"]


def test_a_package_without_a_hash_is_refused_and_nothing_is_added_to_the_lock(
    install: ModuleType, tmp_path: Path
) -> None:
    digest = make_wheel(tmp_path / "wheels", "tack", "Requires-Dist: board\n")
    make_wheel(tmp_path / "wheels", "board")
    core = tmp_path / "requirements" / "core.txt"
    core.write_text(f"board==1.0\ntack==1.0 --hash=sha256:{digest}\n")
    with pytest.raises(install.InstallError):
        install.install_packages("core", "cpu", "2.13.0")
    core.write_text("tack==1.0\n")
    with pytest.raises(install.InstallError):
        install.install_packages("core", "cpu", "2.13.0")
    assert records(install) == []
    core.write_text(f"tack==1.0 --hash=sha256:{digest}\n")
    install.install_packages("core", "cpu", "2.13.0")
    assert records(install) == ["tack-1.0.dist-info"]


def test_a_cuda_build_brings_its_own_packages_at_the_pinned_versions(install: ModuleType, tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    digest = make_wheel(wheels, "tack")
    make_wheel(wheels, "tack", version="2.0")
    make_wheel(wheels, "nvidia_x", version="1.0")
    make_wheel(wheels, "nvidia_x", version="2.0")
    make_wheel(wheels, "torch", "Requires-Dist: tack\nRequires-Dist: nvidia-x\n", version="2.13.0")
    (tmp_path / "requirements" / "core.txt").write_text(f"tack==1.0 --hash=sha256:{digest}\n")
    (tmp_path / "requirements" / "torch.txt").write_text("torch==2.13.0\nnvidia-x==1.0\n")
    install.install_packages("core", "cuda", "2.13.0")
    assert records(install) == ["nvidia_x-1.0.dist-info", "tack-1.0.dist-info", "torch-2.13.0.dist-info"]


@pytest.mark.parametrize("lost", ["tack.py", "tack-1.0.dist-info/RECORD"])
def test_what_an_interrupted_run_damaged_comes_back_with_its_hash(
    install: ModuleType, tmp_path: Path, lost: str
) -> None:
    digest = make_wheel(tmp_path / "wheels", "tack")
    core = tmp_path / "requirements" / "core.txt"
    core.write_text(f"tack==1.0 --hash=sha256:{digest}\n")
    install.install_packages("core", "cpu", "2.13.0")
    Path(install.site_packages(), lost).unlink()
    install.repair_interrupted()
    make_wheel(tmp_path / "wheels", "tack", "Summary: another file of the same version\n")
    with pytest.raises(install.InstallError, match="is refused"):
        install.install_packages("core", "cpu", "2.13.0")
    assert make_wheel(tmp_path / "wheels", "tack") == digest
    install.install_packages("core", "cpu", "2.13.0")
    assert Path(install.site_packages(), lost).is_file()
