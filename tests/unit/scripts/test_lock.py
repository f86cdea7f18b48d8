"""The lock is made from what pip resolves and what the index offers; a narrower index is refused."""

from __future__ import annotations

import hashlib
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import lock

A, B, C = ("a" * 64, "b" * 64, "c" * 64)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_words: object) -> None:
        pass


@pytest.fixture
def index(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder that is served as a package index, and its address."""
    folder = tmp_path / "index"
    folder.mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield folder, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def offer(folder: Path, name: str, files: dict[str, str]) -> None:
    links = "".join(f'<a href="../files/{file}#sha256={digest}">{file}</a>\n' for file, digest in files.items())
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "index.html").write_text(links)


def make_wheel(folder: Path, name: str, version: str, requires: tuple[str, ...] = ()) -> Path:
    record = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}.py", f"version = {version!r}\n")
        wheel.writestr(f"{record}/METADATA", metadata + "".join(f"Requires-Dist: {line}\n" for line in requires))
        wheel.writestr(f"{record}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{record}/RECORD", f"{name}.py,,\n{record}/METADATA,,\n{record}/WHEEL,,\n{record}/RECORD,,\n")
    return path


@pytest.mark.parametrize(
    ("file", "usable"),
    [
        ("rich-15.0.0-py3-none-any.whl", True),
        ("six-1.0-py2.py3-none-any.whl", True),
        ("numpy-2.4.6-cp311-cp311-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl", True),
        ("numpy-2.4.6-cp312-cp312-win_amd64.whl", True),
        ("torchrec-1.8.0-py312-none-any.whl", True),
        ("safetensors-0.8.0-cp38-abi3-macosx_11_0_arm64.whl", True),
        ("psutil-7.2.2-cp36-abi3-musllinux_1_2_aarch64.whl", True),
        ("rich-15.0.0.tar.gz", True),
        ("numpy-2.4.6-cp313-cp313t-win_amd64.whl", False),
        ("numpy-2.4.6-pp311-pypy311_pp73-win_amd64.whl", False),
        ("x-1.0-cp313-abi3-win_amd64.whl", False),
        ("x-1.0-cp310-cp310-win_amd64.whl", False),
        ("x-1.0.win32-py2.4.exe", False),
    ],
)
def test_files_of_the_supported_pythons_on_every_platform_count(file: str, usable: bool) -> None:
    assert lock.is_usable(file) is usable


def test_hashes_are_read_from_the_page_of_an_index() -> None:
    page = (
        f'<a href="https://files.example.org/x/zope.event-6.2-py3-none-any.whl#sha256={A}" data-yanked="">w</a>'
        f"<a class='x' href='../zope_event-6.2.tar.gz#sha256={B}'>s</a>"
        f'<a href="zope_event-6.20-py3-none-any.whl#sha256={C}">another version</a>'
        f'<a href="zope_event_more-6.2-py3-none-any.whl#sha256={C}">another package</a>'
        f'<a href="zope.event-6.2-cp313-cp313-win_amd64.whl#sha256={C}">another Python</a>'
        f'<a href="zope.event-6.2-cp311-cp311-win_amd64.whl#md5={C}">no SHA-256</a><a href="/simple/">up</a>'
    )
    assert lock.hashes_on(page, "zope-event", "6.2") == {A, B}


def test_a_file_is_read_as_it_was_written_and_its_head_stays(tmp_path: Path) -> None:
    path, other = tmp_path / "dev.txt", tmp_path / "core.txt"
    path.write_text("# why\n-r core.txt\nold==1\n")
    other.write_text("# why\n")
    pins = {"b": lock.Pin("2.0", frozenset({A, B})), "a": lock.Pin("1.0", frozenset())}
    lock.write_lock(path, pins)
    assert path.read_text().splitlines()[:3] == ["# why", "-r core.txt", "a==1.0"]
    assert lock.read_lock(path) == pins
    assert lock.included(path) == [path, other]


def test_a_mirror_with_fewer_files_does_not_narrow_the_lock(index: tuple[Path, str]) -> None:
    folder, address = index
    offer(folder, "x", {"x-1.0-py3-none-any.whl": A})
    assert lock.fetch_hashes(address, ("x", "1.0"), frozenset()) == lock.Pin("1.0", frozenset({A}))
    with pytest.raises(lock.LockError, match="x==1.0: the index does not offer 1 of the files in the lock"):
        lock.fetch_hashes(address, ("x", "1.0"), frozenset({A, B}))
    with pytest.raises(lock.LockError, match="does not offer any file with a SHA-256"):
        lock.fetch_hashes(address, ("x", "2.0"), frozenset())
    with pytest.raises(lock.LockError, match="does not answer"):
        lock.fetch_hashes(address, ("y", "1.0"), frozenset())


def test_locks_are_made_from_pyproject_pip_and_the_index(
    index: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, address = index
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    made = [
        make_wheel(wheels, "top", "1.0", ("below", "torch")),
        make_wheel(wheels, "top", "2.0", ("below", "torch")),
        make_wheel(wheels, "below", "1.0"),
        make_wheel(wheels, "extra", "1.0", ("below",)),
        make_wheel(wheels, "builder", "1.0"),
        make_wheel(wheels, "torch", "2.13.0"),
    ]
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in made}
    for name in ("top", "below", "extra", "builder"):
        offer(folder, name, {file: digest for file, digest in digests.items() if file.startswith(name)})
    requirements = tmp_path / "requirements"
    requirements.mkdir()
    for file, text in {"core": "# head\ntop==1.0\n", "dev": "-r core.txt\n", "torch": "torch==2.13.0\n"}.items():
        (requirements / f"{file}.txt").write_text(text)
    (tmp_path / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["builder"]\n[project]\ndependencies = ["top", "torch"]\n'
        '[project.optional-dependencies]\ndev = ["extra"]\n'
    )
    for name, value in {
        "ROOT": tmp_path,
        "REQUIREMENTS": requirements,
        "RESOLVED": ("core", "dev"),
        "BY_HAND": (),
    }.items():
        monkeypatch.setattr(lock, name, value)
    monkeypatch.setattr(lock, "WITHOUT_HASHES", requirements / "torch.txt")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))

    lock.make_locks(address, upgrade=set())
    core, dev = lock.read_lock(requirements / "core.txt"), lock.read_lock(requirements / "dev.txt")
    assert {name: pin.version for name, pin in core.items()} == {"below": "1.0", "builder": "1.0", "top": "1.0"}
    assert core["top"].hashes == {digests["top-1.0-py3-none-any.whl"]}
    assert set(dev) == {"extra"}, "what core.txt has is not repeated, and torch has no hash"

    monkeypatch.setattr(lock, "RESOLVED", ("core",))
    lock.make_locks(address, upgrade={"top"})
    assert lock.read_lock(requirements / "core.txt")["top"].version == "2.0"
    assert (requirements / "core.txt").read_text().startswith("# head\n")
