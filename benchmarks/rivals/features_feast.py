"""This module computes the features of `feature_list` in Feast: a rival of `tackboard bench features`.

It takes the tables and returns Feast's answer to one request. It runs in the rivals' environment only (`make rivals`).
The features are two on-demand feature views, because requests and candidates have different inputs. `of_request` has
one row, and its inputs are the user's events as arrays. `of_candidates` has a row per candidate, and its inputs are the
attributes of the item and the values of the request, repeated in every row. If rivals may prepare data before the clock
starts, the features that depend on an item alone are computed in advance and stored with the item. `of_candidates` then
computes only the features that depend on both request and item. Three variants are measured:

    python   `transform_dict` in native Python mode, with inputs already fetched, as lists
    pandas   `transform_arrow` in pandas mode for candidates, with inputs already fetched, as Arrow tables; the view of
             the request is the same as in `python`
    store    the function that a user of Feast calls: `get_online_features` with the views in native Python mode; the
             attributes of the items are in Feast's SQLite online store, and Feast fetches them and calls the views

`python` and `pandas` time only the functions that `get_online_features` calls, without its own overhead. So their times
are a lower bound of Feast's time. The code is tuned: the functions use NumPy or vectorised pandas, with the same code
as `features_numpy` and `features_pandas`. Loops over rows only look up cached results for strings.
"""

from __future__ import annotations

import datetime
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from feast import Entity, FeatureStore, FeatureView, Field, FileSource, OnDemandFeatureView, RepoConfig, RequestSource
from feast.on_demand_feature_view import on_demand_feature_view
from feast.types import Array, Bool, Bytes, Float64, Int64, String
from feast.value_type import ValueType
from numpy.typing import NDArray

from rivals import features_numpy, features_pandas
from rivals.feature_frames import Frames, event_values, request_values
from rivals.feature_list import (
    BOOL,
    FLOAT,
    INT,
    INTS,
    ITEM_FEATURES,
    PAIR_FEATURES,
    REQUEST_FEATURES,
    ROW_FEATURES,
    cosines,
    dots,
    known_brand_id,
    known_sale,
    known_string_id,
    squares,
    to_arrow,
)
from tackboard.bench.features.data import WIDTH, World

TEXT, BYTES, TEXTS = pa.string(), pa.binary(), pa.list_(pa.string())
FEAST_TYPES = {
    INT: Int64, FLOAT: Float64, BOOL: Bool, TEXT: String, BYTES: Bytes, INTS: Array(Int64), TEXTS: Array(String)
}  # fmt: skip
SAMPLES = {INT: 1, FLOAT: 1.0, BOOL: True, INTS: [1]}
NO_VECTOR = bytes(4 * WIDTH)
ITEM_FIELDS = {
    "price": FLOAT, "list_price": FLOAT, "rating": FLOAT, "editor_rating": FLOAT, "views": INT, "clicks": INT,
    "category": TEXT, "brand": TEXT, "title": TEXT, "born": INT, "embedding": BYTES,
}  # fmt: skip
NUMBERS = [name for name, kind in ITEM_FIELDS.items() if kind in (INT, FLOAT)]
PREPARED_FIELDS = ITEM_FEATURES | {name: ITEM_FIELDS[name] for name in ("price", "category", "born", "embedding")}
"""Stored fields of an item, if the features that depend on the item alone were computed beforehand."""
ASKED_FIELDS = {
    "request_ms": INT, "budget": FLOAT, "country_id": INT, "taste": BYTES, "top_items": BYTES, "seen_categories": TEXT,
    "seen_times": BYTES,
}  # fmt: skip
"""Values of the request, repeated for every candidate. Vectors are bytes, the fastest type in Feast."""
HISTORY_FIELDS = {
    "request_ms": INT, "device": TEXT, "country": TEXT, "age": FLOAT, "born": FLOAT, "event_item": INTS,
    "event_action": TEXTS, "event_category": TEXTS, "event_time": INTS, "event_dwell": INTS,
}  # fmt: skip


def fields(types: dict[str, Any]) -> list[Field]:
    """Returns Feast's schema for names and types."""
    return [Field(name=name, dtype=FEAST_TYPES[kind]) for name, kind in types.items()]


# ---- what the views compute ----


