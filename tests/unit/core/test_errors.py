"""Errors: three lines at most, and the exit codes that scripts rely on."""

from __future__ import annotations

import pytest

from tackboard.core import errors
from tackboard.core.errors import USER_MODULE_PREFIX, TackboardError, counted, line_of_user_code, shown_bytes

EXIT_CODES = {
    "TackboardError": 1,
    "UsageError": 2,
    "ConfigError": 2,
    "StorageError": 2,
    "DataError": 3,
    "CorruptFileError": 3,
    "DivergedError": 4,
    "Preempted": 75,
    "LostProcess": 75,
}


@pytest.mark.parametrize("name", EXIT_CODES)
def test_exit_code_of_each_class(name: str) -> None:
    error = getattr(errors, name)("something")
    assert isinstance(error, TackboardError)
    assert error.exit_code == EXIT_CODES[name]


def test_every_error_class_has_a_documented_code() -> None:
    classes = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert classes == set(EXIT_CODES)


def test_a_message_never_grows_past_three_lines() -> None:
    error = TackboardError("got\nmany\r\nlines", allowed=" a\u2028\n b ", fix="do\tthis")
    assert str(error).splitlines() == ["got many lines", "a b", "do this"]
    assert str(TackboardError("got", fix="fix")) == "got\nfix", "an absent part leaves no empty line"


def test_an_error_is_traced_to_the_innermost_line_of_the_users_file() -> None:
    code = compile("def outer(f):\n    inner(f)\ndef inner(f):\n    f()\n", "/home/me/mine.py", "exec")
    user = {"__name__": f"{USER_MODULE_PREFIX}abc"}
    exec(code, user)  # noqa: S102 - stands for an imported file of a user's
    with pytest.raises(ZeroDivisionError) as caught:
        user["outer"](lambda: 1 // 0)  # type: ignore[operator]
    assert line_of_user_code(caught.value) == "/home/me/mine.py:4"
    with pytest.raises(ZeroDivisionError) as caught:
        1 // 0  # noqa: B018
    assert line_of_user_code(caught.value) is None


def test_one_is_told_of_as_one() -> None:
    assert [counted(number, "user") for number in (0, 1, 2000)] == ["0 users", "1 user", "2,000 users"]


def test_sizes_in_a_message_have_a_unit() -> None:
    assert [shown_bytes(size) for size in (3100, 2_000_000, 1_500_000_000)] == ["3.1 kB", "2.0 MB", "1.5 GB"]
