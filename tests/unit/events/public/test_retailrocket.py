from __future__ import annotations

from collections.abc import Callable

import pytest

from tackboard.core.errors import DataError
from tackboard.events.dataset import Dataset
from tackboard.events.public.retailrocket import HEADER, RETAILROCKET

USERS = ("train-1", "test-1")
FILES = {
    "retail_beh.train.inter": f"{HEADER}\n1\t5 6 5\t2 1 3\t6\n2\t6\t0\t5\n",
    "retail_beh.test.inter": f"{HEADER}\n1\t7\t2\t7\n",
}


def test_a_line_is_a_user_whose_last_event_is_the_purchase(import_tiny: Callable[..., Dataset]) -> None:
    dataset = import_tiny(RETAILROCKET, FILES, (3, 3, 8))
    rows = dataset.read_events(["user", "item", "action"]).to_pylist()
    by_user = {user: [(row["item"], row["action"]) for row in rows if row["user"] == user] for user in USERS}
    assert by_user["train-1"] == [(5, "view"), (6, "cart"), (5, "type_3"), (6, "buy")]
    assert by_user["test-1"] == [(7, "view"), (7, "buy")]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("3\t5 6\t2\t5", "retail_beh.test.inter line 2 has 2 items and 1 types"),
        ("3\t5\t9\t5", "the code 9 has no name"),
        ("3\t5\t2", "as published"),
    ],
)
def test_lines_that_do_not_fit_are_refused(import_tiny: Callable[..., Dataset], line: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        import_tiny(RETAILROCKET, FILES | {"retail_beh.test.inter": f"{HEADER}\n{line}\n"}, (3, 3, 8))
    with pytest.raises(DataError, match="does not begin with the columns"):
        import_tiny(RETAILROCKET, FILES | {"retail_beh.test.inter": f"{line}\n"}, (3, 3, 8))
