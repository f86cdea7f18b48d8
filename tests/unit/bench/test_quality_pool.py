"""Cells run in processes of their own. A stand-in for the cell's program makes each take as long as its test needs."""

import dataclasses
import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from tackboard.bench import quality_pool
from tackboard.bench.quality_cells import Cell, Work
from tackboard.bench.quality_pool import Pool

PROGRAM = """
import json, os, signal, sys, time
from pathlib import Path
root, spec, device, threads = sys.argv[1:]
cell = json.loads(Path(spec).read_text())
told = cell["protocol"]
print("of", os.environ["TACKBOARD_CELL_OF"], flush=True)
print("device", device, "threads", threads, os.environ["OMP_NUM_THREADS"], flush=True)
def stop(number, frame):
    Path(root, "saved-" + cell["method"]).write_text("")
    sys.exit(75)
signal.signal(signal.SIGTERM, signal.SIG_IGN if told.get("deaf") else stop)
with open(Path(root) / "order.txt", "a") as order:
    order.write(f"{cell['method']}\\n")
time.sleep(told.get("seconds", 0))
tries = Path(root, "tries-" + cell["method"])
tries.write_text(tries.read_text() + "x" if tries.exists() else "x")
if len(tries.read_text()) <= told.get("crashes", 0):
    os.kill(os.getpid(), signal.SIGABRT)
if told.get("code"):
    print("error: it broke\\nallowed: whole ones\\nuse another")
    sys.exit(told["code"])
folder = Path(root) / "cells" / Path(spec).stem
folder.mkdir()
(folder / "cell.json").write_text(json.dumps(cell))
(folder / "result.json").write_text(json.dumps({"metrics": {"hr@10": 0.25}, "device": device}))
"""


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Work:
    (tmp_path / "stand_in_cell.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(quality_pool, "PROGRAM", "stand_in_cell")
    return Work.open(tmp_path / "work")


def cell(method: str, after: Cell | None = None, **told: object) -> Cell:
    return Cell(prepared="d", ties="file", method=method, seed=0, stage="s", protocol=told, after=after)


def started(work: Work) -> list[str]:
    return (work.root / "order.txt").read_text().split()


def test_cells_are_done_once_and_after_those_they_build_on(work: Work, capsys: pytest.CaptureFixture[str]) -> None:
    first = cell("first", seconds=0.3)
    cells = [cell("second", first), cell("third", first), cell("alone")]
    report = Pool(work, jobs=2).run(cells)
    assert (report.num_found, report.num_done, report.failures, report.left) == (0, 4, (), ())
    assert not report.is_stopped
    assert sorted(started(work)) == ["alone", "first", "second", "third"]
    assert started(work).index("second") > started(work).index("alone"), "it waited for the first"
    again = Pool(work, jobs=2).run(cells)
    assert (again.num_found, again.num_done) == (4, 0)
    assert len(started(work)) == 4
    told = capsys.readouterr().err
    assert "4 cells, 0 of them finished before" in told and "hr@10 0.2500" in told


def test_cell_that_dies_of_a_signal_is_started_again(work: Work, capsys: pytest.CaptureFixture[str]) -> None:
    often = quality_pool.MAX_TRIES
    report = Pool(work, jobs=2).run([cell("shaky", crashes=often - 1), cell("broken", crashes=often), cell("good")])
    assert report.num_done == 2 and [one.cell.method for one in report.failures] == ["broken"]
    assert report.failures[0].code == -signal.SIGABRT
    assert started(work).count("shaky") == often and started(work).count("broken") == often
    assert f"died of signal 6 after 0 s, 1 of {often} tries" in capsys.readouterr().err


def test_failing_cell_stops_only_what_builds_on_it(work: Work) -> None:
    bad = cell("bad", code=4)
    report = Pool(work).run([cell("child", bad), bad, cell("good")])
    assert report.num_done == 1 and not report.is_stopped
    assert [(one.cell.method, one.code, one.reason) for one in report.failures] == [("bad", 4, "error: it broke")]
    assert "error: it broke" in report.failures[0].log.read_text()
    assert [one.method for one in report.left] == ["child"]
    assert Pool(work).run([bad]).failures, "a failed cell is tried again"


def test_reason_is_that_of_the_last_try(work: Work) -> None:
    bad = cell("bad", code=1)
    work.log(bad).write_text("error: of yesterday\n")
    assert [one.reason for one in Pool(work).run([bad]).failures] == ["error: it broke"]
    path = work.log(cell("other"))
    path.write_text("error: of yesterday\nTraceback\nValueError: no error of ours\n")
    assert quality_pool._reason(path, 20) == "ValueError: no error of ours"
    assert quality_pool._reason(path.with_name("absent"), 0) == ""


def test_words_of_progress(work: Work, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality_pool, "TELL_EVERY_S", 0.0)
    Pool(work).run([cell("slow", seconds=0.5)])
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "1 cell, 0 of them finished before"
    assert any(line.startswith("0/1 finished; d_slow_seed0_s 0 s") for line in lines)
    assert not any(line.endswith((", ", " ")) for line in lines)


def test_a_killed_process_is_a_failure_where_it_may_not_be_tried_again(
    work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quality_pool, "MAX_TRIES", 1)
    slow = cell("slow", seconds=60)

    def kill() -> None:
        while not (work.root / "order.txt").exists():
            time.sleep(0.02)
        [pid] = [int(path.name) for path in Path("/proc").glob("[0-9]*") if _runs(path, work)]
        os.kill(pid, signal.SIGKILL)

    threading.Thread(target=kill).start()
    report = Pool(work).run([slow])
    assert [one.code for one in report.failures] == [-signal.SIGKILL]


def _runs(path: Path, work: Work) -> bool:
    try:
        command = (path / "cmdline").read_bytes()
    except OSError:
        return False
    return b"stand_in_cell" in command and str(work.root).encode() in command


def test_when_time_is_up_processes_save_and_the_rest_is_left(work: Work) -> None:
    began = time.monotonic()
    report = Pool(work, end=time.monotonic() + 1.0).run([cell("slow", seconds=60), cell("later")])
    assert time.monotonic() - began < 10
    assert report.is_stopped and not report.failures
    assert sorted(one.method for one in report.left) == ["later", "slow"]
    assert (work.root / "saved-slow").exists()
    assert started(work) == ["slow"]


def test_nothing_is_started_shortly_before_the_end(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality_pool, "LATE_SHARE", 0.999)
    began = time.monotonic()
    report = Pool(work, end=began + 30.0).run([cell("first", seconds=0.5), cell("second")])
    assert time.monotonic() - began < 10, "it does not wait for an end that nothing runs towards"
    assert report.is_stopped and not report.failures
    assert [one.method for one in report.left] == ["second"] and started(work) == ["first"]


def test_a_process_that_does_not_end_is_killed(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality_pool, "GRACE_S", 0.3)
    report = Pool(work, end=time.monotonic() + 1.0).run([cell("deaf", seconds=60, deaf=True)])
    assert report.is_stopped and [one.method for one in report.left] == ["deaf"]


def test_a_signal_ends_the_round_as_a_time_limit_does(work: Work) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def ask() -> None:
        while not (work.root / "order.txt").exists():
            time.sleep(0.02)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=ask).start()
    report = Pool(work).run([cell("slow", seconds=60)])
    assert report.is_stopped and (work.root / "saved-slow").exists()
    assert signal.getsignal(signal.SIGTERM) is before


def test_cores_are_shared_by_the_processes(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality_pool, "usable_cores", lambda: 16)
    one = cell("one")
    Pool(work, jobs=3, device="cuda").run([one])
    assert work.log(one).read_text().splitlines() == [f"of {os.getpid()}", "device cuda threads 5 5"]
    assert json.loads(work.spec(one).read_text()) == one.describe()
    assert dataclasses.asdict(one)["method"] == "one"
