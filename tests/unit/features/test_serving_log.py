"""The log of served features: what is written, what is never written, what is dropped, and what a reader refuses."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tackboard.core.config import to_dict
from tackboard.core.errors import ConfigError, CorruptFileError, DataError, StorageError, UsageError
from tackboard.features import serving_log
from tackboard.features.column import Column, differing_rows
from tackboard.features.language import Context, Events, FeatureSet, Float, Item, String, User, cross, feature, sequence
from tackboard.features.online_executor import OnlineExecutor
from tackboard.features.serving_log import (
    FeatureLog,
    FeatureLogConfig,
    LoggedRequest,
    column_digest,
    open_log,
    private_features,
    read_key,
    user_digest,
)
from tackboard.features.types import FLOAT, ID, STRING, TIME

KEY = bytes(range(32))
OTHER_KEY = bytes(32)
USER = 7_777_777_777_777
item, user, events, context = Item(price=Float()), User(), Events(), Context(device=String())
FEATURES = FeatureSet(
    "home",
    price=item.price,
    count=events.count(),
    seen=events.matching(events.item, item.id).count(),
    device=context.device,
    history=sequence(item=events.collect(events.item), action=events.collect(events.action)),
    me=user.id,
    pair=cross(user.id, item.id),
    derived=feature("me").bucket_hash(100),
)


def computed(features: FeatureSet = FEATURES) -> dict[str, Any]:
    """One request as the server knows it: arguments of `offer`."""
    items = np.array([5, 6, 7])
    said = {"device": Column.of(STRING, ["phone"])}
    values = OnlineExecutor(features.plan).compute(
        history={
            "time": Column.of(TIME, [1000, 2000]),
            "item": Column.of(ID, [5, 9]),
            "action": Column.of(STRING, ["click", "é"]),
        },
        request_ms=3000,
        user_id=USER,
        item_ids=items,
        item={"price": Column.of(FLOAT, [float("nan"), None, -0.0])},
        context=said,
    )
    return {"user_id": USER, "request_ms": 3000, "item_ids": items, "features": values, "context": said}


def read(folder: Path, key: bytes = KEY) -> list[LoggedRequest]:
    return [record for file in open_log(folder, key) for record in file.records()]


def write(folder: Path, count: int = 1, **config: Any) -> FeatureLog:
    """A log of `count` requests, closed."""
    log = FeatureLog(folder, FEATURES, KEY, FeatureLogConfig(**config))
    request = computed()
    for number in range(count):
        log.offer(**request | {"request_ms": 3000 + number})
        wait_for(lambda: not log._line)
    assert log.close()
    return log


def wait_for(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.001)


def lines_of(folder: Path) -> list[bytes]:
    (path,) = folder.glob("features-*.jsonl")
    return path.read_bytes().splitlines(keepends=True)


def test_what_was_served_is_read_back_bit_for_bit(tmp_path: Path) -> None:
    request = computed()
    log = write(tmp_path / "log")
    (record,) = read(tmp_path / "log")
    assert (log.num_logged, log.num_dropped) == (1, 0)
    assert record.request_ms == 3000
    assert record.user == user_digest(KEY, USER)
    assert record.item_ids.tolist() == [5, 6, 7]
    assert record.context["device"].to_pylist() == ["phone"]
    assert set(record.features) == {"price", "count", "seen", "device", "history"}
    for name, column in record.features.items():
        assert not len(differing_rows(column, request["features"][name])), name
    assert np.signbit(record.features["price"].values[2])
    (file,) = open_log(tmp_path / "log", KEY)
    assert file.features is not None and file.features.hash == FEATURES.hash
    (single,) = open_log(file.path, KEY)
    assert len(list(single.records())) == 1


def test_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    write(tmp_path / "log")
    (path,) = (tmp_path / "log").iterdir()
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_the_users_id_is_nowhere_in_the_file(tmp_path: Path) -> None:
    """Neither as a number nor in the base64 of an array: features of the id are digests."""
    assert private_features(FEATURES.plan) == {"me", "pair", "derived"}
    write(tmp_path)
    content = b"".join(lines_of(tmp_path))
    stored = json.loads(lines_of(tmp_path)[1])
    assert str(USER).encode() not in content
    assert all(set(stored["features"][name]) == {"digest"} for name in ("me", "pair", "derived"))
    (record,) = read(tmp_path)
    for name in ("me", "pair", "derived"):
        assert record.digests[name] == column_digest(KEY, computed()["features"][name])
        assert record.digests[name] != column_digest(OTHER_KEY, computed()["features"][name])


def test_hashes_of_users_depend_on_the_key_and_know_every_id() -> None:
    ids = [0, 1, -1, -(1 << 63), (1 << 63) - 1]
    digests = [user_digest(key, user_id) for key in (KEY, OTHER_KEY) for user_id in ids]
    assert len(set(digests)) == len(digests)
    assert {len(digest) for digest in digests} == {16}


def test_the_sample_is_a_share_and_the_same_everywhere(tmp_path: Path) -> None:
    log = FeatureLog(tmp_path, FEATURES, KEY, FeatureLogConfig(sample=0.25))
    again = FeatureLog(tmp_path, FEATURES, KEY, FeatureLogConfig(sample=0.25))
    drawn = [log.is_sampled(user_id, 1000 + user_id) for user_id in range(4000)]
    assert 850 < sum(drawn) < 1150
    assert drawn == [again.is_sampled(user_id, 1000 + user_id) for user_id in range(4000)]
    for sample, expected in ((0.0, 0), (1.0, 50)):
        all_or_none = FeatureLog(tmp_path, FEATURES, KEY, FeatureLogConfig(sample=sample))
        assert sum(all_or_none.is_sampled(user_id, 5) for user_id in range(50)) == expected
        all_or_none.close()
    chosen = next(user_id for user_id in range(100) if not log.is_sampled(user_id, 3000))
    assert not log.offer(**computed() | {"user_id": chosen})
    assert log.close()
    assert again.close()
    assert (log.num_logged, log.num_dropped) == (0, 0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("config", "taken"),
    [({"max_waiting": 2}, [True, True, False, False, False]), ({"max_waiting_bytes": 1}, [True, False, False])],
)
def test_a_full_queue_drops_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, int], taken: list[bool]
) -> None:
    gate, entered = threading.Event(), threading.Event()
    write_all = FeatureLog._write_all

    def slow(self: FeatureLog, line: bytes) -> None:
        entered.set()
        assert gate.wait(20)
        write_all(self, line)

    monkeypatch.setattr(FeatureLog, "_write_all", slow)
    log = FeatureLog(tmp_path, FEATURES, KEY, FeatureLogConfig(**config))
    request = computed()
    assert log.offer(**request)
    assert entered.wait(20)
    assert [log.offer(**request) for _ in taken] == taken
    assert log.num_dropped == taken.count(False)
    gate.set()
    assert log.close()
    assert len(read(tmp_path)) == log.num_logged == 1 + taken.count(True)
    assert not log.offer(**request)


def test_arrays_are_the_logs_own(tmp_path: Path) -> None:
    """A view of a request's body must not keep it, and what changes after the offer must not change the log."""
    request = computed()
    body = np.array([1.0, 2.0, 3.0])
    request["features"]["price"] = Column(FLOAT, body[:])
    items = request["item_ids"]
    log = FeatureLog(tmp_path, FEATURES, KEY)
    log.offer(**request)
    body[:], items[:] = 9.0, 9
    assert log.close()
    (record,) = read(tmp_path)
    assert record.features["price"].to_pylist() == [1.0, 2.0, 3.0]
    assert record.item_ids.tolist() == [5, 6, 7]


