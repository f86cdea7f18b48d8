"""Changed rows in files: what is encoded is decoded, and positions that lie outside or twice are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tackboard.checkpoint import stored_rows as module
from tackboard.checkpoint.stored_rows import decode, describe, encode, fresh_rows_of, is_smaller, merge, rows_dtype
from tackboard.core.errors import ConfigError, DataError
from tackboard.models.changed_rows import ChangedRows
from tackboard.ops.fresh_rows import FreshRows

FRESH = FreshRows(-(1 << 63), 0.5)
DESCRIBED = describe({"a.weight": (FRESH, 100), "weight": (FRESH, 10)})


def changed(
    rows: list[int], num_rows: int = 100, width: int | None = 2, fresh: FreshRows | None = FRESH
) -> ChangedRows:
    values = torch.rand(len(rows), width) if width else torch.rand(len(rows))
    return ChangedRows(torch.tensor(rows, dtype=torch.int32), values, num_rows, fresh)


def test_what_is_encoded_is_decoded() -> None:
    whole = torch.rand(3, 2)
    tables = {"a.weight": changed([0, 5, 99]), "weight": changed([], 10), "b.weight": whole}
    stored = encode(tables)
    assert set(stored) == {"a.weight:rows", "a.weight:values", "weight:rows", "weight:values", "b.weight"}
    found = decode(stored, DESCRIBED)
    assert set(found) == set(tables) and found["b.weight"] is whole
    for name in ("a.weight", "weight"):
        one, other = found[name], tables[name]
        assert isinstance(one, ChangedRows) and isinstance(other, ChangedRows)
        assert (one.num_rows, one.fresh) == (other.num_rows, FRESH)
        assert torch.equal(one.rows_N, other.rows_N) and torch.equal(one.values_Nd, other.values_Nd)
    sums = {"adagrad.a": changed([4], width=None), "adagrad.": changed([9], 10, width=None)}
    assert [stored.shape for stored in decode(encode(sums), DESCRIBED).values()] == [(100,), (10,)]
    assert fresh_rows_of(DESCRIBED, "a.weight") == (FRESH, 100)


@pytest.mark.parametrize("rows", [[3, 3], [4, 3], [-1, 3], [3, 100]])
def test_positions_that_do_not_rise_within_the_table_are_refused(rows: list[int]) -> None:
    with pytest.raises(DataError, match=r"a\.weight:rows must hold rising positions from 0 to 99"):
        decode(encode({"a.weight": changed(rows)}), DESCRIBED)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"a.weight:values": torch.rand(1, 2)}, r"\(2,\) positions and \(1, 2\) values"),
        ({"a.weight:values": torch.rand(2)}, "positions and"),
        ({"a.weight:rows": torch.tensor([[1, 2]])}, "positions and"),
        ({"a.weight:rows": torch.tensor([1, 2])}, "positions of type torch.int64"),
        ({"a.weight:values": torch.ones(2, 2).long()}, "values of type torch.int64"),
    ],
)
def test_tensors_that_do_not_belong_together_are_refused(change: dict[str, torch.Tensor], words: str) -> None:
    stored = encode({"a.weight": changed([1, 2])})
    with pytest.raises(DataError, match=words):
        decode(stored | change, DESCRIBED)
    del stored["a.weight:values"]
    with pytest.raises(DataError, match="a.weight:values is missing"):
        decode(stored, DESCRIBED)


def test_parts_of_a_table_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    for rows_at_once in (module._ROWS_AT_ONCE, 2):
        monkeypatch.setattr(module, "_ROWS_AT_ONCE", rows_at_once)
        parts = [changed([0, 5, 60, 61, 62]), changed([]), changed([1, 2, 3, 4, 99])]
        merged = merge(
            [{"a.weight": parts[0]}, {"a.weight": parts[1], "weight": changed([3], 10)}, {"a.weight": parts[2]}]
        )
        assert set(merged) == {"a.weight", "weight"}
        found = merged["a.weight"]
        assert isinstance(found, ChangedRows) and [len(part.rows_N) for part in found.parts] == [5, 0, 5]
        for rows in ([99], [0], [3, 61], [62], [4, 5]):
            with pytest.raises(DataError, match=r"two parts of a\.weight hold the same row"):
                merge([{"a.weight": part} for part in (*parts, changed(rows))])
    assert merge([]) == {}


@pytest.mark.parametrize("other", [changed([7], 10), changed([7], width=3), changed([7], width=None), torch.zeros(3)])
def test_parts_that_do_not_belong_together_are_refused(other: Any) -> None:
    with pytest.raises(DataError, match=r"parts? of a\.weight"):
        merge([{"a.weight": changed([1])}, {"a.weight": other}])


@pytest.mark.parametrize(
    "content",
    [None, {}, {"key": 1, "std": 0.1}, {"key": "1", "std": 0.1, "num_rows": 3},
     {"key": 1 << 63, "std": 1.0, "num_rows": 3}, {"key": 1, "std": float("nan"), "num_rows": 3},
     {"key": 1, "std": 1.0, "num_rows": -1}, {"key": 1, "std": 1.0, "num_rows": 1 << 60}],
)  # fmt: skip
def test_a_wrong_description_is_refused(content: Any) -> None:
    with pytest.raises((DataError, ConfigError), match=r"fresh_rows\.a\.weight"):
        decode(encode({"a.weight": changed([1])}), {"a.weight": content})


def test_the_smaller_form_is_chosen() -> None:
    assert is_smaller(93, 100, 64) and not is_smaller(95, 100, 64)  # 68 bytes for a changed row, 64 for any row
    assert is_smaller(49, 100, 4) and not is_smaller(50, 100, 4)
    assert not is_smaller(0, 0, 4)
    assert (rows_dtype(1 << 31), rows_dtype((1 << 31) + 1)) == (torch.int32, torch.int64)
