from __future__ import annotations

import gzip
import os
import time
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


def test_a_missing_column_lists_what_there_is(tmp_path: Path) -> None:
    source = inspect(write(tmp_path / "a.csv", "user_id,item_id\n"))
    with pytest.raises(DataError) as caught:
        require_columns(source, {"--user": "user_id", "--item": "itemid"})
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert "'itemid'" in lines[0]
    assert "user_id, item_id" in lines[1]
    assert "did you mean --item item_id?" in lines[2]


@pytest.mark.parametrize("row", ["anna-77,lamp,1700000000", "anna-77,lamp,2024-05-01", "7,7,170", "a@b.c,anna-77,x"])
def test_a_first_line_that_is_data_is_not_shown(tmp_path: Path, row: str) -> None:
    path = write(tmp_path / "log.csv", f"{row}\n{row}\n".encode())
    with pytest.raises(DataError, match="its first line looks like data") as error:
        require_columns(inspect(path), {"--user": "user"})
    assert not any(word in str(error.value).replace(str(path), "") for word in row.split(","))


@pytest.mark.parametrize("header", [",user_id", "User Id,item", "größe,Ünit", "_user,x"])
def test_unusual_names_are_names(tmp_path: Path, header: str) -> None:
    with pytest.raises(DataError, match="its columns: "):
        require_columns(inspect(write(tmp_path / "log.csv", f"{header}\n1,2\n".encode())), {"--user": "user"})


@pytest.mark.parametrize(
    ("content", "words"), [(b"\n\n", "no header"), (b"\xff\xfeu,i\n", "neither Parquet nor UTF-8")]
)
def test_unreadable_files_are_named(tmp_path: Path, content: bytes, words: str) -> None:
    with pytest.raises(DataError, match=words):
        inspect(write(tmp_path / "log.csv", content))


def test_where_text_stops_being_utf8_is_said(tmp_path: Path) -> None:
    lines = b"u,i\n" + b"1,2\n" * 5
    for bad, line in ((b"\xff,2\n", 7), (b"\xff\n", 7)):  # the second has the wrong number of fields as well
        for content in (lines + bad, gzip.compress(lines + bad)):
            with pytest.raises(DataError, match=f"not UTF-8 text in line {line}"):
                read(inspect(write(tmp_path / "a.csv", content)))


def test_a_quote_may_hold_delimiters_and_newlines_but_not_swallow_lines(tmp_path: Path) -> None:
    rows = read(inspect(write(tmp_path / "a.csv", 'u,i\n"a,b","c\nd"\n')))
    assert rows.table.to_pylist() == [{"u": "a,b", "i": "c\nd"}]
    source = inspect(write(tmp_path / "a.csv", "u,i,n\n1,2,3\n" + '1,"2,3\n' + "1,2,3\n" * 500))
    with pytest.raises(DataError, match="line 3 opens a quote"):
        read(source)


def test_a_header_without_a_line_break_has_no_rows(tmp_path: Path) -> None:
    source = inspect(write(tmp_path / "a.csv", "u,i"))
    assert read(source).table.num_rows == 0
    assert read(source, as_text=["u"]).table.column_names == ["u", "i"]


def test_parquet_is_read_group_by_group_and_an_error_names_the_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"u": pa.array(range(300)), "x": [f"text {n}" for n in range(300)]})
    pq.write_table(table, path, row_group_size=100, compression="none", use_dictionary=False, write_page_checksum=True)
    assert read(inspect(path), ["x", "u"]).table.equals(table.select(["x", "u"]))
    data = bytearray(path.read_bytes())
    data[data.index(b"text 150")] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(DataError, match="a.parquet rows 101 to 200 cannot be read"):
        read(inspect(path))
    assert read(inspect(path), ["u"]).table.num_rows == 300


def test_parquet_with_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    binary = pa.array([b"a", b"\xff\xfe"], pa.binary())
    pq.write_table(pa.table({"x": binary.view(pa.string())}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="rows 1 to 2 cannot be read"):
        read(inspect(tmp_path / "a.parquet"))


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        inspect(tmp_path / "no.csv")
    with pytest.raises(UsageError, match="is a folder"):
        inspect(tmp_path)


@pytest.mark.parametrize("change", ["grow", "touch", "replace", "remove"])
def test_a_file_that_is_not_what_it_was_is_refused(tmp_path: Path, change: str) -> None:
    path = write(tmp_path / "a.csv", CSV)
    source = inspect(path)
    if change == "grow":
        path.write_text(CSV + "9,3,z\n")
    elif change == "touch":
        os.utime(path, ns=(1, 1))
    elif change == "replace":
        os.replace(write(tmp_path / "b.csv", CSV), path)
    else:
        path.unlink()
    expected = {"grow": "was 23 bytes, is 29", "remove": "is gone"}.get(change, "was rewritten")
    with pytest.raises(DataError, match=f"a.csv changed while it was read: it {expected}"):
        read(source)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (",".join(f"c{number}" for number in range(10_001)), "has 10,001 columns"),
        (",".join(f"c{number}" for number in range(200_000)), "has more than 1.* columns"),  # The header is cut.
        ("x" + "ä" * (1 << 20), "has a first line of more than 1,048,576 bytes"),
    ],
    ids=["10,001 columns", "200,000 columns", "a first line without end"],
)
def test_a_header_that_is_too_long_is_told_as_such(tmp_path: Path, header: str, words: str) -> None:
    path = write(tmp_path / "wide.csv", f"{header}\n1\n")
    begun = time.process_time()
    with pytest.raises(DataError, match=words):
        inspect(path)
    assert time.process_time() - begun < 2


def test_the_limit_of_columns_holds_for_parquet_and_is_allowed_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "wide.csv"
    path.write_text(",".join(f"a_rather_long_name_of_a_column_{number}" for number in range(10_000)) + "\n")
    assert len(inspect(path).columns) == 10_000
    monkeypatch.setattr("tackboard.events.tabular.MAX_COLUMNS", 10)
    pq.write_table(pa.table({f"c{number}": [1] for number in range(11)}), tmp_path / "wide.parquet")
    with pytest.raises(DataError, match=r"wide\.parquet has 11 columns") as caught:
        inspect(tmp_path / "wide.parquet")
    assert caught.value.allowed == "allowed: up to 10"
