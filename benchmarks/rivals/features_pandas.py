"""This module computes the features of `feature_list` in hand-written pandas: a rival of `tackboard bench features`.

It takes the tables as data frames (`feature_frames`) and returns a frame with a row per request and a frame with a row
per candidate. It runs in the rivals' environment only (`make rivals`). It is tuned as a pandas expert would tune it,
and each choice was measured. There is no `apply` and no loop over rows, and vectors are separate arrays. In a batch,
strings are categoricals. Features that depend on an item alone are computed once per item and taken by position. Frames
are merged with only the needed columns. For one request, the values of the user are plain numbers, not frames of one
row. Texts are then plain strings, because a categorical would carry all its categories through every operation.
`features_numpy` measures code without frames.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from rivals.feature_frames import Array, Frames, request_values
from rivals.feature_list import (
    AGE_LIMITS,
    DECAY,
    DEVICES,
    ITEM_AGE_LIMITS,
    PRICE_LIMITS,
    REQUEST_FEATURES,
    ROW_FEATURES,
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

EVENT_COLUMNS = ["item_id", "action", "time_ms", "received_ms", "order", "dwell_ms", "category"]


# ---- what a batch and a single request share ----


def item_features(items: pd.DataFrame, embedding_square: Array) -> dict[str, Any]:
    """Computes features that depend on the item alone."""
    price, list_price, views = items["price"], items["list_price"], items["views"].fillna(0)
    filled = price.fillna(0.0)
    ctr = (items["clicks"].fillna(0) + 1) / (views + 20)
    return {
        "ctr": ctr,
        "discount": (1.0 - price / list_price).where(price < list_price, 0.0),
        "price_missing": price.isna(),
        "rating": items["rating"].fillna(items["editor_rating"]).fillna(3.0),
        "category_id": mapped(items["category"], known_string_id),
        "log_price": np.log1p(filled),
        "price_z": np.nan_to_num(np.clip((price.to_numpy() - 35.0) / 40.0, -3.0, 3.0)),
        "price_bucket": np.searchsorted(PRICE_LIMITS, filled, side="right"),
        "log_views": np.log1p(views),
        "ctr_log_odds": np.log(ctr / (1.0 - ctr)),
        "embedding_norm": np.sqrt(embedding_square),
        "brand_id": mapped(items["brand"], known_brand_id),
        "is_sale": mapped(items["title"], known_sale),
    }


def pair_features(
    rows: pd.DataFrame, item_ids: Any, request_ms: Any, budget: Any, country_id: Any, category_id: Any
) -> dict[str, Any]:
    """Computes features that depend on both the request and the candidate. Values of the request may be scalars."""
    days = (request_ms - rows["born"]) / 1000.0 / 86400.0
    return {
        "is_new": days < 7.0,
        "affordable": rows["price"] <= budget,
        "item_bucket": item_buckets(item_ids),
        "country_x_category": cross_ids(country_id, category_id),
        "item_age_bucket": np.searchsorted(ITEM_AGE_LIMITS, days.fillna(-1.0), side="right"),
        "item_age_days": days.fillna(0.0),
    }


def mapped(texts: pd.Series, function: Any) -> Array:
    """Applies a function to strings, once per category if they are categorical. A missing string counts as ""."""
    if isinstance(texts.dtype, pd.CategoricalDtype):
        values = [function(text) for text in texts.cat.categories]
        return np.array([*values, function("")])[texts.cat.codes]  # The code of a missing string is -1.
    return texts.fillna("").map(function).to_numpy()


# ---- batch ----


class BatchContender(Frames):
    """Computes many requests with few candidates each."""

    def compute(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Computes the features of the requests and of the rows. This call is timed."""
        user = self.user_index.get_indexer(self.requests["user_id"])
        asked = self.requests.merge(self.users, on="user_id", how="left").rename_axis("request").reset_index()
        pairs = asked[["request", "user_id", "request_ms"]].merge(
            self.events[["user_id", *EVENT_COLUMNS]], on="user_id"
        )
        pairs = pairs[pairs["received_ms"] < pairs["request_ms"]]
        pairs["age_ms"] = pairs["request_ms"] - pairs["time_ms"]
        requests = self._request_features(asked, pairs)
        embedding_square = squares(self.embedding)
        items = self.items.assign(**item_features(self.items, embedding_square))
        place, request = self.item_index.get_indexer(self.rows["item_id"]), self.rows["request"].to_numpy()
        kept = [name for name in items.columns if name not in {"item_id", "title", "brand"}]
        rows = items[kept].take(place).reset_index(drop=True)
        of_request = asked[["request_ms", "budget"]].assign(country_id=requests["country_id"]).take(request)
        of_request = of_request.reset_index(drop=True)
        rows = rows.assign(
            **pair_features(
                rows,
                self.rows["item_id"],
                of_request["request_ms"],
                of_request["budget"],
                of_request["country_id"],
                rows["category_id"],
            ),
            taste_match=self._taste_match(user[request], place, embedding_square),
            same_category=self._same_category(pairs, request, rows["category"]),
            in_top=self._in_top(requests["top_items"], request),
        )
        return requests[list(REQUEST_FEATURES)], rows[list(ROW_FEATURES)]

    def _request_features(self, asked: pd.DataFrame, pairs: pd.DataFrame) -> pd.DataFrame:
        """Computes the features that have one value per request."""
        moment = pd.to_datetime(asked["request_ms"], unit="ms", utc=True)
        weekday = moment.dt.tz_convert("America/New_York").dt.weekday.astype(np.int64)
        hour = moment.dt.tz_convert("Europe/Berlin").dt.hour.astype(np.int64)
        device = asked["device"].str.lower().map(DEVICES).fillna(0).astype(np.int64)
        clicks = pairs[pairs["action"] == "click"]
        by_request = pairs.assign(recent=pairs["age_ms"] < WEEK_MS, save=pairs["action"] == "save").groupby("request")
        dwell = clicks["dwell_ms"].fillna(0.0)
        click_sums = pd.DataFrame(
            {
                "request": clicks["request"],
                "dwell_7d": dwell.where(clicks["age_ms"] < WEEK_MS, 0.0),
                "decayed_dwell": dwell * np.exp(clicks["age_ms"] * DECAY),
            }
        ).groupby("request").sum()  # fmt: skip
        distinct = clicks[["request", "category"]].dropna().drop_duplicates().groupby("request").size()
        top, last = _top(clicks), clicks.drop_duplicates("request", keep="last").set_index("request")["item_id"]
        requests = pd.DataFrame(
            {
                "is_weekend": weekday >= 5,
                "country_id": mapped(asked["country"], known_string_id),
                "device_x_hour": cross_ids(device, hour),
                "device_index": device,
                "age_bucket": np.searchsorted(AGE_LIMITS, asked["age"].fillna(0), side="right"),
                "hour": hour,
                "weekday": weekday,
                "user_age_days": ((asked["request_ms"] - asked["born"]) / 1000.0 / 86400.0).fillna(0.0),
                "last_click": last.astype("Int64"),
                "categories": distinct,
                "top_items": top,
            },
            index=asked.index,
        )  # fmt: skip
        sums = by_request[["recent", "save"]].sum().rename(columns={"recent": "events_7d", "save": "saves"})
        requests = requests.join(sums).join(click_sums)
        counts = ["events_7d", "saves", "categories", "dwell_7d"]
        requests[counts] = requests[counts].fillna(0).astype(np.int64)
        requests["decayed_dwell"] = requests["decayed_dwell"].fillna(0.0)
        requests["save_rate"] = (requests["saves"] / requests["events_7d"]).replace(np.inf, 0.0).fillna(0.0)
        requests["top_items"] = requests["top_items"].where(requests["top_items"].notna(), pd.Series([[]] * len(asked)))
        requests["num_top"] = requests["top_items"].str.len()
        requests["favourite"] = top.str[0].astype("Int64").reindex(asked.index)
        return requests

    def _taste_match(self, user: Array, item: Array, embedding_square: Array) -> Array:
        product = dots(self.taste[user], self.embedding[item])
        return cosines(product, squares(self.taste)[user], embedding_square[item])

    def _same_category(self, pairs: pd.DataFrame, request: Array, category: pd.Series) -> Array:
        """Returns, for each row, the number of events of its category that its request sees."""
        counts = pairs.groupby(["request", "category"], observed=True).size().rename("times").reset_index()
        wanted = pd.DataFrame({"request": request, "category": category})
        return (
            wanted.merge(counts, on=["request", "category"], how="left")["times"].fillna(0).astype(np.int64).to_numpy()
        )

    def _in_top(self, top_items: pd.Series, request: Array) -> Array:
        """Returns, for each row, whether its item is one of the top items of its request."""
        top = top_items.explode().dropna().astype(np.int64).rename("item_id").rename_axis("request").reset_index()
        wanted = pd.DataFrame({"request": request, "item_id": self.rows["item_id"]})
        return wanted.merge(top.assign(found=True), on=["request", "item_id"], how="left")["found"].eq(True).to_numpy()

    to_arrow = staticmethod(to_arrow)


