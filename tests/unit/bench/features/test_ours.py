"""Our own side: batch and online give the same bits for the same request, prepared or not."""

import numpy as np
import pyarrow as pa
import pytest

from tackboard.bench.features.data import QUICK, World, online_world
from tackboard.bench.features.ours import BatchContender, OnlineContender


@pytest.fixture(scope="module")
def world() -> World:
    return online_world(QUICK, 3)


@pytest.mark.parametrize("prepared", [True, False])
def test_online_is_batch(world: World, prepared: bool) -> None:
    batch, online = BatchContender(world), OnlineContender(world, prepared=prepared)
    of_requests, of_rows = batch.to_arrow(batch.compute())
    answers = [online.to_arrow(online.compute(number)) for number in range(world.requests.num_rows)]
    for table, part in ((of_requests, 0), (of_rows, 1)):
        joined = pa.concat_tables([answer[part] for answer in answers])
        assert table.num_rows == joined.num_rows
        for name in table.column_names:
            assert table[name].to_pylist() == joined[name].to_pylist(), name


def test_values_mean_what_their_names_say(world: World) -> None:
    batch = BatchContender(world)
    of_requests, of_rows = batch.to_arrow(batch.compute())
    user, moment = (world.requests[name].to_numpy() for name in ("user_id", "request_ms"))
    times, owners = world.events["time_ms"].to_numpy(), world.events["user_id"].to_numpy()
    recent = [int(((owners == u) & (times > t - 7 * 86_400_000)).sum()) for u, t in zip(user, moment, strict=True)]
    assert of_requests["events_7d"].to_pylist() == recent
    known = np.isin(world.rows["item_id"].to_numpy(), world.items["item_id"].to_numpy())
    assert of_rows["price_missing"].to_numpy()[~known].all()
    assert not of_rows["price_missing"].to_numpy()[known].all()
