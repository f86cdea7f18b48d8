"""A contender is believed only where every segment is there once and every tensor is right."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tackboard.bench.loader.check import Reference, digests
from tackboard.bench.loader.contender import write_check
from tackboard.bench.loader.data import Setting
from tackboard.bench.loader.ours import Contender


@pytest.fixture
def told(loader_folder: Path, tmp_path: Path) -> dict[str, Any]:
    """What a right contender tells."""
    write_check(Contender(loader_folder, "product").epoch(0), tmp_path / "right.npz")
    with np.load(tmp_path / "right.npz") as file:
        return dict(file)


def differences(loader_folder: Path, tmp_path: Path, told: dict[str, Any]) -> list[str]:
    np.savez(tmp_path / "told.npz", **told)
    return Reference(Setting.read(loader_folder)).differences(tmp_path / "told.npz")


def test_the_same_is_accepted(loader_folder: Path, tmp_path: Path, told: dict[str, Any]) -> None:
    assert differences(loader_folder, tmp_path, told) == []


def test_a_segment_that_is_not_there(loader_folder: Path, tmp_path: Path, told: dict[str, Any]) -> None:
    count = len(told["digests"])
    told["digests"] = told["digests"][1:]
    (sentence,) = differences(loader_folder, tmp_path, told)
    assert sentence == f"the epoch has {count - 1} segments instead of {count}; 1 of ours are missing"


def test_a_segment_twice_instead_of_another(loader_folder: Path, tmp_path: Path, told: dict[str, Any]) -> None:
    told["digests"][1] = told["digests"][0]
    assert "1 of ours are missing" in differences(loader_folder, tmp_path, told)[0]


@pytest.mark.parametrize("name", ["item_rows", "item_log_q", "items", "columns/time", "is_positive", "users"])
def test_a_tensor_that_differs(loader_folder: Path, tmp_path: Path, told: dict[str, Any], name: str) -> None:
    changed = told[f"1/{name}"].copy()
    changed.flat[0] = not changed.flat[0] if changed.dtype == np.bool_ else changed.flat[0] + 1
    told[f"1/{name}"] = changed
    assert differences(loader_folder, tmp_path, told) == [f"batch 1: {name} differs"]


def test_a_tensor_of_another_type_or_missing(loader_folder: Path, tmp_path: Path, told: dict[str, Any]) -> None:
    told["0/items"] = told["0/items"].astype(np.int32)
    del told["2/users"]
    found = differences(loader_folder, tmp_path, told)
    assert found == ["batch 0: items differs", "batch 2: only one side has users"]


def test_digests_depend_on_order_user_and_every_column() -> None:
    columns = {name: np.array([1, 2, 1, 2]) for name in ("item", "action", "surface", "time", "is_positive")}
    users, offsets = np.array([5, 5]), np.array([0, 2, 4])
    same = digests(users, offsets, columns)
    assert same[0] == same[1]
    assert digests(np.array([5, 6]), offsets, columns)[1] != same[1]
    for name in columns:
        swapped = columns | {name: np.array([1, 2, 2, 1])}
        one, other = digests(users, offsets, swapped)
        assert one == same[0] and other != same[1], name
