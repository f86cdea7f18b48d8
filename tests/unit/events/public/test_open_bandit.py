from __future__ import annotations

from collections.abc import Callable

import pytest

from tackboard.core.errors import DataError
from tackboard.events.dataset import Dataset
from tackboard.events.public.open_bandit import CAMPAIGNS, OPEN_BANDIT, POLICIES

FEATURES = ",".join(f"user_feature_{n}" for n in range(4))
HEADER = f",timestamp,item_id,position,click,propensity_score,{FEATURES},user-item_affinity_0,user-item_affinity_1\n"
ITEMS = ",item_id,item_feature_0,item_feature_1,item_feature_2,item_feature_3\n0,0,-0.5,a,b,c\n1,1,0.25,a,b,c\n"


def files(item: int = 1) -> dict[str, str]:
    found = {}
    for policy in POLICIES:
        for campaign in CAMPAIGNS:
            folder = f"obd/{policy}/{campaign}"
            rows = f"0,2019-11-25 10:00:00.004101+00:00,{item},3,1,0.087,p,q,r,s,0.0,0.5\n"
            rows += "1,2019-11-25 10:00:01.500000+00:00,0,1,0,0.5,p,q,r,t,0.125,0.0\n"
            found[f"{folder}/{campaign}.csv"] = HEADER + rows
            found[f"{folder}/item_context.csv"] = ITEMS
    return found


def test_impressions_are_events_with_their_propensity(import_tiny: Callable[..., Dataset]) -> None:
    dataset = import_tiny(OPEN_BANDIT, files(), (12, 6, 12))
    rows = dataset.read_events().to_pylist()
    first, last = rows[0], rows[-1]
    assert (first["user"], first["item"], first["surface"], first["action"]) == (0, "all-1", "all", "click")
    assert (first["position"], first["request"], first["policy"]) == (2, 0, "bts")
    assert (first["propensity"], first["affinity"], first["time_ms"]) == (0.087, 0.5, 1_574_676_000_004)
    assert (last["item"], last["action"], last["policy"]) == ("women-0", "impression", "random")
    assert (last["position"], last["affinity"]) == (0, 0.125)
    assert {row["item"]: row["feature_0"] for row in dataset.read_items().to_pylist()}["men-1"] == 0.25
    assert dataset.read_users(["user", "user_feature_3"]).to_pylist()[1] == {"user": 1, "user_feature_3": "t"}


def test_an_item_without_an_affinity_is_refused(import_tiny: Callable[..., Dataset]) -> None:
    with pytest.raises(DataError, match="bts/all/all.csv has an item without an affinity"):
        import_tiny(OPEN_BANDIT, files(item=2), (12, 6, 12))
