"""Hours and weekdays against Python's zoneinfo, which reads the same files in its own way."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.resources
import re
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tackboard.core.errors import DataError, UsageError
from tackboard.features.column import Column
from tackboard.features.kernels import clock
from tackboard.features.operators import REGISTRY, TypeClash
from tackboard.features.types import INT, TIME

ZONES = [
    "UTC",
    "Europe/Berlin",
    "Europe/London",
    "Europe/Dublin",
    "Europe/Lisbon",
    "Europe/Moscow",
    "America/New_York",
    "America/St_Johns",
    "America/Sao_Paulo",
    "America/Nuuk",
    "America/Santiago",
    "Asia/Kathmandu",
    "Asia/Kolkata",
    "Asia/Gaza",
    "Asia/Tehran",
    "Africa/Casablanca",
    "Africa/Cairo",
    "Australia/Lord_Howe",
    "Pacific/Apia",
    "Pacific/Chatham",
    "Antarctica/Troll",
]
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
FIRST_MS = (datetime(1, 1, 3, tzinfo=UTC) - EPOCH) // timedelta(milliseconds=1)
LAST_MS = (datetime(9999, 12, 29, tzinfo=UTC) - EPOCH) // timedelta(milliseconds=1)
INT64 = st.integers(-(2**63), 2**63 - 1)


@functools.cache
def reference(name: str) -> ZoneInfo:
    path = importlib.resources.files("tzdata").joinpath("zoneinfo", *name.split("/"))
    with path.open("rb") as file:
        return ZoneInfo.from_file(file)


def local_times(name: str, times_ms: list[int]) -> list[datetime]:
    zone = reference(name)
    return [(EPOCH + timedelta(milliseconds=ms)).astimezone(zone) for ms in times_ms]


def compute(name: str, column: Column, zone: str) -> list[Any]:
    operator = REGISTRY[name]
    assert operator.rule((column.type,), {"zone": zone}) == INT.with_nullable(column.type.nullable)
    whole: Column = operator.kernel(column, zone=zone)
    assert whole.type == INT
    assert whole.values.dtype == np.int64
    return whole.to_pylist()


def check(zone: str, times_ms: list[int], shift: int = 0) -> None:
    column = Column.of(TIME, times_ms)
    wanted = local_times(zone, [ms + shift for ms in times_ms])
    assert compute("hour", column, zone) == [time.hour for time in wanted]
    assert compute("weekday", column, zone) == [time.weekday() for time in wanted]
    assert compute("minute_of_day", column, zone) == [time.hour * 60 + time.minute for time in wanted]


@pytest.mark.parametrize("zone", ZONES)
def test_hours_weekdays_and_minutes(zone: str) -> None:
    """Around every transition, at random, and every 91 hours, so that a transition which our table lacks is found."""
    transitions = clock.zone(zone).transitions_s.tolist()
    around = [1000 * second + step for second in transitions for step in (-1001, -1000, -1, 0, 1, 999, 3_600_000)]
    random = np.random.default_rng(7)
    check(
        zone,
        [
            *(ms for ms in around if FIRST_MS < ms < LAST_MS),
            *range(-2_900_000_000_000, 4_200_000_000_000, 91 * 3_600_000),
            *random.integers(FIRST_MS, LAST_MS, size=500).tolist(),
            *random.integers(-(2**41), 2**42, size=500).tolist(),
        ],
    )


def test_all_zones_of_the_database() -> None:
    random = np.random.default_rng(8)
    for zone in sorted(clock.zone_names()):
        assert len(np.unique(clock.zone(zone).transitions_s)) == len(clock.zone(zone).transitions_s)
        last = clock.zone(zone).cycle_start_s * 1000
        near_the_end = random.integers(last - 3 * 366 * 86_400_000, last + 2 * 366 * 86_400_000, size=20)
        times = [*random.integers(-(2**42), 2**43, size=30).tolist(), *near_the_end.tolist(), FIRST_MS, LAST_MS]
        wanted = [time.hour * 60 + time.minute for time in local_times(zone, times)]
        assert REGISTRY["minute_of_day"].kernel(Column.of(TIME, times), zone=zone).to_pylist() == wanted, zone


@settings(max_examples=200, deadline=None)
@given(INT64 | st.integers(LAST_MS, 2**60), st.sampled_from(ZONES))
def test_every_time_of_64_bits_has_an_hour(ms: int, zone: str) -> None:
    """Outside Python's years the calendar is followed 400 years at a time, and the first offset before the first."""
    cycle = clock.CYCLE_S * 1000
    shift = 0
    if ms >= LAST_MS:
        shift = -((ms - LAST_MS) // cycle + 1) * cycle
    elif ms <= FIRST_MS:
        shift = ((FIRST_MS - ms) // cycle + 1) * cycle
    check(zone, [ms], shift)


@settings(max_examples=25, deadline=None)
@given(data=st.data(), zone=st.sampled_from(ZONES))
def test_missing_times_and_rows_alone(check_kernel: Callable[..., None], data: st.DataObject, zone: str) -> None:
    def twin(ms: int) -> int:
        return int(clock.zone(zone).local_seconds(np.array([ms, ms]))[0]) // 3600 % 24

    check_kernel(data, "hour", ["time"], twin, zone=zone)
    since = lambda a, b: float((a - b + 2**63) % 2**64 - 2**63) / 1000.0  # noqa: E731
    check_kernel(data, "seconds_since", ["time", "time"], since)


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("Europe/Berln", "Europe/Berlin"),
        ("europe/berlin", "Europe/Berlin"),
        ("New York", "America/New_York"),
        ("Kathmandu", "Asia/Kathmandu"),
        ("utc", "UTC"),
        ("../../../etc/passwd", ""),
        ("", ""),
        ("é" * 10_000, ""),
    ],
)
def test_an_unknown_zone_is_refused_with_a_suggestion(wrong: str, meant: str) -> None:
    for name in ("hour", "weekday", "minute_of_day"):
        with pytest.raises(TypeClash) as clash:
            REGISTRY[name].rule((TIME,), {"zone": wrong})
        assert len(clash.value.got) < 200
        assert f"{meant}" in clash.value.fix


