from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tackboard.core.errors import DataError, UsageError
from tackboard.events.checks import measures
from tackboard.events.checks.measures import (
    DAY_MS,
    HOUR_MS,
    IdCounts,
    NameCounts,
    Sample,
    Slice,
    names_in,
    newest_time,
    numbers_in,
    parse_range,
)
from tackboard.events.dataset import open_dataset

DAY = 20_000


@pytest.fixture
def dataset(make_dataset: Callable[..., Path], tmp_path: Path) -> measures.Dataset:
    events = [
        (user, item, "click", "home", DAY * DAY_MS + day * DAY_MS + 3 * HOUR_MS)
        for user, item, day in ((1, 7, 0), (1, 8, 1), (1, 7, 3), (2, 7, 1))
    ]
    received = [time + 1500 for *_, time in events]
    fields = {
        "country": pa.array(["de", None, "fr", "de"]).dictionary_encode(),
        "note": pa.array(["x", None, "x", "y"]),
        "paid": [True, False, None, True],
        "price": [1.0, None, float("nan"), 4.0],
    }
    return open_dataset(make_dataset(tmp_path, events, received_ms=received, fields=fields))


def test_what_a_piece_holds(dataset: measures.Dataset) -> None:
    (table,) = Slice(dataset).chunks(measures.columns_of(dataset))
    assert measures.name_columns(dataset) == ["action", "surface", "hour", "country", "note", "paid"]
    assert measures.number_columns(dataset) == ["gap_s", "lateness_s", "events_per_user", "price"]
    assert names_in(table, "hour") == {"03": 4}
    assert names_in(table, "country") == {"de": 2, "fr": 1, "(missing)": 1}
    assert names_in(table, "note") == {"x": 2, "y": 1, "(missing)": 1}
    assert names_in(table, "paid") == {"true": 2, "false": 1, "(missing)": 1}
    assert numbers_in(table, "gap_s").tolist() == [86_400.0, 172_800.0]
    assert numbers_in(table, "lateness_s").tolist() == [1.5] * 4
    assert numbers_in(table, "events_per_user").tolist() == [3.0, 1.0]
    price = numbers_in(table, "price")
    assert price[[0, 3]].tolist() == [1.0, 4.0] and np.isnan(price[[1, 2]]).all()


def test_a_range_of_days(dataset: measures.Dataset) -> None:
    first, last = np.datetime64(DAY + 1, "D"), np.datetime64(DAY + 2, "D")
    part = Slice(dataset, *parse_range(f"{first}..{last}"))
    assert [len(table) for table in part.chunks([])] == [2]
    assert [len(table) for table in Slice(dataset, *parse_range(f"..{first}")).chunks([])] == [3]
    assert [len(table) for table in Slice(dataset, *parse_range(f"{last}..")).chunks([])] == [1]
    assert list(Slice(dataset, *parse_range("..2001-01-01")).chunks([])) == []


@pytest.mark.parametrize("text", ["", "..", "2026-01-01", "2026-13-01..", "2026-02-01..2026-01-01", "a..b"])
def test_ranges_that_mean_nothing(text: str) -> None:
    with pytest.raises(UsageError):
        parse_range(text)


def test_a_sample_is_whole_while_it_fits_and_even_beyond() -> None:
    small = Sample()
    small.add(np.array([3.0, np.nan, 1.0, 2.0]))
    assert small.quantiles([0.0, 0.5, 1.0]).tolist() == [1.0, 2.0, 3.0]
    assert len(Sample().quantiles([0.5])) == 0
    large = Sample()
    for start in range(0, 400_000, 50_000):
        large.add(np.arange(start, start + 50_000, dtype=np.float64))
    assert large.num_seen == 400_000 and not large.is_whole
    assert np.allclose(large.quantiles([0.1, 0.5, 0.9]), [40_000, 200_000, 360_000], atol=3_000)
    again = Sample()
    again.add(np.arange(400_000, dtype=np.float64))
    assert again.quantiles([0.5]).tolist() == large.quantiles([0.5]).tolist(), "however the values were cut"


def test_names_beyond_bounds_are_given_up_rarest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measures, "MAX_NAMES", 4)
    names = NameCounts()
    names.add({"a": 5, "b": 4, "c": 1, "d": 1, "e": 1})
    assert names.top(10) == ["a", "b"]
    names.add({"c": 4})
    assert names.top(2) == ["a", "b"]


def test_ids_are_counted_over_all_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measures, "MERGE_AT", 3)
    counts = IdCounts()
    for ids in ([5, 5, 1], [2, 5], [-9]):
        counts.add(np.array(ids))
    ids, number = counts.result()
    assert dict(zip(ids.tolist(), number.tolist(), strict=True)) == {-9: 1, 1: 1, 2: 1, 5: 3}
    assert [len(part) for part in IdCounts().result()] == [0, 0]


def test_the_newest_time_is_not_in_the_future(make_dataset: Callable[..., Path], tmp_path: Path) -> None:
    now = 1_700_000_000_000
    times = [now - 5, now + DAY_MS, now + DAY_MS + 1, now + 300 * DAY_MS]
    dataset = open_dataset(
        make_dataset(tmp_path, [(user, 1, "click", "home", time) for user, time in enumerate(times)])
    )
    assert newest_time(dataset, "time_ms", now_ms=now) == (now + DAY_MS, 2)
    assert newest_time(dataset, "time_ms") == (times[-1], 0)
    with pytest.raises(DataError, match="every received_ms of .* lies in the future"):
        newest_time(dataset, "received_ms", now_ms=now - 2 * DAY_MS)
