"""Training in several processes gives what one process gives, and survives the death of any process."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.dist, pytest.mark.timeout(400)]
HERE, ROOT = Path(__file__).parent, Path(__file__).resolve().parents[2]
TINY = (
    *("model.tables.num_hashes=4", "model.tables.num_rows=103", "model.tables.dim=8", "model.width=32"),
    *("model.backbone.num_layers=2", "model.backbone.num_heads=2", "model.max_history=16", "model.dropout=0"),
    *("data.max_length=16", "data.tokens_per_step=512", "data.uniform_negatives=64", "data.features="),
    *("model.request_features=[]", "training.device=cpu", "training.num_threads=1", "training.log_every=1"),
)
Scene = dict[str, Any]
Play = Callable[..., list[list[dict[str, Any]]]]


def command(*arguments: str, folder: Path, timeout_s: int = 390) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small synthetic world with labelled requests, and a pretrained run of one process."""
    folder = tmp_path_factory.mktemp("world")
    world = ("--set", "num_users=200", "--set", "num_items=300")
    command("-m", "tackboard", "data", "synth", *world, folder=folder)
    requests = ("--candidates", "20", "--per-user", "4", "--also", "save")
    command("-m", "tackboard", "data", "pseudo-requests", "datasets/demo", *requests, folder=folder)
    settings = ("training.steps=5", "training.device=cpu")
    pretrain = [word for setting in settings for word in ("--set", setting)]
    command("-m", "tackboard", "train", "demo", *pretrain, "--runs", "pretrained", folder=folder)
    return folder


@pytest.fixture
def play(data: Path, tmp_path: Path) -> Play:
    """Runs chains of scenes; a chain is one scene, or scenes that follow each other in one folder."""

    def run(*chains: Scene | list[Scene], at_once: int = 1) -> list[list[dict[str, Any]]]:
        lists = [chain if isinstance(chain, list) else [chain] for chain in chains]
        for scene in itertools.chain.from_iterable(lists):
            folder = tmp_path / scene["name"]
            scene["folder"] = str(folder)
            if not folder.exists():
                folder.mkdir()
                (folder / "datasets").symlink_to(data / "datasets")
                (folder / "pretrained").symlink_to(data / "pretrained")
        file = tmp_path / "chains.json"
        file.write_text(json.dumps(lists))
        lines = command(str(HERE / "train_program.py"), str(file), str(at_once), folder=tmp_path).splitlines()
        return json.loads(lines[-1])

    return run


def scene(name: str, size: int, *settings: str, recipe: str = "demo", more: tuple[str, ...] = (), **kind: Any) -> Scene:
    words = [word for setting in settings for word in ("--set", setting)]
    return {"name": name, "size": size, "arguments": [recipe, *words, *more], **kind}


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "runs/latest/metrics.jsonl").read_text().splitlines()]


