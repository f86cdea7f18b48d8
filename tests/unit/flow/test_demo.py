"""The pipeline, with commands that answer at once: order, files, failures, and that it leaves nothing behind."""

import fcntl
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tackboard.core.config import apply_overrides
from tackboard.core.errors import UsageError
from tackboard.data.config import PartOfUsers
from tackboard.data.request_loader import RequestConfig
from tackboard.flow.command import StageError
from tackboard.flow.demo import OWN_NAMES, DemoConfig, TrainingWatch, build_commands, claim_folder, run_demo
from tackboard.flow.display import Display
from tackboard.flow.outcome import STAGE_NAMES
from tackboard.recipes.registry import find_recipe

pytestmark = pytest.mark.usefixtures("fake_commands")


def config(out: Path, **changes: int) -> DemoConfig:
    settings = {"num_users": 8, "num_candidates": 20, "num_compared": 2} | changes
    return DemoConfig(out=out, **settings)


def test_every_stage_runs_and_leaves_its_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "demo"
    outcome = run_demo(config(out), live=False)
    assert (*outcome.stages, "report") == STAGE_NAMES
    assert [metrics["hit@3"] for metrics in outcome.lift["next"].values()] == [0.1, 0.2, 0.3]
    assert len(outcome.latencies_ms) == 16
    assert outcome.largest_difference <= 1e-5
    assert outcome.gap_closed == 0.5
    assert outcome.peak_rss_bytes > 10_000_000
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("] ")[1].split()[0] for line in lines] == [*outcome.stages, "report"]
    assert "HIT@3 0.300 (next), the item means' is 0.100" in lines[7]
    assert "16 requests of 20 candidates" in lines[9]
    assert "32 served features computed again in batch, 0 differ" in lines[11]
    logs = sorted(path.name for path in (out / "logs").iterdir())
    assert logs == [
        "compare-1.log",
        "compare-2.log",
        "data.log",
        "evaluate.log",
        "export.log",
        "finetune-eval.log",
        "finetune.log",
        "pretrain.log",
        "ranker-eval.log",
        "ranker.log",
        "replay.log",
        "requests.log",
        "serve.log",
    ]
    assert "Tackboard demo" in (out / "report.html").read_text()
    marker = json.loads((out / "demo.json").read_text())
    assert marker["status"] == "done" and marker["requests"] == 16
    assert marker["replayed"] == {"compared": 8, "values": 32, "mismatches": 0, "late": 1}
    assert (out / "logs" / "serve.log").read_text().endswith("stopped\n")


def test_a_second_demo_replaces_the_first_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    with claim_folder(out):
        (out / "runs").mkdir()
        (out / "runs" / "old").write_text("old")
    (out / "notes.txt").write_text("mine")
    with claim_folder(out):
        assert not (out / "runs").exists()
        assert (out / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("content", ["notes.txt", "demo.json", "runs"])
def test_a_folder_that_is_not_a_demos_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / content).write_text("{}")
    with pytest.raises(UsageError, match="no demo made this folder"):
        with claim_folder(tmp_path):
            pytest.fail("the folder was taken")
    assert (tmp_path / content).read_text() == "{}"


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "demo").write_text("a file")
    with pytest.raises(UsageError, match="is a file"):
        run_demo(config(tmp_path / "demo"))


def test_two_demos_never_share_a_folder(tmp_path: Path) -> None:
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="another demo is running"):
            run_demo(config(tmp_path))


