"""features.parquet holds the values of a feature set for every event of a snapshot, in the order of events.parquet.

Columns of any type are stored and read back bit for bit. Decided: text is stored as plain strings, because the
dictionary of a column may hold a string twice. A vector is stored as a list, and the metadata holds its width (see
events/vector_columns.py). A sequence is stored as a struct of lists. features.json in the same folder holds the types.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tackboard.core.documents import blaming
from tackboard.core.errors import CorruptFileError, DataError
from tackboard.events.dataset import Dataset
from tackboard.events.layout import RowReader
from tackboard.events.vector_columns import WIDTH, from_stored
from tackboard.features.arrow import arrow_type, from_arrow, to_arrow
from tackboard.features.column import Column
from tackboard.features.feature_set import FeatureSet, read_features
from tackboard.features.types import FeatureType

FEATURES = "features.parquet"


def stored_schema(features: FeatureSet) -> pa.Schema:
    """Returns the schema of features.parquet for a feature set."""
    return pa.schema([_field(feature.name, feature.type) for feature in features.features()])


def stored_arrays(columns: Mapping[str, Column], schema: pa.Schema) -> dict[str, pa.Array]:
    """Converts columns to the types of `schema`. If a text cannot be stored, a DataError names the feature."""
    arrays = {}
    for name, column in columns.items():
        try:
            arrays[name] = to_arrow(column).cast(schema.field(name).type)
        except DataError as error:
            raise DataError(f"feature {name}: {error.got}", allowed=error.allowed, fix=error.fix) from None
    return arrays


def read_features_table(dataset: Dataset, names: Iterable[str] | None = None) -> dict[str, Column]:
    """Reads the stored features of a snapshot (all, or only `names`), with one value per event, in the events' order.

    Raises DataError if the snapshot has no features, and UsageError if a name is unknown.
    """
    return read_features_rows(dataset, names, [(0, dataset.num_events)])[0]


def read_features_rows(
    dataset: Dataset, names: Iterable[str] | None, spans: Sequence[tuple[int, int]]
) -> tuple[dict[str, Column], int]:
    """Returns the stored features of the events in all spans [first, last), and the number of compressed bytes read."""
    features = read_features(dataset.path)
    if features is None:
        raise DataError(
            f"{dataset.path} holds no features", fix=f"tackboard features backfill SPEC --data {dataset.path.parent}"
        )
    if names is not None:
        features = features.trimmed(names)
    types = {feature.name: feature.type for feature in features.features()}
    path = dataset.path / FEATURES
    with contextlib.closing(RowReader(path)) as reader:
        if missing := [name for name in types if name not in reader.schema.names]:
            raise CorruptFileError(f"{path} does not hold the feature {missing[0]}")
        if reader.num_rows != dataset.num_events:
            raise CorruptFileError(f"{path} does not hold a row per event")
        with blaming(path):
            table = from_stored(reader.read(spans, list(types)))
            columns = {name: from_arrow(table[name], type_, f"feature {name}") for name, type_ in types.items()}
        return columns, reader.bytes_read


class StoredRows:
    """Reads some columns of a features.parquet from the first row to the last, one row group after the other."""

    def __init__(self, path: Path, names: Iterable[str]) -> None:
        self._path = path
        self._names = list(names)
        self._file = pq.ParquetFile(path)
        self._group = 0
        self._held = self._file.schema_arrow.empty_table().select(self._names)

    def read(self, num_rows: int) -> pa.Table:
        """Returns the next `num_rows` rows. Raises CorruptFileError if there are fewer."""
        while self._held.num_rows < num_rows:
            if self._group == self._file.num_row_groups:
                raise CorruptFileError(f"{self._path} does not hold a row per event")
            more = self._file.read_row_group(self._group, columns=self._names)
            self._held = pa.concat_tables([self._held, more.select(self._names)])
            self._group += 1
        rows, self._held = self._held.slice(0, num_rows), self._held.slice(num_rows)
        return rows

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _field(name: str, type_: FeatureType) -> pa.Field:
    metadata = {"feature_type": str(type_)}
    if type_.kind == "vector":
        metadata[WIDTH.decode()] = str(type_.width)
    return pa.field(name, _stored_type(type_), metadata=metadata)


def _stored_type(type_: FeatureType) -> pa.DataType:
    if type_.kind == "vector":
        return pa.list_(pa.float32())
    if type_.kind == "list":
        return pa.large_list(_stored_type(type_.of_elements()))
    if type_.kind == "sequence":
        return pa.struct([(name, _stored_type(column)) for name, column in type_.columns])
    return pa.string() if type_.kind == "string" else arrow_type(type_)