def checked(results: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Returns the results of chains of one scene, all of which ended well."""
    found = [result for (result,) in results]
    for result in found:
        assert set(result["codes"]) == {0}, result["said"]
    return found


def differences(one: Path, other: Path) -> list[float]:
    """The relative difference of the losses of each step. Both runs read the same tokens."""
    pairs = list(zip(metrics(one), metrics(other), strict=True))
    assert all(a["tokens"] == b["tokens"] and a["step"] == b["step"] for a, b in pairs)
    return [abs(a["loss"] - b["loss"]) / abs(a["loss"]) for a, b in pairs]


def test_several_processes_learn_what_one_learns(play: Play, tmp_path: Path) -> None:
    long = (*TINY, "training.steps=100", "training.checkpoint_every=100")
    shares = [(2, "row"), (3, "table"), (4, "row"), (2, "table")]
    several = [scene(f"{size}-{way}", size, *long, f"parallel.sharding={way}") for size, way in shares]
    checked(play(scene("one", 1, *long), *several))
    for size, way in shares:
        differing = differences(tmp_path / "one", tmp_path / f"{size}-{way}")
        assert len(differing) == 100
        assert max(differing[:20]) < 1e-5, (size, way)
        assert max(differing) < 1e-3, (size, way)
    trained = [json.loads((tmp_path / name / "runs/latest/config.json").read_text()) for name in ("one", "4-row")]
    assert trained[0] == trained[1]


VARIANTS = {
    # Steps of few segments: some processes have nothing to do in a step.
    "few segments, later negatives, multi-token": (
        *("data.max_length=8", "data.tokens_per_step=20", "model.loss.later_negatives=true"),
        *("model.loss.multi_token_weight=0.5", "model.loss.multi_token_share=1.0"),
    ),
    "streaming frequencies": ("model.loss.streaming_frequencies=true", "data.uniform_negatives=0"),
    "exact softmax, hstu": (
        *("data.uniform_negatives=300", "model.loss.in_batch_negatives=false", "model.backbone.kind=hstu"),
    ),
    "validation, no mask": (
        *("training.validate_every=4", "data.validation_share=0.2", "model.loss.mask_same_user=false"),
    ),
}


def test_every_kind_of_loss_is_that_of_one_process(play: Play, tmp_path: Path) -> None:
    scenes = []
    for number, settings in enumerate(VARIANTS.values()):
        for size in (1, 3):
            scenes.append(scene(f"{number}-{size}", size, *TINY, "training.steps=6", *settings))
    checked(play(*scenes))
    for number, name in enumerate(VARIANTS):
        one, three = tmp_path / f"{number}-1", tmp_path / f"{number}-3"
        assert max(differences(one, three)) < 1e-5, name
        assert judgements(one) == pytest.approx(judgements(three), rel=1e-5)


def judgements(folder: Path) -> list[float]:
    lines = (folder / "runs/latest/events.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines if "validated" in line]


RIVALS = """
import dataclasses
from tackboard.models.sequential import sasrec
from tackboard.recipes.demo import demo

def recipe():
    config = demo()
    data = dataclasses.replace(config.data, features="", max_length=32, tokens_per_step=1024, uniform_negatives=300)
    return dataclasses.replace(config, data=data, model=sasrec(512, dropout=0.0))
"""


def test_rivals_learn_what_one_process_learns(play: Play, tmp_path: Path) -> None:
    """Their losses are means over a process's own events, and a process without events has no figures to log."""
    (tmp_path / "rivals.py").write_text(RIVALS)
    settings = ("training.steps=6", "training.log_every=1", "training.num_threads=1", "training.device=cpu")
    judged = ("training.validate_every=3", "data.validation_share=0.2", "model.loss.kind=full")
    few = ("data.max_length=8", "data.tokens_per_step=24", "model.loss.kind=contrastive")
    recipe = str(tmp_path / "rivals.py:recipe")
    scenes = [scene(f"full-{size}", size, *settings, *judged, recipe=recipe) for size in (1, 3)]
    checked(play(*scenes, scene("few", 3, *settings, *few, recipe=recipe)))
    assert max(differences(tmp_path / "full-1", tmp_path / "full-3")) < 1e-5
    assert len(judgements(tmp_path / "full-1")) == 2
    assert judgements(tmp_path / "full-1") == pytest.approx(judgements(tmp_path / "full-3"), rel=1e-5)


def test_rankers_learn_what_one_process_learns(play: Play, tmp_path: Path) -> None:
    settings = ("training.steps=6", "model.dropout=0", "model.head.dropout=0", "training.device=cpu")
    settings = (*settings, "training.log_every=1", "training.num_threads=1", "training.validate_every=3")
    for recipe in ("finetune-late-last", "finetune-early"):
        start = {"recipe": recipe, "more": ("--from", "pretrained/latest")}
        names = {size: f"{recipe}-{size}" for size in (1, 2, 3)}
        checked(play(*(scene(name, size, *settings, **start) for size, name in names.items())))
        for size in (2, 3):
            assert max(differences(tmp_path / names[1], tmp_path / names[size])) < 1e-5, (recipe, size)
            judged = [judgements(tmp_path / names[number]) for number in (1, size)]
            assert len(judged[0]) == 2
            assert judged[0] == pytest.approx(judged[1], rel=1e-5), (recipe, size)


def test_coded_rows_change_the_loss_little_and_are_counted(play: Play, tmp_path: Path) -> None:
    settings = (*TINY, "model.tables.dim=32", "model.width=128", "training.steps=40")
    precisions = {"fp8": 0.28, "int8": 0.28, "bf16": 0.52}
    scenes = [
        scene(
            *(name, 2, *settings, f"parallel.forward_precision={name}", f"parallel.backward_precision={name}"),
            more=("--json",),
        )
        for name in precisions
    ]
    results = checked(play(scene("fp32", 2, *settings), *scenes))
    for name, result in zip(precisions, results[1:], strict=True):
        assert max(differences(tmp_path / "fp32", tmp_path / name)) < 0.01, name
        told = json.loads(result["said"][0].splitlines()[-1])
        assert told["wire"]["share"] <= precisions[name], told["wire"]
        for process in told["balance"]["processes"]:
            assert process["measured_lookups_per_step"] > 0 and process["measured_ms_per_step"] > 0
        assert not result["said"][1], "only process 0 speaks"


def contents(folder: Path) -> dict[str, str]:
    """The hash of every tensor file of the newest checkpoint, and the steps of the run."""
    newest = folder / "runs/latest/checkpoints/latest"
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in newest.glob("*.safetensors")}
    state = json.loads((newest / "state.json").read_text())
    found["state"] = json.dumps([state[name] for name in ("step", "data_step", "num_tokens", "guard")])
    return found


