"""`tackboard data …`: what each command leaves on disk, prints for people and for machines, and refuses."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tackboard.core.hashing import string_id
from tackboard.data.request_layout import read_requests
from tackboard.events.dataset import open_dataset
from tackboard.events.privacy.forgetting import add_forgotten, read_forgotten
from tackboard.events.public import deskdrop
from tackboard.events.public.listing import DATASETS
from tackboard.events.public.publisher import PublishedCounts
from tackboard.events.sequence_store import create_store, open_store
from tackboard.events.synthetic.world_config import WorldConfig
from tackboard.events.synthetic.world_dataset import write_world

Program = Callable[..., Any]
Make = Callable[..., Path]
DAY_MS = 86_400_000
START_MS = 20_000 * DAY_MS
FUTURE_MS = 4_000_000_000_000
SECRET = "anna-1234567"
SMALL = ("--set", "num_users=30", "--set", "num_items=120")
DESKDROP = (
    "timestamp,eventType,contentId,personId,sessionId,userAgent,userRegion,userCountry\n1470000000,VIEW,5,6,7,,,\n"
)


def test_synth_makes_worlds_that_are_shipped_or_ones_own(
    tackboard: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = tackboard("data", "synth", *SMALL)
    assert answer.code == 0, answer.err
    dataset = open_dataset(tmp_path / "datasets" / "demo")
    assert (dataset.num_users, dataset.num_items) == (30, 120)
    assert f"{dataset.num_events:,}" in answer.out
    other = tackboard("data", "synth", *SMALL, "--seed", 2, "--name", "other", "--json").json()["dataset"]
    assert not open_dataset(other).read_events().equals(dataset.read_events())
    (tmp_path / "mine.json").write_text(json.dumps({"num_users": 12, "num_items": 100}))
    assert tackboard("data", "synth", "--world", "mine.json").code == 0
    assert open_dataset(tmp_path / "datasets" / "mine").num_users == 12


def test_import_makes_a_dataset_of_files(tackboard: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = dataclasses.replace(deskdrop.DESKDROP, counts=PublishedCounts(1, 1, 1))
    monkeypatch.setitem(DATASETS, "deskdrop", one)
    file, out = tmp_path / "users_interactions.csv", tmp_path / "datasets"
    file.write_text(DESKDROP)
    answer = tackboard("data", "import", "deskdrop", file, "--out", out)
    assert answer.code == 0, answer.err
    assert {"events                  1", "actions      view"} <= set(answer.out.splitlines())
    found = tackboard("data", "import", "deskdrop", file, "--out", out, "--name", "mine", "--json").json()
    assert Path(found["dataset"]).parent == out / "mine"
    assert found["statistics"]["num_events"] == 1
    assert found["terms"] == "ODbL 1.0, contents DbCL 1.0"


def test_import_lists_what_to_download_and_on_what_terms(tackboard: Program) -> None:
    answer = tackboard("data", "import", "--list")
    assert answer.code == 0
    for public in DATASETS.values():
        assert f"{public.name}: {public.title}" in answer.out.splitlines()
    assert "  files  ml-1m.zip, or its ratings.dat, movies.dat and users.dat" in answer.out.splitlines()
    listed = tackboard("data", "import", "--list", "--json").json()["datasets"]
    assert [entry["name"] for entry in listed] == list(DATASETS)
    assert listed[1]["counts"] == {"users": 6040, "items": 3706, "events": 1_000_209}


@pytest.mark.parametrize(
    ("arguments", "words"), [([], "no dataset was named"), (["deskdrop"], "needed: users_interactions.csv")]
)
def test_import_needs_a_name_and_files(tackboard: Program, arguments: list[str], words: str) -> None:
    answer = tackboard("data", "import", *arguments)
    assert answer.code == 2 and words in answer.err and len(answer.err.splitlines()) <= 3


def test_label_says_what_came_of_it(tackboard: Program, tmp_path: Path) -> None:
    write_world(WorldConfig(num_users=20, num_items=40, num_topics=5, median_events=8.0), tmp_path, "small")
    world = tmp_path / "small"
    answer = tackboard("data", "label", world, "--label", "save=7d", "--label", "click=30m", "--negatives", "2")
    assert answer.code == 0, answer.err
    table = read_requests(open_dataset(world))
    lines = answer.out.splitlines()
    assert lines[0].split() == ["requests", f"{table.num_rows:,}"]
    clicks = sum(value == 1 for values in table["label_click"].to_pylist() for value in values)
    assert lines[2].startswith(f"click        {clicks:>12,}  positive, ")
    assert any("negatives because of --negatives" in line for line in lines)
    assert lines[-1] == f"dataset      {(world / 'latest').resolve()}"
    content = tackboard("data", "label", world, "--label", "save=7d", "--seed", "3", "--json").json()
    assert Path(content["dataset"]) == (world / "latest").resolve()
    labels = [{"action": "save", "window_ms": 604_800_000}]
    assert content["rules"] == {"labels": labels, "shown": None, "negatives": None, "seed": 3}
    label = content["counts"]["labels"]["save"]
    assert label["positives"] + label["negatives"] + label["not_known_yet"] == content["counts"]["candidates"]


def test_from_files_to_labels(tackboard: Program, tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("who,what,when,act,call\nann,lamp,2024-05-01T10:05:00Z,click,r1\n")
    rows = [f"ann,{item},2024-05-01T10:00:00Z,r1,{place}" for place, item in enumerate(("sofa", "lamp"))]
    (tmp_path / "shown.csv").write_text("\n".join(["who,what,when,call,position", *rows]) + "\n")
    options = {"--user": "who", "--item": "what", "--time": "when", "--action": "act", "--request": "call"}
    words = [word for pair in options.items() for word in pair]
    answer = tackboard("init", tmp_path / "log.csv", *words, "--impressions", tmp_path / "shown.csv", "--name", "shop",
                       "--out", tmp_path, "--recipe", tmp_path / "recipe.py")  # fmt: skip
    assert answer.code == 0, answer.err
    assert "impressions             2" in answer.out
    assert tackboard("data", "label", tmp_path / "shop", "--label", "click=10m").code == 0
    row = read_requests(open_dataset(tmp_path / "shop")).to_pylist()[0]
    assert (row["position"], row["label_click"]) == ([0, 1], [None, 1])
    # An item that was only shown is in the catalogue: nothing is wrong with the data.
    assert tackboard("data", "check", tmp_path / "shop").code == 0


def test_warnings_of_check_are_no_failure(tackboard: Program, make_dataset: Make, tmp_path: Path) -> None:
    folder = make_dataset(tmp_path, [(1, 7, "click", "home", START_MS)] * 2, received_ms=[START_MS - 1] * 2)
    answer = tackboard("data", "check", folder)
    assert answer.code == 0
    assert answer.out.splitlines()[0].endswith(": 2 events, 1 user, 1 item")
    assert "warning  events.parquet: 1 row repeats user, item, action and time of an earlier row (row 1)" in answer.out
    assert "warning  events.parquet: 2 rows were received before they happened (row 0, 1)" in answer.out
    assert "0 errors, 2 warnings; rows are counted from 0" in answer.out


def test_errors_of_check_end_with_3(tackboard: Program, make_dataset: Make, tmp_path: Path) -> None:
    sound = make_dataset(tmp_path, [(user, item, "click", "home", START_MS) for user in range(5) for item in range(4)])
    snapshot = Path(shutil.copytree((sound / "latest").resolve(), tmp_path / "broken"))
    (snapshot / "items.parquet").write_bytes(b"")
    answer = tackboard("data", "check", snapshot)
    assert answer.code == 3
    assert "error    items.parquet: " in answer.out
    assert 1 <= len(answer.err.splitlines()) <= 3 and "items.parquet" in answer.err
    result = tackboard("data", "check", snapshot, "--json").json()
    assert result["num_errors"] == 2
    assert result["findings"][0].keys() == {"rule", "severity", "file", "count", "rows", "wrong", "fix"}


def test_stats_are_a_table_and_a_page(tackboard: Program, tiny_dataset: Path, tmp_path: Path) -> None:
    out = tmp_path / "pages" / "tiny.html"
    answer = tackboard("data", "stats", tiny_dataset, "--out", out)
    assert answer.code == 0
    lines = dict(line.split("  ", 1) for line in answer.out.splitlines() if "  " in line)
    assert lines["events"].strip().startswith("137, ")
    assert lines["users"].strip() == "14"
    assert answer.out.endswith(f"page: {out}\n")
    assert out.read_text().startswith("<!doctype html>")
    assert tackboard("data", "stats", tiny_dataset, "--json").json()["page"] is None
    (tmp_path / "file").write_text("")
    answer = tackboard("data", "stats", tiny_dataset, "--out", tmp_path / "file" / "x.html")
    assert answer.code == 2 and f"error: --out {tmp_path / 'file' / 'x.html'}: " in answer.err


def test_drift_shows_distances_and_has_a_threshold(
    tackboard: Program, tiny_dataset: Path, make_dataset: Make, tmp_path: Path
) -> None:
    other = make_dataset(tmp_path, [(1, n % 20, "click", "home", START_MS + n % 6 * DAY_MS) for n in range(24)])
    answer = tackboard("data", "drift", tiny_dataset, other)
    assert answer.code == 0
    assert answer.out.splitlines()[0].split()[:3] == ["column", "JS,", "bits"]
    assert answer.out.endswith("137 old events, 24 new events\n")
    answer = tackboard("data", "drift", tiny_dataset, other, "--threshold", "0.1", "--json")
    assert answer.code == 3
    worst = answer.json()["distances"][0]
    assert worst["jensen_shannon_bits"] > 0.1 and worst["column"] in answer.err
    assert len(answer.err.splitlines()) <= 3
    ranges = ("--old-range", "..2024-10-05", "--new-range", "2024-10-06..")
    answer = tackboard("data", "drift", other, other, *ranges, "--json").json()
    assert (answer["num_old"], answer["num_new"]) == (8, 16)


@pytest.fixture
def two_users(make_dataset: Make, tmp_path: Path) -> Path:
    return make_dataset(tmp_path, [(user, "a", "click", "home", START_MS) for user in (SECRET, "ben", SECRET)])


def test_forget_lists_a_user_and_tells_what_remains(tackboard: Program, two_users: Path) -> None:
    answer = tackboard("data", "forget", "--user", SECRET, "--data", two_users)
    assert answer.code == 0
    assert read_forgotten(two_users).user_ids.tolist() == [string_id(SECRET)]
    snapshot = (two_users / "latest").resolve()
    assert f"{snapshot.name} still holds 1 forgotten user with 2 events" in answer.out
    assert f"tackboard data retain {two_users.resolve()} --prune" in answer.out
    assert SECRET not in answer.out + answer.err


def test_forget_reads_users_from_standard_input(
    tackboard: Program, two_users: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{SECRET}\n\nben\n"))
    answer = tackboard("data", "forget", "--user", "-", "--data", two_users, "--json")
    result = answer.json()
    assert result["num_users"] == result["datasets"][0]["snapshots"][0]["num_users"] == 2
    assert set(read_forgotten(two_users).user_ids.tolist()) == {string_id(SECRET), string_id("ben")}
    assert SECRET not in answer.out


def test_a_store_forgets_at_once(tackboard: Program, two_users: Path, tmp_path: Path) -> None:
    event = {"item_id": 1, "action": "click", "surface": "home", "time_ms": START_MS}
    with create_store(tmp_path / "store.db") as store:
        store.append(string_id(SECRET), [event])
        store.append(42, [event, event | {"time_ms": START_MS + 1}])
        store.append(5, [event])
    answer = tackboard("data", "forget", "--user", SECRET, "--user", "42", "--store", tmp_path / "store.db")
    assert answer.code == 0
    assert answer.out == f"{tmp_path / 'store.db'}: removed 3 events; found 2 of 2 users\n"
    assert answer.err == ""
    with open_store(tmp_path / "store.db") as store:
        assert [store.read(user).num_events for user in (string_id(SECRET), 42, 5)] == [0, 0, 1]
    assert len(read_forgotten(two_users)) == 0
    missing = tackboard("data", "forget", "--user", SECRET, "--data", two_users, "--store", tmp_path / "nothing.db")
    assert missing.code == 2 and SECRET not in missing.err
    assert len(read_forgotten(two_users)) == 1, "the list comes first"


def test_forget_tells_of_a_user_who_occurs_nowhere(tackboard: Program, two_users: Path, tmp_path: Path) -> None:
    create_store(tmp_path / "store.db").close()
    names = ["--user", SECRET, "--user", f" {SECRET}", "--user", "bne"]
    places = ["--data", two_users, "--store", tmp_path / "store.db"]
    answer = tackboard("data", "forget", *names, *places)
    assert answer.code == 0
    assert (
        f"{two_users.resolve()}: 2 users will be left out of new snapshots; 1 found in existing snapshots\n"
        in answer.out
    )
    assert "removed 0 events; found 0 of 2 users" in answer.out
    assert answer.err == "warning: 1 of 2 users were not found; check whether the ids are right\n"
    result = tackboard("data", "forget", *names, *places, "--json").json()
    assert (result["num_users"], result["num_found"]) == (2, 1)
    assert (result["datasets"][0]["num_found"], result["stores"][0]["num_found"]) == (1, 0)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--user", "a"], 2, "no dataset and no store was named"),
        (["--user", " ", "--data", "{dataset}"], 2, "no user was named"),
        (["--user", SECRET, "--data", "nowhere"], 3, "nowhere is not a dataset's folder"),
    ],
)
def test_forget_needs_users_and_places(
    tackboard: Program, two_users: Path, arguments: list[str], code: int, says: str
) -> None:
    answer = tackboard("data", "forget", *(word.format(dataset=two_users) for word in arguments))
    assert answer.code == code and says in answer.err and SECRET not in answer.err
    assert len(read_forgotten(two_users)) == 0


@pytest.fixture
def ten_days(make_dataset: Make, tmp_path: Path) -> Path:
    rows = [(user, 7, "click", "home", START_MS + day * DAY_MS) for user in (1, 2, 3) for day in range(10)]
    return make_dataset(tmp_path, rows)


def test_retain_drops_old_events_and_then_older_snapshots(tackboard: Program, ten_days: Path, tmp_path: Path) -> None:
    old = open_dataset(ten_days).path
    add_forgotten(ten_days, [2])
    answer = tackboard("data", "retain", ten_days, "--days", "3.5")
    assert answer.code == 0
    new = open_dataset(ten_days)
    assert answer.out == (
        "left out  22 events and 1 user; forgotten: 1 user\n"
        "          older snapshots still hold these events; --prune removes snapshots that no unfinished run needs\n"
        f"dataset   {new.path}\n"
    )
    assert (new.num_events, new.num_users) == (8, 2)
    (tmp_path / "runs").mkdir()
    result = tackboard("data", "retain", ten_days, "--prune", "--runs", tmp_path / "runs", "--json").json()
    assert (result["removed"], result["kept"], result["num_events_removed"]) == ([old.name], {}, 0)
    assert Path(result["path"]) == new.path and not old.exists()


def test_retain_writes_nothing_where_nobody_knows_what_may_be_removed(
    tackboard: Program, ten_days: Path, tmp_path: Path
) -> None:
    old = open_dataset(ten_days).path
    answer = tackboard("data", "retain", ten_days, "--days", "2", "--prune", "--runs", tmp_path / "nowhere")
    assert answer.code == 2 and "is not a folder of runs" in answer.err
    assert open_dataset(ten_days).path == old


def test_a_wrong_clock_costs_nothing(tackboard: Program, make_dataset: Make, tmp_path: Path) -> None:
    rows = [(1, 7, "click", "home", START_MS + day * DAY_MS) for day in range(10)]
    dataset = make_dataset(tmp_path, [*rows, (2, 7, "click", "home", FUTURE_MS)])
    answer = tackboard("data", "retain", dataset, "--days", "4")
    assert answer.code == 0
    assert "left out  5 events and 0 users" in answer.out
    assert "kept      1 event dated in the future; `data check` names the rows" in answer.out
    times = open_dataset(dataset).read_events(["time_ms"])["time_ms"].to_pylist()
    assert times == [*(START_MS + day * DAY_MS for day in range(5, 10)), FUTURE_MS]
    assert tackboard("data", "retain", dataset, "--days", "4", "--json").json()["num_future"] == 1
    dataset = make_dataset(tmp_path, [(2, 7, "click", "home", FUTURE_MS)], name="future")
    answer = tackboard("data", "retain", dataset, "--days", "4")
    assert answer.code == 3 and "every time_ms" in answer.err


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A world of 30 users."""
    write_world(WorldConfig(num_users=30, num_items=120), tmp_path, "small")
    return tmp_path / "small"


