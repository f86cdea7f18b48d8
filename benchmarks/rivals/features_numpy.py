"""This module computes the features of `feature_list` in hand-written NumPy: a rival of `tackboard bench features`.

It takes the tables as pandas frames (`feature_frames`) and returns a frame with a row per request and a frame with a
row per candidate. It runs in the rivals' environment only (`make rivals`). It shows how much faster code becomes
without data frames: all values are arrays, positions and codes. pandas is used only to look up ids, to convert time
zones and to group rows. Strings are codes, so that text is processed once per distinct string. Features that depend on
an item alone are computed once per item and taken by position. Events are matched with requests by repeated positions,
not by a join.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from rivals.feature_frames import Array, Frames, event_values, request_values
from rivals.feature_list import (
    AGE_LIMITS,
    DECAY,
    DEVICES,
    ITEM_AGE_LIMITS,
    PRICE_LIMITS,
    WEEK_MS,
    cosines,
    cross_ids,
    dots,
    item_buckets,
    known_brand_id,
    known_sale,
    known_string_id,
    squares,
    to_arrow,
)
from tackboard.bench.features.data import World

# ---- what a batch and a single request share ----


def item_columns(items: pd.DataFrame) -> dict[str, Any]:
    """Returns the columns of the items as arrays, and texts as (codes, categories)."""
    texts = {name: items[name].cat for name in ("category", "brand", "title")}
    numbers = ("price", "list_price", "rating", "editor_rating", "views", "clicks", "born")
    return {name: items[name].to_numpy() for name in numbers} | {
        name: (text.codes.to_numpy(), text.categories.to_numpy()) for name, text in texts.items()
    }


def item_features(items: dict[str, Any], embedding_square: Array) -> dict[str, Array]:
    """Computes features that depend on the item alone."""
    nothing = known_string_id("")
    return number_features(items, embedding_square) | {
        "category_id": per_category(items["category"], known_string_id, np.int64, missing=nothing),
        "brand_id": per_category(items["brand"], known_brand_id, np.int64, missing=nothing),
        "is_sale": per_category(items["title"], known_sale, np.bool_, missing=False),
    }


def number_features(items: dict[str, Any], embedding_square: Array) -> dict[str, Array]:
    """Computes features that depend on the numbers of the item alone."""
    price, list_price, rating = items["price"], items["list_price"], items["rating"]
    views = np.nan_to_num(items["views"])
    ctr = (np.nan_to_num(items["clicks"]) + 1) / (views + 20)
    filled = np.nan_to_num(price)
    rating = np.where(np.isnan(rating), items["editor_rating"], rating)
    with np.errstate(invalid="ignore"):
        discount = np.where(price < list_price, 1.0 - price / list_price, 0.0)
    return {
        "ctr": ctr,
        "discount": discount,
        "price_missing": np.isnan(price),
        "rating": np.where(np.isnan(rating), 3.0, rating),
        "log_price": np.log1p(filled),
        "price_z": np.nan_to_num(np.clip((price - 35.0) / 40.0, -3.0, 3.0)),
        "price_bucket": np.searchsorted(PRICE_LIMITS, filled, side="right"),
        "log_views": np.log1p(views),
        "ctr_log_odds": np.log(ctr / (1.0 - ctr)),
        "embedding_norm": np.sqrt(embedding_square),
    }


def request_features(requests: pd.DataFrame) -> dict[str, Array]:
    """Computes features that depend on the request and its user, but not on events."""
    clock = pd.DatetimeIndex(pd.to_datetime(requests["request_ms"], unit="ms", utc=True))
    weekday = clock.tz_convert("America/New_York").weekday.to_numpy().astype(np.int64)
    hour = clock.tz_convert("Europe/Berlin").hour.to_numpy().astype(np.int64)
    devices, countries = requests["device"].cat, requests["country"].cat
    device = per_category(
        (devices.codes.to_numpy(), devices.categories), lambda text: DEVICES.get(text.lower(), 0), np.int64, missing=0
    )
    born = requests["born"].to_numpy()
    return {
        "is_weekend": weekday >= 5,
        "country_id": per_category(
            (countries.codes.to_numpy(), countries.categories), known_string_id, np.int64, missing=known_string_id("")
        ),
        "device_x_hour": cross_ids(device, hour),
        "device_index": device,
        "age_bucket": np.searchsorted(AGE_LIMITS, requests["age"].fillna(0).to_numpy(), side="right"),
        "hour": hour,
        "weekday": weekday,
        "user_age_days": np.nan_to_num((requests["request_ms"].to_numpy() - born) / 1000.0 / 86400.0),
    }


def pair_features(
    request_ms: Any, budget: Any, country_id: Any, item_ids: Array, born: Array, price: Array, category_id: Array
) -> dict[str, Array]:
    """Computes features that depend on both the request and the candidate. Values of the request may be scalars."""
    days = (request_ms - born) / 1000.0 / 86400.0
    return {
        "is_new": days < 7.0,
        "affordable": price <= budget,
        "item_bucket": item_buckets(item_ids),
        "country_x_category": cross_ids(country_id, category_id),
        "item_age_bucket": np.searchsorted(ITEM_AGE_LIMITS, np.where(np.isnan(days), -1.0, days), side="right"),
        "item_age_days": np.nan_to_num(days),
    }


def per_category(text: tuple[Array, Any], function: Any, dtype: Any, *, missing: Any) -> Array:
    """Applies a function to strings, given as codes and categories. Calls the function once per distinct string."""
    codes, categories = text
    used, places = np.unique(codes, return_inverse=True)
    values = [missing if code < 0 else function(categories[code]) for code in used]
    return np.array(values, dtype=dtype)[places]


def finite_rate(part: Array, whole: Array) -> Array:
    """Returns `part` / `whole`, and 0 if `whole` is 0."""
    return np.divide(part, whole, out=np.zeros(len(part)), where=whole > 0)


# ---- batch ----


class BatchContender(Frames):
    """Computes many requests with few candidates each."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        counts = self.events.groupby("user_id", sort=True).size().reindex(self.user_index).to_numpy()
        self.first_event = np.concatenate([[0], np.cumsum(counts)])

    def compute(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Computes the features of the requests and of the rows. This call is timed."""
        user = self.user_index.get_indexer(self.requests["user_id"])
        asked = pd.concat([self.requests, self.users.drop(columns="user_id").take(user).reset_index(drop=True)], axis=1)
        events_of, request_of = self._pairs(user, asked["request_ms"].to_numpy())
        of_requests = self._history(events_of, request_of, asked["request_ms"].to_numpy()) | request_features(asked)
        of_requests["save_rate"] = finite_rate(of_requests["saves"], of_requests["events_7d"])
        embedding_square = squares(self.embedding)
        of_items = item_features(item_columns(self.items), embedding_square)
        item = self.item_index.get_indexer(self.rows["item_id"])
        request = self.rows["request"].to_numpy()
        of_rows = {name: values[item] for name, values in of_items.items()}
        of_rows |= pair_features(
            asked["request_ms"].to_numpy()[request],
            asked["budget"].to_numpy()[request],
            of_requests["country_id"][request],
            self.rows["item_id"].to_numpy(),
            self.items["born"].to_numpy()[item],
            self.items["price"].to_numpy()[item],
            of_rows["category_id"],
        )
        product = dots(self.taste[user[request]], self.embedding[item])
        of_rows["taste_match"] = cosines(product, squares(self.taste)[user[request]], embedding_square[item])
        of_rows["same_category"] = self._same_category(events_of, request_of, request, item, len(asked))
        top = of_requests.pop("top")
        of_rows["in_top"] = (top[request] == self.rows["item_id"].to_numpy()[:, None]).any(axis=1)
        return pd.DataFrame(of_requests), pd.DataFrame(of_rows)

    def _pairs(self, user: Array, request_ms: Array) -> tuple[Array, Array]:
        """Returns (events, requests): one pair for every event that a request sees."""
        lengths = np.diff(self.first_event)[user]
        request_of = np.repeat(np.arange(len(user)), lengths)
        before = np.cumsum(lengths) - lengths
        events_of = np.arange(len(request_of)) + np.repeat(self.first_event[user] - before, lengths)
        seen = self.events["received_ms"].to_numpy()[events_of] < request_ms[request_of]
        return events_of[seen], request_of[seen]

    def _history(self, events_of: Array, request_of: Array, request_ms: Array) -> dict[str, Any]:
        """Computes the aggregations over the events that each request sees."""
        events, count = self.events, len(request_ms)
        actions = events["action"].cat
        codes = {name: actions.categories.get_loc(name) for name in ("click", "save")}
        action, times = actions.codes.to_numpy()[events_of], events["time_ms"].to_numpy()
        recent = request_ms[request_of] - times[events_of] < WEEK_MS
        is_click = action == codes["click"]
        clicks, of = events_of[is_click], request_of[is_click]
        age_ms = request_ms[of] - times[clicks]
        dwell = events["dwell_ms"].fillna(0).to_numpy()[clicks]
        item = events["item_id"].to_numpy()[clicks]
        category = events["category"].cat.codes.to_numpy()[clicks]
        num_categories = len(events["category"].cat.categories)
        distinct = pd.unique((of * num_categories + category)[category >= 0]) // num_categories
        last = np.full(count, -1)
        last[of] = np.arange(len(of))
        top, lengths = _top(of, item, count)
        favourite = pd.array(np.where(lengths > 0, top[:, 0], 0), dtype="Int64")
        favourite[lengths == 0] = pd.NA
        last_click = pd.array(item[last], dtype="Int64")
        last_click[last < 0] = pd.NA
        week = np.where(age_ms < WEEK_MS, dwell, 0.0)
        return {
            "events_7d": np.bincount(request_of[recent], minlength=count),
            "saves": np.bincount(request_of[action == codes["save"]], minlength=count),
            "last_click": last_click,
            "categories": np.bincount(distinct, minlength=count),
            "dwell_7d": np.bincount(of, weights=week, minlength=count).astype(np.int64),
            "decayed_dwell": np.bincount(of, weights=dwell * np.exp(age_ms * DECAY), minlength=count),
            "top": top,
            "top_items": [row[:length] for row, length in zip(top, lengths, strict=True)],
            "num_top": lengths,
            "favourite": favourite,
        }

    def _same_category(self, events_of: Array, request_of: Array, request: Array, item: Array, count: int) -> Array:
        """Returns, for each row, the number of events of its category that its request sees."""
        size = len(self.events["category"].cat.categories)
        category = self.events["category"].cat.codes.to_numpy()[events_of]
        counts = np.bincount((request_of * size + category)[category >= 0], minlength=count * size)
        wanted = self.items["category"].cat.codes.to_numpy()[item]
        return np.where(wanted >= 0, counts[request * size + np.maximum(wanted, 0)], 0)

    to_arrow = staticmethod(to_arrow)


def _top(of: Array, item: Array, count: int) -> tuple[Array, Array]:
    """Returns up to five most frequent items of each request [count, 5], and how many there are [count].

    Among equally frequent items, the newer item comes first.
    """
    clicks = pd.DataFrame({"of": of, "item": item, "place": np.arange(len(of))})
    groups = clicks.groupby(["of", "item"], sort=False)["place"].agg(["size", "max"]).reset_index()
    groups = groups.iloc[np.lexsort((-groups["max"].to_numpy(), -groups["size"].to_numpy(), groups["of"].to_numpy()))]
    rank = groups.groupby("of", sort=False).cumcount().to_numpy()
    best = groups[rank < 5]
    top = np.full((count, 5), np.iinfo(np.int64).min)
    top[best["of"].to_numpy(), rank[rank < 5]] = best["item"].to_numpy()
    return top, np.bincount(best["of"].to_numpy(), minlength=count)


# ---- one request ----


class OnlineContender:
    """Computes one request at a time. If `prepared`, features that depend on an item alone are computed beforehand."""

    def __init__(self, world: World, *, prepared: bool) -> None:
        frames = Frames(world)
        columns = item_columns(frames.items)
        self.items: dict[str, Array] | None = None
        if prepared:
            self.embedding, self.embedding_square = frames.embedding, squares(frames.embedding)
            self.index = frames.item_index
            self.items = item_features(columns, self.embedding_square)
            self.items |= {"price": columns["price"], "born": columns["born"], "category": columns["category"][0]}
        self.requests: list[dict[str, Any]] = []
        for request, events, item_ids in frames.single_requests():
            history = {name: events[name].to_numpy() for name in ("item_id", "time_ms", "dwell_ms")}
            history |= {name: events[name].cat.codes.to_numpy() for name in ("action", "category")}
            request |= {"history": history, "item_ids": item_ids}
            if not prepared:
                place = frames.item_index.get_indexer(item_ids)
                request["items"] = {
                    name: (values[0][place], values[1]) if isinstance(values, tuple) else values[place]
                    for name, values in columns.items()
                }
                request["embedding"] = frames.embedding[place]
            self.requests.append(request)
        actions = frames.events["action"].cat.categories
        self.click, self.save = (actions.get_loc(name) for name in ("click", "save"))
        self.num_categories = len(frames.events["category"].cat.categories)

    def compute(self, number: int) -> tuple[dict[str, Any], dict[str, Array]]:
        """Computes the features of one request and of its candidates. This call is timed."""
        asked = self.requests[number]
        history, action, category = asked["history"], asked["history"]["action"], asked["history"]["category"]
        is_click, dwell = action == self.click, np.nan_to_num(history["dwell_ms"])
        age_ms = asked["request_ms"] - history["time_ms"]
        of_request = event_values(age_ms, is_click, action == self.save, history["item_id"], dwell)
        clicked = category[is_click]
        of_request["categories"] = len(np.unique(clicked[clicked >= 0]))
        names = ("request_ms", "device", "country", "age", "born")
        of_request |= request_values(
            **{name: asked[name] for name in names}, saves=of_request["saves"], events_7d=of_request["events_7d"]
        )
        in_category = np.bincount(category[category >= 0], minlength=self.num_categories)
        return of_request, self._candidates(asked, of_request, in_category)

    def _candidates(self, asked: dict[str, Any], of_request: dict[str, Any], in_category: Array) -> dict[str, Array]:
        item_ids = asked["item_ids"]
        if self.items is None:
            embedding, items = asked["embedding"], asked["items"]
            embedding_square = squares(embedding)
            rows = item_features(items, embedding_square)
            price, born, category = items["price"], items["born"], items["category"][0]
        else:
            place = self.index.get_indexer(item_ids)
            rows = {name: values[place] for name, values in self.items.items()}
            embedding, embedding_square = self.embedding[place], self.embedding_square[place]
            price, born, category = rows.pop("price"), rows.pop("born"), rows.pop("category")
        country_id = of_request["country_id"]
        rows |= pair_features(
            asked["request_ms"], asked["budget"], country_id, item_ids, born, price, rows["category_id"]
        )
        rows["taste_match"] = cosines(dots(asked["taste"], embedding), squares(asked["taste"]), embedding_square)
        rows["same_category"] = np.where(category >= 0, in_category[category], 0)
        rows["in_top"] = np.isin(item_ids, of_request["top_items"])
        return rows

    to_arrow = staticmethod(to_arrow)