@pytest.mark.parametrize(
    ("variable", "value", "words", "code"),
    [
        ("FAKE_FAIL", "data:3", "broken on purpose", 3),
        ("FAKE_FAIL", "serve:3", "broken on purpose", 3),
        ("FAKE_FAIL", "features:3", "broken on purpose", 3),
        ("FAKE_SKEW", "1", "server and offline scores differ by", 1),
        ("FAKE_REFUSE", "1", "the queue is full", 1),
    ],
)
def test_what_fails_ends_the_demo_with_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, words: str, code: int
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(StageError, match=words) as caught:
        run_demo(config(tmp_path / "demo"), live=False)
    assert caught.value.exit_code == code
    assert not (tmp_path / "demo" / "report.html").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_while_serving_it_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setenv("FAKE_HANG", "serve")
    fake = Path(__file__).parent / "fake_tackboard.py"
    program = (
        "import signal, sys\nfrom pathlib import Path\nfrom tackboard.flow import command\n"
        # A shell that starts us in the background makes children ignore Ctrl-C; a user's terminal does not.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"command.PROGRAM = (sys.executable, {str(fake)!r})\n"
        "from tackboard.flow.demo import DemoConfig, run_demo\n"
        "run_demo(DemoConfig(out=Path('demo'), num_users=2, num_compared=1), live=False)\n"
    )
    demo = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    log = tmp_path / "demo" / "logs" / "serve.log"
    deadline = time.monotonic() + 30
    while not (log.exists() and "this is serve" in log.read_text()):
        assert time.monotonic() < deadline and demo.poll() is None
        time.sleep(0.02)
    os.kill(demo.pid, number)
    _, errors = demo.communicate(timeout=20)
    assert "KeyboardInterrupt" in errors
    assert [pid for pid in _running() if str(tmp_path) in _folder_of(pid)] == []


def test_training_is_followed_line_by_line(tmp_path: Path) -> None:
    class Seen(Display):
        def __init__(self) -> None:
            super().__init__(1, live=False)
            self.updates: list[tuple[float | None, float | None, str | None]] = []

        def update(self, done: float | None = None, total: float | None = None, note: str | None = None) -> None:
            self.updates.append((done, total, note))

    display = Seen()
    (tmp_path / "earlier").mkdir()
    (tmp_path / "earlier" / "metrics.jsonl").write_text('{"step": 9, "loss": 9.0}\n')
    watch = TrainingWatch(tmp_path, display)
    watch()
    run = tmp_path / "one"
    run.mkdir()
    (run / "config.json").write_text('{"training": {"steps": 40}}')
    metrics = run / "metrics.jsonl"
    metrics.write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "lo')
    watch()
    metrics.write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.0}\n{"step": 2, "other": 1}\n')
    watch()
    watch()
    metrics.write_text('{"step": 1, "loss": 3.0}\n')
    watch()
    assert display.updates == [(1, 40, "loss 3.000"), (2, 40, "loss 2.000"), (1, 40, "loss 3.000")]


def test_commands_name_only_the_demos_folder(tmp_path: Path) -> None:
    commands = build_commands(config(tmp_path / "x"))
    assert commands["data"][:2] == ("data", "synth")
    for name in ("pretrain", "ranker", "finetune"):
        assert f"data.dataset={tmp_path / 'x' / 'datasets' / 'demo'}" in commands[name]
    serve = commands["serve"]
    for option, name in (("--port-file", "port"), ("--log-features", "served"), ("--log-key", "log.key")):
        assert serve[serve.index(option) + 1] == str(tmp_path / "x" / name)
        assert name in OWN_NAMES  # so a second demo takes it away


def test_the_users_of_the_test_are_left_out_of_pretraining_and_of_both_rankers(tmp_path: Path) -> None:
    def held_out(name: str) -> NDArray[np.bool_]:
        command = build_commands(config(tmp_path))[name]
        settings = [word for before, word in itertools.pairwise(command) if before == "--set"]
        data = apply_overrides(find_recipe(command[1]), settings).data
        shares = {"test_share": data.test_share} if isinstance(data, RequestConfig) else {}
        return ~PartOfUsers("train", data.validation_share, **shares).of(np.arange(5000))

    pretrained = held_out("pretrain")
    assert 900 < pretrained.sum() < 1100
    assert np.array_equal(held_out("ranker"), pretrained)
    assert np.array_equal(held_out("finetune"), pretrained)


@pytest.mark.parametrize("changes", [{"num_users": 0}, {"num_candidates": -1}, {"num_compared": 9}])
def test_settings_that_cannot_be_are_refused(tmp_path: Path, changes: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=next(iter(changes))):
        config(tmp_path, **changes)


def _running() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _folder_of(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/cwd")
    except OSError:
        return ""
