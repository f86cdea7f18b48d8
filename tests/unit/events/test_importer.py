from __future__ import annotations

import gzip
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from tackboard.core.errors import DataError, UsageError
from tackboard.events.dataset import Dataset, open_dataset
from tackboard.events.importer import ImportConfig, ImportReport, default_name, import_log

GOOD = "u,i,t,a\n1,10,1700000000,click\n1,11,1700000060,save\n2,10,1700000030,click\n"


def run(tmp_path: Path, content: str | bytes, **options: object) -> tuple[Dataset, ImportReport]:
    file = tmp_path / "log.csv"
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    columns: dict[str, object] = {"user": "u", "item": "i", "time": "t"}
    config = ImportConfig(files=[file], **{**columns, **options})  # type: ignore[arg-type]
    path, report = import_log(config, tmp_path / "datasets", "log")
    return open_dataset(path), report


def test_a_clean_log_keeps_every_row(tmp_path: Path) -> None:
    dataset, report = run(tmp_path, GOOD, action="a")
    assert (report.rows_read, report.rows_kept, report.fixes()) == (3, 3, [])
    rows = dataset.read_events().to_pylist()
    assert [(r["user"], r["item"], r["action"], r["surface"], r["time_ms"], r["order"]) for r in rows] == [
        (1, 10, "click", "default", 1_700_000_000_000, 0),
        (1, 11, "save", "default", 1_700_000_060_000, 1),
        (2, 10, "click", "default", 1_700_000_030_000, 2),
    ]
    assert dataset.manifest["source"]["report"]["rows_read"] == 3


def test_csv_gzip_and_parquet_of_one_log_give_the_same_events(tmp_path: Path) -> None:
    tables = []
    for kind in ("csv", "gzip", "parquet"):
        folder = tmp_path / kind
        folder.mkdir()
        content: bytes = GOOD.encode()
        if kind == "gzip":
            content = gzip.compress(content)
        if kind == "parquet":
            pq.write_table(pa.csv.read_csv(pa.BufferReader(content)), folder / "x")
            content = (folder / "x").read_bytes()
        tables.append(run(folder, content, action="a")[0].read_events())
    assert tables[0].equals(tables[1])
    assert tables[0].equals(tables[2])


def test_rows_out_of_order_are_sorted_and_ties_keep_the_order_of_the_file(tmp_path: Path) -> None:
    dataset, report = run(tmp_path, "u,i,t\n1,c,30\n1,b,10\n1,a,10\n2,z,5\n")
    assert report.out_of_order == 1
    assert dataset.read_events(["item"])["item"].to_pylist()[:3] == ["b", "a", "c"]
    assert "sorted by time" in report.fixes()[0][1]


def test_bad_rows_within_the_allowed_share_are_dropped_and_counted(tmp_path: Path) -> None:
    good = "".join(f"u{i % 7},{i},{1_700_000_000 + i}\n" for i in range(400))
    bad = "  ,5,1700000000\nu1,,1700000000\nu1,7,yesterday\nu1,8\n"
    dataset, report = run(tmp_path, "u,i,t\n" + good + bad)
    assert (report.empty_users, report.empty_items, report.unparsable_times, report.malformed) == (1, 1, 1, 1)
    assert (report.rows_read, report.rows_kept, dataset.num_events) == (404, 400, 400)
    assert len(report.fixes()) == 4


def test_too_many_bad_rows_are_refused_by_line_and_nothing_is_written(tmp_path: Path) -> None:
    content = "u,i,t\n1,5,1700000000\n,6,1700000001\n1,,1700000002\n1,8,never\n1,9\n1,10,1700000003\n"
    with pytest.raises(DataError) as caught:
        run(tmp_path, content)
    message = str(caught.value)
    assert "4 of 6 rows" in message
    assert "1 without a user (line 3)" in message
    assert "1 without an item (line 4)" in message
    assert "1 with an unparsable time (line 5)" in message
    assert "wrong number of fields (line 6)" in message
    assert len(message.splitlines()) == 3
    assert not (tmp_path / "datasets").exists()
    _, report = run(tmp_path, content, max_bad_share=0.7)
    assert report.rows_kept == 2


