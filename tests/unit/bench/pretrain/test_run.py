"""The whole bench at its smallest size, with every measurement in this process."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rivals import plain_pretrain
from tackboard.bench.pretrain import contender, peaks, run
from tackboard.bench.pretrain.ladder import Rung
from tackboard.bench.pretrain.report import report
from tackboard.bench.pretrain.run import BASE, aims, ladder_figures, rival_figures
from tackboard.bench.report import table_lines, write_result
from tackboard.core.errors import TackboardError, UsageError
from tackboard.core.processes import Answer

TURN = dict.fromkeys([*run.FIGURES, "recompiled"], 1.0)


def answer_here(command: Sequence[str], environment: Mapping[str, str]) -> Answer:
    """Answers as the started process would."""
    module, path = command[2], Path(command[3])
    if module.startswith("rivals."):
        return Answer(0, json.dumps(plain_pretrain.train(json.loads(path.read_text()))), "", 0)
    return Answer(0, json.dumps(contender.measure(contender.Spec.read(path))), "", 0)


@pytest.mark.filterwarnings("ignore:.*")
def test_the_bench_measures_and_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "ask", answer_here)
    monkeypatch.setitem(peaks.SQUARE, "cpu", 64)
    monkeypatch.setitem(peaks.COPIED_NUMBERS, "cpu", 1 << 16)
    monkeypatch.setattr(run.torch.cuda, "is_available", lambda: False)
    result = run.measure(tmp_path / "work", quick=True, overrides=["training.num_threads=1"])
    size = result["sizes"]["tiny"]
    assert [line["name"] for line in size["ladder"]] == [
        BASE,
        "threads",
        "workers",
        "memory",
        "loss",
        "groups",
        "negatives",
    ]
    assert len({line["last_loss"] for line in size["ladder"]}) == 1
    assert size["rival"]["is_checked"]
    assert size["floor"]["total_ms"] > 0
    assert 0 < size["product"]["mfu"] < 1
    json.dumps(result)
    made = report(result)
    assert any("plain PyTorch" in line for line in table_lines(made))
    path = write_result(made, tmp_path / "results", "here")
    assert "Tiny: the ladder" in path.read_text(encoding="utf-8")
    assert len(list(path.parent.glob("*.svg"))) == 2


@pytest.mark.filterwarnings("ignore:.*")
def test_chosen_rungs_are_measured_and_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "ask", answer_here)
    monkeypatch.setitem(peaks.SQUARE, "cpu", 64)
    monkeypatch.setitem(peaks.COPIED_NUMBERS, "cpu", 1 << 16)
    monkeypatch.setattr(run.torch.cuda, "is_available", lambda: False)
    result = run.measure(tmp_path, quick=True, rungs=["loss"], overrides=["training.num_threads=1"])
    assert [line["name"] for line in result["sizes"]["tiny"]["ladder"]] == ["loss", "negatives"]
    with pytest.raises(UsageError, match="there is no rung 'graph'"):
        run.measure(tmp_path, quick=True, rungs=["graph"])


def test_a_rung_that_changes_the_loss_is_an_error() -> None:
    rung = Rung("fast", "something fast", settings_off=["seed=0"], tolerance=0.01)
    runs = {BASE: [TURN | {"last_loss": 2.0, "wall_ms": 6.0}], "fast": [TURN | {"last_loss": 2.01, "wall_ms": 2.0}]}
    assert ladder_figures(runs, [rung])[1]["gain"] == 3.0
    with pytest.raises(TackboardError, match="the loss with fast is 2.1"):
        ladder_figures(runs | {"fast": [TURN | {"last_loss": 2.1}]}, [rung])
    with pytest.raises(TackboardError, match="the loss with fast is nan"):
        ladder_figures(runs | {"fast": [TURN | {"last_loss": float("nan")}]}, [rung])


def test_a_rival_with_another_loss_gets_no_figures() -> None:
    run_of_rival = {"first_loss": 5.0, "wall_ms": 10.0, "cpu_ms": 10.0, "tokens_per_s": 100.0, "peak_bytes": 1}
    ours: dict[str, Any] = {"wall_ms": 5.0, "cpu_ms": 8.0, "tokens_per_s": 200.0}
    assert rival_figures(None, 5.0, ours) is None
    assert rival_figures([{"failed": "no torch"}], 5.0, ours) == {"failed": "no torch"}
    assert rival_figures([run_of_rival], 5.1, ours) == {"failed": "its first loss is 5.0, ours is 5.1"}
    of_nan = rival_figures([run_of_rival | {"first_loss": float("nan")}], 5.0, ours)
    assert of_nan == {"failed": "its first loss is nan, ours is 5.0"}
    found = rival_figures([run_of_rival], None, ours)
    assert found is not None
    assert (found["times_as_fast"], found["times_as_fast_per_cpu_s"], found["is_checked"]) == (2.0, 1.25, False)


def test_aims_depend_on_the_size_and_the_device() -> None:
    size = {
        "product": {"floor_share": 0.7, "wall_per_gpu": 1.04},
        "ladder": [{"wall_ms": 44.0}],
        "rival": {"times_as_fast_per_cpu_s": 2.5},
    }
    assert [aim["met"] for aim in aims("cpu", size, "cpu")] == [True]
    assert [aim["met"] for aim in aims("h200", size, "cuda")] == [True, True]
    assert [aim["met"] for aim in aims("h200-256", size, "cuda")] == [False, True]
    assert [aim["value"] for aim in aims("ml-1m", size, "cuda")] == [1.04]
