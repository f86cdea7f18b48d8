"""The state of a training run's checkpoint is checked field by field; what is wrong is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tackboard.checkpoint.trained import load_trained, read_state
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


def test_a_newer_version_is_refused(folder: Path) -> None:
    change(folder, format_version=4)
    with pytest.raises(DataError, match=r"state\.json has format version 4"):
        read_state(folder)