@pytest.mark.parametrize(
    ("content", "words"),
    [("u,i,t\n", "no rows"), ("u,i,t\n1,2,3000000000000\n1,2,3\n", "mixes"), ("u,i,when\n1,2,3\n", "no column 't'")],
)
def test_logs_that_cannot_be_read_are_refused(tmp_path: Path, content: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        run(tmp_path, content)
    assert not (tmp_path / "datasets").exists()


def test_a_log_of_only_bad_rows_or_a_share_outside_0_to_1_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="2 of 2 rows"):
        run(tmp_path, "u,i,t\n,1,5\n,2,6\n", max_bad_share=1.0)
    with pytest.raises(UsageError, match="max-bad-share"):
        run(tmp_path, GOOD, max_bad_share=5.0)


def test_optional_columns_are_imported_and_their_gaps_filled_by_rule(tmp_path: Path) -> None:
    content = "u,i,t,a,s,r,p,got\n1,5,10,,home,q1,0,12\n1,6,20,click,,,x,soon\n"
    dataset, report = run(tmp_path, content, action="a", surface="s", request="r", position="p", received="got")
    assert (report.empty_actions, report.empty_surfaces) == (1, 1)
    assert (report.unparsable_positions, report.unparsable_received) == (1, 1)
    rows = dataset.read_events().to_pylist()
    assert [(r["action"], r["surface"], r["request"], r["position"], r["received_ms"]) for r in rows] == [
        ("unknown", "home", "q1", 0, 12_000),
        ("click", "unknown", None, None, 20_000),
    ]


def test_item_attributes_join_by_name_and_keep_items_without_events(tmp_path: Path) -> None:
    items = tmp_path / "items.csv"
    items.write_text(
        "title,i,created_at\nten,10,2023-01-01\neleven,11,2023-01-02\nnew,12,2023-01-03\nten,10,2020-01-01\n"
    )
    dataset, report = run(tmp_path, GOOD, items=items)
    rows = {row["item"]: row for row in dataset.read_items().to_pylist()}
    assert rows[12]["num_events"] == 0
    assert rows[12]["first_ms"] is None
    assert rows[10]["title"] == "ten"
    assert rows[10]["birth_ms"] == 1_672_531_200_000
    assert (dataset.num_items, dataset.statistics["num_items"]) == (3, 2)
    assert report.item_attribute_rows_dropped == 1


def test_user_attributes_join_by_the_first_column_and_keep_the_events_type(tmp_path: Path) -> None:
    users = tmp_path / "users.csv"
    users.write_text("person,age\n1,30\nu2,40\n")
    dataset, _ = run(tmp_path, "u,i,t\n1,5,10\nu2,6,20\n", users=users)
    assert {row["user"]: row["age"] for row in dataset.read_users().to_pylist()} == {"1": 30, "u2": 40}


@pytest.mark.parametrize(
    ("option", "content", "words"),
    [
        ("items", "title,code\nten,10\nnew,12\n", r"2 of 2 rows of .*attributes.csv .line 2, 3. have no id"),
        ("items", "i,price\n", "attributes.csv has a header but no rows"),
        ("users", "u,valid_from_ms,age\n2,5,30\n1,5,30\n1,6,30\n1,5,31\n", "1 rows of the users .* line 3 and line 5"),
        ("users", "u,valid_from_ms,age\n2,5,30\n1,5,30\n1,6,30\n1,5,31\n", "one user at 5 in "),
        ("users", "u,valid_from_ms,age\n1,5,30\n1,soon,31\n", "or no usable valid_from_ms"),
        ("users", "u,valid_from_ms,valid_from\n1,5,2024-01-01\n", "both"),
    ],
)
def test_attributes_that_break_the_rules_are_refused(tmp_path: Path, option: str, content: str, words: str) -> None:
    file = tmp_path / "attributes.csv"
    file.write_text(content)
    with pytest.raises(DataError, match=words):
        run(tmp_path, GOOD, **{option: file})
    assert not (tmp_path / "datasets").exists()


def test_fields_of_csv_and_parquet_are_the_same(tmp_path: Path) -> None:
    content = "u,i,t,dwell,Price,ok,note\n1,5,10,7,1.5,true,a\n1,6,20,,,,\n2,5,30,-1,2.0,false,b\n"
    fields = {"dwell": "dwell", "price": "Price", "ok": "ok", "note": "note"}
    (tmp_path / "csv").mkdir()
    from_csv, _ = run(tmp_path / "csv", content, fields=fields)
    options = pa.csv.ConvertOptions(strings_can_be_null=True)
    pq.write_table(pa.csv.read_csv(pa.BufferReader(content.encode()), convert_options=options), tmp_path / "x")
    from_parquet, _ = run(tmp_path, (tmp_path / "x").read_bytes(), fields=fields)
    assert from_csv.fields == {"dwell": "int", "price": "float", "ok": "bool", "note": "string"}
    rows = from_csv.read_events(list(fields)).to_pylist()
    assert rows[:2] == [
        {"dwell": 7, "price": 1.5, "ok": True, "note": "a"},
        {"dwell": None, "price": None, "ok": None, "note": None},
    ]
    assert from_csv.read_events().equals(from_parquet.read_events())


