"""Datasets on disk that are broken in one way each, and what `data check` says of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tackboard.core.hashing import string_id
from tackboard.core.manifest import MANIFEST, seal, unseal, write_manifest
from tackboard.events.checks.quality import check_dataset
from tackboard.events.dataset import open_dataset
from tackboard.events.privacy.forgetting import FILE_NAME, add_forgotten, user_ids_of

START_MS = 1_700_000_000_000
NUM_USERS, NUM_EVENTS = 20, 6
USER = "somebody"
Damage = Callable[[Path], object]


def rows() -> list[tuple[str, str, str, str, int]]:
    return [
        (f"{USER}-{user}", f"item-{(7 * user + number) % 13}", "click", "home", START_MS + 60_000 * number + user)
        for user in range(NUM_USERS)
        for number in range(NUM_EVENTS)
    ]


@pytest.fixture(scope="module")
def sound(make_dataset: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A snapshot with nothing wrong."""
    users = pa.table(
        {"user": pa.array([f"{USER}-{n}" for n in range(NUM_USERS)]).dictionary_encode(), "age": range(20)}
    )
    items = {
        "item": pa.array([f"item-{n % 13}" for n in range(26)]).dictionary_encode(),
        "birth_ms": [START_MS - 1000] * 26,
        "valid_from_ms": [START_MS] * 13 + [START_MS + 1] * 13,
    }
    folder = make_dataset(
        tmp_path_factory.mktemp("sound"),
        rows(),
        fields={"price": [float(n) for n in range(NUM_USERS * NUM_EVENTS)]},
        item_attributes=pa.table(items),
        user_attributes=users,
        impressions=pa.table(
            {
                "request": [1, 2],
                "position": pa.array([0, 1], pa.int32()),
                "item_id": [string_id("item-1"), string_id("item-2")],
            }
        ),
    )
    return open_dataset(folder).path


@pytest.fixture
def snapshot(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "snapshot"))


def reseal(snapshot: Path) -> None:
    """Makes the manifest vouch for whatever lies there."""
    content = unseal((snapshot / MANIFEST).read_bytes())
    assert content is not None
    extra = {key: content[key] for key in ("name", "source")}
    (snapshot / MANIFEST).unlink()
    write_manifest(snapshot, "dataset", extra)


def truncated(name: str) -> Damage:
    return lambda snapshot: (snapshot / name).write_bytes((snapshot / name).read_bytes()[:-40])


def flipped(name: str, place: int) -> Damage:
    def damage(snapshot: Path) -> None:
        data = bytearray((snapshot / name).read_bytes())
        data[place] ^= 0xFF
        (snapshot / name).write_bytes(data)

    return damage


def written(name: str, content: str | bytes) -> Damage:
    return lambda snapshot: (snapshot / name).write_bytes(content.encode() if isinstance(content, str) else content)


def removed(name: str) -> Damage:
    return lambda snapshot: (snapshot / name).unlink()


def changed(name: str, change: Callable[[pa.Table], pa.Table]) -> Damage:
    """Rewrites a Parquet file."""

    def damage(snapshot: Path) -> None:
        table = change(pq.read_table(snapshot / name))
        pq.write_table(table, snapshot / name, row_group_size=max(table.num_rows, 1))

    return damage


def values(column: str, change: Callable[[np.ndarray], Any]) -> Callable[[pa.Table], pa.Table]:
    """A change of one column of numbers."""

    def apply(table: pa.Table) -> pa.Table:
        array = np.array(table[column].to_numpy())
        place = table.column_names.index(column)
        return table.set_column(place, table.schema.field(column), pa.array(change(array), table[column].type))

    return apply


def put(row: int, value: Any) -> Callable[[np.ndarray], Any]:
    return lambda array: [value if place == row else one for place, one in enumerate(array.tolist())]


