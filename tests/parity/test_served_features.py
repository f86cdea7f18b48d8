"""What a server computed for live requests is what the batch executor computes from the dataset, bit for bit.

A log with string ids, late events, a field and user attributes becomes a dataset; a model with features of its own is
trained, exported and served by the commands a user types; the client asks as of many moments; the server's log is
replayed. Then the same with clients that forget an event or know one before the log did.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tackboard.core import keyed_random
from tackboard.features.serving_log import open_log, read_key
from tackboard.scoring.client import ScoringClient

ROOT = Path(__file__).resolve().parents[2]
NUM_USERS, NUM_ROWS, START_S = 25, 500, 1_700_000_000
COUNTRIES = ("de", "fr", "")
FEATURES = """\
from tackboard.features.language import Events, FeatureSet, Int, Request, String, User, days, feature, hours, minutes

events, request, user = Events(dwell_ms=Int()), Request(), User(country=String())
clicks = events.where(events.action == "click")
features = FeatureSet(
    "own",
    hour=request.time.hour("Europe/Berlin") / 24,
    clicks=clicks.within(minutes(40)).count().log1p(),
    ratio=(feature("clicks") + 1) / (events.count() + 1),
    dwell=clicks.decayed_sum(events.dwell_ms.fill_missing(0), half_life=hours(1)).log1p(),
    abroad=user.country.fill_missing("") == "fr",
    someone=user.id.bucket_hash(7),
    unread=events.distinct(events.surface),
)
"""
RECIPE = """\
from tackboard.data.loader import DataConfig
from tackboard.models.pinfm import PinFMConfig
from tackboard.models.tables import TableConfig
from tackboard.train.config import RunConfig, TrainingConfig


def recipe() -> RunConfig:
    return RunConfig(
        name="served",
        data=DataConfig(dataset="datasets/served", features="own.py", max_length=12, tokens_per_step=256),
        model=PinFMConfig(
            tables=TableConfig(num_hashes=2, num_rows=64, dim=8), width=16, max_history=12,
            request_features=("hour", "clicks", "ratio", "dwell", "abroad", "someone"),
        ),
        training=TrainingConfig(steps=3, num_threads=1, device="cpu"),
    )
"""


def all_events() -> list[dict[str, Any]]:
    """Events in ms; one in nine is received an hour late."""
    rows = []
    for row in range(NUM_ROWS):
        draw = keyed_random.uniform(51, row, np.arange(6))
        time_ms = 1000 * (START_S + 60 * row)
        rows.append(
            {
                "user": f"user {int(draw[0] * NUM_USERS)}",
                "item": f"thing {int(draw[1] * 30)}",
                "action": "click" if draw[2] < 0.6 else "save",
                "surface": "home" if draw[3] < 0.5 else "search",
                "time_ms": time_ms,
                "received_ms": time_ms + (3_600_000 if draw[4] < 1 / 9 else 500),
                "dwell_ms": None if draw[5] < 0.2 else int(draw[5] * 10_000),
            }
        )
    return rows


EVENTS = all_events()


def country_of(user: str) -> str:
    return COUNTRIES[int(user.split()[1]) % 3]


@pytest.fixture(scope="module")
def folder(tackboard: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a dataset, a bundle and a key."""
    folder = tmp_path_factory.mktemp("served")
    names = list(EVENTS[0])
    lines = [",".join("" if event[name] is None else str(event[name]) for name in names) for event in EVENTS]
    (folder / "log.csv").write_text("\n".join([",".join(names), *lines]) + "\n")
    users = sorted({event["user"] for event in EVENTS})
    (folder / "users.csv").write_text("user,country\n" + "\n".join(f"{u},{country_of(u)}" for u in users) + "\n")
    (folder / "own.py").write_text(FEATURES)
    (folder / "tiny.py").write_text(RECIPE)
    (folder / "log.key").write_text("5a" * 32)
    columns = "--user user --item item --time time_ms --action action --surface surface --received received_ms"
    for arguments in (
        f"init --from log.csv {columns} --field dwell_ms --users users.csv --name served".split(),
        ["train", "tiny.py:recipe"],
        ["export", "runs/latest", "--out", "bundle", "--name", "served"],
    ):
        answer = tackboard(*arguments, cwd=folder)
        assert answer.code == 0, answer.err
    return folder