def test_exact_duplicates_are_dropped_and_rows_that_differ_in_a_column_kept(tmp_path: Path) -> None:
    content = "u,i,t,a,other\n1,x,5,click,p\n1,x,5,click,q\n1,x,5,save,p\n1,x,6,click,p\n"
    dataset, report = run(tmp_path, content, action="a")
    assert report.duplicates == 1
    assert dataset.read_events(["order"])["order"].to_pylist() == [0, 2, 3]
    content = "u,i,t,n,x\n" + "1,5,10,,\n1,5,10,-1,\n1,5,10,-1,0.5\n1,5,10,-1,0.5\n1,5,10,-1,0.25\n"
    dataset, report = run(tmp_path, content, fields={"n": "n", "x": "x"})
    assert report.duplicates == 1
    assert dataset.read_events(["n", "x"]).to_pylist() == [
        {"n": None, "x": None},
        {"n": -1, "x": None},
        {"n": -1, "x": 0.5},
        {"n": -1, "x": 0.25},
    ]


def test_a_field_is_found_by_its_column_and_named_by_the_rules(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="did you mean --field aa"):
        run(tmp_path, GOOD.replace("a\n", "aa\n", 1), fields={"x": "aaa"})
    for name in ("user", "Price"):
        with pytest.raises(UsageError, match="--field another_name=a"):
            run(tmp_path, GOOD, fields={name: "a"})


def test_contexts_are_checked_and_a_bad_one_named_by_its_line(tmp_path: Path) -> None:
    content = 'u,i,t,c\n1,5,10,"{""device"": ""phone""}"\n1,6,20,\n'
    dataset, _ = run(tmp_path, content, context="c")
    assert dataset.read_events(["context"])["context"].to_pylist() == ['{"device": "phone"}', None]
    # The dropped row before it counts as a line, and its own context does not matter.
    with pytest.raises(DataError, match=r"log.csv line 5: the context is JSON, but not an object"):
        run(tmp_path, content + ",7,30,{\n1,8,40,[1]\n", context="c", max_bad_share=0.5)


@pytest.mark.parametrize("kind", ["ms", "timestamp"])
def test_attributes_valid_from_a_time(tmp_path: Path, kind: str) -> None:
    items = tmp_path / "items.csv"
    header, old, new = (
        ("valid_from_ms", "0", "1704067200000") if kind == "ms" else ("valid_from", "1970-01-02", "2024-01-01")
    )
    items.write_text(f"i,{header},price\n10,{new},2.5\n10,{old},1.5\n12,{old},9\n")
    dataset, report = run(tmp_path, GOOD, items=items)
    first = 0 if kind == "ms" else 86_400_000
    history = dataset.read_history("item")
    assert history is not None
    assert [tuple(row.values()) for row in history.to_pylist()] == [
        (10, first, 1.5),
        (10, 1_704_067_200_000, 2.5),
        (12, first, 9.0),
    ]
    assert {row["item"]: row["price"] for row in dataset.read_items().to_pylist()} == {10: 2.5, 11: None, 12: 9.0}
    assert "valid_from_ms" not in dataset.read_items().column_names
    assert report.item_attribute_rows_dropped == 0


def test_vectors_come_from_parquet(tmp_path: Path) -> None:
    items = tmp_path / "items.parquet"
    pq.write_table(pa.table({"i": [10, 12, 13], "v": [[1.0, 2.0], [3.0, 4.0], None]}), items)
    dataset, _ = run(tmp_path, GOOD, items=items)
    vectors = dataset.read_items(["v"])["v"]
    assert vectors.type == pa.list_(pa.float32(), 2)
    assert vectors.to_pylist() == [[1.0, 2.0], None, [3.0, 4.0], None]
    pq.write_table(pa.table({"i": [10], "v": pa.array([[1.0, 2.0]], pa.list_(pa.float64(), 2))}), items)
    assert run(tmp_path, GOOD, items=items)[0].read_items(["v"])["v"].type == pa.list_(pa.float32(), 2)
    pq.write_table(pa.table({"i": [10, 12], "v": pa.array([[1.0, 2.0], None], pa.list_(pa.float64(), 2))}), items)
    with pytest.raises(DataError, match="store this column as lists without a fixed size"):
        run(tmp_path, GOOD, items=items)


