from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

Program = Callable[..., Any]
START_MS = 1_700_000_000_000


def test_distances_and_a_threshold(
    tackboard: Program, tiny_dataset: Path, make_dataset: Callable[..., Path], tmp_path: Path
) -> None:
    answer = tackboard("data", "drift", tiny_dataset, tiny_dataset, "--threshold", "0")
    assert answer.code == 0, "equal is not above 0"
    other = make_dataset(tmp_path, [(1, item, "click", "home", START_MS) for item in range(20)])
    answer = tackboard("data", "drift", tiny_dataset, other)
    assert answer.code == 0
    assert answer.out.splitlines()[0].split()[:3] == ["column", "JS,", "bits"]
    assert answer.out.endswith("137 old events, 20 new events\n")
    answer = tackboard("data", "drift", tiny_dataset, other, "--threshold", "0.1", "--json")
    assert answer.code == 3
    worst = answer.json()["distances"][0]
    assert worst["jensen_shannon_bits"] > 0.1 and worst["column"] in answer.err
    assert len(answer.err.splitlines()) <= 3


def test_ranges(tackboard: Program, make_dataset: Callable[..., Path], tmp_path: Path) -> None:
    day = 86_400_000
    folder = make_dataset(tmp_path, [(1, n % 3, "click", "home", START_MS + n * day) for n in range(6)])
    answer = tackboard(
        "data", "drift", folder, folder, "--old-range", "..2023-11-15", "--new-range", "2023-11-16..", "--json"
    )
    assert (answer.json()["num_old"], answer.json()["num_new"]) == (2, 4)
    assert tackboard("data", "drift", folder, folder, "--old-range", "yesterday").code == 2
