"""A user's raw id leaves no trace in what we say: error texts, logs, metrics, run directories, bundles, reports.

One user with a recognisable id, a string in one world and a whole number in the other, goes the whole way: a log that
is broken around them, import, features, training, evaluation, export, scores, a server with its metrics and its log of
features, replay, and every command about data. Whatever is printed or left behind outside the dataset is searched for
the id as text and, for the number, as the eight bytes it has in memory.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tackboard.core import keyed_random
from tackboard.events.privacy.forgetting import user_ids_of
from tackboard.events.sequence_store import create_store
from tackboard.scoring.client import ScoringClient

ROOT = Path(__file__).resolve().parents[2]
PLANTED = {"string": "planted-person-8675309", "int": "8675309867530911"}
NUM_ROWS, NUM_USERS, START_S = 160, 8, 1_700_000_000
FEATURES = """\
from tackboard.features.language import Context, Events, FeatureSet, Int, Request, String, User, hours, minutes

events, request, user = Events(dwell=Int()), Request(), User(country=String(), age=Int(minimum=0))
features = FeatureSet(
    "own",
    clicks=events.where(events.action == "click").within(minutes(40)).count().log1p(),
    dwell=events.decayed_sum(events.dwell.fill_missing(0), half_life=hours(1)).log1p(),
    someone=user.id.bucket_hash(7),
    abroad=user.country.fill_missing("") == "fr",
)
"""
RECIPE = """\
from tackboard.data.loader import DataConfig
from tackboard.models.pinfm import PinFMConfig
from tackboard.models.tables import TableConfig
from tackboard.train.config import RunConfig, TrainingConfig


def recipe() -> RunConfig:
    return RunConfig(
        name="private",
        data=DataConfig(dataset="datasets/private", features="own.py", max_length=12, tokens_per_step=256),
        model=PinFMConfig(
            tables=TableConfig(num_hashes=2, num_rows=64, dim=4), width=8, max_history=12,
            request_features=("clicks", "someone", "abroad"),
        ),
        training=TrainingConfig(steps=2, checkpoint_every=1, log_every=1, num_threads=1, device="cpu"),
    )
