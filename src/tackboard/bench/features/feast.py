"""The 40 features of `set.py` as Feast on-demand feature views: a rival of `tackboard bench features`.

In: the tables of `data.py`. Out: what Feast answers for one request. It runs in the rivals' environment only
(`make rivals`). There are two views, because the rows of one all have the same inputs: `of_request` with one row, whose
inputs are the user's events as arrays, and `of_candidates` with a row per candidate, whose inputs are the attributes of
the item and, repeated, what the request knows. Where contenders may prepare, what depends on an item alone is a stored
feature of the item, and the second view computes only what depends on both. Three variants are measured:

    python   `transform_dict` of both views in native Python mode, inputs already fetched, as lists
    pandas   `transform_arrow` of both views in pandas mode, inputs already fetched, as Arrow tables
    store    what a user of Feast calls: `get_online_features` with the views in native Python mode; the attributes of
             the items lie in Feast's SQLite online store, and Feast fetches them, calls the views and makes the answer

`python` and `pandas` are what `get_online_features` calls inside, without its price: the least that Feast can take.
Tuned: inside the functions everything is NumPy or vectorised pandas, the same code as in `numpy.py` and
`pandas.py`; no row is looped over except to look up what a string became before.
"""

from __future__ import annotations

import datetime
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from feast import Entity, FeatureStore, FeatureView, Field, FileSource, OnDemandFeatureView, RepoConfig, RequestSource
from feast.on_demand_feature_view import on_demand_feature_view
from feast.types import Array, Bool, Bytes, Float64, Int64, String
from feast.value_type import ValueType
from numpy.typing import NDArray

from tackboard.bench.features import numpy as features_numpy
from tackboard.bench.features import pandas as features_pandas
from tackboard.bench.features.data import WIDTH, World
from tackboard.bench.features.rival import (
    AGE_LIMITS,
    DECAY,
    DEVICES,
    WEEK_MS,
    cosines,
    cross_ids,
    dots,
    known_brand_id,
    known_sale,
    known_string_id,
    squares,
)

NO_VECTOR = bytes(4 * WIDTH)
ITEM_FIELDS = {
    "price": Float64, "list_price": Float64, "rating": Float64, "editor_rating": Float64, "views": Int64,
    "clicks": Int64, "category": String, "brand": String, "title": String, "born": Int64, "embedding": Bytes,
}  # fmt: skip
OWN_TYPES = {
    "ctr": Float64, "discount": Float64, "price_missing": Bool, "rating": Float64, "category_id": Int64,
    "log_price": Float64, "price_z": Float64, "price_bucket": Int64, "log_views": Float64, "ctr_log_odds": Float64,
    "embedding_norm": Float64, "brand_id": Int64, "is_sale": Bool,
}  # fmt: skip
"""Features of an item alone."""
PAIR_TYPES = {
    "same_category": Int64, "is_new": Bool, "affordable": Bool, "item_bucket": Int64, "country_x_category": Int64,
    "item_age_bucket": Int64, "taste_match": Float64, "item_age_days": Float64, "in_top": Bool,
}  # fmt: skip
"""Features of a request and an item together."""
CANDIDATE_TYPES = OWN_TYPES | PAIR_TYPES
PREPARED_FIELDS = OWN_TYPES | {"price": Float64, "category": String, "born": Int64, "embedding": Bytes}
"""What is stored of an item where everything that depends on it alone was computed beforehand."""
ASKED_FIELDS = {
    "request_ms": Int64, "budget": Float64, "country_id": Int64, "taste": Bytes, "top_items": Bytes,
    "seen_categories": String, "seen_times": Bytes,
}  # fmt: skip
"""What the request knows, repeated for every candidate; vectors as bytes, the quickest thing that Feast carries."""
ASKED_ARROW = {
    "request_ms": pa.int64(), "budget": pa.float64(), "country_id": pa.int64(), "taste": pa.binary(),
    "top_items": pa.binary(), "seen_categories": pa.string(), "seen_times": pa.binary(),
}  # fmt: skip
HISTORY_FIELDS = {
    "request_ms": Int64, "device": String, "country": String, "age": Float64, "user_born": Float64,
    "event_item": Array(Int64), "event_action": Array(String), "event_category": Array(String),
    "event_time": Array(Int64), "event_dwell": Array(Int64),
}  # fmt: skip
REQUEST_TYPES = {
    "events_7d": Int64, "saves": Int64, "last_click": Int64, "categories": Int64, "dwell_7d": Int64,
    "decayed_dwell": Float64, "top_items": Array(Int64), "save_rate": Float64, "is_weekend": Bool, "country_id": Int64,
    "device_x_hour": Int64, "device_index": Int64, "age_bucket": Int64, "hour": Int64, "weekday": Int64,
    "user_age_days": Float64, "num_top": Int64, "favourite": Int64,
}  # fmt: skip


