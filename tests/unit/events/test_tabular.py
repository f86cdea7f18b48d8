from __future__ import annotations

import gzip
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tackboard.core.errors import DataError, UsageError
from tackboard.events.tabular import inspect, read, require_columns

CSV = "u,i,note\n007,1,x\n8,2,y\n"


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize("delimiter", [",", "\t", ";", "|"])
def test_csv_with_any_usual_delimiter_and_a_mark_of_byte_order(tmp_path: Path, delimiter: str) -> None:
    source = inspect(write(tmp_path / "log.any", "\ufeff" + CSV.replace(",", delimiter)))
    assert (source.format, source.columns) == ("csv", ("u", "i", "note"))
    assert read(source, ["u"]).table.to_pydict() == {"u": ["007", "8"]}


def test_the_content_decides_not_the_name(tmp_path: Path) -> None:
    zipped = inspect(write(tmp_path / "a.csv", gzip.compress(CSV.encode())))
    assert read(zipped).table.num_rows == 2
    pq.write_table(pa.table({"u": [1]}), tmp_path / "b.csv")
    assert inspect(tmp_path / "b.csv").format == "parquet"
    assert read(inspect(tmp_path / "b.csv")).table["u"].to_pylist() == [1]


def test_attribute_columns_get_types_and_ids_stay_text(tmp_path: Path) -> None:
    table = read(inspect(write(tmp_path / "a.csv", CSV)), as_text=["u"]).table
    assert table["u"].to_pylist() == ["007", "8"]
    assert table["i"].to_pylist() == [1, 2]


def test_rows_with_the_wrong_number_of_fields_are_left_out_and_numbered(tmp_path: Path) -> None:
    rows = read(inspect(write(tmp_path / "a.csv", "u,i\n1,2\n3\n4,5\n6,7,8\n9,10\n")))
    assert rows.table["u"].to_pylist() == ["1", "4", "9"]
    assert rows.malformed.tolist() == [3, 5]
    assert [rows.line_of(row) for row in range(3)] == [2, 4, 6]


def test_quoted_fields_may_hold_delimiters_and_newlines(tmp_path: Path) -> None:
    rows = read(inspect(write(tmp_path / "a.csv", 'u,i\n"a,b","c\nd"\n')))
    assert rows.table.to_pylist() == [{"u": "a,b", "i": "c\nd"}]


def test_a_missing_column_lists_what_there_is(tmp_path: Path) -> None:
    source = inspect(write(tmp_path / "a.csv", "user_id,item_id\n"))
    with pytest.raises(DataError) as caught:
        require_columns(source, {"--user": "user_id", "--item": "itemid"})
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert "'itemid'" in lines[0]
    assert "user_id, item_id" in lines[1]
    assert "did you mean --item item_id?" in lines[2]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "no header"),
        (b"\n\n", "no header"),
        (b"PK\x03\x04rest", "zip archive"),
        (b"PAR1 but not really", "cannot be read"),
        (b"\x1f\x8bbroken", "cannot be read"),
        (b"\xff\xfeu,i\n", "neither Parquet nor UTF-8"),
        (b"u,u\n1,2\n", "two columns named 'u'"),
    ],
)
def test_unreadable_files_are_named(tmp_path: Path, content: bytes, words: str) -> None:
    with pytest.raises(DataError, match=words):
        inspect(write(tmp_path / "log.csv", content))


def test_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    source = inspect(write(tmp_path / "a.csv", b"u,i\n\xff\xfe,2\n"))
    with pytest.raises(DataError, match="not UTF-8"):
        read(source)


def test_a_truncated_archive_is_refused(tmp_path: Path) -> None:
    long = "u,i\n" + "".join(f"{i},{i * 7919}\n" for i in range(50_000))
    source = inspect(write(tmp_path / "a.csv.gz", gzip.compress(long.encode())[:-2000]))
    with pytest.raises(DataError, match="cannot be read"):
        read(source)


def test_a_missing_file_and_a_folder_are_wrong_use(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        inspect(tmp_path / "no.csv")
    with pytest.raises(UsageError, match="is a folder"):
        inspect(tmp_path)
