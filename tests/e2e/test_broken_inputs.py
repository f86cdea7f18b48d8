"""Broken logs, and what `tackboard init` says of each: the file, the row where there is one, exit code 3.

This table is the documentation of what is caught. Each row plants one fault in a log that would import otherwise, next
to a dataset that exists already. Whatever the fault, at most three lines come out, no traceback, no raw user id, and
nothing is written: neither a part of a dataset nor a recipe. `tests/e2e/test_mistakes.py` has the mistakes of those who
type; here the data are wrong.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import io
import os
import random
import shlex
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import Answer
else:
    Answer = Any

WRONG_USE, DATA_INVALID = 2, 3
SECRET = "raw-user-id"
"""Begins every user id of the logs here: no message may hold it."""
HEADER = "user,item,time,action\n"
NUM_ROWS = 400


def lines(first: int = 0, count: int = NUM_ROWS, *, per_second: int = 1) -> str:
    return "".join(
        f"{SECRET}-{n % 7},i{n % 11},{(1_700_000_000 + n) * per_second},click\n" for n in range(first, first + count)
    )


GOOD = HEADER + lines()
INIT = "init log --user user --item item --time time --action action --name mine"
Plant = Callable[[Path], object]


@dataclasses.dataclass(frozen=True)
class Fault:
    """One row: what is planted in the folder, fragments that the message must hold, what is typed, the exit code."""

    name: str
    plant: Plant
    says: tuple[str, ...]
    command: str = INIT
    code: int = DATA_INVALID


def file(name: str, content: str | bytes) -> Plant:
    data = content.encode() if isinstance(content, str) else content

    def plant(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)

    return plant


def log(content: str | bytes) -> Plant:
    return file("log", content)


def both(*plants: Plant) -> Plant:
    return lambda folder: [plant(folder) for plant in plants]


def parquet(*, edit: Callable[[bytearray], object] | None = None, **columns: Any) -> Callable[[], bytes]:
    """A log of Parquet as bytes: the good one with other `columns`, its bytes then edited."""

    def make() -> bytes:
        import pyarrow as pa
        import pyarrow.parquet as pq

        content = {
            "user": [f"{SECRET}-{n % 7}" for n in range(NUM_ROWS)],
            "item": [n % 11 for n in range(NUM_ROWS)],
            "time": [1_700_000_000 + n for n in range(NUM_ROWS)],
            "action": ["click"] * NUM_ROWS,
        } | {name: make_column(pa) for name, make_column in columns.items()}
        sink = io.BytesIO()
        pq.write_table(pa.table(content), sink, row_group_size=100, write_page_checksum=True)
        data = bytearray(sink.getvalue())
        if edit is not None:
            edit(data)
        return bytes(data)

    return make


def made(name: str, make: Callable[[], bytes]) -> Plant:
    """`file` whose content is made when it is planted, because Arrow must not be imported with this module."""
    return lambda folder: file(name, make())(folder)


def cut(data: bytearray) -> None:
    del data[len(data) * 2 // 3 :]


def flip_a_page(data: bytearray) -> None:
    """Flips bits of the first page's values, behind the magic number and the page's header."""
    place = data.index(SECRET.encode()) + 4
    data[place] ^= 0xFF


def flip_a_header(data: bytearray) -> None:
    data[4:12] = b"\xff" * 8


def flip_the_footer(data: bytearray) -> None:
    num_bytes = int.from_bytes(data[-8:-4], "little")
    data[-8 - num_bytes : -8 - num_bytes // 2] = bytes(num_bytes - num_bytes // 2)


def set_row(value: Any, row: int, type_: str) -> Callable[[Any], Any]:
    """A column of plausible times or items whose `row` (from 1) is `value`."""

    def column(pa: Any) -> Any:
        values = [1_700_000_000 + n for n in range(NUM_ROWS)]
        values[row - 1] = value
        return pa.array(values, getattr(pa, type_)())

    return column


def replace_line(number: int, text: str) -> str:
    """The good log with another line `number`, from 1."""
    content = GOOD.splitlines()
    content[number - 1] = text
    return "\n".join(content) + "\n"


def nested(pa: Any) -> Any:
    return pa.array([[n] for n in range(NUM_ROWS)])


def structs(pa: Any) -> Any:
    return pa.array([{"id": n} for n in range(NUM_ROWS)])


def booleans(pa: Any) -> Any:
    return pa.array([True] * NUM_ROWS)


def years(text: str) -> str:
    return HEADER + "".join(f"{SECRET},i{n},{text},click\n" for n in range(5))


def far_dates(pa: Any) -> Any:
    return pa.array([10_000_000] * NUM_ROWS, pa.date32())


VERSIONS = f"user,valid_from_ms,age\n{SECRET}-1,5,30\n{SECRET}-2,5,40\n{SECRET}-1,5,31\n"
FAULTS = [
    # Files that are torn.
    Fault("a truncated Parquet file", made("log", parquet(edit=cut)), ("log cannot be read",)),
    Fault("a Parquet file of only its first bytes", log(b"PAR1"), ("log cannot be read",)),
    Fault("a Parquet page with flipped bits", made("log", parquet(edit=flip_a_page)), ("log rows 1 to 100 cannot be",)),
    Fault("a Parquet page without a header", made("log", parquet(edit=flip_a_header)), ("log rows 1 to 100 cannot",)),
    Fault("a Parquet footer with zeros", made("log", parquet(edit=flip_the_footer)), ("log cannot be read",)),
    Fault(
        "a truncated gzip file",
        log(gzip.compress(GOOD.encode(), mtime=0)[:-40]),
        ("log cannot be read",),
    ),
    Fault("a gzip file of only its first bytes", log(b"\x1f\x8b\x08\x00"), ("log cannot be read",)),
    Fault("an empty file", log(b""), ("log has no header line", "first line names the columns")),
    Fault("a header and nothing else", log(HEADER), ("log has a header but no rows",)),
    Fault("a Parquet file without rows", made("log", lambda: empty_parquet()), ("log has a header but no rows",)),
    Fault("text that is not UTF-8", log(replace_line(7, f"{SECRET},i1,1700000000,\xe9").encode("latin-1")),
          ("log is not UTF-8 text in line 7", "iconv")),
    Fault("NUL bytes in an id", log(replace_line(9, f"{SECRET}\x00,i1,1700000000,click")),
          ("log line 9: the column 'user' holds a NUL byte",)),
    Fault("NUL bytes instead of lines", log(GOOD.encode() + b"\x00" * 4096 + b"\n" + b"\x00\n" * 20),
          ("21 with the wrong number of fields (line 402",)),
    Fault("a quote that is never closed", log(replace_line(20, f'{SECRET},"i1,1700000000,click')),
          ("log line 20 opens a quote",)),
    Fault("a quote that swallows the rest", log(replace_line(20, f'{SECRET},i1,1700000000,"click')),
          ("log line 20: the column 'action' holds a line break",)),
    # Columns and types.
    Fault("a missing column", log(GOOD.replace("item", "thing", 1)), ("log has no column 'item'", "its columns: us")),
    Fault("a column twice", log(GOOD.replace("action", "user", 1)), ("log has two columns named 'user'",)),
    Fault("a column twice in Parquet", made("log", lambda: double_parquet()), ("log has two columns named 'user'",)),
    Fault("lines with the wrong number of fields", log(GOOD + f"{SECRET},i1\n" * 10),
          ("10 of 410 rows of log", "10 with the wrong number of fields (line 402, 403, 404)")),
    Fault("no user anywhere", log(GOOD.replace(SECRET, "").replace("-", "").replace("\n0", "\n").replace("\n1", "\n")),
          ("without a user (line",)),
    Fault("lists where ids are expected", made("log", parquet(item=nested)),
          ("log row 1: the id column 'item' has type list",)),
    Fault("structs where actions are expected", made("log", parquet(action=structs)),
          ("log row 1: the column 'action' has type struct",)),
    Fault("truth values for times", made("log", parquet(time=booleans)),
          ("log row 1: the time column 'time' has type bool",)),
    Fault("an integer id above 2^63", made("log", parquet(item=set_row(2**64 - 1, 30, "uint64"))),
          ("log row 30: the column 'item' holds a number above 2^63 - 1",)),
    Fault("an id with a fraction", made("log", parquet(item=set_row(0.5, 12, "float64"))),
          ("log row 12: the id column 'item' holds fractions",)),
    # Times.
    Fault("seconds and milliseconds in one file", log(GOOD + lines(0, 5, per_second=1000)),
          ("'time' mixes seconds and milliseconds: seconds from log line 2, milliseconds from log line 402",)),
    Fault("numbers and ISO 8601 in one file", log(GOOD + f"{SECRET},i1,2024-05-01,click\n"),
          ("mixes numbers and ISO 8601 text: numbers from log line 2, ISO 8601 text from log line 402",)),
    Fault("the year 1", log(years("0001-01-01T00:00:00Z")), ("5 with an unparsable time (line 2, 3, 4)",)),
    Fault("the year 30000", log(years("30000-01-01")), ("5 with an unparsable time (line 2, 3, 4)",)),
    Fault("the year 29349 as a date of Parquet", made("log", parquet(time=far_dates)),
          ("400 with an unparsable time (row 1, 2, 3)",)),
    Fault("times before 1970", log(years("-86400")), ("5 with an unparsable time (line 2, 3, 4)",)),
    # Files that do not fit together.
    Fault("seconds in one file and milliseconds in another",
          both(file("log/a.csv", GOOD), file("log/b.csv", HEADER + lines(per_second=1000))),
          ("mixes seconds and milliseconds: seconds from log/a.csv line 2, milliseconds from log/b.csv line 2",)),
    Fault("a type that differs between files",
          both(made("log/a.parquet", parquet()), made("log/b.parquet", parquet(item=lambda pa: ["x"] * NUM_ROWS))),
          ("log/b.parquet, row 1 and below: the column 'item' is string, but int64 in log/a.parquet",)),
    Fault("a column that one file lacks",
          both(file("log/a.csv", GOOD), file("log/b.csv", GOOD.replace("time", "when", 1))),
          ("log/b.csv has no column 'time'",)),
    Fault("CSV and Parquet in one folder", both(file("log/a.csv", GOOD), made("log/b.parquet", parquet())),
          ("log/b.parquet is Parquet, but log/a.csv is CSV",)),
    Fault("one torn file among whole ones",
          both(file("log/a.csv", GOOD), made("log/b.csv", lambda: gzip.compress(GOOD.encode(), mtime=0)[:-40])),
          ("log/b.csv cannot be read",)),
    Fault("a folder without logs", lambda folder: (folder / "log").mkdir(), ("log is a folder without logs",)),
    Fault("a folder of hidden files", file("log/_SUCCESS", ""), ("log is a folder without logs",)),
    Fault("something else in a folder of logs", both(file("log/a.csv", GOOD), file("log/notes.md", "x")),
          ("log/notes.md is not a log, judging by its name", "*.csv", "move the file away")),
    Fault("a folder named like a log", both(file("log/a.csv", GOOD), lambda folder: (folder / "log" / "b.csv").mkdir()),
          ("log/b.csv is a folder inside a folder of logs",)),
    # Paths that hold no file.
    Fault("a symlink to nothing", lambda folder: (folder / "log").symlink_to("gone"),
          ("log is a symlink whose target does not exist",)),
    Fault("a pipe", lambda folder: os.mkfifo(folder / "log"), ("log is not a regular file",)),
    Fault("a zip archive", log(b"PK\x03\x04 and more"), ("log is a zip archive", "unzip the archive")),
    # Files of attributes.
    Fault("two versions of a user from one time", both(log(GOOD), file("users.csv", VERSIONS)),
          ("one user at 5 in users.csv line 2 and line 4", "one row per id and time"), f"{INIT} --users users.csv"),
    Fault("users without ids", both(log(GOOD), file("users.csv", f"user,age\n{SECRET},1\n ,2\n{SECRET}-1,3\n,4\n")),
          ("2 of 4 rows of users.csv (line 3, 5) have no id",), f"{INIT} --users users.csv"),
    Fault("an empty file of items", both(log(GOOD), file("items.csv", "")), ("items.csv has no header line",),
          f"{INIT} --items items.csv"),
    Fault("a file of items without rows", both(log(GOOD), file("items.csv", "item,price\n")),
          ("items.csv has a header but no rows",), f"{INIT} --items items.csv"),
    Fault("births in two units", both(log(GOOD), file("items.csv", "item,birth\ni1,1700000000\ni2,1700000000000\n")),
          ("'birth' mixes seconds and milliseconds: seconds from items.csv line 2, milliseconds from items.csv ",),
          f"{INIT} --items items.csv"),
    Fault("a field that is a list", made("log", parquet(more=nested)), ("log row 1: the column 'more' has type list",),
          f"{INIT} --field more"),
    Fault("a context that is no object", log(GOOD), ("log line 2: the context is not JSON",),
          f"{INIT} --context item"),
    # Wrong use, not wrong data.
    Fault("a pattern that matches nothing", log(GOOD), ("no file matches logs/*.csv",), code=WRONG_USE,
          command=INIT.replace("init log", "init 'logs/*.csv'")),
    Fault("a file given twice", log(GOOD), ("log is given twice",), code=WRONG_USE,
          command=INIT.replace("init log", "init log log")),
]  # fmt: skip


def empty_parquet() -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = ("user", "item", "time", "action")
    sink = io.BytesIO()
    pq.write_table(pa.table({name: pa.array([], pa.string()) for name in names}), sink)
    return sink.getvalue()


def double_parquet() -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = io.BytesIO()
    columns = [pa.array([1, 2])] * 5
    pq.write_table(pa.Table.from_arrays(columns, ["user", "item", "time", "action", "user"]), sink)
    return sink.getvalue()


@pytest.fixture(scope="module")
def before_the_fault(tackboard: Callable[..., Answer], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a dataset `mine` made from a good log."""
    folder = tmp_path_factory.mktemp("before")
    (folder / "good.csv").write_text(GOOD)
    columns = ["--user", "user", "--item", "item", "--time", "time", "--action", "action"]
    answer = tackboard("init", "good.csv", *columns, "--name", "mine", "--recipe", "first.py", cwd=folder)
    assert answer.code == 0, answer.err
    return folder


