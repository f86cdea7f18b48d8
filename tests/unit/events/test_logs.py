from __future__ import annotations

import gzip
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tackboard.core.errors import DataError, UsageError
from tackboard.events.logs import LONG_BYTES, find_logs, read_log

WANTED = {"--user": "u", "--item": "i"}


def write(path: Path, content: str) -> Path:
    path.write_bytes(gzip.compress(content.encode()) if path.name.endswith(".gz") else content.encode())
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three files of one log, the last of them gzipped and with its columns in another order."""
    logs = tmp_path / "logs"
    logs.mkdir()
    write(logs / "b.csv", "u,i\n3,30\n4,40\n")
    write(logs / "a.csv", "u,i\n1,10\n2\n2,20\n")
    write(logs / "c.csv.gz", "i,more,u\n50,x,5\n")
    (logs / "_SUCCESS").touch()
    (logs / ".b.csv.crc").touch()
    return logs


def test_a_folder_a_pattern_and_names_mean_the_same_files_in_the_order_of_their_names(folder: Path) -> None:
    named = [folder / name for name in ("a.csv", "b.csv", "c.csv.gz")]
    assert find_logs([folder]) == named
    assert find_logs([folder / "*.csv*"]) == named
    assert find_logs([folder.parent / "**" / "?.csv", named[2]]) == named
    assert find_logs(named[::-1]) == named
    odd = write(folder.parent / "log[1].csv", "u,i\n")
    assert find_logs([odd]) == [odd], "a file whose name looks like a pattern is a file"


def test_rows_of_all_files_stand_below_each_other_and_know_their_place(folder: Path) -> None:
    log = read_log(find_logs([folder]), WANTED, {})
    assert log.columns["u"].to_pylist() == ["1", "2", "3", "4", "5"]
    assert log.columns["i"].to_pylist() == ["10", "20", "30", "40", "50"]
    assert (log.num_rows, log.num_malformed, log.typed) == (5, 1, False)
    places = [log.place_of(row).removeprefix(f"{folder}/") for row in range(5)]
    assert places == ["a.csv line 2", "a.csv line 4", "b.csv line 2", "b.csv line 3", "c.csv.gz line 2"]
    assert log.malformed_places(3) == [f"{folder / 'a.csv'} line 3"]
    assert log.title == f"{folder / 'a.csv'} and 2 more"


def test_a_column_is_given_up_with_its_last_use(folder: Path) -> None:
    log = read_log([folder / "b.csv"], WANTED, {"also": "i"})
    assert log.take("u").to_pylist() == ["3", "4"]
    assert log.take("i").to_pylist() == log.take("i").to_pylist() == ["30", "40"]
    assert not log.columns


def test_files_without_rows_do_not_disturb(folder: Path) -> None:
    write(folder / "a0.csv", "u,i\n")
    write(folder / "z.csv", "u,i")
    log = read_log(find_logs([folder]), WANTED, {})
    assert log.num_rows == 5
    assert log.place_of(2).endswith("b.csv line 2")


def test_integers_of_any_width_and_texts_of_any_kind_are_one_type(tmp_path: Path) -> None:
    texts = pa.array(["x", "y"])
    for name, integers, words in (("a", pa.int32(), texts), ("b", pa.int64(), texts.dictionary_encode())):
        pq.write_table(pa.table({"u": pa.array([1, 2], integers), "i": words}), tmp_path / f"{name}.parquet")
    log = read_log(find_logs([tmp_path]), WANTED, {})
    assert (log.columns["u"].type, log.columns["i"].type, log.typed) == (pa.int64(), pa.string(), True)
    assert log.columns["u"].to_pylist() == [1, 2, 1, 2]
    assert log.columns["i"].to_pylist() == ["x", "y", "x", "y"]
    assert log.place_of(3) == f"{tmp_path / 'b.parquet'} row 2"


def test_a_further_column_that_one_file_lacks_is_refused_by_file(tmp_path: Path) -> None:
    pq.write_table(pa.table({"u": [1], "i": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"u": [1]}), tmp_path / "c.parquet")
    with pytest.raises(DataError, match="c.parquet has no column 'i' .given by --field"):
        read_log([tmp_path / "a.parquet", tmp_path / "c.parquet"], {"--user": "u"}, {"more": "i"})


def test_what_no_log_can_be_is_refused(folder: Path) -> None:
    (folder / "link.csv").symlink_to(folder / "b.csv")
    with pytest.raises(UsageError, match="link.csv is the same file as .*b.csv"):
        find_logs([folder])
    (folder / "link.csv").unlink()
    (folder / "old").mkdir()
    (folder / "old" / ".hidden.csv").touch()
    with pytest.raises(DataError, match="old is a folder without logs"):
        find_logs([folder / "old"])
    with pytest.raises(UsageError, match="no log was given"):
        find_logs([])


def test_long_logs_show_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = write(tmp_path / "a.csv", "u,i\n1,2\n")
    read_log([short], WANTED, {})
    assert capsys.readouterr().err == ""
    long = write(tmp_path / "b.csv", "u,i,x\n" + f"1,2,{'x' * 10_000}\n" * (LONG_BYTES // 10_000 + 1))
    read_log([long], WANTED, {})
    assert f"reading: {long.stat().st_size:,}/{long.stat().st_size:,} bytes" in capsys.readouterr().err
