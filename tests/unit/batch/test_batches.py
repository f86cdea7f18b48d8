"""Batches: what they say of themselves, and that every tensor moves, also those of lists."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tackboard.batch import HashConfig, Jagged, RequestBatch, SequenceBatch
from tackboard.batch.builder import make_batch
from tackboard.core.errors import ConfigError
from tackboard.features.column import Column, sequence_column
from tackboard.features.types import ID, INT

HASHING = HashConfig(num_hashes=3, num_rows=11, seed=4)


@pytest.fixture
def histories() -> SequenceBatch:
    history = sequence_column(np.array([2]), item=Column.of(ID, [5, 6]), action=Column.of(INT, [1, 2]))
    return make_batch(history=history, request={"hour": Column.of(INT, [3])}, hashing=HASHING)


@pytest.fixture
def requests(histories: SequenceBatch) -> RequestBatch:
    return RequestBatch(
        histories=histories,
        request_ms=torch.zeros(1, dtype=torch.int64),
        request_of=torch.zeros(3, dtype=torch.int64),
        candidates=torch.tensor([1, 0, 1]),
        positions=torch.arange(3),
        weights=torch.ones(3),
        labels={"save": torch.tensor([1.0, 0.0, 0.0])},
        known={"save": torch.tensor([True, True, False])},
        features={"tags": Jagged(torch.tensor([7, 8]), torch.tensor([0, 2, 2, 2]))},
    )


def test_a_column_that_is_not_carried_is_named_with_what_to_do(histories: SequenceBatch) -> None:
    with pytest.raises(ConfigError) as caught:
        histories.column("gap")
    assert "history.gap" in caught.value.got
    assert caught.value.allowed == "carried: history.item, history.action"
    assert "add history.gap to `reads`" in caught.value.fix
    with pytest.raises(ConfigError, match=r"history\.time"):
        _ = histories.times_ms


def test_a_batch_says_how_much_work_it_is_and_whether_there_is_any(
    histories: SequenceBatch, requests: RequestBatch
) -> None:
    assert (histories.num_tokens, histories.has_targets()) == (2, False)
    assert (requests.num_tokens, requests.has_targets()) == (5, True)
    unknown = {"save": torch.zeros(3, dtype=torch.bool)}
    nothing = RequestBatch(**{**vars(requests), "known": unknown})
    assert not nothing.has_targets()


def test_rows_of_candidates_are_those_of_their_items(requests: RequestBatch) -> None:
    rows = requests.histories.item_rows
    assert requests.candidate_rows().tolist() == [rows[1].tolist(), rows[0].tolist(), rows[1].tolist()]


@given(st.lists(st.lists(st.integers(0, 99), max_size=4), max_size=6), st.data())
def test_lists_taken_by_row(lists: list[list[int]], data: st.DataObject) -> None:
    offsets = torch.tensor([0, *itertools.accumulate(map(len, lists))])
    jagged = Jagged(torch.tensor([value for row in lists for value in row], dtype=torch.int64), offsets)
    rows = data.draw(st.lists(st.integers(0, len(lists) - 1), max_size=8)) if lists else []
    taken = jagged.take(torch.tensor(rows, dtype=torch.int64))
    assert taken.lengths().tolist() == [len(lists[row]) for row in rows]
    assert taken.values.tolist() == [value for row in rows for value in lists[row]]
    assert (taken.offsets.dtype, taken.values.dtype) == (torch.int64, torch.int64)


def test_a_feature_for_each_candidate_is_its_own_or_that_of_its_request(requests: RequestBatch) -> None:
    request = {"hour": torch.tensor([3, 4]), "likes": Jagged(torch.tensor([1.0, 2.0, 5.0]), torch.tensor([0, 2, 3]))}
    histories = SequenceBatch(**{**vars(requests.histories), "offsets": torch.tensor([0, 1, 2]), "request": request})
    batch = RequestBatch(**{**vars(requests), "histories": histories, "request_of": torch.tensor([0, 1, 1])})
    assert batch.of_candidates("tags") is requests.features["tags"]
    assert batch.of_candidates("hour").tolist() == [3, 4, 4]  # type: ignore[union-attr]
    likes = batch.of_candidates("likes")
    assert isinstance(likes, Jagged)
    assert (likes.values.tolist(), likes.lengths().tolist()) == ([1.0, 2.0, 5.0, 5.0], [2, 1, 1])
    with pytest.raises(ConfigError, match="reads price, which the batch does not carry") as caught:
        batch.of_candidates("price")
    assert caught.value.allowed == "carried: tags, hour, likes"
    assert "add price to `reads`" in caught.value.fix


def test_a_list_is_no_number(histories: SequenceBatch) -> None:
    tags = Jagged(torch.tensor([7, 8]), torch.tensor([0, 2]))
    assert tags.lengths().tolist() == [2]
    batch = SequenceBatch(**{**vars(histories), "request": {"tags": tags}})
    with pytest.raises(ConfigError, match="reads tags as a number, but it is a list"):
        batch.of_request("tags")
    assert histories.of_request("hour").tolist() == [3]
