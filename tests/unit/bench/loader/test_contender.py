"""What a contender's process measures and prints."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tackboard.bench.loader import contender as program
from tackboard.bench.loader.ours import Contender


def test_figures_of_a_process(loader_folder: Path) -> None:
    arguments = ["tackboard", "product", str(loader_folder), "memory,check"]
    done = subprocess.run(
        [sys.executable, "-m", "tackboard.bench.loader.contender", *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["idle_bytes"] > 1 << 20 and figures["num_examples"] > 100
    assert (loader_folder / "tackboard_product_check.npz").exists()


def test_speed_is_measured_over_whole_epochs(loader_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "LEAST_SECONDS", 0.0)
    contender = Contender(loader_folder, "product")
    once = program.measure_once(contender)
    speed = program.measure_speed(contender)
    assert speed["num_epochs"] == 1 and speed["num_examples"] == once["num_examples"]
    assert speed["num_tokens"] == once["num_tokens"] and 0 < speed["cpu_seconds"] < 60


def test_the_epoch_that_is_not_counted_ends_early(loader_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "WARM_UP_SECONDS", -1.0)
    monkeypatch.setattr(program, "LEAST_SECONDS", 0.0)
    inner = Contender(loader_folder, "product")
    seen: list[int] = []

    class Counted:
        def epoch(self, number: int, num_workers: int = 0) -> Iterator[Any]:
            for batch in inner.epoch(number, num_workers):
                seen.append(number)
                yield batch

    program.measure_speed(Counted())
    assert seen.count(0) == 1 and seen.count(1) > 5


def test_two_workers_give_the_same_epoch(loader_folder: Path) -> None:
    contender = Contender(loader_folder, "product")
    assert program.TASKS["workers2"](contender)["num_tokens"] == program.measure_once(contender)["num_tokens"]