"""
INIT = [
    "init", "--from", "log.csv", "--user", "who", "--item", "what", "--time", "when", "--action", "how",
    "--surface", "where", "--received", "seen", "--request", "page", "--field", "dwell=dwell",
    "--users", "users.csv", "--name", "private",
]  # fmt: skip


class Watch:
    """Everything that was said or left behind, searched for one id."""

    def __init__(self, planted: str) -> None:
        self.planted = planted
        self.traces = [planted.encode()]
        if planted.isdigit():
            self.traces += [int(planted).to_bytes(8, order, signed=True) for order in ("little", "big")]  # type: ignore[arg-type]
        self.num_bytes = 0

    def see(self, where: str, data: bytes | str) -> None:
        """Fails where the id occurs in what was printed or written."""
        content = data.encode() if isinstance(data, str) else data
        self.num_bytes += len(content)
        for trace in self.traces:
            assert trace not in content, f"{where} holds the user's id: {content[:300]!r}"

    def see_folder(self, folder: Path) -> int:
        """The same of every file under a folder, and of their names; how many there were."""
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        for path in files:
            self.see(f"the name of {path.name}", str(path.relative_to(folder)))
            self.see(str(path.relative_to(folder)), path.read_bytes())
        return len(files)


class World:
    """A folder, the user in it, and the commands, watched."""

    def __init__(self, folder: Path, kind: str, program: Callable[..., Any]) -> None:
        self.folder, self.kind, self.program = folder, kind, program
        self.planted = PLANTED[kind]
        self.watch = Watch(self.planted)

    @property
    def user(self) -> Any:
        return int(self.planted) if self.kind == "int" else self.planted

    def run(self, *arguments: str, code: int = 0) -> Any:
        answer = self.program(*arguments, cwd=self.folder)
        assert answer.code == code, (arguments, answer.out[-500:], answer.err)
        self.watch.see(f"stdout of {arguments[:2]}", answer.out)
        self.watch.see(f"stderr of {arguments[:2]}", answer.err)
        return answer

    def names(self) -> list[str]:
        others = [str(1000 + n) if self.kind == "int" else f"user {n}" for n in range(1, NUM_USERS)]
        return [self.planted, *others]

    def rows(self) -> list[list[Any]]:
        rows = []
        for row in range(NUM_ROWS):
            draw = keyed_random.uniform(61, row, np.arange(4))
            moment = START_S + 60 * row
            name = self.names()[int(draw[0] * NUM_USERS)]
            how = "click" if draw[2] < 0.6 else "save"
            rows.append(
                [name, f"thing {int(draw[1] * 20)}", moment, how, "home", moment + row % 3, f"p{row}", int(9 * draw[3])]
            )
        return rows

    def write_log(self, rows: list[list[Any]]) -> None:
        lines = ["who,what,when,how,where,seen,page,dwell", *(",".join(map(str, row)) for row in rows)]
        (self.folder / "log.csv").write_text("\n".join(lines) + "\n")

    def write_users(self, ages: dict[str, Any]) -> None:
        lines = [
            f"{name},{'fr' if number % 2 else 'de'},{ages.get(name, 30)}" for number, name in enumerate(self.names())
        ]
        (self.folder / "users.csv").write_text("\n".join(["who,country,age", *lines]) + "\n")


@pytest.fixture(scope="module", params=["string", "int"])
def world(
    request: pytest.FixtureRequest, tackboard: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> World:
    """A dataset, a run and a bundle."""
    world = World(tmp_path_factory.mktemp(f"private-{request.param}"), request.param, tackboard)
    world.write_log(world.rows())
    world.write_users({})
    (world.folder / "own.py").write_text(FEATURES)
    (world.folder / "private.py").write_text(RECIPE)
    world.run(*INIT)
    world.run("train", "private.py:recipe")
    world.run("evaluate", "runs/latest")
    world.run("export", "runs/latest", "--out", "bundle")
    return world


def test_runs_and_bundles_hold_no_user(world: World) -> None:
    assert world.watch.see_folder(world.folder / "runs") > 10
    assert world.watch.see_folder(world.folder / "bundle") >= 5
    # The search would find it: the dataset does hold it.
    with pytest.raises(AssertionError, match="holds the user's id"):
        world.watch.see_folder(world.folder / "datasets")


@pytest.mark.parametrize("fault", ["fields", "time", "item", "received", "duplicate version", "age", "user column"])
def test_a_broken_import_names_lines_not_users(world: World, tmp_path: Path, fault: str) -> None:
    broken = World(tmp_path, world.kind, world.program)
    rows = broken.rows()
    arguments = [*INIT]
    broken.write_users({})
    cells: dict[str, tuple[int, Any]] = {"time": (2, "yesterday"), "item": (1, ""), "received": (5, 10**18)}
    for row in rows:
        if row[0] == broken.planted and fault in cells:
            row[cells[fault][0]] = cells[fault][1]
        elif row[0] == broken.planted and fault == "fields":
            row.append("one more")
    if fault == "duplicate version":
        lines = "".join(f"{broken.planted},de,{START_S}\n" for _ in range(2))
        (tmp_path / "users.csv").write_text("who,country,valid_from\n" + lines)
    elif fault == "age":
        broken.write_users({broken.planted: "not a number"})
        (tmp_path / "users.csv").write_text((tmp_path / "users.csv").read_text() + f"{broken.planted}\n,\n,\n,\n")
    elif fault == "user column":
        arguments[arguments.index("when")] = "who"
    broken.write_log(rows)
    answer = broken.program(*arguments, cwd=tmp_path)
    assert answer.code in (0, 2, 3) and "bug" not in answer.err
    broken.watch.see(f"stdout, {fault}", answer.out)
    broken.watch.see(f"stderr, {fault}", answer.err)


def test_commands_about_data_and_features(world: World) -> None:
    page = world.folder / "page.html"
    world.run("data", "check", "datasets/private")
    world.run("data", "check", "datasets/private", "--json")
    world.run("data", "stats", "datasets/private", "--out", str(page))
    world.run("data", "stats", "datasets/private", "--json")
    world.run("data", "drift", "datasets/private", "datasets/private", "--json")
    world.run("features", "check", "own.py", "--data", "datasets/private", "--json")
    world.run("features", "explain", "own.py")
    world.run("verify", "datasets/private")
    world.watch.see("the page", page.read_bytes())


def test_a_value_out_of_range_is_told_without_its_user(world: World, tmp_path: Path) -> None:
    other = World(tmp_path, world.kind, world.program)
    other.write_log(other.rows())
    other.write_users({other.planted: -5})
    other.run(*INIT)
    source = FEATURES.replace("someone=user.id.bucket_hash(7)", "age=user.age")
    (tmp_path / "own.py").write_text(source)
    answer = other.run("features", "check", "own.py", "--data", "datasets/private", code=3)
    assert "is -5; 1 of" in answer.err
    other.run("features", "backfill", "own.py", "--data", "datasets/private", code=3)


def request_of(world: World, **changes: Any) -> dict[str, Any]:
    mine = [row for row in world.rows() if row[0] == world.planted][:5]
    history = [
        {"item": row[1], "action": row[3], "surface": row[4], "time_ms": 1000 * row[2], "dwell": row[7]} for row in mine
    ]
    request = {
        "user": world.user,
        "request_time_ms": 1000 * (START_S + 60 * NUM_ROWS),
        "history": history,
        "candidates": ["thing 1", "thing 2"],
        "attributes": {"user_country": ["de"]},
    }
    return request | changes


BAD_REQUESTS: list[dict[str, Any]] = [
    {"candidates": []},
    {"user": ["{user}"]},
    {"user": {"id": "{user}"}},
    {"user": "{other}"},
    {"history": [{"item": 7.5}]},
    {"attributes": {"user_country": ["de", "fr"]}},
    {"attributes": {"user_name": ["de"]}},
    {"request_time_ms": "now"},
]


def bad_requests(world: World) -> list[dict[str, Any]]:
    """Each names the user and has something else, or the user itself, in a form that cannot be."""
    text = json.dumps(BAD_REQUESTS).replace('"{user}"', json.dumps(world.user))
    # The same id in the other type: a number given as text, a text that is given as its own bytes.
    other = world.planted if world.kind == "int" else 12.5
    return [request_of(world, **changes) for changes in json.loads(text.replace('"{other}"', json.dumps(other)))]


def test_scores_and_requests_that_cannot_be_scored(world: World) -> None:
    path = world.folder / "request.json"
    path.write_text(json.dumps(request_of(world)))
    world.run("score", "request.json", "--offline", "--bundle", "bundle")
    for request in bad_requests(world):
        path.write_text(json.dumps(request))
        answer = world.program("score", "request.json", "--offline", "--bundle", "bundle", cwd=world.folder)
        assert answer.code == 2, (request, answer)
        world.watch.see("score", answer.out + answer.err)
    path.write_text(json.dumps(request_of(world))[:-7])
    world.run("score", "request.json", "--offline", "--bundle", "bundle", code=2)


@pytest.fixture(scope="module")
def server(world: World) -> Iterator[tuple[World, int]]:
    """`tackboard serve` with a log of features; when it has ended, what it printed is looked at."""
    (world.folder / "log.key").write_text("7" * 64)
    printed = world.folder / "printed.txt"
    with printed.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tackboard", "serve", "bundle", "--port", "0", "--port-file", "port",
             "--log-features", "served", "--log-key", "log.key", "--timeout-ms", "20000"],
            cwd=world.folder, env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, stderr=output, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        line = process.stdout.readline()
        try:
            yield world, int(line.rsplit(":", 1)[1])
        finally:
            process.terminate()
            rest = process.stdout.read()
            process.stdout.close()
            assert process.wait(20) == 0
    world.watch.see("the server's output", line + rest + printed.read_text())
    assert world.watch.see_folder(world.folder / "served") >= 1
    answer = world.run(
        "features", "replay", "served", "--data", "datasets/private", "--key", "log.key", "--json", code=3
    )
    assert json.loads(answer.out)["num_requests"] >= 1


def test_the_server_says_nothing_about_its_users(server: tuple[World, int]) -> None:
    world, port = server
    client = ScoringClient(f"http://127.0.0.1:{port}")
    good = request_of(world)
    events = good["history"]
    client.score(
        {name: [event[name] for event in events] for name in events[0]},
        good["candidates"],
        request_ms=good["request_time_ms"],
        user=good["user"],
        attributes=good["attributes"],
    )
    datatype = "INT64" if world.kind == "int" else "BYTES"
    user = {"name": "user", "datatype": datatype, "shape": [1], "data": [world.user]}
    candidates = {"name": "candidate_item", "datatype": "BYTES", "shape": [1], "data": ["thing 1"]}
    history = {"name": "history_item", "datatype": "BYTES", "shape": [0], "data": []}
    bodies: list[Any] = [
        {"inputs": [user]},
        {"inputs": [history, candidates, user | {"shape": [3]}]},
        {"inputs": [history, candidates, user | {"datatype": "FP32"}]},
        {"inputs": [history, candidates, user | {"data": [[world.user]]}]},
        {"inputs": [history, candidates, user | {"data": {"id": world.user}}]},
        {"inputs": [history, candidates, user, user]},
        {"inputs": [history, candidates, user | {"name": "users"}]},
        {"inputs": [history, candidates | {"data": [world.user]}, user], "parameters": {"who": 5}},
        {"id": "5", "inputs": user},
    ]
    for body in [*(json.dumps(body).encode() for body in bodies), b'{"user": ' + json.dumps(world.user).encode()]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request("POST", "/v2/models/" + client.model + "/infer", body)
        response = connection.getresponse()
        answer = response.read()
        connection.close()
        assert response.status in (200, 400), answer
        world.watch.see("the server's answer", answer)
    for path in ("/metrics", "/v2", f"/v2/models/{client.model}", f"/v2/models/{client.model}/stats"):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request("GET", path)
        world.watch.see(path, connection.getresponse().read())
        connection.close()


def test_a_store_tells_lines_not_users(world: World, tmp_path: Path) -> None:
    other = World(tmp_path, world.kind, world.program)
    good = {"user": world.user, "item": "a", "action": "click", "surface": "home", "time_ms": 1000 * START_S}
    other.run("sequences", "create", "store.db")
    faults: list[Any] = [
        good | {"time_ms": "now"},
        good | {"action": ""},
        good | {"item": None},
        good | {"user": [world.user]},
        good | {"price": 1},
        [world.user],
    ]
    for fault in faults:
        (tmp_path / "events.jsonl").write_text(json.dumps(good) + "\n" + json.dumps(fault) + "\n")
        other.run("sequences", "append", "store.db", "events.jsonl", code=3)
    (tmp_path / "events.jsonl").write_text(json.dumps(good) + "\n")
    other.run("sequences", "append", "store.db", "events.jsonl")
    other.run("sequences", "stats", "store.db")
    other.run("sequences", "retain", "store.db", "--days", "1")


def test_forgetting_says_no_name_and_no_import_brings_the_user_back(world: World, tmp_path: Path) -> None:
    other = World(tmp_path, world.kind, world.program)
    other.write_log(other.rows())
    other.write_users({})
    other.run(*INIT)
    with create_store(tmp_path / "store.db") as store:
        user_id = user_ids_of(other.planted)[-1]
        event = {"item_id": 1, "action": "click", "surface": "home", "time_ms": 1000 * START_S}
        store.append(user_id, [event])
        store.append(5, [event])
    answer = other.run("data", "forget", "--user", other.planted, "--data", "datasets/private", "--store", "store.db")
    assert "removed 1 event" in answer.out
    if other.kind == "string":
        other.watch.see("the list", (tmp_path / "datasets" / "private" / "forgotten.json").read_bytes())
    (tmp_path / "runs").mkdir()
    other.run("data", "retain", "datasets/private", "--prune")
    # Not even as bytes: the dataset's folder is the only place that may hold users, and this one is gone from it.
    forgotten = tmp_path / "datasets" / "private" / "forgotten.json"
    kept = forgotten.read_bytes()
    forgotten.unlink()
    other.watch.see_folder(tmp_path / "datasets")
    forgotten.write_bytes(kept)
    other.run(*INIT, "--force")
    forgotten.unlink()
    other.watch.see_folder(tmp_path / "datasets")
