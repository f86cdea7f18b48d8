"""Documents are read strictly, and an error about their content names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest

from tackboard.core.documents import blaming, read_document
from tackboard.core.errors import ConfigError, CorruptFileError, DataError, UsageError

FIELDS = {"count": int, "inside.names": tuple[str, ...], "kind": Literal["a", "b"], "shares": dict[str, float]}
GOOD = {"count": 3, "inside": {"names": ["x"], "more": 1}, "kind": "a", "shares": {"x": 0.5, "y": 1}, "unknown": None}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "document.json"


def test_what_is_there_comes_back_with_fields_that_are_not_known(path: Path) -> None:
    path.write_text(json.dumps(GOOD))
    assert read_document(path, FIELDS, {"later": int, "inside.more": int}) == GOOD


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"count": True}, "count = True"),
        ({"count": 1 << 63}, "count has more than 64 bits"),
        ({"inside": []}, "it has no object inside"),
        ({"inside": {}}, "it lacks inside.names"),
        ({"inside": {"names": ["x", 5]}}, r"inside.names\[1\] = 5"),
        ({"kind": ["a"]}, "kind = "),
        ({"shares": {"x": "half"}}, "shares.x = 'half'"),
        ({"shares": []}, "shares = "),
        ({"later": "x"}, "later = 'x'"),
    ],
)
def test_a_wrong_field_is_told_with_the_file(path: Path, change: dict[str, Any], words: str) -> None:
    path.write_text(json.dumps(GOOD | change))
    with pytest.raises(CorruptFileError, match=rf"document\.json is malformed: {words}"):
        read_document(path, FIELDS, {"later": int})


def test_what_is_no_object_is_told(path: Path) -> None:
    for text in ("[]", "5", "null"):
        path.write_text(text)
        with pytest.raises(CorruptFileError, match="it is not a JSON object"):
            read_document(path, {"count": int})


@pytest.mark.parametrize("error", [ConfigError("x = 5"), DataError("x = 5"), KeyError("x = 5"), RuntimeError("x = 5")])
def test_an_error_of_the_content_is_blamed_on_the_file(path: Path, error: Exception) -> None:
    with pytest.raises(CorruptFileError, match=r"document\.json is malformed: .*x = 5"), blaming(path):
        raise error


@pytest.mark.parametrize("error", [UsageError("--code"), DataError("it"), KeyboardInterrupt(), OSError(5, "x")])
def test_other_errors_pass(path: Path, error: BaseException) -> None:
    if isinstance(error, DataError):
        error = DataError(f"{path} is bad")
    with pytest.raises(type(error)) as caught, blaming(path):
        raise error
    assert caught.value is error