@pytest.fixture
def serve(folder: Path) -> Iterator[Callable[[str], ScoringClient]]:
    """`serve("log")` starts a server that logs into that folder, and gives a client of it."""
    started: list[subprocess.Popen[str]] = []

    def start(log: str) -> ScoringClient:
        arguments = ["serve", "bundle", "--port", "0", "--log-features", log, "--log-key", "log.key"]
        process = subprocess.Popen(
            [sys.executable, "-m", "tackboard", *arguments, "--log-sample", "1", "--timeout-ms", "20000"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        return ScoringClient(process.stdout.readline().split()[-1])

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=10)


def ask(client: ScoringClient, known: Callable[[dict[str, Any], int], bool]) -> int:
    """Asks as of many moments, for users with the events that the client knows then; returns how often."""
    count = 0
    for user in sorted({event["user"] for event in EVENTS}):
        for row in (0, 171, 333, 600):
            now_ms = 1000 * (START_S + 60 * row) + 250
            mine = [event for event in EVENTS if event["user"] == user and known(event, now_ms)]
            # In any order: the server sorts them.
            mine = mine[::-1] if count % 2 else mine
            fields = ("item", "action", "surface", "time_ms", "dwell_ms")
            country = country_of(user)
            client.score(
                {name: [event[name] for event in mine] for name in fields},
                [f"thing {number}" for number in range(count % 7 + 1)],
                binary=count % 3 > 0,
                request_ms=now_ms,
                user=user,
                attributes={"user_country": [country]} if country else {},
            )
            count += 1
    return count


def received(event: dict[str, Any], now_ms: int) -> bool:
    return event["received_ms"] < now_ms


def replayed(tackboard: Callable[..., Any], folder: Path, log: str, count: int) -> tuple[int, dict[str, Any], str]:
    """Exit code, report and error of `features replay`, once all `count` records are there."""
    key, ends = read_key(folder / "log.key"), time.monotonic() + 20
    while not any((folder / log).iterdir()) or sum(len(list(f.records())) for f in open_log(folder / log, key)) < count:
        assert time.monotonic() < ends
        time.sleep(0.05)
    arguments = ["features", "replay", log, "--data", "datasets/served", "--key", "log.key", "--json"]
    answer = tackboard(*arguments, cwd=folder)
    return answer.code, json.loads(answer.out), answer.err


def differing(report: dict[str, Any]) -> dict[str, set[str]]:
    return {
        name: {reason for reason, count in result["mismatches"].items() if count}
        for name, result in report["features"].items()
        if any(result["mismatches"].values())
    }


def test_an_honest_client_sees_no_difference(
    tackboard: Callable[..., Any], folder: Path, serve: Callable[[str], ScoringClient]
) -> None:
    count = ask(serve("honest"), received)
    code, report, _ = replayed(tackboard, folder, "honest", count)
    assert code == 0
    assert (report["num_requests"], report["num_compared"], report["num_mismatches"]) == (count, count, 0)
    assert set(report["features"]) == {"history", "hour", "clicks", "ratio", "dwell", "abroad", "someone"}
    assert report["num_values"] == 7 * count
    assert report["num_late"] > 0, "some requests fell between an event and its late arrival"
    content = b"".join(path.read_bytes() for path in (folder / "honest").iterdir())
    assert b"user 1" not in content


def test_clients_that_forget_an_event_or_know_it_too_soon_are_found(
    tackboard: Callable[..., Any], folder: Path, serve: Callable[[str], ScoringClient]
) -> None:
    """One click of one user is forgotten; what all other users did is known before the log received it."""
    forgotten = next(event for event in EVENTS[100:] if event["action"] == "click" and event["dwell_ms"])

    def known(event: dict[str, Any], now_ms: int) -> bool:
        if event["user"] == forgotten["user"]:
            return received(event, now_ms) and event is not forgotten
        return bool(event["time_ms"] < now_ms)

    count = ask(serve("dishonest"), known)
    code, report, err = replayed(tackboard, folder, "dishonest", count)
    assert code == 3
    found = differing(report)
    assert {"history", "ratio"} <= set(found) and "hour" not in found
    assert found["history"] == {"skew", "late"}
    assert set().union(*found.values()) == {"skew", "late"}
    assert err.startswith("error: the served values of feature ")
