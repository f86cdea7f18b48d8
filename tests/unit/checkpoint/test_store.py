"""Checkpoints: what was saved comes back bit for bit, and a damaged one is never the one that is used."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from tackboard.checkpoint.store import CheckpointStore, find_checkpoint, load_checkpoint
from tackboard.core.errors import CorruptFileError, DataError
from tackboard.core.manifest import verify_manifest, write_manifest

Groups = dict[str, dict[str, torch.Tensor]]


def groups_of(value: float) -> Groups:
    """Tensors that are awkward to store: views, tied ones, scalars, empty ones, other dtypes, values not finite."""
    grid = torch.arange(12.0).view(3, 4) + value
    return {
        "dense": {"transposed": grid.T, "scalar": torch.tensor(value), "empty": torch.zeros(0, 3)},
        "tied": {"one": grid, "other": grid, "part": grid[1:2], "nothing": torch.zeros(0)},
        "tables": {"rows": torch.full((5, 2), value, dtype=torch.float16)},
        "optimizer": {"step": torch.tensor(7), "odd": torch.tensor([float("inf"), -0.0])},
    }


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "run" / "checkpoints")


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_round_trip(store: CheckpointStore) -> None:
    saved = groups_of(1.5)
    path = store.save(3, saved, {"step": 3, "nested": {"list": [1, None]}})
    checkpoint = load_checkpoint(path)
    assert checkpoint.state == {"step": 3, "nested": {"list": [1, None]}}
    assert {group: set(tensors) for group, tensors in checkpoint.tensors.items()} == {
        group: set(tensors) for group, tensors in saved.items()
    }
    for group, tensors in saved.items():
        for name, tensor in tensors.items():
            assert torch.equal(checkpoint.tensors[group][name], tensor)
            assert checkpoint.tensors[group][name].dtype == tensor.dtype
    assert set(load_checkpoint(path, groups=("dense",)).tensors) == {"dense"}


def test_documents_lie_beside_the_state_and_are_verified(store: CheckpointStore) -> None:
    documents = {"features.json": {"name": "é", "nodes": [1, None]}, "more.json": {}}
    path = store.save(3, groups_of(1.5), {"step": 3}, documents)
    assert json.loads((path / "features.json").read_text()) == documents["features.json"]
    assert json.loads((path / "more.json").read_text()) == {}
    assert {entry["name"] for entry in verify_manifest(path, "checkpoint")["files"]} >= {"features.json", "more.json"}
    assert set(load_checkpoint(path).tensors) == set(groups_of(0))
    damage(path / "features.json")
    with pytest.raises(CorruptFileError, match=r"features\.json"):
        load_checkpoint(path)
    assert store.find_latest() is None


def test_latest_is_the_newest_and_two_are_kept(store: CheckpointStore) -> None:
    for step in (0, 5, 10, 100):
        store.save(step, groups_of(step), {})
    assert sorted(os.listdir(store.folder)) == ["latest", "step-00000010", "step-00000100"]
    assert os.readlink(store.folder / "latest") == "step-00000100"
    found = store.find_latest()
    assert found is not None and found.path == store.folder / "step-00000100"
    assert set(found.tensors) == set(groups_of(0)) and load_checkpoint(found) is found


def test_saving_a_step_again_keeps_the_intact_one(store: CheckpointStore) -> None:
    store.save(1, groups_of(1.0), {})
    store.save(1, groups_of(2.0), {})
    assert float(load_checkpoint(store.folder / "latest").tensors["dense"]["scalar"]) == 1.0


@pytest.mark.parametrize("name", ["dense.safetensors", "tables.safetensors", "state.json", "MANIFEST.json"])
def test_a_damaged_newest_is_passed_over(store: CheckpointStore, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    older = store.save(1, groups_of(1.0), {})
    newest = store.save(2, groups_of(2.0), {})
    damage(newest / name)
    with pytest.raises(CorruptFileError, match=name.replace(".", r"\.")):
        load_checkpoint(newest)
    found = store.find_latest()
    assert found is not None and found.path == older and found.tensors["dense"]["scalar"] == 1.0
    assert "skipping step-00000002" in capsys.readouterr().err
    # The run that goes on from the older one comes to step 2 again and must leave a good one there.
    store.save(2, groups_of(3.0), {})
    assert float(load_checkpoint(store.folder / "latest").tensors["dense"]["scalar"]) == 3.0


def test_damaged_checkpoints_never_push_out_a_good_one(store: CheckpointStore) -> None:
    for step in (4, 6):
        damage(store.save(step, groups_of(step), {}) / "state.json")
    assert store.find_latest() is None
    store.save(0, groups_of(0.0), {})  # all was lost: the run starts again
    found = store.find_latest()
    assert found is not None and found.path == store.folder / "step-00000000"
    assert (store.folder / "latest" / "MANIFEST.json").is_file()


def test_leftovers_of_a_killed_writer_are_no_checkpoints(store: CheckpointStore) -> None:
    store.save(1, groups_of(1.0), {})
    leftover = store.folder / ".step-00000002.gone-1a2b"
    leftover.mkdir()
    (store.folder / "step-00000003").mkdir()  # no manifest: never finished
    assert store.complete() == [store.folder / "step-00000001"]
    found = store.find_latest()
    assert found is not None and found.path == store.folder / "step-00000001"
    assert leftover.exists(), "who only looks cleans nothing"
    store.clean()
    assert not leftover.exists()


def test_an_empty_or_absent_folder_has_no_latest(store: CheckpointStore) -> None:
    assert store.find_latest() is None


def test_what_was_found_holds_while_the_folder_has_the_same_checkpoints(store: CheckpointStore) -> None:
    store.save(1, groups_of(1.0), {})
    damage(store.save(2, groups_of(2.0), {}) / "state.json")
    known = store.find_latest()
    assert known is not None and known.path.name == "step-00000001"
    assert store.find_latest(known) is known
    other = CheckpointStore(store.folder).find_latest(known)
    assert other is known
    newer = store.save(3, groups_of(3.0), {})  # by another process, say
    found = store.find_latest(known)
    assert found is not None and found.path == newer
    assert torch.equal(known.tensors["dense"]["scalar"], torch.tensor(1.0)), "its files are gone, and still mapped"


def test_find_checkpoint_takes_a_run_a_folder_or_a_checkpoint(store: CheckpointStore) -> None:
    store.save(1, groups_of(1.0), {})
    newest = store.save(2, groups_of(2.0), {}).resolve()
    for place in (store.folder.parent, store.folder, newest, store.folder / "latest"):
        assert find_checkpoint(place) == newest
    (store.folder / "latest").unlink()
    assert find_checkpoint(store.folder.parent).resolve() == newest


def test_find_checkpoint_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        find_checkpoint(tmp_path / "absent")
    with pytest.raises(DataError, match="holds no complete checkpoint"):
        find_checkpoint(tmp_path)


def test_another_kind_of_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    write_manifest(tmp_path, "dataset")
    with pytest.raises(DataError, match="is a dataset"):
        load_checkpoint(tmp_path)