def edited(name: str, **changes: Any) -> Damage:
    """Changes keys of a JSON file."""
    return lambda snapshot: (snapshot / name).write_text(
        json.dumps(json.loads((snapshot / name).read_text()) | changes)
    )


BROKEN: list[tuple[str, Damage, str, str, tuple[int, ...]]] = [
    ("truncated Parquet", truncated("events.parquet"), "file-unreadable", "events.parquet", ()),
    ("truncated items", truncated("items.parquet"), "file-unreadable", "items.parquet", ()),
    ("an empty file", written("users.parquet", b""), "file-unreadable", "users.parquet", ()),
    ("no Parquet at all", written("impressions.parquet", b"user,item\n"), "file-unreadable", "impressions.parquet", ()),
    ("flipped footer", flipped("events.parquet", -10), "file-unreadable", "events.parquet", ()),
    ("missing items", removed("items.parquet"), "file-missing", "items.parquet", ()),
    ("missing statistics", removed("statistics.json"), "file-missing", "statistics.json", ()),
    ("a column is missing", changed("events.parquet", lambda table: table.drop_columns(["received_ms"])),
     "column-missing", "events.parquet", ()),
    ("a column of another type", changed("events.parquet", lambda table: table.set_column(4, "time_ms",
     table["time_ms"].cast(pa.float64()))), "column-type", "events.parquet", ()),
    ("times in seconds", changed("events.parquet", values("time_ms", lambda t: t // 1000)), "time-range",
     "events.parquet", (0, 1, 2, 3, 4)),
    ("a time in the future", changed("events.parquet", values("received_ms", put(119, 2**62))), "time-range",
     "events.parquet", (119,)),
    ("a null", changed("events.parquet", values("order", put(3, None))), "null", "events.parquet", (3,)),
    ("another user's id", changed("events.parquet", values("user_id", put(0, -(2**63)))), "id-mismatch",
     "events.parquet", (0,)),
    ("not sorted", changed("events.parquet", lambda table: table.take([1, 0, *range(2, 120)])), "not-sorted",
     "events.parquet", (1,)),
    ("a field that is not finite", changed("events.parquet", values("price", put(5, float("inf")))), "not-finite",
     "events.parquet", (5,)),
    ("an item twice", changed("items.parquet", lambda table: table.take([0, 0, *range(1, 13)])), "duplicate-id",
     "items.parquet", (1,)),
    ("an item that is not listed", changed("items.parquet", lambda table: table.slice(1)), "unknown-item",
     "events.parquet", None),
    ("a user who is not listed", changed("users.parquet", lambda table: table.slice(1)), "unknown-user",
     "events.parquet", (0, 1, 2, 3, 4)),
    ("wrong counts", changed("users.parquet", values("num_events", put(2, 99))), "count-mismatch", "users.parquet",
     (2,)),
    ("versions out of order", changed("item_history.parquet", lambda table: table.take(list(range(25, -1, -1)))),
     "not-sorted", "item_history.parquet", (1, 2, 3, 4, 5)),
    ("an impression of nothing", changed("impressions.parquet", values("item_id", put(1, 5))), "unknown-item",
     "impressions.parquet", (1,)),
    ("a position below 0", changed("impressions.parquet", values("position", put(0, -1))), "position-range",
     "impressions.parquet", (0,)),
    ("statistics that disagree", edited("statistics.json", num_events=7), "statistics", "statistics.json", ()),
    ("statistics that are none", written("statistics.json", "[]"), "file-unreadable", "statistics.json", ()),
    ("a layout that disagrees", edited("layout.json", events=[0, 119]), "layout", "layout.json", ()),
    ("a layout of other users", edited("layout.json", first_users=[5]), "layout", "layout.json", ()),
    ("a layout with a file that is not there", edited("layout.json", requests=[0, 3]), "layout", "layout.json", ()),
    ("a layout of a newer version", edited("layout.json", version=99), "layout", "layout.json", ()),
    ("no layout at all", written("layout.json", "{}"), "layout", "layout.json", ()),
    ("features of other events", lambda snapshot: pq.write_table(pa.table({"a": [1.0]}), snapshot / "features.parquet"),
     "row-count", "features.parquet", ()),
]  # fmt: skip


def test_nothing_is_wrong_with_a_sound_snapshot(sound: Path) -> None:
    report = check_dataset(sound)
    assert report.findings == []
    assert (report.num_events, report.num_users, report.num_items) == (120, 20, 13)
    assert check_dataset(sound.parent).path == sound


@pytest.mark.parametrize(("name", "damage", "rule", "file", "where"), BROKEN, ids=[row[0] for row in BROKEN])
def test_what_is_broken_is_found_although_the_manifest_vouches_for_it(
    snapshot: Path, name: str, damage: Damage, rule: str, file: str, where: tuple[int, ...] | None
) -> None:
    damage(snapshot)
    reseal(snapshot)
    report = check_dataset(snapshot)
    found = [one for one in report.findings if (one.rule, one.file) == (rule, file)]
    assert found, report.findings
    assert report.num_errors
    if where is not None:
        assert found[0].rows == where
    assert USER not in str(report.findings)


def test_every_byte_is_checked_against_the_manifest(snapshot: Path) -> None:
    flipped("events.parquet", 50)(snapshot)
    (snapshot / "statistics.json").write_text((snapshot / "statistics.json").read_text() + "\n")
    (snapshot / "extra.txt").write_text("x")
    removed("item_history.parquet")(snapshot)
    found = {(one.rule, one.file): one.wrong for one in check_dataset(snapshot).findings}
    assert "SHA-256" in found["manifest", "events.parquet"]
    assert "bytes" in found["manifest", "statistics.json"]
    assert "not listed" in found["manifest", "extra.txt"]
    assert ("file-missing", "item_history.parquet") in found


def test_a_manifest_that_is_damaged_missing_or_newer(snapshot: Path) -> None:
    whole = (snapshot / MANIFEST).read_bytes()
    (snapshot / MANIFEST).write_bytes(whole.replace(b'"dataset"', b'"datasex"'))
    (damaged,) = check_dataset(snapshot).findings
    assert damaged.rule == "manifest" and "its own SHA-256" in damaged.wrong
    (snapshot / MANIFEST).unlink()
    (missing,) = check_dataset(snapshot).findings
    assert "never finished" in missing.wrong
    content = unseal(whole)
    assert content is not None
    del content["sha256_of_the_above"]
    (snapshot / MANIFEST).write_bytes(seal(content | {"format_version": 99}))
    (newer,) = check_dataset(snapshot).findings
    assert newer.wrong == "format version 99, allowed: up to 1"
    (snapshot / MANIFEST).write_bytes(seal(content | {"kind": "bundle"}))
    (other,) = check_dataset(snapshot).findings
    assert "is a bundle" in other.wrong


def test_forgotten_users_and_a_damaged_list_are_told(snapshot: Path) -> None:
    add_forgotten(snapshot.parent, user_ids_of(f"{USER}-3"))
    (held,) = check_dataset(snapshot).findings
    assert (held.rule, held.severity, held.count) == ("forgotten-user", "warning", 1)
    (snapshot.parent / FILE_NAME).write_text("{}")
    (damaged,) = check_dataset(snapshot).findings
    assert damaged.rule == "forgotten-list" and damaged.wrong.startswith("forgotten.json is corrupt")


def test_flipped_bytes_never_end_in_anything_but_a_report(snapshot: Path) -> None:
    whole = (snapshot / "events.parquet").read_bytes()
    num_found = 0
    for place in range(4, len(whole), 211):
        (snapshot / "events.parquet").write_bytes(whole)
        flipped("events.parquet", place)(snapshot)
        reseal(snapshot)
        num_found += bool(check_dataset(snapshot).findings)
    assert num_found >= 10