def test_attributes_says_what_it_added_and_what_the_vectors_saw(tackboard: Program, small: Path) -> None:
    command = ("data", "attributes", small, "--first-event", "first_event_ms", "--vectors", "near", "--width", 4)
    answer = tackboard(*command, "--group", "topic")
    assert answer.code == 0, answer.err
    lines = answer.out.splitlines()
    assert lines[0] == "first_event_ms: the time of each item's first event"
    assert lines[1] == "near: vectors of width 4, from the whole log (give --until to keep later events out)"
    dataset = open_dataset(small)
    assert {"first_event_ms", "near"} <= set(dataset.read_items().column_names)
    events = dataset.read_events(["time_ms", "received_ms"])
    middle = sorted(events["time_ms"].to_pylist())[events.num_rows // 2]
    told = tackboard(*command, "--until", middle, "--action", "click", "--window", 2, "--seed", 3, "--json").json()
    made = told["attributes"]["near"]
    assert (made["until_ms"], made["actions"], made["window"], made["seed"]) == (middle, ["click"], 2, 3)
    assert made["counts"]["events"] < events.num_rows / 2
    assert made["counts"]["with_neighbours"] + made["counts"]["zero"] == dataset.num_items
    bad = tackboard("data", "attributes", small, "--vectors", "near", "--until", "soon")
    assert (bad.code, bad.err.splitlines()[0]) == (2, "error: --until 'soon' is not a time")
    few = tackboard("data", "attributes", small, "--vectors", "few", "--max-pairs", 5, "--json").json()
    assert few["attributes"]["few"]["counts"]["pairs_dropped"] > 0


def test_attributes_says_how_often_live_counts_change(tackboard: Program, small: Path) -> None:
    command = ("data", "attributes", small, "--live-counts", "reads_1h=1h", "--live-counts", "reads_24h=24h")
    told = tackboard(*command, "--action", "click", "--step", "30m", "--json").json()
    made = told["attributes"]["reads_24h"]
    assert (made["window_ms"], made["step_ms"], made["actions"]) == (86_400_000, 1_800_000, ["click"])
    answer = tackboard(*command)
    assert answer.code == 0, answer.err
    lines = answer.out.splitlines()
    assert lines[0].startswith("reads_1h: ") and lines[0].endswith(" changes, at multiples of 300 s")
    assert lines[1].endswith(" changes, at multiples of 7,200 s")
    assert lines[2].startswith("live counts ") and lines[2].endswith(" kB  live_counts.parquet")
    bad = tackboard("data", "attributes", small, "--live-counts", "reads=24")
    assert bad.code == 2 and len(bad.err.splitlines()) == 3
    assert bad.err.startswith("error: cannot read the window '24' of --live-counts reads=24\n")
    assert "live counts never look ahead" in " ".join(tackboard("data", "attributes", "--help").out.split())


def test_pseudo_requests_counts_what_it_made(tackboard: Program, small: Path) -> None:
    answer = tackboard("data", "pseudo-requests", small, "--candidates", 60, "--per-user", 2)
    assert answer.code == 0, answer.err
    num_requests = read_requests(open_dataset(small)).num_rows
    lines = answer.out.splitlines()
    assert lines[0] == f"requests     {num_requests:>12,}"
    assert any(line.startswith("short ") and "with fewer than 60 other items" in line for line in lines)
    options = ("--from", "all", "--since", "2025-01-10", "--action", "click", "--label", "read", "--seed", 4)
    told = tackboard("data", "pseudo-requests", small, "--candidates", 3, *options, "--json").json()
    rules = {"candidates": 3, "pool": "all", "per_user": None, "since_ms": 1_736_467_200_000, "label": "read"}
    assert told["rules"] == rules | {"actions": ["click"], "seed": 4, "repeats": False, "also": []}
    table = read_requests(open_dataset(small))
    assert told["counts"]["requests"] == table.num_rows and told["counts"]["requests_short"] == 0
    assert min(table["time_ms"].to_pylist()) >= 1_736_467_200_000 and "label_read" in table.column_names
    assert told["counts"]["repeats_left_out"] > 0 and told["counts"]["repeats_kept"] == 0
    kept = tackboard("data", "pseudo-requests", small, "--candidates", 3, *options, "--repeats")
    assert kept.code == 0, kept.err
    (line,) = [line for line in kept.out.splitlines() if line.startswith("repeats ")]
    assert f"warning: in {line.split()[1]} requests the user had engaged with the true item before" in kept.err
    assert int(line.split()[1]) == told["counts"]["repeats_left_out"]
    nothing = tackboard("data", "pseudo-requests", small)
    assert (nothing.code, nothing.err.splitlines()[0]) == (2, "error: no events were chosen")