def fields(types: dict[str, Any]) -> list[Field]:
    """A schema."""
    return [Field(name=name, dtype=dtype) for name, dtype in types.items()]


# ---- what the views compute ----


def request_values(inputs: dict[str, Any]) -> dict[str, Any]:
    """Features of one request from one row of inputs; arrays of events are lists."""
    request_ms = int(inputs["request_ms"])
    action, category = np.asarray(inputs["event_action"]), np.asarray(inputs["event_category"])
    age_ms, is_click = request_ms - np.asarray(inputs["event_time"]), action == "click"
    item, dwell = np.asarray(inputs["event_item"])[is_click], np.asarray(inputs["event_dwell"])[is_click]
    distinct, last_place, times = np.unique(item[::-1], return_index=True, return_counts=True)
    top = distinct[np.lexsort((last_place, -times))[:5]]
    events_7d, saves = int(np.count_nonzero(age_ms < WEEK_MS)), int(np.count_nonzero(action == "save"))
    moment = pd.Timestamp(request_ms, unit="ms", tz="UTC")
    hour, weekday = moment.tz_convert("Europe/Berlin").hour, moment.tz_convert("America/New_York").weekday()
    device = DEVICES.get(inputs["device"].lower(), 0)
    return {
        "events_7d": events_7d,
        "saves": saves,
        "last_click": int(item[-1]) if len(item) else None,
        "categories": len(set(category[is_click].tolist()) - {""}),
        "dwell_7d": int(dwell[age_ms[is_click] < WEEK_MS].sum()),
        "decayed_dwell": float((dwell * np.exp(age_ms[is_click] * DECAY)).sum()),
        "top_items": top.tolist(),
        "save_rate": saves / events_7d if events_7d else 0.0,
        "is_weekend": weekday >= 5,
        "country_id": known_string_id(inputs["country"] or ""),
        "device_x_hour": int(cross_ids(device, hour)[0]),
        "device_index": device,
        "age_bucket": int(np.searchsorted(AGE_LIMITS, inputs["age"] or 0, side="right")),
        "hour": hour,
        "weekday": weekday,
        "user_age_days": 0.0 if inputs["user_born"] is None else (request_ms - inputs["user_born"]) / 1000.0 / 86400.0,
        "num_top": len(top),
        "favourite": int(top[0]) if len(top) else None,
    }


def candidate_lists(inputs: dict[str, Any]) -> dict[str, list[Any]]:
    """Features of the candidates from lists, in NumPy, as lists: of the pairs alone where the others are given."""
    prepared = "category_id" in inputs
    numbers = (
        ("price", "born") if prepared else ("price", "list_price", "rating", "editor_rating", "views", "clicks", "born")
    )
    items = {name: np.array(inputs[name], dtype=np.float64) for name in numbers}
    embedding = stacked(inputs["embedding"])
    embedding_square = squares(embedding)
    rows: dict[str, Any] = {}
    if prepared:
        nothing = known_string_id("")  # Feast's store has no value for an item that it does not know
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
    """Features of the candidates from a frame, in pandas: of the pairs alone where the others are given."""
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
    """What depends on the user's events or vector and the candidate together."""
    taste, top = np.frombuffer(asked["taste"], np.float32)[None], np.frombuffer(asked["top_items"], np.int64)
    times = dict(zip(asked["seen_categories"].split("\n"), np.frombuffer(asked["seen_times"], np.int64), strict=True))
    return {
        "taste_match": cosines(dots(taste, embedding), squares(taste), embedding_square),
        "same_category": np.array([times.get(category, 0) for category in categories]),
        "in_top": np.isin(item_ids, top),
    }


def stacked(vectors: Any) -> NDArray[np.float32]:
    """Vectors given as bytes, zeros where missing."""
    return np.frombuffer(b"".join([vector or NO_VECTOR for vector in vectors]), np.float32).reshape(-1, WIDTH)


