"""The state of a training run's checkpoint is checked field by field; what is wrong is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tackboard.checkpoint.trained import load_trained, read_state, stored_optimizer, stored_tables
from tackboard.core.errors import CorruptFileError, DataError
from tackboard.core.manifest import MANIFEST, write_manifest

GOLDEN = Path(__file__).parents[2] / "golden" / "checkpoint-v1"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN, tmp_path / "checkpoint"))


def change(folder: Path, **values: Any) -> None:
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(state | values))


def test_a_checkpoint_of_version_1_has_all_fields(folder: Path) -> None:
    assert read_state(folder)["step"] == 3
    assert set(load_trained(folder).tensors) == {"dense", "tables"}


def test_a_group_that_is_not_there_is_named(folder: Path) -> None:
    (folder / "optimizer.safetensors").unlink()
    (folder / MANIFEST).unlink()
    write_manifest(folder, "checkpoint")
    assert set(load_trained(folder).tensors) == {"dense", "tables"}
    with pytest.raises(CorruptFileError, match=r"optimizer\.safetensors is missing"):
        load_trained(folder, ("dense", "tables", "optimizer"))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"step": -1}, "a number of steps or tokens is below 0"),
        ({"lineage": {"dataset": "x", "snapshot": "../y"}}, "lineage.snapshot"),
        ({"lineage": {"dataset": "x\0", "snapshot": "y"}}, "lineage.snapshot"),
        ({"vocabulary": None}, "no object vocabulary"),
    ],
)
def test_a_wrong_field_is_named(folder: Path, values: dict[str, Any], words: str) -> None:
    change(folder, **values)
    with pytest.raises(CorruptFileError, match=rf"state\.json is malformed: .*{words}"):
        read_state(folder)


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    """A checkpoint of three processes."""
    return Path(shutil.copytree(GOLDEN.with_name("checkpoint-v3"), tmp_path / "checkpoint"))


def reseal(folder: Path) -> None:
    (folder / MANIFEST).unlink()
    write_manifest(folder, "checkpoint")


ALL = ("dense", "tables", "optimizer")


def test_only_the_wanted_parts_are_read(parts: Path) -> None:
    tables = {"tables-r00000", "tables-r00001", "tables-r00002"}
    assert set(load_trained(parts).tensors) == {"dense"} | tables
    assert set(load_trained(parts, ("optimizer",)).tensors) == {
        "optimizer", "optimizer-r00000", "optimizer-r00001", "optimizer-r00002"
    }  # fmt: skip
    assert len(load_trained(parts, ALL).tensors) == 8


@pytest.mark.parametrize("name", ["tables-r00001", "optimizer-r00002", "optimizer"])
def test_a_part_that_is_not_there_is_named(parts: Path, name: str) -> None:
    (parts / f"{name}.safetensors").unlink()
    reseal(parts)
    with pytest.raises(CorruptFileError, match=rf"{name}\.safetensors is missing"):
        load_trained(parts, ALL)


@pytest.mark.parametrize(
    ("name", "num_parts"), [("tables-r00003", 3), ("tables", 3), ("tables-r00002", 2), ("optimizer-r00000", 1)]
)
def test_a_part_too_many_is_named(parts: Path, name: str, num_parts: int) -> None:
    if not (parts / f"{name}.safetensors").exists():
        shutil.copy(parts / "tables-r00001.safetensors", parts / f"{name}.safetensors")
    if num_parts == 1:
        (parts / "tables-r00000.safetensors").rename(parts / "tables.safetensors")
        for rank in (1, 2):
            (parts / f"tables-r0000{rank}.safetensors").unlink()
    change(parts, num_parts=num_parts)
    reseal(parts)
    with pytest.raises(CorruptFileError, match=rf"{name}\.safetensors is not one of the {num_parts} parts"):
        load_trained(parts, ALL)


def test_two_parts_with_the_same_row_are_refused(parts: Path) -> None:
    shutil.copy(parts / "tables-r00001.safetensors", parts / "tables-r00002.safetensors")
    reseal(parts)
    checkpoint = load_trained(parts, ALL)
    with pytest.raises(CorruptFileError, match=r"checkpoint/tables is malformed: two parts of item_tables\.weight"):
        stored_tables(checkpoint)
    checkpoint.tensors["optimizer"] |= {"adagrad.item_tables": torch.zeros(400)}
    with pytest.raises(CorruptFileError, match=r"adagrad\.item_tables is stored twice"):
        stored_optimizer(checkpoint)


def test_a_number_of_parts_below_1_is_refused(parts: Path) -> None:
    change(parts, num_parts=0)
    with pytest.raises(CorruptFileError, match="num_parts = 0"):
        read_state(parts)


def test_a_newer_version_is_refused(folder: Path) -> None:
    change(folder, format_version=4)
    with pytest.raises(DataError, match=r"state\.json has format version 4"):
        read_state(folder)
