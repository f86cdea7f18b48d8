"""The made-up tables: the same for a seed, sorted, and with the awkward parts in them."""

from pathlib import Path

import numpy as np
import pytest

from tackboard.bench.features.data import QUICK, TABLES, World, batch_world, online_world, read_world


@pytest.fixture(scope="module")
def world() -> World:
    return batch_world(QUICK, 3)


def test_a_seed_gives_the_same_tables(world: World) -> None:
    again, other = batch_world(QUICK, 3), batch_world(QUICK, 4)
    assert all(getattr(world, name).equals(getattr(again, name)) for name in TABLES)
    assert not world.events.equals(other.events)


def test_tables_survive_the_disk(world: World, tmp_path: Path) -> None:
    world.write(tmp_path / "w")
    read = read_world(tmp_path / "w")
    assert all(getattr(world, name).equals(getattr(read, name)) for name in TABLES)


def test_events_are_sorted_and_each_user_has_50_to_500(world: World) -> None:
    user, time_ms = world.events["user_id"].to_numpy(), world.events["time_ms"].to_numpy()
    assert np.array_equal(np.lexsort((time_ms, user)), np.arange(len(user)))
    _, counts = np.unique(user, return_counts=True)
    assert len(counts) == QUICK.num_users
    assert counts.min() >= 50 and counts.max() <= 500


def test_the_awkward_parts_are_there(world: World) -> None:
    delay_ms = world.events["received_ms"].to_numpy() - world.events["time_ms"].to_numpy()
    assert delay_ms.min() > 0
    assert 0.01 < (delay_ms > 60_000).mean() < 0.06
    for table, names in (
        (world.items, ("price", "category", "embedding", "brand")),
        (world.users, ("country", "taste")),
    ):
        assert all(table[name].null_count for name in names)
    unseen = ~np.isin(world.rows["item_id"].to_numpy(), world.items["item_id"].to_numpy())
    assert 0 < unseen.sum() < len(unseen) / 20
    # A tenth of the items gets far more than a tenth of the events.
    _, counts = np.unique(world.events["item_id"].to_numpy(), return_counts=True)
    assert np.sort(counts)[::-1][: QUICK.num_items // 10].sum() > 0.2 * counts.sum()


def test_rows_are_requests_with_candidates(world: World) -> None:
    assert world.rows.num_rows == QUICK.num_requests * QUICK.num_candidates
    assert np.array_equal(
        world.rows["request"].to_numpy(), np.repeat(np.arange(QUICK.num_requests), QUICK.num_candidates)
    )


def test_online_everything_is_received_before_the_request() -> None:
    world = online_world(QUICK, 3)
    assert world.events["received_ms"].to_numpy().max() < world.requests["request_ms"].to_numpy().min()
    assert world.events.num_rows == QUICK.online_requests * QUICK.online_events
    assert world.rows.num_rows == QUICK.online_requests * QUICK.online_candidates