def is_sample(texts: list[str]) -> bool:
    """Whether Feast only wants to know the types: it then calls a view with made-up inputs, whatever their meaning."""
    return texts == ["hello world"]


def samples(types: dict[str, Any]) -> dict[str, list[Any]]:
    """One row of some value of each type."""
    values = {str(Int64): 1, str(Float64): 1.0, str(Bool): True, str(Array(Int64)): [1]}
    return {name: [values[str(dtype)]] for name, dtype in types.items()}


# ---- the views ----


def make_views(
    mode: str, candidate_sources: list[Any], types: dict[str, Any]
) -> tuple[OnDemandFeatureView, OnDemandFeatureView]:
    """The two views, the second one giving `types`.

    A function imports what it calls, because Feast stores its source and runs that elsewhere.
    """
    history = RequestSource(name="history", schema=fields(HISTORY_FIELDS))

    @on_demand_feature_view(sources=[history], schema=fields(REQUEST_TYPES), mode="python")
    def of_request(inputs: dict) -> dict:
        from tackboard.bench.features.feast import HISTORY_FIELDS, REQUEST_TYPES, is_sample, request_values, samples

        if is_sample(inputs["device"]):
            return samples(REQUEST_TYPES)
        row = request_values({name: inputs[name][0] for name in HISTORY_FIELDS})
        return {name: [value] for name, value in row.items()}

    if mode == "python":

        @on_demand_feature_view(sources=candidate_sources, schema=fields(types), mode="python")
        def of_candidates(inputs: dict) -> dict:
            from tackboard.bench.features.feast import CANDIDATE_TYPES, candidate_lists, is_sample, samples

            return samples(CANDIDATE_TYPES) if is_sample(inputs["category"]) else candidate_lists(inputs)

    else:

        @on_demand_feature_view(sources=candidate_sources, schema=fields(types), mode="pandas")
        def of_candidates(inputs: pd.DataFrame) -> pd.DataFrame:
            from tackboard.bench.features.feast import candidate_frame

            return candidate_frame(inputs)

    return of_request, of_candidates


# ---- inputs ----


def item_inputs(world: World, *, prepared: bool) -> pa.Table:
    """The attributes of the items, or what is stored of them; vectors as bytes, strings as strings."""
    columns = {name: world.items[name].combine_chunks() for name in ("item_id", *ITEM_FIELDS)}
    if prepared:
        square = squares(features_numpy.vectors(world.items["embedding"])[:-1])
        own = features_numpy.item_features(features_numpy.item_columns(features_numpy.frame(world.items)), square)
        columns |= {name: pa.array(values) for name, values in own.items()}
    columns["embedding"] = _as_bytes(columns["embedding"])
    for name in ("category", "brand", "title"):
        columns[name] = columns[name].cast(pa.string())
    return pa.table(columns).select(["item_id", *(PREPARED_FIELDS if prepared else ITEM_FIELDS)])


def unknown_item(*, prepared: bool) -> dict[str, Any]:
    """What is stored of an item that nobody knows, for those who compute beforehand; nothing for the others."""
    if not prepared:
        return dict.fromkeys(ITEM_FIELDS)
    nothing = np.full(1, np.nan)
    numbers = dict.fromkeys(("price", "list_price", "rating", "editor_rating", "views", "clicks", "born"), nothing)
    texts = {name: (np.array([-1]), [""]) for name in ("category", "brand", "title")}
    own = features_numpy.item_features(numbers | texts, np.zeros(1))
    return dict.fromkeys(PREPARED_FIELDS) | {name: values[0].item() for name, values in own.items()}


def request_inputs(world: World, number: int) -> dict[str, Any]:
    """One request: `history` is the row of the first view, with the user's events as lists."""
    asked = world.requests.slice(number, 1).to_pylist()[0]
    place = world.users["user_id"].to_pylist().index(asked["user_id"])
    user = world.users.slice(place, 1)
    events = world.events.filter(pc.equal(world.events["user_id"], asked["user_id"]))
    candidates = world.rows.filter(pc.equal(world.rows["request"], number))
    history = {
        "request_ms": asked["request_ms"],
        "device": asked["device"],
        "country": user["country"][0].as_py(),
        "age": user["age"][0].as_py(),
        "user_born": user["born"][0].as_py(),
        "event_item": events["item_id"].to_pylist(),
        "event_action": events["action"].to_pylist(),
        "event_category": [category or "" for category in events["category"].to_pylist()],
        "event_time": events["time_ms"].to_pylist(),
        # Both features of it take a missing one for 0, and Feast has no arrays with gaps.
        "event_dwell": [dwell or 0 for dwell in events["dwell_ms"].to_pylist()],
    }
    return {
        "history": {name: [value] for name, value in history.items()},
        "budget": user["budget"][0].as_py(),
        "taste": _as_bytes(user["taste"].combine_chunks())[0].as_py() or NO_VECTOR,
        "item_ids": candidates["item_id"].to_pylist(),
    }


