"""Mistakes that users make, and what they are told: at most three lines, the right exit code, never a traceback.

This table is the documentation of our error texts. Each row plants one mistake in an otherwise working command. The
first line names what was given, the others what is allowed and what to do; where a word was mistyped, the nearest right
one is suggested. Exit codes: 2 wrong use, 3 data invalid.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tackboard.core.manifest import MANIFEST, seal, unseal

if TYPE_CHECKING:
    from conftest import Answer
else:
    Answer = Any

WRONG_USE, DATA_INVALID = 2, 3
ROOT = Path(__file__).resolve().parents[2]
GOOD_LOG = "user,item,time,action\n" + "".join(f"u{n % 7},i{n % 11},{1_700_000_000 + n},click\n" for n in range(60))
INIT = "init --from log.csv --user user --item item --time time"
GOOD_REQUEST = {
    "history": [{"item": 100001, "action": "click", "surface": "home", "time_ms": 1_700_000_000_000}],
    "candidates": [100001, 100002],
}
SCORE = "score request.json --offline --bundle {workspace}/bundle"
TRAIN = "train {workspace}/recipe.py:recipe --set data.dataset={workspace}/datasets/tiny"


@dataclasses.dataclass(frozen=True)
class Mistake:
    """One row: what is typed, the exit code, what the message must hold (between bars), and what is planted first."""

    name: str
    command: str
    code: int
    says: str
    plant: Callable[[Path, Path], object] = lambda folder, workspace: None


def several(command: str, code: int, rows: list[tuple[Any, ...]]) -> list[Mistake]:
    """Mistakes that are planted for one command: (name, says, plant or nothing)."""
    return [Mistake(name, command, code, *rest) for name, *rest in rows]


def file(name: str, content: str | bytes) -> Callable[[Path, Path], object]:
    """Plants a file in the folder that the command runs in."""
    data = content.encode() if isinstance(content, str) else content
    return lambda folder, workspace: (folder / name).write_bytes(data)


def log(content: str | bytes) -> Callable[[Path, Path], object]:
    return file("log.csv", content)


def request(**changes: Any) -> Callable[[Path, Path], object]:
    return file("request.json", json.dumps(GOOD_REQUEST | changes))


def copied(source: str, target: str, *damages: Callable[[Path], object]) -> Callable[[Path, Path], object]:
    """Plants a copy of something in the workspace, damaged."""

    def plant(folder: Path, workspace: Path) -> None:
        shutil.copytree((workspace / source).resolve(), folder / target, symlinks=True)
        for damage in damages:
            damage(folder / target)

    return plant


def flip(pattern: str) -> Callable[[Path], object]:
    """Flips one bit in the middle of the first file that matches."""

    def damage(folder: Path) -> None:
        path = sorted(folder.glob(pattern))[0]
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)

    return damage


def newer_format(folder: Path) -> None:
    content = unseal((folder / MANIFEST).read_bytes())
    assert content is not None
    del content["sha256_of_the_above"]
    (folder / MANIFEST).write_bytes(seal(content | {"format_version": 2}))


def signature_of_user_code(folder: Path) -> None:
    """Makes a bundle look as if its model came from a user's file."""
    from tackboard.core.manifest import write_manifest

    path = folder / "signature.json"
    signature = json.loads(path.read_text())
    signature["model"]["config_class"] = "my_model.py:MyConfig"
    path.write_text(json.dumps(signature))
    (folder / MANIFEST).unlink()
    write_manifest(folder, "bundle")


def features(definitions: str, *, name: str = "mine.py", item: str = "topic=Int()") -> Callable[[Path, Path], object]:
    """Plants a file of features; they stand in its line 4."""
    head = f"from tackboard.features.language import *\nitem = Item({item})\nevents = Events()\n"
    return file(name, f'{head}features = FeatureSet("home", {definitions})\n')


def newer_features(folder: Path, workspace: Path) -> None:
    """Plants the features.json of a tackboard to come."""
    from tackboard.features.language import Events, FeatureSet

    content = FeatureSet("home", count=Events().count()).to_json() | {"format_version": 2}
    (folder / "features.json").write_text(json.dumps(content))


def both(*plants: Callable[[Path, Path], object]) -> Callable[[Path, Path], object]:
    return lambda folder, workspace: [plant(folder, workspace) for plant in plants]


