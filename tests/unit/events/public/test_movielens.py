from __future__ import annotations

from collections.abc import Callable

import pytest

from tackboard.core.errors import DataError
from tackboard.events.dataset import Dataset
from tackboard.events.public.movielens import ML_1M, ML_100K

FILES_1M = {
    "ml-1m/ratings.dat": "1::10::5::978000060\n1::20::3::978000060\n2::10::1::978000000\n",
    "ml-1m/movies.dat": "10::Café (1990)::Comedy|Drama\n20::Other, The (2000)::Drama\n30::Unseen (1999)::War\n".encode(
        "latin-1"
    ),
    "ml-1m/users.dat": "1::F::18::3::01234\n2::M::50::7::00072-1\n",
}
FILES_100K = {
    "ml-100k/u.data": "2\t20\t3\t880000000\n1\t10\t5\t880000000\n2\t10\t4\t880000000\n",
    "ml-100k/u.item": "10|Café (1990)|01-Jan-1990||http://x|0|1|1\n20|Other (2000)||||1|0|0\n".encode("latin-1"),
    "ml-100k/u.user": "1|30|F|painter|01234\n2|40|M|other|A1B2C\n",
    "ml-100k/u.genre": "unknown|0\nAction|1\nDrama|2\n\n",
}


def test_ml_1m(import_tiny: Callable[..., Dataset]) -> None:
    dataset = import_tiny(ML_1M, FILES_1M, (2, 2, 3))
    rows = dataset.read_events(["user", "item", "action", "rating", "time_ms"]).to_pylist()
    assert [tuple(row.values()) for row in rows] == [
        (1, 10, "rating_5", 5, 978_000_060_000),
        (1, 20, "rating_3", 3, 978_000_060_000),
        (2, 10, "rating_1", 1, 978_000_000_000),
    ]
    items = {row["item"]: row for row in dataset.read_items().to_pylist()}
    assert items[10]["title"] == "Café (1990)"
    assert items[10]["genres"] == ["Comedy", "Drama"]
    assert items[30]["num_events"] == 0
    users = {row["user"]: row for row in dataset.read_users().to_pylist()}
    assert (users[2]["gender"], users[2]["age"], users[2]["occupation"], users[2]["zip"]) == ("M", 50, 7, "00072-1")


def test_ml_100k(import_tiny: Callable[..., Dataset]) -> None:
    dataset = import_tiny(ML_100K, FILES_100K, (2, 2, 3))
    rows = dataset.read_events(["user", "item", "action"]).to_pylist()
    assert [tuple(row.values()) for row in rows] == [(1, 10, "rating_5"), (2, 20, "rating_3"), (2, 10, "rating_4")]
    items = {row["item"]: row for row in dataset.read_items().to_pylist()}
    assert (items[10]["genres"], items[10]["release_date"]) == (["Action", "Drama"], "01-Jan-1990")
    assert (items[20]["genres"], items[20]["release_date"]) == (["unknown"], None)
    assert {row["user"]: row["occupation"] for row in dataset.read_users().to_pylist()} == {1: "painter", 2: "other"}


def test_a_rating_of_six_stars_is_not_movielens(import_tiny: Callable[..., Dataset]) -> None:
    with pytest.raises(DataError, match="not ml-1m as published"):
        import_tiny(ML_1M, FILES_1M | {"ml-1m/ratings.dat": "1::10::6::978000060\n"}, (1, 1, 1))
    with pytest.raises(DataError, match="not ml-100k as published: .*u.genre"):
        import_tiny(ML_100K, FILES_1M, (2, 2, 3))