def test_two_hundred_thousand_rows_take_seconds(tmp_path: Path) -> None:
    rows = np.arange(200_000)
    table = pa.table({"u": rows % 5003, "i": [f"item {i % 997}" for i in rows], "t": 1_700_000_000 + rows[::-1]})
    pa.csv.write_csv(table, tmp_path / "big.csv")
    started = time.process_time()
    dataset, report = run(tmp_path, (tmp_path / "big.csv").read_bytes())
    assert time.process_time() - started < 5
    assert dataset.num_events == 200_000
    assert report.out_of_order == 200_000 - 5003


def test_several_files_are_one_log_in_the_order_of_their_names(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / "b.csv").write_text("u,i,t\nx,3,10\nx,1,10\n")
    (folder / "a.csv").write_text("u,i,t\nx,1,10\nx,2,20\nx\n")
    columns = {"user": "u", "item": "i", "time": "t", "max_bad_share": 0.5}
    tables = []
    for files in ([folder], [folder / "*.csv"], [folder / "b.csv", folder / "a.csv"]):
        path, report = import_log(ImportConfig(files=files, **columns), tmp_path / "datasets", "log")  # type: ignore[arg-type]
        tables.append(open_dataset(path).read_events())
    assert all(table.equals(tables[0]) for table in tables)
    # The second row of b.csv repeats the first of a.csv; ties are in the order of the files.
    assert [(row["item"], row["order"]) for row in tables[0].to_pylist()] == [(1, 0), (3, 2), (2, 1)]
    assert (report.rows_read, report.malformed, report.duplicates, report.out_of_order) == (5, 1, 1, 1)
    assert open_dataset(path).manifest["source"]["num_files"] == 2


def test_bad_rows_of_several_files_are_named_by_file(tmp_path: Path) -> None:
    for name, rows in (("a", "x,1,10\n"), ("b", ",3,10\nx,2,never\nx\n")):
        (tmp_path / f"{name}.csv").write_text("u,i,t\n" + rows)
    config = ImportConfig(files=[tmp_path / "?.csv"], user="u", item="i", time="t")
    with pytest.raises(DataError) as caught:
        import_log(config, tmp_path / "datasets", "log")
    file = tmp_path / "b.csv"
    assert f"3 of 4 rows of {tmp_path / 'a.csv'} and 1 more cannot be used" in str(caught.value)
    assert f"1 without a user ({file} line 2)" in str(caught.value)
    assert f"1 with an unparsable time ({file} line 3)" in str(caught.value)
    assert f"1 with the wrong number of fields ({file} line 4)" in str(caught.value)


def test_dropped_rows_and_duplicates_leave_every_column_in_step(tmp_path: Path) -> None:
    rows = [f"u{n % 5},i{n % 7},{1_700_000_000 + n},{'view' if n % 2 else 'save'},r{n},{n}" for n in range(90)]
    rows[10] = rows[10].replace("u0", "")
    content = "u,i,t,a,r,f\n" + "\n".join([*rows, *rows[40:60]]) + "\n"
    dataset, report = run(tmp_path, content, action="a", request="r", fields={"f": "f"}, max_bad_share=0.1)
    assert (report.empty_users, report.duplicates, dataset.num_events) == (1, 20, 89)
    for row in dataset.read_events().to_pylist():
        n = row["order"]
        assert row["action"] == ("view" if n % 2 else "save")
        assert (row["user"], row["item"], row["request"], row["f"]) == (f"u{n % 5}", f"i{n % 7}", f"r{n}", n)
        assert row["received_ms"] == row["time_ms"] == 1000 * (1_700_000_000 + n)


def test_names_of_datasets_come_from_files_folders_and_patterns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert default_name(Path("x/My log.csv.gz")) == "My-log"
    assert default_name(Path("événements.parquet")) == "v-nements"
    assert default_name(Path("....csv")) == "log"
    assert default_name(Path("x/my logs")) == "my-logs"
    assert default_name(Path("x/shop/*.csv")) == "shop"
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert default_name(Path("*.csv")) == default_name(Path(".")) == "here"
