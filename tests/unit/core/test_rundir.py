"""The run directory: what a kill tears is cut, what a resumed run repeats stands there once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tackboard.core import rundir
from tackboard.core.errors import CorruptFileError, DataError, UsageError
from tackboard.core.rundir import RunDirectory, describe_environment, git_commit


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "runs", "demo", {"name": "demo", "seed": 1})


def test_create_writes_config_and_environment(run: RunDirectory) -> None:
    assert run.config == {"name": "demo", "seed": 1}
    assert json.loads((run.path / "env.json").read_text())["packages"]["numpy"]
    assert not (run.path.parent / "latest").is_symlink(), "it has no checkpoint yet"
    assert "_demo_" in run.path.name
    assert run.checkpoints.is_dir()
    second = RunDirectory.create(run.path.parent, "demo", {})
    assert second.path != run.path


def test_naming_a_run_writes_nothing(tmp_path: Path) -> None:
    named = RunDirectory.new(tmp_path / "runs", "demo")
    assert list(tmp_path.iterdir()) == []
    named.write({"seed": 1})
    assert RunDirectory.open(named.path).config == {"seed": 1}


def test_open_follows_latest_and_refuses_what_is_no_run(run: RunDirectory, tmp_path: Path) -> None:
    run.make_latest()
    assert RunDirectory.open(run.path.parent / "latest").path == run.path.resolve()
    with pytest.raises(DataError, match="is not a run"):
        RunDirectory.open(tmp_path)
    (run.path / "config.json").write_text("{")
    with pytest.raises(CorruptFileError, match=r"config\.json"):
        RunDirectory.open(run.path).config  # noqa: B018


def test_status_is_new_until_set(run: RunDirectory) -> None:
    assert run.status == "new"
    run.set_status("failed: loss is nan")
    assert run.status == "failed: loss is nan"


@pytest.mark.parametrize("torn", ['{"step": 3, "lo', '{"step": 3}', "\u00e9"])
def test_cleaning_cuts_a_torn_last_line_and_opening_changes_nothing(run: RunDirectory, torn: str) -> None:
    run.log_metrics(1, loss=0.5)
    run.log_metrics(2, loss=0.25)
    for name in ("metrics.jsonl", "events.jsonl"):
        with (run.path / name).open("ab") as file:
            file.write(torn.encode()[:-1] if not torn.isascii() else torn.encode())
    before = (run.path / "metrics.jsonl").read_bytes()
    reopened = RunDirectory.open(run.path)
    assert (run.path / "metrics.jsonl").read_bytes() == before
    reopened.clean()
    assert [(line["step"], line["loss"]) for line in reopened.read_metrics()] == [(1, 0.5), (2, 0.25)]
    assert (run.path / "events.jsonl").read_bytes() == b""
    reopened.log_metrics(3, loss=0.1)
    assert [line["step"] for line in reopened.read_metrics()] == [1, 2, 3]


def test_cut_metrics_drops_what_a_resumed_run_will_write_again(run: RunDirectory) -> None:
    run.cut_metrics_after(0)  # nothing there yet
    assert run.read_metrics() == []
    for step in (2, 4, 6):
        run.log_metrics(step)
    run.cut_metrics_after(4)
    assert [line["step"] for line in run.read_metrics()] == [2, 4]


def test_a_flipped_bit_of_the_metrics_costs_at_most_its_line(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2, 3):
        run.log_metrics(step, loss=0.5)
    path = run.path / "metrics.jsonl"
    intact = path.read_bytes()
    for bit in range(0, 8 * len(intact), 11):  # Every position and bit of a line, spread over the three lines.
        damaged = bytearray(intact)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        run.clean()
        run.cut_metrics_after(3)
        steps = [line["step"] for line in run.read_metrics()]
        assert len({1, 2, 3} & set(steps)) >= 1, f"bit {bit}: {steps}"
    assert "metrics.jsonl has 1 damaged line, now removed" in capsys.readouterr().err


@pytest.mark.parametrize("garbage", [b"\xff\xfe\x00", b"", b"dond\n", b"running\nrunning\n"])
def test_a_status_that_cannot_be_read_is_unknown(run: RunDirectory, garbage: bytes) -> None:
    (run.path / "STATUS").write_bytes(garbage)
    assert run.status == "unknown"


def test_an_event_stands_in_both_logs(run: RunDirectory) -> None:
    run.log_event("checkpoint", step=4)
    assert json.loads((run.path / "events.jsonl").read_text())["step"] == 4
    assert (run.path / "log.txt").read_text().endswith("Z checkpoint step=4\n")


def test_environment_survives_without_git(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(rundir, "RECORDED_PACKAGES", ("numpy", "no-such-package"))
    assert git_commit() is None
    environment = describe_environment()
    assert environment["commit"] is None
    assert environment["packages"]["no-such-package"] is None


def test_figures_that_are_not_finite_become_null(run: RunDirectory) -> None:
    run.log_metrics(1, loss=float("inf"), norm=float("nan"), tokens=3)
    (line,) = run.read_metrics()
    assert (line["loss"], line["norm"], line["tokens"]) == (None, None, 3)


def test_an_older_run_can_become_the_latest_again(run: RunDirectory) -> None:
    newer = RunDirectory.create(run.path.parent, "newer", {})
    newer.make_latest()
    assert (run.path.parent / "latest").resolve() == newer.path.resolve()
    run.make_latest()
    assert (run.path.parent / "latest").resolve() == run.path.resolve()


def test_a_file_is_no_folder_of_runs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="file is a file"):
        RunDirectory.new(tmp_path / "file", "x")