def of_one_request(inputs: dict[str, Any]) -> dict[str, Any]:
    """Computes the features of one request from one row of inputs, with events as lists."""
    action, category = np.asarray(inputs["event_action"]), np.asarray(inputs["event_category"])
    age_ms, is_click = inputs["request_ms"] - np.asarray(inputs["event_time"]), action == "click"
    item_ids, dwell_ms = np.asarray(inputs["event_item"]), np.asarray(inputs["event_dwell"])
    row = event_values(age_ms, is_click, action == "save", item_ids, dwell_ms)
    names = ("request_ms", "device", "country", "age", "born")
    row |= request_values(**{name: inputs[name] for name in names}, saves=row["saves"], events_7d=row["events_7d"])
    return row | {
        "categories": len(set(category[is_click].tolist()) - {""}),
        "top_items": row["top_items"].tolist(),
    }


def candidate_lists(inputs: dict[str, Any]) -> dict[str, list[Any]]:
    """Computes features of the candidates from lists, in NumPy.

    If the inputs hold item features, computes only PAIR_FEATURES.
    """
    prepared = "category_id" in inputs
    numbers = ("price", "born") if prepared else NUMBERS
    items = {name: np.array(inputs[name], dtype=np.float64) for name in numbers}
    embedding = stacked(inputs["embedding"])
    embedding_square = squares(embedding)
    rows: dict[str, Any] = {}
    if prepared:
        nothing = known_string_id("")  # Feast's store has no values for an unknown item.
        category_id = np.array([nothing if value is None else value for value in inputs["category_id"]])
    else:
        category_id = np.array([known_string_id(text or "") for text in inputs["category"]])
        rows |= features_numpy.number_features(items, embedding_square) | {
            "category_id": category_id,
            "brand_id": np.array([known_brand_id(text or "") for text in inputs["brand"]]),
            "is_sale": np.array([known_sale(text or "") for text in inputs["title"]]),
        }
    asked = {name: inputs[name][0] for name in ASKED_FIELDS}
    budget = np.nan if asked["budget"] is None else asked["budget"]
    item_ids = np.array(inputs["item_id"], dtype=np.int64)
    rows |= features_numpy.pair_features(
        asked["request_ms"], budget, asked["country_id"], item_ids, items["born"], items["price"], category_id
    )
    rows |= together(asked, inputs["category"], item_ids, embedding, embedding_square)
    return {name: values.tolist() for name, values in rows.items()}


def candidate_frame(inputs: pd.DataFrame) -> pd.DataFrame:
    """Does the same as `candidate_lists`, but in pandas and from a frame."""
    embedding = stacked(inputs["embedding"])
    embedding_square = squares(embedding)
    asked = inputs[list(ASKED_FIELDS)].iloc[0].to_dict()
    rows: dict[str, Any] = {}
    if "category_id" not in inputs:
        rows |= features_pandas.item_features(inputs, embedding_square)
    rows |= features_pandas.pair_features(
        inputs,
        inputs["item_id"],
        asked["request_ms"],
        asked["budget"],
        asked["country_id"],
        rows.get("category_id", inputs.get("category_id")),
    )
    rows |= together(asked, inputs["category"], inputs["item_id"].to_numpy(), embedding, embedding_square)
    return pd.DataFrame(rows)


def together(
    asked: dict[str, Any],
    categories: Any,
    item_ids: NDArray[Any],
    embedding: NDArray[Any],
    embedding_square: NDArray[Any],
) -> dict[str, NDArray[Any]]:
    """Computes features that depend on both the candidate and the user's events or vector."""
    taste, top = np.frombuffer(asked["taste"], np.float32)[None], np.frombuffer(asked["top_items"], np.int64)
    times = dict(zip(asked["seen_categories"].split("\n"), np.frombuffer(asked["seen_times"], np.int64), strict=True))
    return {
        "taste_match": cosines(dots(taste, embedding), squares(taste), embedding_square),
        "same_category": np.array([times.get(category, 0) for category in categories]),
        "in_top": np.isin(item_ids, top),
    }


def stacked(vectors: Any) -> NDArray[np.float32]:
    """Returns vectors, given as bytes, as an array. A missing vector becomes zeros."""
    return np.frombuffer(b"".join([vector or NO_VECTOR for vector in vectors]), np.float32).reshape(-1, WIDTH)


def is_sample(texts: list[str]) -> bool:
    """Returns whether the inputs are samples. Feast calls a view with made-up samples to find its output types."""
    return texts == ["hello world"]


def samples(types: dict[str, Any]) -> dict[str, list[Any]]:
    """Returns one row with a sample value of each type."""
    return {name: [SAMPLES[kind]] for name, kind in types.items()}


# ---- the views ----


