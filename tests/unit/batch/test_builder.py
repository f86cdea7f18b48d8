"""The jagged batch: distinct items, offsets and rows, by hand and against core's hash."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tackboard.batch import HashConfig, Jagged, SequenceBatch, item_rows
from tackboard.batch.builder import PreparedHistories, feature_tensor, make_batch, make_request
from tackboard.batch.items import coded_items
from tackboard.core.errors import DataError
from tackboard.core.hashing import row_ids
from tackboard.features.column import Column, sequence_column
from tackboard.features.types import BOOL, FLOAT, ID, INT, STRING, TIME, FeatureType

HASHING = HashConfig(num_hashes=3, num_rows=11, seed=4)


def batch_of(lengths: list[int], items: list[int], **fields: object) -> SequenceBatch:
    count = np.arange(len(items), dtype=np.int64)
    history = sequence_column(
        np.array(lengths, dtype=np.int64),
        item=Column.of(ID, items),
        action=Column(INT, count % 3),
        surface=Column(INT, count % 2),
        time=Column(TIME, count * 1000),
    )
    users = np.arange(len(lengths), dtype=np.int64) + 70
    return make_batch(history=history, users=users, hashing=HASHING, **fields)  # type: ignore[arg-type]


def test_the_picture_of_the_module() -> None:
    batch = batch_of([3, 4], [50, -9, 50, 8, -9, 2**62, 8])
    assert batch.offsets.tolist() == [0, 3, 7]
    assert batch.lengths().tolist() == [3, 4]
    assert batch.item_ids.tolist() == [-9, 8, 50, 2**62]
    assert batch.item_ids[batch.items].tolist() == [50, -9, 50, 8, -9, 2**62, 8]
    assert batch.item_rows.tolist() == row_ids(batch.item_ids.numpy(), 3, 11, 4).tolist()
    assert (batch.num_rows, batch.num_events) == (2, 7)
    assert batch.users.tolist() == [70, 71]


@pytest.mark.parametrize(("lengths", "items"), [([], []), ([0], []), ([0, 2, 0], [5, 5])])
def test_empty_histories(lengths: list[int], items: list[int]) -> None:
    batch = batch_of(lengths, items)
    assert batch.lengths().tolist() == lengths
    assert batch.num_events == len(items)
    assert batch.item_rows.shape == (len(set(items)), 3)


def test_positives_and_frequencies_are_taken_over_per_distinct_item() -> None:
    asked: list[list[int]] = []

    def log_q(items: NDArray[np.int64]) -> NDArray[np.float32]:
        asked.append(items.tolist())
        return (items / 2).astype(np.float32)

    batch = batch_of([3], [9, 4, 9], is_positive=np.array([True, False, True]), log_q=log_q)
    assert asked == [[4, 9]]
    assert batch.item_log_q.tolist() == [2.0, 4.5]
    assert batch.is_positive.tolist() == [True, False, True]


def test_columns_of_the_history_by_name() -> None:
    batch = batch_of([2, 1], [5, 6, 5])
    assert batch.actions.tolist() == [0, 1, 2]
    assert batch.surfaces.tolist() == [0, 1, 0]
    assert batch.times_ms.tolist() == [0, 1000, 2000]
    assert batch.column("time") is batch.times_ms
    assert set(batch.columns) == {"action", "surface", "time"}  # the item has a place of its own
    assert batch.request == {}


@pytest.mark.parametrize(
    ("type_", "values", "dtype", "expected"),
    [
        (BOOL, [True, False], torch.bool, [True, False]),
        (INT, [2**62, -3], torch.int64, [2**62, -3]),
        (ID, [-(2**63)], torch.int64, [-(2**63)]),
        (TIME, [1_700_000_000_000], torch.int64, [1_700_000_000_000]),
        (FLOAT, [0.1, float("inf")], torch.float32, [float(np.float32(0.1)), float("inf")]),
        (FeatureType("vector", width=2), [[1, 2], [3, 4]], torch.float32, [[1, 2], [3, 4]]),
        (FLOAT.in_list(), [[1.5], [], [2.5, 3.5]], torch.float32, [1.5, 2.5, 3.5]),
        (FLOAT.with_nullable(True), [1.0, 2.0], torch.float32, [1.0, 2.0]),
        (INT, [], torch.int64, []),
    ],
)
def test_a_column_as_a_tensor(type_: FeatureType, values: list[Any], dtype: torch.dtype, expected: list[Any]) -> None:
    column = Column.of(type_, values)
    tensor = feature_tensor(column)
    assert (tensor.dtype, tensor.tolist()) == (dtype, expected)
    if len(values):
        before = column.values.copy()
        tensor.zero_()
        assert np.array_equal(column.values, before)  # a tensor of its own


@pytest.mark.parametrize(
    ("column", "got", "fix"),
    [
        (Column.of(FLOAT.with_nullable(True), [1.0, None]), "float? is missing", "fill_missing"),
        (Column.of(STRING, ["a"]), "string cannot become a tensor", "index_in"),
        (Column.of(STRING.in_list(), [["a"]]), "list[string] cannot become a tensor", "hash_id"),
        (sequence_column(np.array([1]), item=Column.of(ID, [5])), "sequence{item: id} cannot become a", "hash_id"),
    ],
)
def test_what_has_no_tensor_says_what_to_use(column: Column, got: str, fix: str) -> None:
    with pytest.raises(DataError) as caught:
        feature_tensor(column)
    assert got in caught.value.got
    assert fix in caught.value.fix


LISTS = Column.of(ID.in_list(), [[7, 8], [], [9]])
VECTORS = Column.of(FeatureType("vector", width=2), [[1, 2], [3, 4], [5, 6]])


def test_features_of_every_type_are_carried_for_requests_and_candidates() -> None:
    """A list keeps its offsets, as `Jagged`."""
    batch = make_request(
        history=sequence_column(np.array([2]), item=Column.of(ID, [5, 6])),
        candidates=np.array([6, 9, 5]),
        hashing=HASHING,
        request={"likes": LISTS.take(np.array([0])), "taste": VECTORS.take(np.array([2])), "at": Column.of(TIME, [4])},
        features={"tags": LISTS, "look": VECTORS, "marks": Column.of(FLOAT.in_list(), [[], [0.5], []])},
    )
    assert (batch.num_requests, batch.num_candidates) == (1, 3)
    assert batch.histories.item_ids.tolist() == [5, 6, 9]
    assert batch.histories.items.tolist() == [0, 1]
    assert batch.candidates.tolist() == [1, 2, 0]
    assert torch.equal(batch.histories.item_rows, item_rows(np.array([5, 6, 9]), HASHING))
    likes, tags, marks = batch.histories.request["likes"], batch.features["tags"], batch.features["marks"]
    assert isinstance(likes, Jagged)
    assert isinstance(tags, Jagged)
    assert isinstance(marks, Jagged)
    assert (likes.values.tolist(), likes.offsets.tolist()) == ([7, 8], [0, 2])
    assert (tags.values.tolist(), tags.offsets.tolist()) == ([7, 8, 9], [0, 2, 2, 3])
    assert (marks.values.dtype, marks.values.tolist(), marks.offsets.tolist()) == (torch.float32, [0.5], [0, 0, 1, 1])
    assert batch.of_candidates("taste").tolist() == [[5.0, 6.0]] * 3  # type: ignore[union-attr]
    assert batch.of_candidates("look").tolist() == [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]  # type: ignore[union-attr]
    assert batch.histories.of_request("at").tolist() == [4]
    assert (batch.labels, batch.known) == ({}, {})
    assert (batch.positions.tolist(), batch.weights.tolist()) == ([-1] * 3, [1.0] * 3)


@given(st.lists(st.lists(st.integers(-3, 3), max_size=4), min_size=1, max_size=6), st.data())
def test_a_slice_of_prepared_histories_is_what_is_built_alone(rows: list[list[int]], data: st.DataObject) -> None:
    """Lists as features of the request before every event, too, in any order of the histories."""

    def parts(chosen: list[int]) -> dict[str, Any]:
        items = [item for row in chosen for item in rows[row]]
        return {
            "history": sequence_column(
                np.array([len(rows[row]) for row in chosen], dtype=np.int64),
                item=Column.of(ID, items),
                action=Column.of(INT, [item % 3 for item in items]),
            ),
            "hashing": HASHING,
            "users": np.array(chosen, dtype=np.int64),
            "request": {
                "hour": Column.of(INT, [item * 2 for item in items]),
                "tags": Column.of(ID.in_list(), [list(range(item)) for item in items]),
            },
            "is_positive": np.array([item > 0 for item in items], dtype=np.bool_),
            "log_q": lambda ids: (ids / 8).astype(np.float32),
        }

    whole = parts(list(range(len(rows))))
    hashing, log_q = whole.pop("hashing"), whole.pop("log_q")
    history = whole.pop("history")
    items, codes = coded_items(history.fields["item"].values, hashing, log_q)
    offsets = history.fields["item"].offsets
    runs = {"events": history, "starts": offsets[:-1], "lengths": np.diff(offsets), "items": items, "codes": codes}
    order = data.draw(st.permutations(range(len(rows))))
    begin = data.draw(st.integers(0, len(rows)))
    end = data.draw(st.integers(begin, len(rows)))
    found = PreparedHistories(**whole, **runs).in_order(np.array(order)).batch(begin, end)
    expected = make_batch(**parts(list(order[begin:end])))
    assert all(torch.equal(one, other) for one, other in zip(found.tensors(), expected.tensors(), strict=True))
    assert [tensor.dtype for tensor in found.tensors()] == [tensor.dtype for tensor in expected.tensors()]


def test_a_batch_owns_its_memory() -> None:
    """A batch is cut from arrays that live as long as the dataset; writing to one must never reach the other."""
    times = np.arange(4, dtype=np.int64)
    history = sequence_column(
        np.array([4]),
        item=Column(ID, times),
        action=Column(INT, times),
        surface=Column(INT, times),
        time=Column(TIME, times),
    )
    batch = make_batch(history=history, users=times[:1], request={"hour": Column(INT, times)}, hashing=HASHING)
    for tensor in (batch.times_ms, batch.actions, batch.surfaces, batch.users, batch.items, batch.request["hour"]):
        tensor.add_(1)
    assert times.tolist() == [0, 1, 2, 3]
