"""features.parquet gives back the bits that it was given, of every type, with missing values, over row groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tackboard.core.errors import CorruptFileError, DataError, UsageError
from tackboard.events.dataset import Dataset, open_dataset
from tackboard.features.column import Column, differing_rows, join_columns
from tackboard.features.language import (
    Bool,
    Events,
    FeatureSet,
    Float,
    Id,
    Int,
    Item,
    List,
    String,
    Time,
    Vector,
    sequence,
)
from tackboard.features.stored_features import FEATURES, StoredRows, read_features_table, stored_arrays, stored_schema
from tackboard.features.types import FeatureType

item = Item(b=Bool(), i=Int(), f=Float(), s=String(), d=Id(), t=Time(), v=Vector(2), ls=List(String), lf=List(Float))
events = Events(note=String(default=""))
ALL = FeatureSet(
    "all",
    **{name: item[name] for name in ("b", "i", "f", "s", "d", "t", "v", "ls", "lf")},
    ids=events.top(events.item, 3),
    run=sequence(item=events.collect(events.item), note=events.collect(events.note), time=events.collect(events.time)),
)
TYPES = {feature.name: feature.type for feature in ALL.features()}
INTS = st.integers(-(1 << 63), (1 << 63) - 1)
# Any 64 bits: NaNs of every payload, infinities and both zeros among them.
FLOATS = st.one_of(
    st.floats(), INTS.map(lambda bits: float(np.array([bits], dtype=np.int64).view(np.float64)[0])), st.just(-0.0)
)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
SCALARS = {"bool": st.booleans(), "int": INTS, "float": FLOATS, "string": TEXTS, "id": INTS, "time": INTS}


def values_of(type_: FeatureType) -> st.SearchStrategy[Any]:
    if type_.kind == "vector":
        values: st.SearchStrategy[Any] = st.lists(st.floats(width=32), min_size=type_.width, max_size=type_.width)
    elif type_.kind == "list":
        values = st.lists(SCALARS[type_.element], max_size=3)
    elif type_.kind == "sequence":
        rows = st.tuples(*(SCALARS[column.element] for _, column in type_.columns))
        values = st.lists(rows, max_size=3).map(
            lambda run: {name: [row[place] for row in run] for place, (name, _) in enumerate(type_.columns)}
        )
    else:
        values = SCALARS[type_.kind]
    return st.none() | values if type_.nullable else values


TABLES = st.integers(1, 6).flatmap(
    lambda rows: st.fixed_dictionaries(
        {name: st.lists(values_of(type_), min_size=rows, max_size=rows) for name, type_ in TYPES.items()}
    )
)


def write(folder: Path, groups: list[dict[str, Column]], features: FeatureSet = ALL) -> Dataset:
    """A snapshot with nothing but features."""
    folder.mkdir(exist_ok=True)
    schema = stored_schema(features)
    num_rows = 0
    with pq.ParquetWriter(folder / FEATURES, schema) as writer:
        for columns in groups:
            arrays = stored_arrays(columns, schema)
            writer.write_table(pa.table([arrays[name] for name in schema.names], schema=schema))
            num_rows += len(columns["i"])
    features.write(folder)
    return Dataset(path=folder, manifest={}, statistics={"num_events": num_rows})


@settings(max_examples=15, deadline=None)
@given(st.lists(TABLES, min_size=1, max_size=3))
def test_every_bit_comes_back(tmp_path_factory: pytest.TempPathFactory, tables: list[dict[str, list[Any]]]) -> None:
    groups = [{name: Column.of(TYPES[name], values) for name, values in table.items()} for table in tables]
    dataset = write(tmp_path_factory.mktemp("stored"), groups)
    found = read_features_table(dataset)
    for name, type_ in TYPES.items():
        assert found[name].type == type_
        assert not len(differing_rows(found[name], join_columns([group[name] for group in groups]))), name


@pytest.fixture
def small(tmp_path: Path) -> Dataset:
    empty = {"item": [], "note": [], "time": []}
    plain: dict[str, Any] = {"b": True, "i": 1, "f": 0.5, "s": "x", "d": 2, "t": 3, "v": [1, 2], "ls": [], "lf": []}
    rows = [{name: Column.of(TYPES[name], [value]) for name, value in (plain | {"ids": [], "run": empty}).items()}] * 5
    return write(tmp_path / "small", rows)


def test_only_what_is_asked_for_is_read(small: Dataset) -> None:
    assert list(read_features_table(small, ["run", "i"])) == ["run", "i"]
    assert read_features_table(small, ["i"])["i"].to_pylist() == [1] * 5
    with pytest.raises(UsageError, match="there is no feature runs"):
        read_features_table(small, ["runs"])


def test_a_text_of_a_dictionary_with_doubles(tmp_path: Path) -> None:
    dictionary = np.array(["a", "b", "a", "unused"], dtype=np.object_)
    texts = FeatureSet("texts", i=item.s)
    column = Column(
        TYPES["s"], np.array([2, 1, 0, 2]), present=np.array([True, True, True, False]), dictionary=dictionary
    )
    dataset = write(tmp_path / "x", [{"i": column}], texts)
    assert read_features_table(dataset)["i"].to_pylist() == ["a", "b", "a", None]


def test_half_a_surrogate_pair_names_the_feature() -> None:
    with pytest.raises(DataError, match="feature s: a text holds half a surrogate pair"):
        stored_arrays({"s": Column.of(TYPES["s"], ["\ud800"])}, stored_schema(ALL))


def test_rows_are_read_in_pieces_of_any_size(small: Dataset) -> None:
    rows = StoredRows(small.path / FEATURES, ["s", "v"])
    pieces = [rows.read(number) for number in (0, 2, 0, 3)]
    assert [piece.num_rows for piece in pieces] == [0, 2, 0, 3]
    assert pieces[1].column_names == ["s", "v"]
    assert pieces[3]["v"].to_pylist() == [[1, 2]] * 3
    with pytest.raises(CorruptFileError, match="does not hold a row per event"):
        rows.read(1)
    rows.close()


def test_a_snapshot_without_features(tiny_dataset: Path) -> None:
    with pytest.raises(DataError, match="holds no features") as refused:
        read_features_table(open_dataset(tiny_dataset), ["i"])
    assert refused.value.fix == f"tackboard features backfill SPEC --data {tiny_dataset.resolve()}"


def test_files_that_do_not_belong_together(small: Dataset, tmp_path: Path) -> None:
    other = Dataset(path=small.path, manifest={}, statistics={"num_events": 6})
    with pytest.raises(CorruptFileError, match="does not hold a row per event"):
        read_features_table(other)
    FeatureSet("all", more=events.count()).write(small.path)
    with pytest.raises(CorruptFileError, match="does not hold the feature more"):
        read_features_table(small)
    (small.path / FEATURES).write_bytes(b"PAR1 and no more")
    with pytest.raises(CorruptFileError, match=r"features\.parquet cannot be read"):
        read_features_table(small)


def test_the_schema_says_what_the_features_are(small: Dataset) -> None:
    field = pq.read_schema(small.path / FEATURES).field("v")
    assert field.metadata[b"feature_type"] == b"vector[2]?"
