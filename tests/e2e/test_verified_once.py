"""Every command hashes a file at most once: what was verified is passed on, not looked up again."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tackboard.core import manifest
from tackboard.scoring.scorer import Scorer
from tackboard.train.trainer import Trainer

Program = Callable[..., Any]


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> Counter[Path]:
    """How often each file was hashed since the test began, by its real path."""
    counts: Counter[Path] = Counter()
    honest = manifest.sha256_file

    def count(path: Path) -> str:
        counts[path.resolve()] += 1
        return honest(path)

    monkeypatch.setattr(manifest, "sha256_file", count)
    return counts


@pytest.fixture
def folder(workspace: Path, tmp_path: Path) -> Path:
    """A copy of the workspace."""
    return Path(shutil.copytree(workspace, tmp_path / "copy", symlinks=True))


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    honest = Trainer._one_step

    def one_step(self: Trainer, *arguments: Any) -> bool:
        if self.step == step:
            raise MemoryError
        return honest(self, *arguments)

    monkeypatch.setattr(Trainer, "_one_step", one_step)


def verified_in(folder: Path, hashed: Counter[Path]) -> set[str]:
    return {path.name for path in hashed if path.is_relative_to(folder.resolve())}


@pytest.mark.parametrize("damaged", [False, True], ids=["intact", "newest damaged"])
def test_a_resumed_run(
    tackboard: Program, folder: Path, damaged: bool, hashed: Counter[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["train", "recipe.py:recipe", "--set", "seed=5", "--json"]
    with monkeypatch.context() as patched:
        stop_at(patched, 3)
        assert tackboard(*command, cwd=folder).code == 1
    run = (folder / "runs" / "latest").resolve()
    before, newest = (run / "checkpoints" / f"step-0000000{step}" for step in (0, 2))
    if damaged:
        data = bytearray((newest / "tables.safetensors").read_bytes())
        data[-1] ^= 1
        (newest / "tables.safetensors").write_bytes(data)
    hashed.clear()
    answer = tackboard(*command, "--resume", str(run), cwd=folder)
    assert answer.code == 0, answer.err
    assert answer.err.count("skipping step-00000002") == damaged
    assert json.loads(answer.out.splitlines()[-1])["step"] == 4
    # What is written is hashed for its manifest, under a temporary name.
    verified = {path.parent for path in hashed if path.parent.name.startswith("step-")}
    assert verified == ({before, newest} if damaged else {newest})
    assert {"events.parquet", "items.parquet"} <= verified_in(folder / "datasets", hashed)
    for path in [path for path in hashed if damaged and path.parent == newest]:
        assert hashed.pop(path) <= 2  # Once more when the run comes to its step again: an intact one would be kept.
    assert max(hashed.values()) == 1, hashed.most_common(3)


@pytest.mark.parametrize(
    ("command", "place", "file"),
    [
        (["evaluate", "runs/latest"], "datasets", "events.parquet"),
        (["evaluate", "runs/latest"], "runs", "tables.safetensors"),
        (["export", "runs/latest", "--out", "other"], "runs", "tables.safetensors"),
        (["train", "recipe.py:recipe", "--set", "seed=6"], "datasets", "events.parquet"),
        (["train", "recipe.py:recipe", "--fast-dev-run"], "runs", "tables.safetensors"),
        (["score", "request.json", "--offline", "--bundle", "bundle"], "bundle", "item_tables.weight.safetensors"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("has_latest", [True, False])
def test_a_command(
    tackboard: Program, folder: Path, hashed: Counter[Path], command: list[str], place: str, file: str, has_latest: bool
) -> None:
    (folder / "request.json").write_text(json.dumps({"history": [], "candidates": [1, 2], "request_time_ms": 5}))
    if not has_latest:
        (folder / "runs" / "latest" / "checkpoints" / "latest").unlink()
    answer = tackboard(*command, cwd=folder)
    assert answer.code == 0, answer.err
    assert file in verified_in(folder / place, hashed)
    assert max(hashed.values()) == 1, hashed.most_common(3)


def test_the_load_of_a_server(folder: Path, hashed: Counter[Path]) -> None:
    Scorer.load(folder / "bundle", num_threads=1)
    assert verified_in(folder, hashed) >= {"dense.safetensors", "item_tables.weight.safetensors", "signature.json"}
    assert max(hashed.values()) == 1
