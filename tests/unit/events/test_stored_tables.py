import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tackboard.core.errors import CorruptFileError
from tackboard.events.stored_tables import check_files, check_rows, out_of_order

GOLDEN = Path(__file__).parents[2] / "golden"
EVENTS = Path("events.parquet")
ITEMS = Path("items.parquet")


def table(**columns: list[int | None]) -> pa.Table:
    return pa.table({name: pa.array(values, pa.int64()) for name, values in columns.items()})


@pytest.mark.parametrize("name", ["dataset-v1", "dataset-v1-requests"])
def test_the_golden_snapshots_pass(name: str) -> None:
    check_files(GOLDEN / name, {"events": pq.read_metadata(GOLDEN / name / EVENTS).num_rows})
    for path in (GOLDEN / name).glob("*.parquet"):
        check_rows(pq.read_table(path), path)


def test_a_file_of_other_columns_or_rows_is_named(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(GOLDEN / "dataset-v1", tmp_path / "x"))
    with pytest.raises(CorruptFileError, match=r"events\.parquet has 9 rows"):
        check_files(folder, {"events": 10})
    (folder / "features.json").write_text("{}")
    with pytest.raises(CorruptFileError, match=r"features\.parquet cannot be read"):
        check_files(folder, {})
    pq.write_table(pa.table({"x": [1]}), folder / "features.parquet")
    with pytest.raises(CorruptFileError, match=r"features\.parquet has 1 rows"):
        check_files(folder, {"features": 9})
    users = pq.read_table(folder / "users.parquet")
    pq.write_table(users.drop_columns(["user_id"]), folder / "users.parquet")
    with pytest.raises(CorruptFileError, match=r"users\.parquet has no column user_id"):
        check_files(folder, {})
    pq.write_table(users.set_column(1, "user_id", pa.array(["x"] * users.num_rows)), folder / "users.parquet")
    with pytest.raises(CorruptFileError, match=r"users\.parquet: user_id is string"):
        check_files(folder, {})
    (folder / "users.parquet").unlink()
    with pytest.raises(CorruptFileError, match=r"users\.parquet cannot be read"):
        check_files(folder, {})


def test_rows_in_order_pass_and_others_are_named() -> None:
    check_rows(table(user_id=[-5, -5, 7, 7], time_ms=[3, 3, 1, 2]), EVENTS)
    check_rows(table(time_ms=[3, 1]), EVENTS)  # Whose times these are is not known.
    check_rows(table(item_id=[1, 2]), ITEMS)
    for rows, path in (
        (table(user_id=[7, 5]), EVENTS),
        (table(user_id=[5, 5], time_ms=[2, 1]), EVENTS),
        (table(item_id=[1, 1]), ITEMS),
    ):
        with pytest.raises(CorruptFileError, match="is not sorted by"):
            check_rows(rows, path)
    with pytest.raises(CorruptFileError, match="1 rows have no time_ms"):
        check_rows(table(user_id=[5, 5], time_ms=[1, None]), EVENTS)


def test_rows_out_of_order_are_counted_from_the_row_before() -> None:
    keys = [np.array([1, 1, 0, 2]), np.array([5, 4, 9, 1])]
    assert out_of_order(keys, None).tolist() == [1, 2]
    assert out_of_order(keys, (1, 6)).tolist() == [0, 1, 2]
    assert out_of_order(keys[:1], None, strictly=True).tolist() == [1, 2]