MISTAKES = [
    # Importing one's own log.
    Mistake(
        "a column that is not there",
        "init --from log.csv --user users --item item --time time",
        DATA_INVALID,
        "log.csv has no column 'users' (given by --user) | its columns: user, item | did you mean --user user?",
        log(GOOD_LOG),
    ),
    Mistake("a log that does not exist", INIT, WRONG_USE, "log.csv does not exist"),
    *several(
        INIT,
        DATA_INVALID,
        [
            (
                "an empty folder instead of a log",
                "log.csv is a folder without logs | one CSV or Parquet file",
                lambda folder, workspace: (folder / "log.csv").mkdir(),
            ),
            ("an empty log", "log.csv has no header line", log("")),
            ("a log of only a header", "log.csv | no rows", log("user,item,time\n")),
            ("times that are no times", "log.csv | 60 of 60 rows | time", log(GOOD_LOG.replace(",1700", ",soon1700"))),
            (
                "seconds and milliseconds in one column",
                "'time' mixes seconds and milliseconds | one unit",
                log(GOOD_LOG + "u1,i1,1700000000000,click\n"),
            ),
            ("rows without a user", "log.csv | 20 of 80 rows | user", log(GOOD_LOG + ",i1,1700000000,click\n" * 20)),
            (
                "a log that is binary rubbish",
                "log.csv is neither Parquet nor UTF-8 text | CSV, gzipped CSV, Parquet",
                log(bytes(range(128, 256)) * 40),
            ),
            ("a Parquet file that was cut", "log.csv cannot be read", log(b"PAR1" + bytes(range(256)) * 4)),
        ],
    ),
    Mistake(
        "a recipe that exists already",
        INIT,
        WRONG_USE,
        "recipe.py exists already | --force",
        lambda folder, workspace: (log(GOOD_LOG)(folder, workspace), (folder / "recipe.py").touch()),
    ),
    Mistake(
        "a dataset name that is a path",
        f"{INIT} --name ../mine",
        WRONG_USE,
        "'../mine' is not a valid dataset name | letters, digits | --name",
        log(GOOD_LOG),
    ),
    Mistake(
        "a typo in a field's column",
        f"{INIT} --field actoin",
        DATA_INVALID,
        "log.csv has no column 'actoin' (given by --field) | did you mean --field action?",
        log(GOOD_LOG),
    ),
    Mistake(
        "a field with a reserved name",
        f"{INIT} --field action",
        WRONG_USE,
        "the field name 'action' is reserved | --field another_name=action",
        log(GOOD_LOG),
    ),
    Mistake(
        "a context that is not JSON",
        f"{INIT} --context action",
        DATA_INVALID,
        "log.csv line 2: the context is not JSON | a JSON object",
        log(GOOD_LOG),
    ),
    Mistake(
        "two versions of an item from one time",
        f"{INIT} --items items.csv",
        DATA_INVALID,
        "repeat an id and a valid_from_ms: 'i1' at 5 | one row per id and time",
        lambda folder, workspace: (
            log(GOOD_LOG)(folder, workspace),
            file("items.csv", "item,valid_from_ms,price\ni1,5,1\ni1,5,2\n")(folder, workspace),
        ),
    ),
    Mistake(
        "a download that ended early",
        "data import ml-1m ml-1m.zip",
        DATA_INVALID,
        "ml-1m.zip is damaged | needed: ml-1m.zip | download it from https://grouplens.org",
        file("ml-1m.zip", b"PK\x03\x04" + bytes(1000)),
    ),
    # Making a world.
    Mistake("a world that does not exist", "data synth --world dmeo", WRONG_USE, "'dmeo' | did you mean demo?"),
    Mistake("a world file that does not exist", "data synth --world my.json", WRONG_USE, "my.json does not exist"),
    Mistake(
        "a world file that is not JSON", "data synth --world my.json", DATA_INVALID, "my.json", file("my.json", "{")
    ),
    Mistake(
        "a typo in a world's setting",
        "data synth --set num_usres=5",
        WRONG_USE,
        "unknown setting num_usres | did you mean num_users?",
    ),
    Mistake("fewer than no users", "data synth --set num_users=-5", WRONG_USE, "num_users = -5 | 1 or more"),
    # Defining features.
    *several(
        "features check mine.py",
        WRONG_USE,
        [
            (
                "features that depend on each other",
                "feature a (mine.py:4) depends on itself: a → b → a | remove one of the references",
                features('a=feature("b") + 1, b=feature("a") * 2'),
            ),
            (
                "a typo in a column",
                "feature topic (mine.py:4): item has no column topik | declared: id, topic | did you mean item.topic?",
                features("topic=item.topik"),
            ),
            (
                "a sum of a number and a text",
                "feature sum (mine.py:4), a + b: it is given | string",
                features('sum=item.topic + "more"'),
            ),
            (
                "a feature that looks into the future",
                "feature popularity (mine.py:4): item.num_events looks into the future | events.count()",
                features("popularity=item.num_events"),
            ),
            (
                "a typo in an operator's name",
                "mine.py:4: there is no operator log1pp | did you mean log1p?",
                features("topic=item.topic.log1pp()"),
            ),
            (
                "a typo in an aggregation's name",
                "mine.py:4: events has no column or operator cuont | did you mean count?",
                features("n=events.cuont()"),
            ),
            (
                "a bare number for a duration",
                "mine.py:4: within(7) | a duration: days(7), hours(1), minutes(5)",
                features("n=events.within(7).count()"),
            ),
            (
                "an error of Python in a file of features",
                "mine.py:4 raised TypeError: unsupported operand | `python mine.py` shows the same error",
                features("squared=item.topic ** 2"),
            ),
            (
                "a file of features that ends the program",
                "mine.py:2 raised SystemExit: 0 | must not end the program",
                file("mine.py", "import sys\nsys.exit(0)\n"),
            ),
            (
                "a default outside the declared range",
                "feature topic (mine.py:4), column: item.topic: default = 9 is outside | declared range: -∞ to 5",
                features("topic=item.topic", item="topic=Int(maximum=5, default=9)"),
            ),
        ],
    ),
    Mistake(
        "a column of events for a feature",
        "features explain mine.py",
        WRONG_USE,
        "feature when (mine.py:4) is a column of the events | events.last(…)",
        features("when=events.time"),
    ),
    Mistake(
        "features of a newer version",
        "features check features.json",
        DATA_INVALID,
        "features.json has feature format version 2 | up to 1 | use a newer tackboard",
        newer_features,
    ),
    Mistake(
        "a file without features",
        "features check mine.py",
        WRONG_USE,
        "mine.py defines no feature set | FeatureSet(",
        file("mine.py", "features = 5\n"),
    ),
    Mistake(
        "a typo in a feature's name",
        "features explain mine.py --feature tpoic",
        WRONG_USE,
        "there is no feature tpoic | did you mean topic?",
        features("topic=item.topic"),
    ),
    *several(
        "features check mine.py --data {workspace}/datasets/tiny",
        DATA_INVALID,
        [
            (
                "a column that the data does not have",
                "feature price (mine.py:4): item.price is not in the data | tackboard init --items FILE | add price",
                features("price=item.price", item="price=Float()"),
            ),
            (
                "a column of another type",
                "feature topic (mine.py:4): item.topic is int64 | declared: string",
                features("topic=item.topic", item="topic=String()"),
            ),
        ],
    ),
    Mistake(
        "a value out of its range",
        "features backfill mine.py --data tiny",
        DATA_INVALID,
        "feature topic (mine.py:4): item.topic is  | declared range: -∞ to 1 | declare another range",
        both(features("topic=item.topic", item="topic=Int(maximum=1)"), copied("datasets/tiny", "tiny")),
    ),
    Mistake(
        "a removed feature in the same version",
        "features check mine.py --against old.py",
        WRONG_USE,
        "feature count (old.py:4) is removed | a new version of feature set home | version=2",
        both(features("topic=item.topic"), features("count=events.count()", name="old.py")),
    ),
    Mistake(
        "a backfill of a snapshot outside its dataset",
        "features backfill mine.py --data copy",
        WRONG_USE,
        "copy is not the newest snapshot of a dataset | latest",
        both(features("topic=item.topic"), copied("datasets/tiny/latest", "copy")),
    ),
    # Training.
    Mistake(
        "a recipe that does not exist", "train dmeo", WRONG_USE, "no recipe 'dmeo' | allowed: demo | did you mean demo?"
    ),
    *several(
        "train my.py:recipe",
        WRONG_USE,
        [
            ("a recipe file that does not exist", "my.py is not a file"),
            (
                "a recipe file with a syntax error",
                "my.py:1 raised SyntaxError: invalid syntax",
                file("my.py", "def recipe(:\n"),
            ),
            (
                "a recipe file without that function",
                "my.py has no function 'recipe' | it defines: receipt | did you mean my.py:receipt?",
                file("my.py", "def receipt(): ...\n"),
            ),
            (
                "a recipe that returns something else",
                "my.py:recipe returned dict | RunConfig",
                file("my.py", "def recipe(): return {}\n"),
            ),
            (
                "a recipe that fails",
                "my.py:1 raised ZeroDivisionError: division by zero | --debug",
                file("my.py", "def recipe(): return 1 / 0\n"),
            ),
        ],
    ),
    Mistake(
        "a typo in a table of settings",
        f"{TRAIN} --set trainning.steps=5",
        WRONG_USE,
        "unknown setting trainning.steps | did you mean training.steps?",
    ),
    Mistake(
        "a typo in a nested setting",
        f"{TRAIN} --set model.tables.num_row=5",
        WRONG_USE,
        "unknown setting model.tables.num_row | did you mean model.tables.num_rows?",
    ),
    Mistake(
        "a setting by the name it had once",
        f"{TRAIN} --set model.table_dim=5",
        WRONG_USE,
        "unknown setting model.table_dim | did you mean model.tables.dim?",
    ),
    Mistake(
        "a setting that has become a table",
        f"{TRAIN} --set model.backbone=hstu",
        WRONG_USE,
        "model.backbone is a table of settings | did you mean model.backbone.kind?",
    ),
    Mistake(
        "a setting that the kind of backbone does not have",
        f"{TRAIN} --set model.backbone.kind=hstu --set model.backbone.time_bias=9",
        WRONG_USE,
        "model.backbone.time_bias = 9 | 0 with hstu, which has no time_bias",
    ),
    Mistake(
        "a word for a number", f"{TRAIN} --set training.steps=ten", WRONG_USE, "training.steps = 'ten' | a whole number"
    ),
    Mistake("a negative size", f"{TRAIN} --set model.width=-8", WRONG_USE, "model.width = -8 | 1 or more"),
    Mistake(
        "a setting without a value", f"{TRAIN} --set training.steps", WRONG_USE, "--set training.steps | name=value"
    ),
    Mistake(
        "sizes that do not fit each other",
        f"{TRAIN} --set data.max_length=500",
        WRONG_USE,
        "data.max_length = 500 | model.max_history = 12",
    ),
    Mistake(
        "a step that holds no segment",
        f"{TRAIN} --set data.tokens_per_step=10",
        WRONG_USE,
        "data.tokens_per_step = 10 | at least 24 | or lower data.max_length",
    ),
    Mistake(
        "a dataset that does not exist",
        "train {workspace}/recipe.py:recipe --set data.dataset={workspace}/datasets/tiyn",
        DATA_INVALID,
        "datasets/tiyn holds no dataset | datasets in | did you mean {workspace}/datasets/tiny?",
    ),
    Mistake(
        "a public dataset that was not imported",
        "train {workspace}/recipe.py:recipe --set data.dataset=datasets/ml-1m",
        DATA_INVALID,
        "datasets/ml-1m holds no dataset | download it | `tackboard data import ml-1m FILE`",
    ),
    Mistake(
        "a bundle instead of a dataset",
        "train {workspace}/recipe.py:recipe --set data.dataset={workspace}/bundle",
        DATA_INVALID,
        "{workspace}/bundle is a bundle | allowed: a dataset",
    ),
    Mistake(
        "a dataset with a flipped bit",
        "train {workspace}/recipe.py:recipe --set data.dataset=bad",
        DATA_INVALID,
        "bad/events.parquet is corrupt",
        copied("datasets/tiny/latest", "bad", flip("events.parquet")),
    ),
    Mistake(
        "an action that never occurs",
        f"{TRAIN} --set 'data.positive_actions=[\"clik\"]'",
        WRONG_USE,
        "'clik' | click | did you mean click?",
    ),
    Mistake(
        "more rows than a table can have",
        f"{TRAIN} --set model.tables.num_rows=4000000000",
        WRONG_USE,
        "model.tables.num_rows = 4000000000 | 1 to 2147483647",
    ),
    Mistake(
        "a model larger than the machine",
        f"{TRAIN} --set model.tables.num_rows=2000000000 --set model.tables.dim=1024",
        WRONG_USE,
        "the model needs 164 | GB | this machine has | lower model.tables.num_rows",
    ),
    Mistake(
        "runs in a place that is a file",
        f"{TRAIN} --runs taken/runs",
        WRONG_USE,
        "Not a directory | taken",
        file("taken", ""),
    ),
    Mistake("a run that does not exist", f"{TRAIN} --resume runs/nope", DATA_INVALID, "runs/nope is not a run"),
    Mistake(
        "a resumed run with another setting",
        f"{TRAIN} --set seed=7 --resume {{workspace}}/runs/latest",
        WRONG_USE,
        "other settings:  | seed | --resume never",
    ),
    Mistake(
        "a run whose config is damaged",
        f"{TRAIN} --resume bad",
        DATA_INVALID,
        "bad/config.json cannot be read as JSON",
        copied("runs/latest", "bad", lambda run: (run / "config.json").write_text("{")),
    ),
    # Evaluating and exporting.
    Mistake("a run to evaluate that does not exist", "evaluate runs/nope", DATA_INVALID, "runs/nope does not exist"),
    Mistake(
        "a run without a checkpoint",
        "evaluate empty",
        DATA_INVALID,
        "empty holds no complete checkpoint",
        lambda folder, workspace: (folder / "empty").mkdir(),
    ),
    Mistake(
        "a checkpoint with a flipped bit",
        "evaluate bad",
        DATA_INVALID,
        "tables.safetensors is corrupt",
        copied("runs/latest", "bad", flip("checkpoints/latest/tables.safetensors")),
    ),
    Mistake(
        "no users to rank",
        "evaluate {workspace}/runs/latest --max-users 0",
        WRONG_USE,
        "--max-users | greater than or equal to 1",
    ),
    Mistake(
        "a bundle that exists already",
        "export {workspace}/runs/latest --out {workspace}/bundle",
        WRONG_USE,
        "{workspace}/bundle exists already",
    ),
    Mistake(
        "a precision that does not exist",
        "export {workspace}/runs/latest --out b --tables fp61",
        WRONG_USE,
        "--tables fp61 | fp32, fp16 | did you mean fp16?",
    ),
    Mistake(
        "a version that is no number",
        "export {workspace}/runs/latest --out b --version one",
        WRONG_USE,
        "--version one | a whole number",
    ),
    Mistake(
        "a model name with a blank",
        "export {workspace}/runs/latest --out b --name 'my model'",
        WRONG_USE,
        "--name my model is not valid | letters, digits",
    ),
    # Serving and scoring.
    Mistake(
        "a checkpoint instead of a bundle",
        "serve {workspace}/runs/latest/checkpoints/latest --port 0",
        DATA_INVALID,
        "is a checkpoint | allowed: a bundle",
    ),
    Mistake("a bundle that does not exist", "serve nope --port 0", DATA_INVALID, "nope is not a folder"),
    *several(
        "serve bad --port 0",
        DATA_INVALID,
        [
            (
                "a bundle with a flipped bit",
                "bad/dense.safetensors is corrupt",
                copied("bundle", "bad", flip("dense.safetensors")),
            ),
            (
                "a bundle of a newer version",
                "format version 2 | up to 1 | use a newer tackboard",
                copied("bundle", "bad", newer_format),
            ),
        ],
    ),
    Mistake(
        "a model of one's own without its code",
        "serve bad --port 0",
        WRONG_USE,
        "my_model.py | never taken from a bundle | --code my_model.py",
        copied("bundle", "bad", signature_of_user_code),
    ),
    Mistake(
        "an open address without a token",
        "serve {workspace}/bundle --host 0.0.0.0 --port 0",
        WRONG_USE,
        "0.0.0.0 | TACKBOARD_TOKEN | --insecure",
    ),
    Mistake("a port that cannot be", "serve {workspace}/bundle --port 99999", WRONG_USE, "port = 99999 | 0 to 65535"),
    Mistake("a negative queue", "serve {workspace}/bundle --max-queue -1", WRONG_USE, "max_queue = -1"),
    Mistake("a request that does not exist", SCORE, WRONG_USE, "request.json cannot be read: No such file"),
    Mistake(
        "a file that cannot be read",
        SCORE.replace("request.json", "/proc/self/mem"),
        WRONG_USE,
        "/proc/self/mem cannot be read: Input/output error",
    ),
    *several(
        SCORE,
        WRONG_USE,
        [
            ("a request that is not JSON", "not JSON | candidates", file("request.json", "{history}")),
            (
                "a typo in a request",
                "unknown key 'candidate' | did you mean 'candidates'?",
                file("request.json", '{"history": [], "candidate": [1]}'),
            ),
            ("no candidates", "candidates is empty | one or more | send the items", request(candidates=[])),
            (
                "ids of the wrong type",
                "candidate 1 is a string | a whole number",
                request(candidates=[100001, "100002"]),
            ),
        ],
    ),
    Mistake(
        "a server that does not answer",
        "score request.json --url http://127.0.0.1:9",
        WRONG_USE,
        "no tackboard server answers at http://127.0.0.1:9 | tackboard serve",
        request(),
    ),
    Mistake(
        "an address that is none",
        "score request.json --url ftp://here",
        WRONG_USE,
        "ftp://here | http://HOST:PORT",
        request(),
    ),
    Mistake(
        "offline without a bundle",
        "score request.json --offline",
        WRONG_USE,
        "--offline and --bundle go together",
        request(),
    ),
    # Verifying.
    Mistake("a file to verify", "verify log.csv", DATA_INVALID, "log.csv is not a sequence store", log(GOOD_LOG)),
    Mistake(
        "a folder that was never finished",
        "verify part",
        DATA_INVALID,
        f"part/{MANIFEST} is missing",
        lambda folder, workspace: (folder / "part").mkdir(),
    ),
    # Typing.
    Mistake("a command that does not exist", "trian demo", WRONG_USE, "trian | train"),
    Mistake("an option that does not exist", "train demo --resum auto", WRONG_USE, "--resum | --resume"),
    Mistake("a missing argument", "export", WRONG_USE, "'run' | tackboard export --help"),
    Mistake("a missing option", "export {workspace}/runs/latest", WRONG_USE, "--out | tackboard export --help"),
    Mistake("an option without its value", "train demo --set", WRONG_USE, "--set | requires an argument"),
]


