"""One flipped bit, a cut, a missing, an added or a swapped file: found on load, and the file named."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tackboard.bundle.signature import read_bundle
from tackboard.checkpoint.store import CheckpointStore, load_checkpoint
from tackboard.cli import main as command_line
from tackboard.core import keyed_random
from tackboard.core.errors import CorruptFileError
from tackboard.core.manifest import MANIFEST, verify_manifest
from tackboard.events.dataset import open_dataset
from tackboard.scoring.scorer import Scorer

if TYPE_CHECKING:
    from conftest import Nursery
else:
    Nursery = Any

KINDS = ("checkpoint", "bundle", "dataset")
LOADERS: dict[str, list[Callable[[Path], Any]]] = {
    "checkpoint": [load_checkpoint],
    "bundle": [read_bundle, Scorer.load],
    "dataset": [open_dataset],
}
DATA_INVALID = 3


@pytest.fixture(scope="module")
def originals(nursery: Nursery) -> dict[str, Path]:
    """A checkpoint, the bundle of it and the dataset behind it, as the commands wrote them."""
    runs = nursery.runs()
    assert runs.train().code == 0
    bundle = nursery.folder / "bundle"
    exported = nursery.run(["export", str(runs.finished), "--out", str(bundle)])
    assert exported.code == 0, exported.log
    return {
        "checkpoint": (runs.finished / "checkpoints" / "latest").resolve(),
        "bundle": bundle,
        "dataset": (nursery.folder / "datasets" / "small" / "latest").resolve(),
    }


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(originals: dict[str, Path], kind: str, tmp_path: Path) -> Path:
    """A copy to damage, which loads before it is damaged."""
    copy = tmp_path / originals[kind].name
    shutil.copytree(originals[kind], copy)
    for load in LOADERS[kind]:
        load(copy)
    return copy


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@contextmanager
def flipped(path: Path, bit: int) -> Iterator[None]:
    """`path` with one bit changed, for as long as the block lasts."""
    offset, mask = bit // 8, 1 << bit % 8
    with path.open("r+b", buffering=0) as file:
        original = file.read()
        file.seek(offset)
        file.write(bytes([original[offset] ^ mask]))
        try:
            yield
        finally:
            file.seek(offset)
            file.write(original[offset : offset + 1])


def bits_of(path: Path, num_random: int) -> list[int]:
    """The first, the last, the middle and some keyed random bits of a file."""
    count = 8 * path.stat().st_size
    drawn = keyed_random.uniform(22, len(path.name), list(range(num_random))) * count
    return sorted({0, count - 1, count // 2, *drawn.astype(int).tolist()})


def assert_refused(kind: str, folder: Path, culprit: Path) -> None:
    for load in LOADERS[kind]:
        with pytest.raises(CorruptFileError) as caught:
            load(folder)
        assert str(culprit) in str(caught.value), f"{load} does not name {culprit.name}: {caught.value}"


def verify(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["tackboard", "verify", str(folder)])
    with pytest.raises(SystemExit) as ended:
        command_line.run()
    return int(str(ended.value.code)), capsys.readouterr().err


@pytest.mark.parametrize("num_random", [4, pytest.param(100, marks=pytest.mark.slow)])
def test_one_flipped_bit_is_found(kind: str, folder: Path, num_random: int) -> None:
    for path in files_of(folder):
        for bit in bits_of(path, num_random):
            with flipped(path, bit):
                assert_refused(kind, folder, path)
    for load in LOADERS[kind]:
        load(folder)


def test_verify_names_the_file_and_exits_3(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(folder, monkeypatch, capsys) == (0, "")
    for path in files_of(folder):
        with flipped(path, 4 * path.stat().st_size):
            code, message = verify(folder, monkeypatch, capsys)
        assert code == DATA_INVALID
        assert str(path) in message and len(message.splitlines()) <= 3, message


def test_a_damaged_checkpoint_is_never_the_latest(originals: dict[str, Path], tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)

    def latest() -> Path | None:
        found = store.find_latest()
        return None if found is None else found.path

    for step in (9, 12):
        shutil.copytree(originals["checkpoint"].parent / f"step-{step:08d}", tmp_path / f"step-{step:08d}")
    for path in files_of(tmp_path / "step-00000012"):
        with flipped(path, 8 * path.stat().st_size - 1):
            assert latest() == tmp_path / "step-00000009", path.name
    assert latest() == tmp_path / "step-00000012"


def test_a_cut_missing_added_or_swapped_file_is_found(kind: str, folder: Path, tmp_path: Path) -> None:
    for path in files_of(folder):
        whole = path.read_bytes()
        for content in (b"", whole[: len(whole) // 2], whole[:-1], whole + b"\n"):
            path.write_bytes(content)
            assert_refused(kind, folder, path)
        path.unlink()
        assert_refused(kind, folder, path)
        path.write_bytes(whole)
    for name in ("extra.safetensors", ".hidden", f"inside/{MANIFEST}"):
        added = folder / name
        added.parent.mkdir(exist_ok=True)
        added.write_bytes(b"x")
        assert_refused(kind, folder, added)
        added.unlink()
    first, second = [path for path in files_of(folder) if path.name != MANIFEST][:2]
    first.rename(tmp_path / "away")
    second.rename(first)
    (tmp_path / "away").rename(second)
    assert_refused(kind, folder, first)


@pytest.mark.parametrize("step", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_every_bit_of_the_manifest(kind: str, folder: Path, step: int) -> None:
    manifest = folder / MANIFEST
    for bit in range(0, 8 * manifest.stat().st_size, step):
        with flipped(manifest, bit), pytest.raises(CorruptFileError, match=r"MANIFEST\.json"):
            verify_manifest(folder, kind)
