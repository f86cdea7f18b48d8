from __future__ import annotations

from collections.abc import Callable

import pytest

from tackboard.core.errors import DataError
from tackboard.events.dataset import Dataset
from tackboard.events.public.kuairand import FILE, KUAIRAND

LINES = """\
user_id,video_id,date,hourmin,time_ms,is_click,is_follow,is_comment,is_forward,long_view,play_time_ms,duration_ms,\
comment_stay_time,is_profile_enter,label,timestamp
7,42,20220412,1200,1649700000123,1,0,0,0,1,1500,3000,25,0,1,2022-04-12
7,43,20220412,1300,1649703600456,0,0,1,0,0,900,0,75,0,0,2022-04-12
"""


@pytest.mark.parametrize(("ending", "delimiter"), [("tsv", "\t"), ("csv", ",")])
def test_likes_hates_and_signals(import_tiny: Callable[..., Dataset], ending: str, delimiter: str) -> None:
    dataset = import_tiny(KUAIRAND, {f"{FILE}.{ending}": LINES.replace(",", delimiter)}, (1, 2, 2))
    rows = dataset.read_events().to_pylist()
    assert [(row["item"], row["action"], row["time_ms"]) for row in rows] == [
        (42, "like", 1649700000123),
        (43, "hate", 1649703600456),
    ]
    assert (rows[0]["is_click"], rows[0]["play_time_ms"], rows[1]["comment_stay_ms"]) == (1, 1500, 75)


def test_another_file_is_refused(import_tiny: Callable[..., Dataset]) -> None:
    with pytest.raises(DataError, match="not kuairand-sample as published"):
        import_tiny(KUAIRAND, {f"{FILE}.tsv": "user_id\tvideo_id\n1\t2\n"}, (1, 2, 2))
