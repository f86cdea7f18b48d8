from __future__ import annotations

import datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tackboard.core.errors import DataError
from tackboard.events.times import parse_milliseconds, parse_times

MOMENT_MS = 1_700_000_000_123


def parse(values: list, type_: pa.DataType | None = None) -> tuple[list[int], list[bool], str]:
    times = parse_times(pa.chunked_array([pa.array(values, type_)]), "when")
    return times.ms.tolist(), times.good.tolist(), times.unit


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [
        (1_700_000_000, "seconds", 1_700_000_000_000),
        (MOMENT_MS, "milliseconds", MOMENT_MS),
        (MOMENT_MS * 1000 + 999, "microseconds", MOMENT_MS),
        (MOMENT_MS * 1_000_000 + 999_999, "nanoseconds", MOMENT_MS),
    ],
)
def test_a_number_is_read_by_its_magnitude(value: int, unit: str, expected: int) -> None:
    for column in ([value], [str(value)], [f" {value} "]):
        assert parse(column) == ([expected], [True], unit)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2023-11-14T22:13:20Z", 1_700_000_000_000),
        ("2023-11-14 22:13:20", 1_700_000_000_000),
        ("2023-11-14T22:13:20.123456", 1_700_000_000_123),
        ("2023-11-15T00:13:20+02:00", 1_700_000_000_000),
        ("2023-11-15 00:13:20 +0200", 1_700_000_000_000),
        ("2023-11-14 22:13:20 UTC", 1_700_000_000_000),
        ("2023-11-14 22:13", 1_699_999_980_000),
        ("2023-11-14", 1_699_920_000_000),
    ],
)
def test_iso_text_with_a_zone_or_else_utc(text: str, expected: int) -> None:
    assert parse([text]) == ([expected], [True], "ISO 8601 text")


def test_what_is_no_time_is_marked() -> None:
    ms, good, _ = parse(["2023-11-14", "soon", "2023-02-31", "", "2023-13-01", "14.11.2023"])
    assert good == [True, False, False, False, False, False]
    assert ms[1:] == [0] * 5
    assert parse([0, -5, 1_700_000_000])[1] == [False, False, True]
    assert parse([None, float("nan"), float("inf"), 1.7e9], pa.float64())[1] == [False, False, False, True]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([True], "type bool"),
        (["1700000000", "2023-11-14"], "mixes numbers and ISO 8601 text"),
        (["soon", "1700000000", "1700000001", "1700000000000"], "seconds from row 2, milliseconds from row 4"),
        ([0, 1_700_000_000_000_000, 1_700_000_000_000], "milliseconds from row 3, microseconds from row 2"),
        (["1700000000", "1700000001\n1,2,1700000002"], "row 2: the column 'when' holds a line break"),
    ],
)
def test_columns_without_one_meaning_are_refused_by_row(values: list, words: str) -> None:
    with pytest.raises(DataError, match=words):
        parse(values)


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
@pytest.mark.parametrize("zone", [None, "UTC", "Europe/Berlin"])
def test_arrow_timestamps_of_any_unit(unit: str, zone: str | None) -> None:
    moment = datetime.datetime(2023, 11, 14, 22, 13, 20, tzinfo=datetime.UTC)
    value = moment if zone else moment.replace(tzinfo=None)
    assert parse([value, None], pa.timestamp(unit, zone)) == ([1_700_000_000_000, 0], [True, False], "timestamps")


def test_dates_are_midnight_utc_and_fractions_of_seconds_are_kept() -> None:
    assert parse([datetime.date(2023, 11, 14)])[0] == [1_699_920_000_000]
    assert parse(["1700000000.123"])[0] == parse([1700000000.123])[0] == [MOMENT_MS]


@given(st.lists(st.datetimes(datetime.datetime(1971, 1, 1), datetime.datetime(2100, 1, 1)), min_size=1, max_size=5))
def test_iso_text_agrees_with_python(moments: list[datetime.datetime]) -> None:
    expected = [int(m.replace(tzinfo=datetime.UTC).timestamp() // 1) * 1000 + m.microsecond // 1000 for m in moments]
    ms, good, _ = parse([moment.isoformat() for moment in moments])
    assert np.all(good)
    assert ms == expected


@pytest.mark.parametrize(
    "column",
    [
        pa.array([0, -5, MOMENT_MS, None]),
        pa.array(["0", " -5 ", str(MOMENT_MS), "soon"]),
        pa.array(["0", "-5", str(MOMENT_MS), "1.5"]).dictionary_encode(),
    ],
)
def test_what_is_said_to_be_milliseconds_is_never_guessed(column: pa.Array) -> None:
    times = parse_milliseconds(pa.chunked_array([column]), "valid_from_ms")
    assert times.ms[:3].tolist() == [0, -5, MOMENT_MS]
    assert times.good.tolist() == [True, True, True, False]


def test_milliseconds_of_other_types() -> None:
    moment = pa.chunked_array([pa.array([MOMENT_MS], pa.timestamp("ms"))])
    assert parse_milliseconds(moment, "valid_from_ms").ms.tolist() == [MOMENT_MS]
    with pytest.raises(DataError, match="above"):
        parse_milliseconds(pa.chunked_array([pa.array([2**64 - 1], pa.uint64())]), "valid_from_ms")


@pytest.mark.parametrize("type_", [pa.int32(), pa.uint32(), pa.int64(), pa.float64()])
def test_seconds_of_any_width_do_not_overflow(type_: pa.DataType) -> None:
    ms, good, unit = parse([1_700_000_000, 1_700_000_001], type_)
    assert (ms, good, unit) == ([1_700_000_000_000, 1_700_000_001_000], [True, True], "seconds")


@pytest.mark.parametrize(
    ("values", "type_"),
    [
        ([10_000_000], pa.date32()),
        ([2**62], pa.timestamp("s")),
        ([-(2**62)], pa.timestamp("s")),
        ([884_541_340_800_000_000], pa.timestamp("us")),
        ([1e300, float("inf"), float("nan"), -1.0], pa.float64()),
        (["0001-01-01", "2300-01-01", "30000-01-01"], pa.string()),
    ],
)
def test_times_out_of_range_are_no_times(values: list[Any], type_: pa.DataType) -> None:
    ms, good, _ = parse(values, type_)
    assert not any(good)
    assert not any(ms)
