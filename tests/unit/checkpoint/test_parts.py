"""The files by which processes agree on one checkpoint (see also chaos/test_kill_parts.py)."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tackboard.checkpoint.parts import SharedSave, group_of, part_name
from tackboard.checkpoint.store import CheckpointStore, load_checkpoint
from tackboard.core.errors import StorageError
from tackboard.core.manifest import MANIFEST, read_manifest


def shared_by(folder: Path, rank: int, **settings: Any) -> SharedSave:
    return SharedSave(
        **{"folder": folder, "step": 4, "rank": rank, "size": 2, "token": "x-1", "timeout_s": 10} | settings
    )


def groups_of(rank: int) -> dict[str, dict[str, torch.Tensor]]:
    own = {part_name("tables", rank): {"t:values": torch.full((2,), float(rank))}, part_name("optimizer", rank): {}}
    return {"dense": {"bias": torch.ones(3)}, **own} if rank == 0 else own


def test_names_of_parts_are_read_back() -> None:
    assert part_name("tables", 3) == "tables-r00003" and group_of("tables-r00003") == ("tables", 3)
    assert group_of("tables") == ("tables", None) and group_of("tables-r3") == ("tables-r3", None)


@pytest.mark.parametrize("first", [0, 1])
def test_two_processes_write_one_checkpoint(tmp_path: Path, first: int) -> None:
    store = CheckpointStore(tmp_path)
    writers = [
        lambda: store.save(4, groups_of(0), {"step": 4}, {"f.json": {}}, shared=shared_by(tmp_path, 0)),
        lambda: store.save_part(groups_of(1), shared_by(tmp_path, 1)),
    ]
    thread = threading.Thread(target=writers[first])
    thread.start()
    thread.join(0.1)
    assert thread.is_alive(), "each waits for the other"
    writers[1 - first]()
    thread.join(10)
    checkpoint = load_checkpoint(tmp_path / "latest")
    assert set(checkpoint.tensors) == {"dense", *groups_of(0), *groups_of(1)}
    assert checkpoint.tensors["tables-r00001"]["t:values"].tolist() == [1.0, 1.0]
    assert load_checkpoint(checkpoint.path, ("tables",)).tensors.keys() == {"tables-r00000", "tables-r00001"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000004"]


def test_a_part_says_whose_it_is(tmp_path: Path) -> None:
    store, one = CheckpointStore(tmp_path), shared_by(tmp_path, 1, timeout_s=0.05)
    with pytest.raises(StorageError, match="step 4 is not complete: rank 0 of 2 has not put it together"):
        store.save_part(groups_of(1), one)
    manifest = read_manifest(one.part(1))
    assert {key: manifest[key] for key in ("step", "rank", "size", "token")} == {
        "step": 4, "rank": 1, "size": 2, "token": "x-1"
    }  # fmt: skip
    assert [entry["name"] for entry in manifest["files"]] == [
        "optimizer-r00001.safetensors",
        "tables-r00001.safetensors",
    ]
    with pytest.raises(FileExistsError):
        store.save_part(groups_of(1), one)
    other = shared_by(tmp_path, 0, token="x-2", timeout_s=0.05)
    with pytest.raises(StorageError, match="rank 1 of 2 has not written its part within 0.05 s"):
        store.save(4, groups_of(0), {}, shared=other)
    other.place.mkdir()
    one.part(1).rename(other.part(1))
    with pytest.raises(StorageError, match="r00001 is the part of another checkpoint"):
        store.save(4, groups_of(0), {}, shared=other)
    assert not list(tmp_path.glob("step-*"))
    store.clean()
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_that_vanishes_is_no_success(tmp_path: Path) -> None:
    store, shared = CheckpointStore(tmp_path), shared_by(tmp_path, 1)
    thread = threading.Thread(target=lambda: (_until(shared.part(1) / MANIFEST), store.clean()))
    thread.start()
    with pytest.raises(StorageError, match="rank 0 of 2 has not put it together"):
        store.save_part(groups_of(1), shared)
    thread.join(10)


def _until(path: Path) -> None:
    while not path.exists():
        time.sleep(0.001)


@pytest.mark.parametrize("rank", [0, 1])
def test_nobody_waits_for_a_lost_process(tmp_path: Path, rank: int) -> None:
    shared, store = shared_by(tmp_path, rank, timeout_s=600), CheckpointStore(tmp_path)
    threading.Timer(0.1, shared.lost.set).start()
    with pytest.raises(StorageError, match="step 4 is not complete: .* before a process was lost"):
        if rank == 0:
            store.save(4, groups_of(0), {"step": 4}, shared=shared)
        else:
            store.save_part(groups_of(1), shared)