def make_views(
    mode: str, candidate_sources: list[Any], types: dict[str, Any]
) -> tuple[OnDemandFeatureView, OnDemandFeatureView]:
    """Returns the two views. The second view has the outputs `types`.

    Each function of a view imports the functions that it calls, because Feast stores the function's source text and
    runs it elsewhere.
    """
    history = RequestSource(name="history", schema=fields(HISTORY_FIELDS))

    @on_demand_feature_view(sources=[history], schema=fields(REQUEST_FEATURES), mode="python")
    def of_request(inputs: dict) -> dict:
        from rivals.feature_list import REQUEST_FEATURES
        from rivals.features_feast import HISTORY_FIELDS, is_sample, of_one_request, samples

        if is_sample(inputs["device"]):
            return samples(REQUEST_FEATURES)
        row = of_one_request({name: inputs[name][0] for name in HISTORY_FIELDS})
        return {name: [value] for name, value in row.items()}

    # Feast requires a different signature in each mode.
    if mode == "python":

        @on_demand_feature_view(sources=candidate_sources, schema=fields(types), mode="python")
        def of_candidates(inputs: dict) -> dict:
            from rivals.feature_list import ROW_FEATURES
            from rivals.features_feast import candidate_lists, is_sample, samples

            return samples(ROW_FEATURES) if is_sample(inputs["category"]) else candidate_lists(inputs)

    else:

        @on_demand_feature_view(sources=candidate_sources, schema=fields(types), mode="pandas")
        def of_candidates(inputs: pd.DataFrame) -> pd.DataFrame:
            from rivals.features_feast import candidate_frame

            return candidate_frame(inputs)

    return of_request, of_candidates


# ---- inputs ----


def item_inputs(world: World, *, prepared: bool) -> pa.Table:
    """Returns the stored fields of the items: attributes and, if `prepared`, features that depend on an item alone.

    The last row is an unknown item. Vectors become bytes.
    """
    items = world.items.take(pa.array([*range(world.items.num_rows), None]))
    columns = {name: items[name].combine_chunks() for name in ("item_id", *ITEM_FIELDS)}
    if prepared:
        frames = Frames(world)
        own = features_numpy.item_features(features_numpy.item_columns(frames.items), squares(frames.embedding))
        columns |= {name: pa.array(values) for name, values in own.items()}
    columns["embedding"] = _as_bytes(columns["embedding"])
    for name in ("category", "brand", "title"):
        columns[name] = columns[name].cast(pa.string())
    return pa.table(columns).select(["item_id", *(PREPARED_FIELDS if prepared else ITEM_FIELDS)])


def request_inputs(world: World) -> Iterator[dict[str, Any]]:
    """Yields the inputs of each request. `history` is the row of the first view, with the user's events as lists."""
    for asked, events, item_ids in Frames(world).single_requests():
        known = {name: None if pd.isna(asked[name]) else asked[name] for name in ("country", "age", "born", "budget")}
        history = {
            "request_ms": asked["request_ms"],
            "device": asked["device"],
            **{name: known[name] for name in ("country", "age", "born")},
            "event_item": events["item_id"].tolist(),
            "event_action": events["action"].tolist(),
            "event_category": events["category"].astype(object).fillna("").tolist(),
            "event_time": events["time_ms"].tolist(),
            # Both features of the dwell time count a missing value as 0, and Feast has no arrays with missing values.
            "event_dwell": events["dwell_ms"].fillna(0).astype(np.int64).tolist(),
        }
        yield {
            "history": {name: [value] for name, value in history.items()},
            "budget": known["budget"],
            "taste": asked["taste"].tobytes(),
            "item_ids": item_ids.tolist(),
        }


def _as_bytes(vectors: pa.FixedSizeListArray) -> pa.Array:
    rows = [None if row is None else np.array(row, dtype=np.float32).tobytes() for row in vectors.to_pylist()]
    return pa.array(rows, pa.binary())


def open_store(folder: Path, items: pa.Table, *, prepared: bool) -> FeatureStore:
    """Makes a feature store in `folder` with a SQLite online store. It holds the items and both views."""
    stored = PREPARED_FIELDS if prepared else ITEM_FIELDS
    store = FeatureStore(
        config=RepoConfig(
            project="bench",
            provider="local",
            registry=str(folder / "registry.db"),
            online_store={"type": "sqlite", "path": str(folder / "online.db")},
            entity_key_serialization_version=3,
        )
    )
    item = Entity(name="item", join_keys=["item_id"], value_type=ValueType.INT64)
    frame = items.to_pandas()
    frame["event_timestamp"] = pd.Timestamp("2026-11-01", tz="UTC")
    frame.to_parquet(folder / "items.parquet")
    attributes = FeatureView(
        name="item_attributes",
        entities=[item],
        ttl=datetime.timedelta(days=0),
        schema=[Field(name="item_id", dtype=Int64), *fields(stored)],
        source=FileSource(path=str(folder / "items.parquet"), timestamp_field="event_timestamp"),
    )
    asked = RequestSource(name="asked", schema=fields(ASKED_FIELDS))
    types = PAIR_FEATURES if prepared else ROW_FEATURES
    store.apply([item, attributes, *make_views("python", [attributes, asked], types)])
    store.write_to_online_store("item_attributes", frame)
    return store


