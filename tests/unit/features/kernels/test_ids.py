from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tackboard.core.hashing import MASK_64, MAX_ROWS, MULTIPLIER_1, MULTIPLIER_2, seed_offset, string_id
from tackboard.features.column import Column
from tackboard.features.kernels.ids import bucket_hash, cross
from tackboard.features.operators import REGISTRY, TypeClash
from tackboard.features.types import FLOAT, ID, INT, STRING, FeatureType

# Changing any of these turns the features of every trained model into noise.
GOLDEN_CROSS = {
    (0, 0): 3531997233750407150,
    (1, 2): -2638227910990607031,
    (2, 1): 7501550741088239033,
    (-1, 2**63 - 1): -6267129795353203406,
}
GOLDEN_CROSS_OF_THREE = 606863171272790979


def slow_id(value: Any) -> int:
    return string_id(value) if isinstance(value, str) else int(value)


def slow_mix(value: int, seed: int) -> int:
    x = (value + seed_offset(seed)) & MASK_64
    x = ((x ^ (x >> 30)) * MULTIPLIER_1) & MASK_64
    x = ((x ^ (x >> 27)) * MULTIPLIER_2) & MASK_64
    return x ^ (x >> 31)


def slow_cross(*values: Any) -> int:
    mixed = slow_mix(slow_id(values[0]) & MASK_64, 0)
    for value in values[1:]:
        mixed = slow_mix(mixed ^ (slow_id(value) & MASK_64), 0)
    return mixed - 2**64 if mixed >= 2**63 else mixed


@pytest.mark.parametrize("kind", ["string", "int", "bool", "time", "id"])
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_hash_id(check_kernel: Callable[..., None], kind: str, data: st.DataObject) -> None:
    check_kernel(data, "hash_id", [kind], slow_id)


@pytest.mark.parametrize(
    "kinds", [("id", "id"), ("string", "string"), ("string", "int", "bool"), ("time", "id")], ids=" ".join
)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_cross(check_kernel: Callable[..., None], kinds: tuple[str, ...], data: st.DataObject) -> None:
    check_kernel(data, "cross", kinds, slow_cross)


@given(data=st.data(), num_buckets=st.integers(1, MAX_ROWS) | st.just(1), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None)
def test_bucket_hash(check_kernel: Callable[..., None], data: st.DataObject, num_buckets: int, seed: int) -> None:
    def twin(value: int) -> int:
        return ((slow_mix(value & MASK_64, (seed << 16) + 1) >> 32) * num_buckets) >> 32

    check_kernel(data, "bucket_hash", ["id"], twin, num_buckets=num_buckets, seed=seed)


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_index_in(check_kernel: Callable[..., None], data: st.DataObject) -> None:
    text = st.sampled_from(["", "a", "\u00e9", "e\u0301", "unused"]) | st.text(max_size=3)
    names = data.draw(st.lists(text, min_size=1, max_size=6, unique=True))
    check_kernel(data, "index_in", ["string"], lambda a: names.index(a) + 1 if a in names else 0, names=names)


def test_golden_values_never_change() -> None:
    pairs = list(GOLDEN_CROSS)
    left, right = (Column.of(ID, [pair[side] for pair in pairs]) for side in (0, 1))
    assert cross(left, right).to_pylist() == list(GOLDEN_CROSS.values())
    texts = [Column.of(STRING, [text]) for text in ("de", "shoes", "\u00e9")]
    assert cross(*texts).to_pylist() == [GOLDEN_CROSS_OF_THREE]
    assert bucket_hash(Column.of(ID, [0, 1, -1]), num_buckets=1000).to_pylist() == [802, 35, 96]


def test_order_and_number_of_crossed_values_matter() -> None:
    one, two, three = (Column.of(INT, [number]) for number in (1, 2, 3))
    crossed = [
        cross(one, two),
        cross(two, one),
        cross(one, one),
        cross(one, two, three),
        cross(cross(one, two), three),
    ]
    assert len({column.to_pylist()[0] for column in crossed}) == 5


@pytest.mark.parametrize(
    ("name", "types", "params"),
    [
        ("hash_id", (FLOAT,), {}),
        ("hash_id", (FeatureType("vector", width=2),), {}),
        ("cross", (ID,), {}),
        ("cross", (ID, FLOAT), {}),
        ("bucket_hash", (STRING,), {"num_buckets": 10}),
        ("bucket_hash", (ID,), {}),
        ("bucket_hash", (ID,), {"num_buckets": 0}),
        ("bucket_hash", (ID,), {"num_buckets": MAX_ROWS + 1}),
        ("bucket_hash", (ID,), {"num_buckets": 10.0}),
        ("bucket_hash", (ID,), {"num_buckets": True}),
        ("bucket_hash", (ID,), {"num_buckets": 10, "seed": -1}),
        ("bucket_hash", (ID,), {"num_buckets": 10, "seed": "a"}),
        ("index_in", (INT,), {"names": ["a"]}),
        ("index_in", (STRING,), {"names": []}),
        ("index_in", (STRING,), {"names": "abc"}),
        ("index_in", (STRING,), {"names": ["a", 1]}),
        ("index_in", (STRING,), {"names": ["a", "b", "a"]}),
    ],
)
def test_wrong_types_and_parameters_clash(name: str, types: tuple[FeatureType, ...], params: dict[str, Any]) -> None:
    with pytest.raises(TypeClash) as clash:
        REGISTRY[name].rule(types, params)
    assert clash.value.allowed
