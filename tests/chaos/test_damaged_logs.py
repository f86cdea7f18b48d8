"""Damage to what a run writes for people does not stop a resume whose checkpoints are intact."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import Reference, Runs
else:
    Reference = Runs = Any


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("metrics.jsonl", lambda data: data[:5] + bytes([data[5] ^ 0x80]) + data[6:]),
        pytest.param("metrics.jsonl", lambda data: data.replace(b"{", b"[", 1), marks=pytest.mark.slow),
        ("STATUS", lambda _data: b"\xff\xfe\x00garbage"),
        pytest.param("STATUS", lambda _data: b"", marks=pytest.mark.slow),
        pytest.param("events.jsonl", lambda data: b"\xff" + data[1:], marks=pytest.mark.slow),
    ],
)
def test_a_run_with_a_damaged_log_is_resumed(runs: Runs, reference: Reference, name: str, damage: Any) -> None:
    killed = runs.train(at=["step-00000006:after-rename", 1], action="kill")
    assert killed.code == -9
    path = runs.all[0] / name
    path.write_bytes(damage(path.read_bytes()))
    resumed = runs.train()
    assert resumed.code == 0, resumed.log
    assert len(runs.all) == 1
    assert runs.digest() == reference.digest
    assert len(reference.metrics) - len(runs.metrics()) == (1 if name == "metrics.jsonl" else 0)