# ---- one request ----


class OnlineContender:
    """Computes one request at a time, in one of the three variants of the module's docstring."""

    def __init__(self, world: World, variant: str, *, prepared: bool) -> None:
        self.variant, self.prepared = variant, prepared
        self.requests = list(request_inputs(world))
        items = item_inputs(world, prepared=prepared)
        known, self.unknown = items.slice(0, len(items) - 1), items.slice(len(items) - 1).to_pylist()[0]
        types = PAIR_FEATURES if prepared else ROW_FEATURES
        if variant == "store":
            self.folder = tempfile.TemporaryDirectory(prefix="tackboard-feast-")
            self.store = open_store(Path(self.folder.name), known, prepared=prepared)
            self.wanted = [f"of_candidates:{name}" for name in types]
            self.wanted += [f"item_attributes:{name}" for name in ITEM_FEATURES] if prepared else []
            return
        stored = PREPARED_FIELDS if prepared else ITEM_FIELDS
        source = RequestSource(name="candidate", schema=fields(stored | ASKED_FIELDS | {"item_id": INT}))
        self.of_request, self.of_candidates = make_views(variant, [source], types)
        places = {item_id: place for place, item_id in enumerate(known["item_id"].to_pylist())}
        lists = {name: items[name].to_pylist() for name in stored}
        # Looks up the values that an online store would return.
        for request in self.requests:
            found = [places.get(item_id, len(known)) for item_id in request["item_ids"]]
            request["items"] = {name: [values[place] for place in found] for name, values in lists.items()}
            request["items"]["item_id"] = request["item_ids"]
            request["table"] = pa.table(request["items"])

    def compute(self, number: int) -> tuple[Any, Any]:
        """Computes the features of one request and of its candidates. This call is timed."""
        request = self.requests[number]
        item_ids = request["item_ids"]
        if self.variant == "store":
            answer = self.store.get_online_features(
                features=[f"of_request:{name}" for name in REQUEST_FEATURES], entity_rows=request["history"]
            ).to_dict()
            asked = {name: [value] * len(item_ids) for name, value in self._asked(request, answer).items()}
            entity_rows = {"item_id": item_ids} | asked
            return answer, self.store.get_online_features(features=self.wanted, entity_rows=entity_rows).to_dict()
        answer = self.of_request.transform_dict(request["history"])
        asked = self._asked(request, answer)
        if self.variant == "python":
            repeated = {name: [value] * len(item_ids) for name, value in asked.items()}
            return answer, self.of_candidates.transform_dict(request["items"] | repeated)
        table = request["table"]
        for name, value in asked.items():
            table = table.append_column(name, pa.repeat(pa.scalar(value, ASKED_FIELDS[name]), len(item_ids)))
        rows = self.of_candidates.transform_arrow(table)
        for name in ITEM_FEATURES if self.prepared else ():
            rows = rows.append_column(name, table[name])
        return answer, rows

    @staticmethod
    def _asked(request: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        """Returns the values of the request that the second view reads."""
        names, times = np.unique(np.asarray(request["history"]["event_category"][0]), return_counts=True)
        keep = names != ""
        return {
            "request_ms": request["history"]["request_ms"][0],
            "budget": request["budget"],
            "country_id": answer["country_id"][0],
            "taste": request["taste"],
            "top_items": np.array(answer["top_items"][0], dtype=np.int64).tobytes(),
            "seen_categories": "\n".join(names[keep]),
            "seen_times": times[keep].tobytes(),
        }

    def to_arrow(self, answer: tuple[Any, Any]) -> tuple[pa.Table, pa.Table]:
        """Returns the answer as Arrow tables for the comparison. This call is not timed."""
        requests, rows = answer
        if isinstance(rows, pa.Table):
            rows = {name: rows[name].to_pylist() for name in rows.column_names}
        # Feast's store has no values for an unknown item, so the caller has to fill them in.
        filled = {
            name: [self.unknown[name] if value is None else value for value in rows[name]]
            if self.prepared and name in ITEM_FEATURES
            else rows[name]
            for name in ROW_FEATURES
        }
        return to_arrow((requests, filled))