@pytest.fixture
def folder(before_the_fault: Path, tmp_path: Path) -> Path:
    """A copy of that folder for one test."""
    return shutil.copytree(before_the_fault, tmp_path / "folder", symlinks=True)


def contents(folder: Path) -> dict[Path, bytes | str | None]:
    """Every path below `folder`, with the bytes of files and the targets of symlinks."""
    return {
        path: os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def check_refused(answer: Answer, fault: Fault) -> None:
    assert answer.code == fault.code, answer.err
    assert answer.out == ""
    assert 1 <= len(answer.err.splitlines()) <= 3, answer.err
    assert answer.err.startswith("error: ")
    assert "Traceback" not in answer.err
    assert SECRET not in answer.err
    for fragment in fault.says:
        assert fragment in answer.err, answer.err


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_a_broken_input_is_refused(fault: Fault, tackboard: Callable[..., Answer], folder: Path) -> None:
    from tackboard.events.dataset import open_dataset

    fault.plant(folder)
    before = contents(folder)
    check_refused(tackboard(*shlex.split(fault.command), cwd=folder), fault)
    assert contents(folder) == before, "a refused import leaves nothing behind"
    assert open_dataset(folder / "datasets" / "mine").num_events == NUM_ROWS


@contextlib.contextmanager
def meanwhile(action: Callable[[int], object]) -> Iterator[None]:
    """Calls `action(0)`, `action(1)`, … in a thread of its own until the block ends."""
    stop = threading.Event()

    def work() -> None:
        number = 0
        while not stop.is_set():
            action(number)
            number += 1

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("kind", ["grows", "is replaced", "is cut"])
def test_a_file_that_changes_while_it_is_read(kind: str, tackboard: Callable[..., Answer], folder: Path) -> None:
    path = folder / "log"
    large = HEADER + lines(count=200_000)
    path.write_text(large)
    new = folder.parent / "new"
    copies = (folder.parent / "even", folder.parent / "odd")
    for copy in copies:
        copy.write_text(large)

    def change(number: int) -> None:
        if kind == "grows":
            with path.open("a") as stream:
                stream.write(lines(number, 1))
        elif kind == "is cut":
            os.truncate(path, path.stat().st_size - 1)
        else:
            os.link(copies[number % 2], new)  # No new text is written: the file changes faster than it can be read.
            os.utime(new, ns=(number, number))
            os.replace(new, path)

    with meanwhile(change):
        answer = tackboard(*shlex.split(INIT), cwd=folder)
    check_refused(answer, Fault(kind, change, ("log changed while it was read", "run the command again")))
    assert sorted(entry.name for entry in folder.iterdir()) == ["datasets", "first.py", "good.csv", "log"]
    assert len(list((folder / "datasets" / "mine").iterdir())) == 2  # the snapshot and `latest`


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_log_that_may_not_be_read(tackboard: Callable[..., Answer], folder: Path) -> None:
    (folder / "log").write_text(GOOD)
    (folder / "log").chmod(0)
    answer = tackboard(*shlex.split(INIT), cwd=folder)
    check_refused(answer, Fault("unreadable", log(""), ("log cannot be read: Permission denied",)))


@pytest.mark.parametrize("kind", ["csv", "gzip", "parquet"])
def test_damaged_bytes_give_an_import_or_a_refusal(kind: str, tmp_path: Path) -> None:
    """Any bytes at all: never another error, never a part of a dataset."""
    from tackboard.core.errors import DataError
    from tackboard.events.importer import ImportConfig, import_log

    content = {"csv": GOOD.encode(), "gzip": gzip.compress(GOOD.encode(), mtime=0), "parquet": parquet()()}[kind]
    config = ImportConfig(files=[tmp_path / "log"], user="user", item="item", time="time", action="action")
    draws, num_refused = random.Random(7), 0
    for _ in range(30):
        data = bytearray(content)
        if draws.random() < 0.2:
            del data[draws.randrange(len(data)) :]
        for _ in range(draws.choice([1, 3, 10])):
            data[draws.randrange(len(data)) : draws.randrange(len(data))] = draws.randbytes(draws.choice([1, 1, 30]))
        (tmp_path / "log").write_bytes(data)
        try:
            import_log(config, tmp_path / "datasets", "log")
        except DataError as error:
            num_refused += 1
            assert len(str(error).splitlines()) <= 3
            assert SECRET not in str(error)
    assert num_refused >= 5
    if (tmp_path / "datasets").exists():
        assert not [path for path in (tmp_path / "datasets").rglob("*") if ".tmp-" in path.name]