def _as_bytes(vectors: pa.FixedSizeListArray) -> pa.Array:
    rows = [None if row is None else np.array(row, dtype=np.float32).tobytes() for row in vectors.to_pylist()]
    return pa.array(rows, pa.binary())


def open_store(folder: Path, items: pa.Table, *, prepared: bool) -> FeatureStore:
    """A feature store with SQLite online store in `folder`, the items in it and both views applied."""
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
    types = PAIR_TYPES if prepared else CANDIDATE_TYPES
    store.apply([item, attributes, *make_views("python", [attributes, asked], types)])
    store.write_to_online_store("item_attributes", frame)
    return store


# ---- one request ----


class Online:
    """One request at a time, in one of the three variants of the module's docstring."""

    def __init__(self, world: World, variant: str, *, prepared: bool) -> None:
        self.variant, self.prepared = variant, prepared
        self.requests = [request_inputs(world, number) for number in range(world.requests.num_rows)]
        items = item_inputs(world, prepared=prepared)
        self.unknown = unknown_item(prepared=prepared)
        if variant == "store":
            self.folder = tempfile.TemporaryDirectory(prefix="tackboard-feast-")
            self.store = open_store(Path(self.folder.name), items, prepared=prepared)
            of_pairs = PAIR_TYPES if prepared else CANDIDATE_TYPES
            self.wanted = [f"of_candidates:{name}" for name in of_pairs]
            self.wanted += [f"item_attributes:{name}" for name in OWN_TYPES] if prepared else []
            return
        stored = PREPARED_FIELDS if prepared else ITEM_FIELDS
        source = RequestSource(name="candidate", schema=fields(stored | ASKED_FIELDS | {"item_id": Int64}))
        self.of_request, self.of_candidates = make_views(variant, [source], PAIR_TYPES if prepared else CANDIDATE_TYPES)
        places = {item_id: place for place, item_id in enumerate(items["item_id"].to_pylist())}
        lists = {name: [*items[name].to_pylist(), self.unknown[name]] for name in stored}
        # What an online store would have answered.
        for request in self.requests:
            found = [places.get(item_id, len(items)) for item_id in request["item_ids"]]
            request["items"] = {name: [values[place] for place in found] for name, values in lists.items()}
            request["items"]["item_id"] = request["item_ids"]
            request["table"] = pa.table(request["items"])

    def compute(self, number: int) -> tuple[Any, Any]:
        """Features of one request and of its candidates. This is what is timed."""
        request = self.requests[number]
        item_ids = request["item_ids"]
        if self.variant == "store":
            answer = self.store.get_online_features(
                features=[f"of_request:{name}" for name in REQUEST_TYPES], entity_rows=request["history"]
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
            table = table.append_column(name, pa.repeat(pa.scalar(value, ASKED_ARROW[name]), len(item_ids)))
        rows = self.of_candidates.transform_arrow(table)
        for name in OWN_TYPES if self.prepared else ():
            rows = rows.append_column(name, table[name])
        return answer, rows

    @staticmethod
    def _asked(request: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        """What the second view is told about the request."""
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
        """For the comparison; not timed."""
        requests, rows = answer
        if isinstance(rows, pa.Table):
            rows = {name: rows[name].to_pylist() for name in rows.column_names}
        # Feast's store has no value for an item that it does not know; whoever serves has to fill it in.
        filled = {
            name: [self.unknown[name] if value is None else value for value in rows[name]]
            if self.prepared and name in OWN_TYPES
            else rows[name]
            for name in CANDIDATE_TYPES
        }
        types = {"last_click": pa.int64(), "favourite": pa.int64(), "top_items": pa.list_(pa.int64())}
        request = {name: pa.array(requests[name], type=types.get(name)) for name in REQUEST_TYPES}
        return pa.table(request), pa.table(filled)