def test_wrong_types_and_parameters() -> None:
    for params in ({}, {"zone": None}, {"zone": 3}, {"zone": ["UTC"]}):
        with pytest.raises(TypeClash, match="time zone"):
            REGISTRY["hour"].rule((TIME,), params)
    with pytest.raises(TypeClash):
        REGISTRY["hour"].rule((INT,), {"zone": "UTC"})
    with pytest.raises(TypeClash):
        REGISTRY["seconds_since"].rule((TIME, INT), {})


def rule_only(footer: str) -> bytes:
    """A TZif file of one kind, no transitions and `footer`."""
    block = clock._HEADER.pack(b"TZif", b"2", 0, 0, 0, 0, 1, 4) + bytes(6) + b"AAA\0"
    return block + block + b"\n" + footer.encode() + b"\n"


@pytest.mark.parametrize(
    "footer", ["AAA3BBB,J60/0,J300", "AAA-3:30:15BBB-5,J61/-25,J299/100:30", "<-03>3<-02>,M3.2.0,M11.1.0", "AAA8"]
)
def test_every_form_of_rule(footer: str, tmp_path: Any) -> None:
    file = tmp_path / "zone"
    file.write_bytes(rule_only(footer))
    with file.open("rb") as opened:
        zone = ZoneInfo.from_file(opened)
    ours = clock.parse_zone(rule_only(footer))
    if footer == "AAA8":
        assert ours.transitions_s.tolist() == []
        return
    times = list(range(0, 4 * 10**9, 97 * 3600 + 13))
    wanted = [second + zone.utcoffset(datetime.fromtimestamp(second, zone)).total_seconds() for second in times]
    assert ours.local_seconds(np.array(times) * 1000).tolist() == wanted


@pytest.mark.parametrize(
    ("date", "common", "leap"),
    [
        ("0", "2023-01-01", "2024-01-01"),
        ("59", "2023-03-01", "2024-02-29"),
        ("J59", "2023-02-28", "2024-02-28"),
        ("J60", "2023-03-01", "2024-03-01"),
        ("J365", "2023-12-31", "2024-12-31"),
        ("M2.5.3", "2023-02-22", "2024-02-28"),
        ("M2.5.4", "2023-02-23", "2024-02-29"),
        ("M12.1.0", "2023-12-03", "2024-12-01"),
    ],
)
def test_dates_of_rules(date: str, common: str, leap: str) -> None:
    """By hand: Python's zoneinfo has the forms without M a day off at the ends of February."""
    assert str(np.datetime64(clock._day(2023, date), "D")) == common
    assert str(np.datetime64(clock._day(2024, date), "D")) == leap


@pytest.mark.parametrize(
    "data", [b"", b"TZif", b"PK" + bytes(100), b"TZif2" + bytes(39), rule_only("nonsense"), rule_only("A")]
)
def test_a_broken_file_is_an_error_of_ours(data: bytes) -> None:
    with pytest.raises(DataError):
        clock.parse_zone(data)


def test_the_package_is_read_when_a_zone_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert clock.database_version() == importlib.metadata.version("tzdata")
    monkeypatch.setitem(sys.modules, "tzdata", None)
    with pytest.raises(UsageError, match="tzdata"):
        clock.database_version()
    source = Path(clock.__file__).read_text(encoding="utf-8")
    assert not re.search(r"^(import|from) (tzdata|zoneinfo)", source, re.MULTILINE), "importing reads no time zones"