def test_a_feature_that_was_not_computed_costs_a_record_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = FeatureLog(tmp_path, FEATURES, KEY)
    assert not log.offer(**computed() | {"features": {}})
    assert log.num_dropped == 1
    assert "'price' was not computed" in capsys.readouterr().err
    assert log.offer(**computed())
    assert log.close()
    assert log.num_logged == 1


def test_files_are_rotated_by_size(tmp_path: Path) -> None:
    write(tmp_path, 5, max_file_bytes=1)
    files = open_log(tmp_path, KEY)
    assert [len(list(file.records())) for file in files] == [1] * 5
    assert [record.request_ms for record in read(tmp_path)] == [3000, 3001, 3002, 3003, 3004]


def test_the_folder_has_a_size_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = write(tmp_path, 6, max_file_bytes=1, max_total_bytes=20_000)
    assert log.num_logged + log.num_dropped == 6
    assert 0 < log.num_dropped < 6
    header = len(next(tmp_path.iterdir()).read_bytes().splitlines()[0])
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 20_000 + header
    err = capsys.readouterr().err
    assert err.count("warning: features are not logged") == 1
    assert "20,000 bytes" in err
    again = write(tmp_path, 1, max_total_bytes=20_000)
    assert (again.num_logged, again.num_dropped) == (0, 1)


