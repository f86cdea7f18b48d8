"""One side of the bench in a process of its own."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from tackboard.bench import rivals
from tackboard.bench.pretrain.contender import Spec, measure
from tackboard.core.processes import ask, last_json_object


def test_a_spec_survives_its_file(tiny_spec: Spec, tmp_path: Path) -> None:
    spec = dataclasses.replace(tiny_spec, off=("threads", "memory"))
    assert Spec.read(spec.write(tmp_path / "spec.json")) == spec


def test_a_process_gives_the_figures_of_this_process(tiny_spec: Spec, tmp_path: Path) -> None:
    path = tiny_spec.write(tmp_path / "spec.json")
    command = [sys.executable, "-m", "tackboard.bench.pretrain.contender", str(path)]
    done = ask(command, environment=rivals.environment())
    assert done.code == 0, done.reason
    found, here = last_json_object(done.output), measure(tiny_spec)
    assert found["last_loss"] == here["last_loss"]
    assert found.keys() == here.keys()
    # The process counts its own memory, not that of the process that started it.
    assert found["peak_bytes"] > 1e7
