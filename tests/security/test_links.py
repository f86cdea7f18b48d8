"""Symbolic links, pipes and sockets inside a dataset, a checkpoint or a bundle are refused by name and never opened."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tackboard.bundle.signature import read_bundle
from tackboard.checkpoint.store import find_checkpoint, load_checkpoint
from tackboard.cli.inspect import verify
from tackboard.core.errors import CorruptFileError
from tackboard.core.manifest import MANIFEST, write_manifest
from tackboard.events.checks.quality import check_dataset
from tackboard.events.dataset import open_dataset
from tackboard.scoring.scorer import Scorer

GOLDEN = Path(__file__).parents[1] / "golden"
LOADERS: dict[str, list[Callable[[Path], object]]] = {
    "checkpoint-v1": [load_checkpoint],
    "bundle-v2": [read_bundle, Scorer.load],
    "dataset-v1": [open_dataset],
}
LISTED = {"checkpoint-v1": "tables.safetensors", "bundle-v2": "dense.safetensors", "dataset-v1": "events.parquet"}


@pytest.fixture(params=sorted(LOADERS))
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / request.param, tmp_path / request.param))


def assert_refused(folder: Path, culprit: Path, words: str = "is a symbolic link") -> None:
    readers = [*LOADERS[folder.name], lambda path: verify(str(path), json_output=False)]
    for read in readers:
        with pytest.raises(CorruptFileError) as caught:
            read(folder)
        assert caught.value.got == f"{culprit} {words}"


@pytest.mark.parametrize("target", ["gone", "..", "/etc/passwd", MANIFEST, "."])
def test_an_added_link_is_refused(folder: Path, target: str) -> None:
    (folder / "added").symlink_to(target)
    assert_refused(folder, folder / "added")


def test_a_link_inside_an_added_folder_is_refused(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "added").symlink_to(folder)
    assert_refused(folder, folder / "sub" / "added")


def test_a_link_in_place_of_a_listed_file_is_refused(folder: Path, tmp_path: Path) -> None:
    """Also where it leads to the very bytes that the manifest has."""
    listed = folder / LISTED[folder.name]
    listed.rename(tmp_path / "outside")
    listed.symlink_to(tmp_path / "outside")
    assert_refused(folder, listed)


def test_a_link_in_place_of_the_manifest_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / MANIFEST).rename(tmp_path / "outside")
    (folder / MANIFEST).symlink_to(tmp_path / "outside")
    assert_refused(folder, folder / MANIFEST)


def test_a_link_in_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(GOLDEN / "bundle-v2", tmp_path / "bundle-v2"))
    (bundle / "tables").rename(tmp_path / "outside")
    (bundle / "tables").symlink_to(tmp_path / "outside")
    assert_refused(bundle, bundle / "tables")


@pytest.mark.parametrize("place", ["added", "listed", MANIFEST])
def test_a_pipe_and_a_socket_are_refused_and_not_opened(folder: Path, place: str) -> None:
    path = folder / (LISTED[folder.name] if place == "listed" else place)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    assert_refused(folder, path, "is not a plain file")
    path.unlink()
    with socket.socket(socket.AF_UNIX) as end:
        # A socket's name may have 107 bytes; the folder's may be longer.
        here = os.open(folder, os.O_RDONLY)
        try:
            end.bind(f"/proc/self/fd/{here}/{path.name}")
        finally:
            os.close(here)
        assert_refused(folder, path, "is not a plain file")


def test_nothing_with_a_link_is_sealed(folder: Path) -> None:
    (folder / MANIFEST).unlink()
    (folder / "added").symlink_to("/etc/passwd")
    with pytest.raises(CorruptFileError, match="added is a symbolic link"):
        write_manifest(folder, "dataset")
    assert not (folder / MANIFEST).exists()


def test_the_check_of_a_dataset_finds_links_and_pipes_and_opens_none(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(GOLDEN / "dataset-v1", tmp_path / "dataset-v1"))
    (folder / "items.parquet").rename(tmp_path / "outside")
    (folder / "items.parquet").symlink_to(tmp_path / "outside")
    (folder / "users.parquet").unlink()
    os.mkfifo(folder / "users.parquet")
    (folder / "added").symlink_to("gone")
    report = check_dataset(folder)
    found = {finding.file for finding in report.findings if "is a link" in finding.wrong}
    assert found == {"added", "items.parquet", "users.parquet"}


def test_the_links_above_these_folders_stay(tmp_path: Path) -> None:
    for name, kind in (("checkpoint-v1", "checkpoints"), ("dataset-v1", "datasets"), ("bundle-v2", "bundles")):
        shutil.copytree(GOLDEN / name, tmp_path / kind / name)
        (tmp_path / kind / "latest").symlink_to(name)
    load_checkpoint(find_checkpoint(tmp_path))
    load_checkpoint(tmp_path / "checkpoints" / "latest")
    assert open_dataset(tmp_path / "datasets").num_events == open_dataset(tmp_path / "datasets" / "latest").num_events
    Scorer.load(tmp_path / "bundles" / "latest")