SHORT = (*TINY, "training.steps=12", "training.checkpoint_every=4", "model.dropout=0.1", "parallel.timeout_s=30")
INSTANTS = 20
AGAIN = ("--resume", "auto")


def test_a_killed_process_costs_nothing(play: Play, tmp_path: Path) -> None:
    """One of two processes is killed at an instant; the other stops; both start again and end in the same bits."""
    (undisturbed,) = checked(play(scene("whole", 2, *SHORT)))
    expected = contents(tmp_path / "whole")
    total = min(undisturbed["communications"])
    instants = [(number % 2, 1 + number * total // INSTANTS) for number in range(INSTANTS)]
    chains = [
        [scene(f"{at}", 2, *SHORT, kill={"rank": rank, "at": at}), scene(f"{at}", 2, *SHORT, more=AGAIN)]
        for rank, at in instants
    ]
    for (rank, at), (killed, resumed) in zip(instants, play(*chains, at_once=6), strict=True):
        assert killed["codes"][rank] == -9
        assert killed["codes"][1 - rank] == 75, killed["said"]
        assert f"process {rank} of 2" in killed["said"][1 - rank], killed["said"]
        assert resumed["codes"] == [0, 0], resumed["said"]
        assert contents(tmp_path / f"{at}") == expected, (rank, at)
        assert [line["step"] for line in metrics(tmp_path / f"{at}")] == list(range(1, 13))


def test_a_run_goes_on_in_another_number_of_processes(play: Play, tmp_path: Path) -> None:
    settings = (*TINY, "training.steps=20", "training.checkpoint_every=6")
    _, two = checked(play(scene("one", 1, *settings), scene("two", 2, *settings)))
    kill = {"rank": 1, "at": two["communications"][1] // 2}
    # How tables are divided does not decide the result, so a resumed run may choose again.
    ways = [(3, "table"), (1, "row"), (4, "row")]
    chains = [
        [
            scene(f"to-{size}", 2, *settings, kill=kill),
            scene(f"to-{size}", size, *settings, f"parallel.sharding={way}", more=AGAIN),
        ]
        for size, way in ways
    ]
    for (size, _), (killed, moved) in zip(ways, play(*chains, at_once=3), strict=True):
        assert killed["codes"] == [75, -9], killed["said"]
        assert set(moved["codes"]) == {0}, moved["said"]
        assert max(differences(tmp_path / "one", tmp_path / f"to-{size}")) < 1e-5, size


def test_all_processes_stop_when_one_is_asked(play: Play, tmp_path: Path) -> None:
    settings = (*TINY, "training.steps=200", "training.checkpoint_every=200")
    stopped, resumed = play(
        [scene("stopped", 2, *settings, signal_after=5), scene("stopped", 2, *settings, more=AGAIN)]
    )[0]
    assert stopped["codes"] == [75, 75], stopped["said"]
    assert "the state is saved" in stopped["said"][0]
    assert resumed["codes"] == [0, 0], resumed["said"]
    checked(play(scene("whole", 2, *settings)))
    assert contents(tmp_path / "stopped") == contents(tmp_path / "whole")
