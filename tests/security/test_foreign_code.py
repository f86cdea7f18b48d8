"""A run, checkpoint, bundle or cell of the bench that somebody else made executes no code; one's own needs no flag.

Every forged artefact names a file that would leave a canary behind. The file's SHA-256 is the one that the artefact
records, as a careful forger would have it: only a record outside the artefact, or the operator, can make it run.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import py_compile
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tackboard.core.manifest import read_manifest, write_manifest

Program = Callable[..., Any]
ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"
EXAMPLE = (ROOT / "examples" / "own_model.py").read_text()
CANARY = "import pathlib\npathlib.Path({canary!r}).write_text('ran')\n"


def reseal(folder: Path) -> None:
    """Gives a forged folder a manifest that fits, as anybody can."""
    manifest = read_manifest(folder)
    ours = ("kind", "format_version", "files", "self_sha256")
    extra = {key: value for key, value in manifest.items() if key not in ours}
    write_manifest(folder, manifest["kind"], extra)


def evil_description(tmp_path: Path) -> tuple[dict[str, Any], Path]:
    """What a forged artefact says of its model, and the canary that its code would leave."""
    code, canary = tmp_path / "evil.py", tmp_path / "canary"
    code.write_text(CANARY.format(canary=str(canary)))
    sha256 = hashlib.sha256(code.read_bytes()).hexdigest()
    return {"config_class": "evil.py:Evil", "config": {}, "code_file": str(code), "code_sha256": sha256}, canary


def forge(tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """The sealed checkpoint of a run whose state.json was changed."""
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000003"
    shutil.copytree(GOLDEN / "checkpoint-v1", checkpoint)
    state = json.loads((checkpoint / "state.json").read_text())
    change(state)
    (checkpoint / "state.json").write_text(json.dumps(state))
    reseal(checkpoint)
    (checkpoint.parent / "latest").symlink_to(checkpoint.name)
    return checkpoint


@pytest.fixture
def forged(tmp_path: Path) -> tuple[Path, Path]:
    """(a run's checkpoint that names a file of code, the canary)."""
    description, canary = evil_description(tmp_path)

    def name_code(state: dict[str, Any]) -> None:
        state["model"] = state["config"]["model"] = description

    return forge(tmp_path, name_code), canary


@pytest.mark.parametrize("command", [["evaluate", "{run}"], ["export", "{run}", "--out", "bundle"]], ids=lambda c: c[0])
@pytest.mark.parametrize("named", ["run", "checkpoint"])
def test_a_forged_run_executes_nothing(
    forged: tuple[Path, Path], command: list[str], named: str, tackboard: Program, tmp_path: Path
) -> None:
    checkpoint, canary = forged
    folder = checkpoint if named == "checkpoint" else checkpoint.parents[1]
    answer = tackboard(*(word.format(run=folder) for word in command), cwd=tmp_path)
    assert not canary.exists()
    assert answer.code == 2 and "no record of training" in answer.err
    assert f"--code {tmp_path / 'evil.py'}" in answer.err and len(answer.err.splitlines()) <= 3
    assert not (tmp_path / "bundle").exists()


def test_a_record_inside_the_run_proves_nothing(
    forged: tuple[Path, Path], tackboard: Program, tmp_path: Path, state_home: Path
) -> None:
    checkpoint, canary = forged
    for place in (checkpoint, checkpoint.parents[1]):
        shutil.copytree(state_home, place / ".local" / "state", dirs_exist_ok=True)
        (place / "trusted-code").mkdir()
    state = json.loads((checkpoint / "state.json").read_text())
    state |= {"trusted": True, "code_file": state["model"]["code_file"]}
    (checkpoint / "state.json").write_text(json.dumps(state))
    reseal(checkpoint)
    answer = tackboard("evaluate", str(checkpoint.parents[1]), cwd=tmp_path)
    assert answer.code == 2 and "no record of training" in answer.err
    assert not canary.exists()


def test_a_file_of_features_that_a_run_names_is_not_run(tackboard: Program, tmp_path: Path) -> None:
    """What a run's model reads is in its features.json; `data.features` counts only where a recipe sets it."""
    description, canary = evil_description(tmp_path)
    run = forge(tmp_path, lambda state: state["config"]["data"].update(features=description["code_file"])).parents[1]
    evaluated = tackboard("evaluate", str(run), "--dataset", str(GOLDEN / "dataset-v1"), cwd=tmp_path)
    assert evaluated.code == 0, evaluated.err
    assert tackboard("export", str(run), "--out", "bundle", cwd=tmp_path).code == 0
    assert not canary.exists()


@pytest.mark.parametrize("damage", [{"code_file": 5}, {"code_sha256": None}, {"code_file": "\0"}, {"code_file": "/"}])
def test_odd_descriptions_are_refused(damage: dict[str, Any], tmp_path: Path) -> None:
    from tackboard.core.errors import UsageError
    from tackboard.models.description import restore_config

    description, canary = evil_description(tmp_path)
    with pytest.raises(UsageError):
        restore_config(description | damage, of_run=True)
    assert not canary.exists()


def test_a_forged_bundle_executes_nothing(tackboard: Program, tmp_path: Path) -> None:
    description, canary = evil_description(tmp_path)
    shutil.copytree(GOLDEN / "bundle-v1", tmp_path / "bundle")
    signature = json.loads((tmp_path / "bundle" / "signature.json").read_text())
    signature["model"] = description
    (tmp_path / "bundle" / "signature.json").write_text(json.dumps(signature))
    reseal(tmp_path / "bundle")
    request = str(GOLDEN / "request.json")
    answer = tackboard("score", request, "--offline", "--bundle", "bundle", cwd=tmp_path)
    assert answer.code == 2 and "--code evil.py" in answer.err
    assert not canary.exists()


def test_a_foreign_work_folder_of_the_bench_executes_nothing(tmp_path: Path) -> None:
    from tackboard.bench.quality.cells import Cell, Work

    description, canary = evil_description(tmp_path)
    state = json.loads((GOLDEN / "checkpoint-v1" / "state.json").read_text())
    work = Work.open(tmp_path / "work")
    about: dict[str, Any] = {"prepared": "x", "ties": "kept", "method": "pinfm", "seed": 0, "stage": "test"}
    cell = Cell(**about, protocol={}, config=state["config"])
    work.save(Cell(**about, protocol={}, config={"model": description}), {}, {})
    assert work.find(cell) is None
    assert not canary.exists()


# ---- this user's own model ----


@pytest.fixture(scope="module")
def dataset(tackboard: Program, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    lines = [f"u{row % 12},i{row * row % 17},{1_700_000_000 + 60 * row}" for row in range(240)]
    (folder / "log.csv").write_text("\n".join(["who,what,at", *lines]) + "\n")
    made = tackboard(
        *["init", "--from", "log.csv", "--user", "who", "--item", "what", "--time", "at", "--name", "own"], cwd=folder
    )
    assert made.code == 0, made.err
    return folder / "datasets" / "own"


def train(tackboard: Program, dataset: Path, folder: Path) -> Any:
    settings = (f"data.dataset={dataset}", 'data.positive_actions=["event"]', "training.steps=1", "model.tables.dim=4")
    return tackboard("train", "mine.py:recipe", *(w for s in settings for w in ("--set", s)), cwd=folder)


@pytest.fixture(scope="module")
def trained(tackboard: Program, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with mine.py and a run that this user's own `train` made of it. Copy it before changing it."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "mine.py").write_text(EXAMPLE)
    answer = train(tackboard, dataset, folder)
    assert answer.code == 0, answer.err
    assert "warning: no record" not in answer.err
    return folder


def evaluate(tackboard: Program, folder: Path, *options: str) -> Any:
    return tackboard("evaluate", "runs/latest", "--max-users", "3", *options, cwd=folder)


def test_the_user_who_trained_needs_no_flag(trained: Path, tackboard: Program, tmp_path: Path) -> None:
    assert evaluate(tackboard, trained).code == 0
    answer = tackboard("export", "runs/latest", "--out", str(tmp_path / "bundle"), cwd=trained)
    assert answer.code == 0, answer.err
    assert answer.out.splitlines()[-1].endswith(f"--code {trained / 'mine.py'}")
    assert not (trained / "__pycache__").exists(), "no bytecode that somebody could replace"


def test_the_record_is_the_users_alone(trained: Path, state_home: Path) -> None:
    folder = state_home / "tackboard" / "trusted-code"
    entries = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    sha256 = hashlib.sha256((trained / "mine.py").read_bytes()).hexdigest()
    assert {"code_file": str(trained / "mine.py"), "code_sha256": sha256} in entries
    assert {path.stat().st_mode & 0o777 for path in folder.glob("*.json")} == {0o600}
    assert {place.stat().st_mode & 0o777 for place in (folder, folder.parent)} == {0o700}


def test_another_user_has_to_name_the_file(
    trained: Path, tackboard: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another"))
    refused = evaluate(tackboard, trained)
    assert refused.code == 2 and "no record of training" in refused.err
    assert evaluate(tackboard, trained, "--code", "mine.py").code == 0
    assert not (tmp_path / "another").exists(), "naming a file once is no trust for ever"


def test_a_changed_file_is_not_run_unless_it_is_named(trained: Path, tackboard: Program, tmp_path: Path) -> None:
    canary, kept = tmp_path / "canary", (trained / "mine.py").read_text()
    (trained / "mine.py").write_text(kept + CANARY.format(canary=str(canary)))
    try:
        for command in (["evaluate", "runs/latest"], ["export", "runs/latest", "--out", str(tmp_path / "bundle")]):
            answer = tackboard(*command, cwd=trained)
            assert answer.code == 2 and "is not the file that this model was trained with" in answer.err
            assert f"--code {trained / 'mine.py'}" in answer.err
        assert not canary.exists()
        named = evaluate(tackboard, trained, "--code", "mine.py")
        assert named.code == 0 and "warning: mine.py is not the file" in named.err
        assert canary.exists()
    finally:
        (trained / "mine.py").write_text(kept)


def test_bytecode_that_somebody_left_is_not_run(tmp_path: Path) -> None:
    from tackboard.core.user_code import load_code

    code, canary = tmp_path / "mine.py", tmp_path / "canary"
    code.write_text(CANARY.format(canary=str(canary)))
    py_compile.compile(str(code), cfile=importlib.util.cache_from_source(str(code)))
    status = code.stat()
    code.write_text("value = 1".ljust(status.st_size))
    os.utime(code, ns=(status.st_atime_ns, status.st_mtime_ns))  # Python would take the bytecode for this source's.
    assert load_code(code, hashlib.sha256(code.read_bytes()).hexdigest()).value == 1
    assert not canary.exists()


@pytest.mark.parametrize("home", [None, "/proc/nowhere", "not/absolute"])
def test_training_goes_on_without_a_place_for_the_record(
    home: str | None, dataset: Path, tackboard: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.delenv("HOME") if home is None else monkeypatch.setenv("HOME", home)
    (tmp_path / "mine.py").write_text(EXAMPLE)
    answer = train(tackboard, dataset, tmp_path)
    assert answer.code == 0, answer.err
    assert "warning: no record of" in answer.err and f"--code {tmp_path / 'mine.py'}" in answer.err
    refused = evaluate(tackboard, tmp_path)
    assert refused.code == 2 and f"--code {tmp_path / 'mine.py'}" in refused.err
    assert evaluate(tackboard, tmp_path, "--code", "mine.py").code == 0
