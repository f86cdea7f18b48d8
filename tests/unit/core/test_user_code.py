"""A user's Python file: imported once, under a name of its own, with errors that say whose they are."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tackboard.core.errors import USER_MODULE_PREFIX, DataError, UsageError, line_of_user_code
from tackboard.core.user_code import load_code


def write(tmp_path: Path, text: str, name: str = "mine.py") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_a_file_is_imported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "value = []\n")
    module = load_code(path)
    module.value.append(1)
    assert load_code(path).value == [1]
    monkeypatch.chdir(tmp_path)
    assert load_code(Path("mine.py")) is module, "whatever way the path is written"
    link = tmp_path / "link.py"
    link.symlink_to(path)
    assert load_code(link) is module
    assert module.__name__.startswith(USER_MODULE_PREFIX) and sys.modules[module.__name__] is module


def test_two_files_of_one_name_are_two_modules(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one, two = (load_code(write(tmp_path / folder, f"value = '{folder}'")) for folder in ("a", "b"))
    assert (one.value, two.value) == ("a", "b")


def test_a_file_may_have_the_name_of_a_library(tmp_path: Path) -> None:
    assert load_code(write(tmp_path, "import json\nvalue = json.dumps(1)", "json.py")).value == "1"
    assert "dumps" in dir(sys.modules["json"])


@pytest.mark.parametrize("name", ["nothing.py", "folder"])
def test_what_is_no_file(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError, match="is not a file"):
        load_code(tmp_path / name)


def test_a_file_that_is_no_python(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a Python file"):
        load_code(write(tmp_path, "x", "notes.txt"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 / 0", ":1 raised ZeroDivisionError: division by zero"),
        ("def f(a):\n    return a\n\nf()", ":4 raised TypeError: f() missing 1 required positional argument: 'a'"),
        ("def f():\n    return nothing\n\nf()", ":2 raised NameError: name 'nothing' is not defined"),
        ("x = 1\ndef", ":2 raised SyntaxError: invalid syntax"),
        ("x = 1\n  y = 2", ":2 raised IndentationError: unexpected indent"),
        ("import nothing_at_all", ":1 raised ModuleNotFoundError: No module named 'nothing_at_all'"),
        ("import json\n\njson.loads('{')", ":3 raised JSONDecodeError"),
    ],
)
def test_an_error_of_the_user(text: str, message: str, tmp_path: Path) -> None:
    path = write(tmp_path, text)
    for _ in range(2):
        with pytest.raises(UsageError) as error:
            load_code(path)
        assert error.value.got.startswith(f"{path}{message}")
        assert error.value.fix == f"`python {path}` shows the same error"
    path.write_text("value = 1")
    assert load_code(path).value == 1, "nothing of the failed import is left"


def test_our_own_error_comes_through_with_its_line(tmp_path: Path) -> None:
    path = write(tmp_path, "from tackboard.core.errors import DataError\n\nraise DataError('wrong', fix='mend it')\n")
    with pytest.raises(DataError) as error:
        load_code(path)
    assert error.value.got == "wrong" and error.value.exit_code == 3
    assert line_of_user_code(error.value) == f"{path}:3"


def test_a_file_that_cannot_be_read_as_text(tmp_path: Path) -> None:
    path = write(tmp_path, "")
    path.write_bytes(b"x = '\xff'\n")
    with pytest.raises(UsageError, match=r"mine\.py.* SyntaxError"):
        load_code(path)


def test_a_file_does_not_end_the_program(tmp_path: Path) -> None:
    path = write(tmp_path, "import sys\nsys.exit('enough')")
    with pytest.raises(UsageError, match=r"mine\.py:2 raised SystemExit: enough") as error:
        load_code(path)
    assert "must not end the program" in error.value.fix


def test_an_interrupt_stays_one_and_leaves_nothing(tmp_path: Path) -> None:
    path = write(tmp_path, "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        load_code(path)
    path.write_text("value = 1")
    assert load_code(path).value == 1