def check(mistake: Mistake, answer: Answer, workspace: Path) -> None:
    assert answer.code == mistake.code, answer.err
    assert "Traceback" not in answer.err and "a bug in tackboard" not in answer.err
    lines = answer.err.splitlines()
    assert lines[0].startswith("error: ")
    assert len(lines) <= 3, answer.err
    for fragment in mistake.says.split(" | "):
        assert fragment.replace("{workspace}", str(workspace)) in answer.err, answer.err
    assert answer.out == ""


def words(mistake: Mistake, workspace: Path) -> list[str]:
    return [word.replace("{workspace}", str(workspace)) for word in shlex.split(mistake.command)]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name.replace(" ", "-"))
def test_a_mistake_is_explained(
    mistake: Mistake, tackboard: Callable[..., Answer], workspace: Path, tmp_path: Path
) -> None:
    mistake.plant(tmp_path, workspace)
    before = sorted(tmp_path.rglob("*"))
    check(mistake, tackboard(*words(mistake, workspace), cwd=tmp_path), workspace)
    assert sorted(tmp_path.rglob("*")) == before, "a refused command leaves nothing behind"


def test_a_port_that_is_taken(tackboard: Callable[..., Answer], workspace: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        mistake = Mistake("port", f"serve {{workspace}}/bundle --port {port}", WRONG_USE, f"{port} | --port")
        check(mistake, tackboard(*words(mistake, workspace), cwd=tmp_path), workspace)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_dataset_that_may_not_be_read(tackboard: Callable[..., Answer], workspace: Path, tmp_path: Path) -> None:
    copied("datasets/tiny/latest", "mine")(tmp_path, workspace)
    (tmp_path / "mine" / "events.parquet").chmod(0)
    mistake = Mistake(
        "unreadable",
        "train {workspace}/recipe.py:recipe --set data.dataset=mine",
        DATA_INVALID,
        "mine/events.parquet | Permission denied",
    )
    check(mistake, tackboard(*words(mistake, workspace), cwd=tmp_path), workspace)


def test_the_same_in_a_process_of_its_own(workspace: Path, tmp_path: Path) -> None:
    mistake = next(mistake for mistake in MISTAKES if mistake.name == "a bundle with a flipped bit")
    mistake.plant(tmp_path, workspace)
    done = subprocess.run(
        [sys.executable, "-m", "tackboard", *words(mistake, workspace)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == mistake.code
    assert len(done.stderr.splitlines()) <= 3
    assert all(fragment in done.stderr for fragment in mistake.says.split(" | "))
