"""`tackboard verify`: one check for datasets, checkpoints, bundles and stores. `tackboard doctor`: what is broken."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tackboard.core import doctor
from tackboard.core.rundir import RunDirectory
from tackboard.events.sequence_store import create_store

Program = Callable[..., Any]


@pytest.mark.parametrize("kind", ["dataset", "checkpoint", "bundle"])
def test_intact_and_damaged(
    tackboard: Program, tmp_path: Path, tiny_dataset: Path, trained_run: RunDirectory, tiny_bundle: Path, kind: str
) -> None:
    sources = {
        "dataset": tiny_dataset / "latest",
        "checkpoint": trained_run.checkpoints / "latest",
        "bundle": tiny_bundle,
    }
    answer = tackboard("verify", sources[kind], "--json")
    assert answer.code == 0
    files = [path for path in sources[kind].rglob("*") if path.is_file() and path.name != "MANIFEST.json"]
    assert answer.json()["kind"] == kind
    assert answer.json()["files"] == len(files)
    assert answer.json()["bytes"] == sum(path.stat().st_size for path in files)
    assert f"{kind} intact" in tackboard("verify", sources[kind]).out

    copy = tmp_path / "copy"
    shutil.copytree(sources[kind].resolve(), copy)
    victim = copy / files[0].relative_to(sources[kind])
    data = bytearray(victim.read_bytes())
    data[0] ^= 1
    victim.write_bytes(data)
    answer = tackboard("verify", copy)
    assert answer.code == 3
    assert answer.err.startswith(f"error: {victim} is corrupt: its SHA-256 differs from the manifest's\n")


def test_a_dataset_and_a_run_stand_for_their_latest(
    tackboard: Program, tiny_dataset: Path, trained_run: RunDirectory
) -> None:
    assert tackboard("verify", tiny_dataset, "--json").json()["kind"] == "dataset"
    assert tackboard("verify", trained_run.path, "--json").json()["kind"] == "checkpoint"


def test_a_sequence_store_is_read_whole(tackboard: Program, tmp_path: Path) -> None:
    path = tmp_path / "users.db"
    event = {"item_id": 1, "action": "a", "surface": "s", "time_ms": 1}
    with create_store(path) as store:
        store.append(7, [event])
    answer = tackboard("verify", path, "--json")
    assert answer.code == 0
    assert answer.json() == {
        "path": str(path),
        "kind": "sequence store",
        "format_version": 2,
        "has_checksums": True,
        "num_users": 1,
        "num_events": 1,
        "num_columns": 0,
        "num_names": 2,
        "num_forgotten_users": 0,
    }
    path.write_bytes(path.read_bytes()[:-4096])
    answer = tackboard("verify", path)
    assert answer.code == 3 and answer.err.startswith(f"error: {path}")
    assert tackboard("verify", "redis://127.0.0.1:1/0").code == 2


def test_the_doctor_prints_problems_with_their_repair(
    tackboard: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders: list[Path] = []

    def collect(folder: Path) -> doctor.MachineFacts:
        folders.append(folder)
        return doctor.MachineFacts(python=(3, 11, 7), installed={"numpy": "2.4.6"})

    monkeypatch.setattr(doctor, "collect", collect)
    monkeypatch.chdir(tmp_path)
    answer = tackboard("doctor")
    assert answer.code == 2
    lines = answer.out.splitlines()
    broken = next(number for number, line in enumerate(lines) if line.startswith("broken  torch "))
    assert lines[broken + 1].strip() == "repair: make install"
    assert any(line.startswith("absent  torchrec") for line in lines)
    answer = tackboard("doctor", "--json")
    assert (answer.code, answer.json()["ok"]) == (2, False)
    assert {"name": "numpy", "status": "ok", "value": "2.4.6", "repair": ""} in answer.json()["findings"]
    assert folders == [tmp_path] * 2