def _top(clicks: pd.DataFrame) -> pd.Series:
    """Returns the five most frequent items of each request as lists. Of equally frequent items, the newer is first."""
    groups = clicks.groupby(["request", "item_id"], sort=False)["order"].agg(["size", "max"]).reset_index()
    groups = groups.sort_values(["request", "size", "max"], ascending=[True, False, False])
    best = groups[groups.groupby("request").cumcount() < 5]
    first = np.flatnonzero(best["request"].ne(best["request"].shift()))
    return pd.Series(np.split(best["item_id"].to_numpy(), first[1:]), index=best["request"].to_numpy()[first])


# ---- one request ----


class OnlineContender:
    """Computes one request at a time. If `prepared`, features that depend on an item alone are computed beforehand."""

    def __init__(self, world: World, *, prepared: bool) -> None:
        frames = Frames(world)
        items = frames.items.astype({"brand": object, "title": object})
        self.items: pd.DataFrame | None = None
        if prepared:
            self.embedding, self.embedding_square = frames.embedding, squares(frames.embedding)
            self.index = frames.item_index
            self.items = items[["price", "born", "category"]].assign(**item_features(items, self.embedding_square))
        self.requests: list[tuple[dict[str, Any], pd.DataFrame, Any]] = []
        for asked, events, item_ids in frames.single_requests():
            place = frames.item_index.get_indexer(item_ids)
            sent = (items.take(place).assign(item_id=item_ids).reset_index(drop=True), frames.embedding[place])
            self.requests.append((asked, events[EVENT_COLUMNS], item_ids if prepared else sent))

    def compute(self, number: int) -> tuple[dict[str, Any], pd.DataFrame]:
        """Computes the features of one request and of its candidates. This call is timed."""
        asked, events, candidates = self.requests[number]
        requests = self._request_features(asked, events)
        if self.items is None:
            rows, embedding = candidates
            embedding_square, item_ids = squares(embedding), rows["item_id"]
            own = item_features(rows, embedding_square)
            category_id = own["category_id"]
        else:
            place, item_ids, own = self.index.get_indexer(candidates), candidates, {}
            rows, embedding, embedding_square = (
                self.items.take(place),
                self.embedding[place],
                self.embedding_square[place],
            )
            category_id = rows["category_id"]
        own |= pair_features(rows, item_ids, asked["request_ms"], asked["budget"], requests["country_id"], category_id)
        own["taste_match"] = cosines(dots(asked["taste"], embedding), squares(asked["taste"]), embedding_square)
        # Categories are compared by code. Both columns have the same categories, and a missing category has code -1.
        categories = events["category"].cat
        times = np.bincount(categories.codes + 1, minlength=len(categories.categories) + 1)
        times[0] = 0
        own["same_category"] = times[rows["category"].cat.codes + 1]
        own["in_top"] = np.isin(item_ids, requests["top_items"])
        return requests, rows.assign(**own)

    def _request_features(self, asked: dict[str, Any], events: pd.DataFrame) -> dict[str, Any]:
        """Computes the features that have one value per request."""
        age_ms = asked["request_ms"] - events["time_ms"]
        is_click = events["action"] == "click"
        clicks, click_age = events[is_click], age_ms[is_click]
        dwell = clicks["dwell_ms"].fillna(0.0)
        groups = clicks.groupby("item_id", sort=False)["order"].agg(["size", "max"])
        top = groups.sort_values(["size", "max"], ascending=False).index[:5].to_numpy()
        events_7d, saves = int((age_ms < WEEK_MS).sum()), int((events["action"] == "save").sum())
        names = ("request_ms", "device", "country", "age", "born")
        return request_values(**{name: asked[name] for name in names}, saves=saves, events_7d=events_7d) | {
            "events_7d": events_7d,
            "saves": saves,
            "last_click": clicks["item_id"].iat[-1] if len(clicks) else None,
            "categories": clicks["category"].nunique(),
            "dwell_7d": int(dwell[click_age < WEEK_MS].sum()),
            "decayed_dwell": (dwell * np.exp(click_age * DECAY)).sum(),
            "top_items": top,
            "num_top": len(top),
            "favourite": top[0] if len(top) else None,
        }

    to_arrow = staticmethod(to_arrow)
