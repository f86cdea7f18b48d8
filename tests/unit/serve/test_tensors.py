from __future__ import annotations

import json
from typing import Any

import hypothesis.extra.numpy as npst
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tackboard.serve.errors import RequestError
from tackboard.serve.tensors import (
    NUMPY_TYPES,
    check_datatype,
    from_binary,
    from_json,
    to_binary,
)


@st.composite
def typed_arrays(draw: st.DrawFn) -> tuple[str, np.ndarray]:
    datatype = draw(st.sampled_from(sorted(NUMPY_TYPES)))
    dtype = NUMPY_TYPES[datatype]
    options: dict[str, Any] = {"allow_nan": False, "allow_infinity": False} if dtype.kind == "f" else {}
    shape = draw(npst.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=5))
    return datatype, draw(npst.arrays(dtype, shape, elements=npst.from_dtype(dtype, **options)))


@settings(max_examples=150, deadline=None)
@given(typed_arrays())
def test_every_numeric_type_survives_binary_and_json(case: tuple[str, np.ndarray]) -> None:
    datatype, array = case
    binary = from_binary("x", datatype, array.shape, memoryview(to_binary(datatype, array)))
    assert isinstance(binary.values, np.ndarray)
    assert np.array_equal(binary.values, array.reshape(-1))
    for data in (array.reshape(-1).tolist(), array.tolist()):
        decoded = from_json("x", datatype, array.shape, json.loads(json.dumps(data)))
        assert isinstance(decoded.values, np.ndarray)
        assert decoded.values.dtype == NUMPY_TYPES[datatype]
        assert np.array_equal(decoded.values, array.reshape(-1))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=12), max_size=20))
def test_text_survives_binary_and_json(texts: list[str]) -> None:
    raw = memoryview(to_binary("BYTES", texts))
    assert from_binary("x", "BYTES", (len(texts),), raw).values == texts
    assert from_json("x", "BYTES", (len(texts),), json.loads(json.dumps(texts))).values == texts


def test_bytes_are_laid_out_as_the_protocol_says() -> None:
    assert to_binary("BYTES", ["ab", ""]) == b"\x02\x00\x00\x00ab\x00\x00\x00\x00"
    assert to_binary("INT64", np.array([1, -1])) == b"\x01" + bytes(7) + b"\xff" * 8


@pytest.mark.parametrize(
    ("datatype", "data", "part"),
    [
        ("INT64", [1.0], "every value must be int"),
        ("INT64", [True], "every value must be int"),
        ("INT64", ["7"], "every value must be int"),
        ("INT64", [None], "every value must be int"),
        ("INT64", [1.8446744073709552e19], "every value must be int"),
        ("INT64", [2**63], "does not fit INT64"),
        ("UINT8", [256], "does not fit UINT8"),
        ("UINT64", [-1], "does not fit UINT64"),
        ("FP16", [1e6], "does not fit FP16"),
        ("FP32", [1e300], "does not fit FP32"),
        ("FP32", [True], "every value must be float or int"),
        ("BOOL", [1], "every value must be bool"),
        ("BYTES", [1], "every value must be a string"),
        ("INT64", [], "0 values where its shape needs 1"),
        ("INT64", [1, 2], "2 values where its shape needs 1"),
        ("INT64", [[1]], "every value must be int"),
        ("INT64", {"a": 1}, "needs a list under data"),
        ("INT64", None, "needs a list under data"),
    ],
)
def test_wrong_json_values_are_told(datatype: str, data: object, part: str) -> None:
    with pytest.raises(RequestError, match=part) as caught:
        from_json("x", datatype, (1,), data)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("datatype", "shape", "raw", "part"),
    [
        ("INT64", (2,), bytes(15), "15 bytes where its shape and datatype need 16"),
        ("FP32", (1,), np.float32("nan").tobytes(), "NaN or infinity"),
        ("FP64", (1,), np.float64("inf").tobytes(), "NaN or infinity"),
        ("BYTES", (1,), b"\x05\x00\x00\x00ab", "runs past the end"),
        ("BYTES", (1,), b"\x05\x00", "no complete length"),
        ("BYTES", (1,), b"\x01\x00\x00\x00\xff", "not UTF-8"),
        ("BYTES", (3,), b"\x00\x00\x00\x00", "1 values where its shape needs 3"),
        ("BYTES", (1,), b"\xff\xff\xff\xff", "runs past the end"),
    ],
)
def test_wrong_bytes_are_told(datatype: str, shape: tuple[int, ...], raw: bytes, part: str) -> None:
    with pytest.raises(RequestError, match=part):
        from_binary("x", datatype, shape, memoryview(raw))


def test_datatypes() -> None:
    assert check_datatype("x", "INT64") == "INT64"
    for datatype, status in (("BF16", 501), ("int64", 400), (None, 400), (["INT64"], 400)):
        with pytest.raises(RequestError) as caught:
            check_datatype("x", datatype)
        assert caught.value.status == status


def test_errors_do_not_repeat_values() -> None:
    with pytest.raises(RequestError) as caught:
        from_json("history_item", "INT64", (1,), ["private-id-4711"])
    assert "4711" not in caught.value.message