def test_room_that_was_made_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_log, "RESCAN_S", 0.0)
    (tmp_path / "features-old.jsonl").write_bytes(b"x" * 50_000)
    log = FeatureLog(tmp_path, FEATURES, KEY, FeatureLogConfig(max_total_bytes=40_000))
    log.offer(**computed())
    wait_for(lambda: log.num_dropped == 1)
    (tmp_path / "features-old.jsonl").unlink()
    log.offer(**computed())
    assert log.close()
    assert log.num_logged == 1


def test_a_full_disk_is_said_once_and_survived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A disk that takes half a line and then nothing: the half is cut off, later lines are whole."""
    real = os.write
    state = {"full": False, "half": False}

    def fake(descriptor: int, data: Any) -> int:
        if threading.current_thread().name != "tackboard-feature-log" or not state["full"]:
            return real(descriptor, data)
        if not state["half"]:
            state["half"] = True
            return real(descriptor, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", fake)
    log = FeatureLog(tmp_path, FEATURES, KEY)
    request = computed()
    log.offer(**request | {"request_ms": 1})
    wait_for(lambda: log.num_logged == 1)
    state["full"] = True
    for number in range(3):
        log.offer(**request)
        wait_for(lambda number=number: log.num_dropped == number + 1)
        state["half"] = False
    state["full"] = False
    log.offer(**request | {"request_ms": 2})
    assert log.close()
    (file,) = open_log(tmp_path, KEY)
    assert [record.request_ms for record in file.records()] == [1, 2]
    assert not file.is_torn
    assert (log.num_logged, log.num_dropped) == (2, 3)
    assert capsys.readouterr().err.count("No space left on device") == 1


def test_a_disk_that_was_full_from_the_start_leaves_no_empty_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fake(descriptor: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    log = FeatureLog(tmp_path, FEATURES, KEY)
    monkeypatch.setattr(os, "write", fake)
    for _ in range(3):
        log.offer(**computed())
    assert log.close()
    monkeypatch.undo()
    assert log.num_dropped == 3
    assert not list(tmp_path.iterdir())


def test_a_line_that_cannot_be_taken_back_is_left_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path)
    log = FeatureLog(tmp_path, FEATURES, KEY)
    log.offer(**computed())
    wait_for(lambda: log.num_logged == 1)

    def fail(*arguments: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "write", fail)
    monkeypatch.setattr(os, "ftruncate", fail)
    log.offer(**computed())
    wait_for(lambda: log.num_dropped == 1)
    monkeypatch.undo()
    log.offer(**computed())
    assert log.close()
    assert [len(list(file.records())) for file in open_log(tmp_path, KEY)] == [1, 1, 1]


def test_what_is_written_is_flushed_regularly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = threading.Event()
    real = os.fdatasync

    def sync(descriptor: int) -> None:
        real(descriptor)
        synced.set()

    monkeypatch.setattr(os, "fdatasync", sync)
    log = FeatureLog(tmp_path, FEATURES, KEY, FeatureLogConfig(flush_every_s=0.01))
    log.offer(**computed())
    assert synced.wait(20)
    assert len(read(tmp_path)) == 1
    assert log.close()


@pytest.mark.parametrize("line", ["header", "record"])
def test_every_torn_end_is_readable(tmp_path: Path, line: str) -> None:
    write(tmp_path, 2)
    lines = lines_of(tmp_path)
    (path,) = tmp_path.iterdir()
    whole = b"" if line == "header" else b"".join(lines[:-1])
    last = lines[0] if line == "header" else lines[-1]
    for length in [*range(0, len(last), 97), len(last) - 1]:
        path.write_bytes(whole + last[:length])
        (file,) = open_log(tmp_path, KEY)
        assert len(list(file.records())) == (0 if line == "header" else 1)
        assert file.is_torn == (line == "header" or length > 0)


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    write(tmp_path, 2)
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    for place in range(0, len(content) - 1, 83):
        damaged = bytearray(content)
        damaged[place] ^= 1
        path.write_bytes(bytes(damaged))
        with pytest.raises(DataError) as caught:
            read(tmp_path)
        assert path.name in str(caught.value)


def test_headers_that_are_refused(tmp_path: Path) -> None:
    write(tmp_path)
    (path,) = tmp_path.iterdir()
    lines = lines_of(tmp_path)
    header = json.loads(lines[0])
    header.pop("seal")
    for line, message in (
        (lines[0].replace(b'"sample":1.0', b'"sample":0.1'), "header is damaged"),
        # Whoever has the key can seal another header; its feature set is checked against its own hash all the same.
        (serving_log._sealed(KEY, header | {"hash": "0" * 64}), "another feature set"),
        (lines[0].replace(b'"format_version":1', b'"format_version":2', 1), "log format version 2"),
        (serving_log._sealed(OTHER_KEY, header | {"key": "0" * 32}), "another key"),
        (b"{}\n", "is not a log of features"),
        (b"[]\n", "is not a JSON object"),
        (b"no json\n", "is not a JSON object"),
        (b"\xff\xfe\n", "is not a JSON object"),
    ):
        path.write_bytes(line + lines[1])
        with pytest.raises(DataError, match=message):
            open_log(tmp_path, KEY)


def test_records_that_do_not_fit_the_header_are_refused(tmp_path: Path) -> None:
    write(tmp_path)
    (path,) = tmp_path.iterdir()
    lines = lines_of(tmp_path)
    record = json.loads(lines[1])
    record.pop("seal")
    changes: list[dict[str, Any]] = [
        {"time": "soon"},
        {"user": 3},
        {"items": None},
        {"context": {"other": {}}},
        {"features": {}},
        {"features": record["features"] | {"price": {}}},
        {"features": record["features"] | {"me": {}}},
    ]
    for change in changes:
        path.write_bytes(lines[0] + serving_log._sealed(KEY, record | change))
        with pytest.raises(CorruptFileError, match="line 2"):
            read(tmp_path)


def test_where_there_is_no_log(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "absent"):
        with pytest.raises(UsageError, match="holds no log of features"):
            open_log(place, KEY)


def test_keys_are_64_hexadecimal_digits(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(KEY.hex() + "\n")
    assert read_key(path) == KEY
    for text in ("", "ab", KEY.hex()[:-1], "g" * 64, KEY.hex() * 2, "é" * 64):
        path.write_text(text)
        with pytest.raises(UsageError, match="holds no key") as caught:
            read_key(path)
        assert "token_hex" in caught.value.fix
    with pytest.raises(UsageError, match="cannot be read"):
        read_key(tmp_path / "absent")


def test_a_folder_that_cannot_be_written_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="log of features"):
        FeatureLog(tmp_path / "file" / "log", FEATURES, KEY)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(UsageError, match="cannot be written"):
        FeatureLog(tmp_path / "log", FEATURES, KEY)


@pytest.mark.parametrize(
    ("field", "value"),
    [("sample", -0.1), ("sample", 1.1), ("max_waiting", 0), ("max_total_bytes", 0), ("flush_every_s", 0.0)],
)
def test_settings_out_of_range(field: str, value: float) -> None:
    assert field in to_dict(FeatureLogConfig())
    with pytest.raises(ConfigError, match=field):
        FeatureLogConfig(**{field: value})  # type: ignore[arg-type]
