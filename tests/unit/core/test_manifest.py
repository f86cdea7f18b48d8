"""The manifest: one flipped bit anywhere is found, and the file is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tackboard.core import manifest
from tackboard.core.errors import CorruptFileError, DataError, StorageError
from tackboard.core.keyed_random import permutation
from tackboard.core.manifest import MANIFEST, read_manifest, seal, unseal, verify_manifest, write_manifest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A finished folder of three files, one of them empty, one in a subfolder."""
    path = tmp_path / "thing"
    (path / "tables").mkdir(parents=True)
    (path / "dense.bin").write_bytes(bytes(range(200)))
    (path / "tables" / "item.bin").write_bytes(b"rows of the table" * 20)
    (path / "empty").write_bytes(b"")
    write_manifest(path, "checkpoint", {"step": 7})
    return path


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def test_round_trip_lists_every_file(folder: Path) -> None:
    content = verify_manifest(folder, "checkpoint")
    assert (content["kind"], content["step"], content["format_version"]) == ("checkpoint", 7, 1)
    assert {entry["name"]: entry["bytes"] for entry in content["files"]} == {
        "dense.bin": 200,
        "empty": 0,
        "tables/item.bin": 340,
    }
    assert list(json.loads((folder / MANIFEST).read_bytes()))[-1] == "sha256_of_the_above"


@pytest.mark.parametrize("meant", [("dense.bin", "empty"), ("dense.bin", "empty", "tables/item.bin", "state.json")])
def test_a_folder_that_does_not_hold_what_was_meant_is_not_sealed(folder: Path, meant: tuple[str, ...]) -> None:
    (folder / MANIFEST).unlink()
    with pytest.raises(StorageError, match=r"has missing or unexpected files: (state\.json|tables/item\.bin)"):
        write_manifest(folder, "checkpoint", meant=meant)
    assert not (folder / MANIFEST).exists()
    write_manifest(folder, "checkpoint", meant=["dense.bin", "empty", "tables/item.bin"])
    verify_manifest(folder, "checkpoint")


def test_a_file_that_changed_since_another_process_wrote_it_is_not_sealed(folder: Path) -> None:
    entries = {entry["name"]: entry["sha256"] for entry in read_manifest(folder)["files"]}
    (folder / MANIFEST).unlink()
    write_manifest(folder, "checkpoint", hashes=entries)
    (folder / MANIFEST).unlink()
    flip(folder / "dense.bin", 5)
    with pytest.raises(StorageError, match=r"dense\.bin has changed since another process wrote it"):
        write_manifest(folder, "checkpoint", hashes=entries)
    assert not (folder / MANIFEST).exists()


def test_every_flipped_bit_of_the_manifest_is_found(folder: Path) -> None:
    original = (folder / MANIFEST).read_bytes()
    for bit in range(8 * len(original)):
        data = bytearray(original)
        data[bit // 8] ^= 1 << bit % 8
        assert unseal(bytes(data)) is None, f"bit {bit}"
    flip(folder / MANIFEST, 3000)
    with pytest.raises(CorruptFileError, match=rf"{MANIFEST} is corrupt"):
        verify_manifest(folder, "checkpoint")


def test_a_shortened_or_lengthened_manifest_is_found(folder: Path) -> None:
    original = (folder / MANIFEST).read_bytes()
    for length in range(len(original)):
        assert unseal(original[:length]) is None
    assert unseal(original + b"\n") is None


@pytest.mark.parametrize("name", ["dense.bin", "tables/item.bin"])
def test_flipped_bits_of_listed_files_are_found_and_the_file_named(folder: Path, name: str) -> None:
    path = folder / name
    num_bits = 8 * path.stat().st_size
    for bit in [0, num_bits - 1, *permutation(num_bits, 1)[:40]]:
        flip(path, int(bit))
        with pytest.raises(CorruptFileError, match=path.name):
            verify_manifest(folder, "checkpoint")
        flip(path, int(bit))
    verify_manifest(folder, "checkpoint")


def test_missing_extra_and_resized_files_are_named(folder: Path) -> None:
    (folder / "tables" / "new").write_text("x")
    with pytest.raises(CorruptFileError, match="tables/new is not in the manifest"):
        verify_manifest(folder, "checkpoint")
    (folder / "tables" / "new").rename(folder / "tables" / MANIFEST)
    with pytest.raises(CorruptFileError, match="is not in the manifest"):
        verify_manifest(folder, "checkpoint")
    (folder / "tables" / MANIFEST).unlink()
    (folder / "empty").write_text("no longer")
    with pytest.raises(CorruptFileError, match=r"empty has 9 bytes"):
        verify_manifest(folder, "checkpoint")
    (folder / "empty").unlink()
    with pytest.raises(CorruptFileError, match="empty is missing"):
        verify_manifest(folder, "checkpoint")
    (folder / "empty").symlink_to("dense.bin")
    with pytest.raises(CorruptFileError, match="empty"):
        verify_manifest(folder, "checkpoint")


def test_a_file_that_cannot_be_read_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(manifest, "sha256_file", refuse)
    with pytest.raises(CorruptFileError, match=r"dense\.bin cannot be read: Permission denied"):
        verify_manifest(folder, "checkpoint")


def test_other_kinds_newer_versions_and_unfinished_folders_are_refused(folder: Path) -> None:
    with pytest.raises(DataError, match="is a checkpoint"):
        verify_manifest(folder, "bundle")
    with pytest.raises(DataError, match="is not a folder"):
        verify_manifest(folder / "nowhere", "bundle")
    (folder / MANIFEST).write_bytes(seal({"kind": "checkpoint", "format_version": 2, "files": []}))
    with pytest.raises(DataError, match="format version 2"):
        read_manifest(folder)
    (folder / MANIFEST).unlink()
    with pytest.raises(CorruptFileError, match="never finished"):
        read_manifest(folder)
