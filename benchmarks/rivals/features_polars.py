"""This module computes the features of `feature_list` in hand-written Polars: a rival of `tackboard bench features`.

It takes the tables as Polars frames and returns a frame with a row per request and a frame with a row per candidate. It
runs in the rivals' environment only (`make rivals`). It is tuned as a Polars expert would tune it, and each choice
was measured. Features that depend on an item alone are computed once per item. Features of a request are computed once
per request. Both are gathered by position, not joined. Events and requests are joined on a dense integer, with only the
needed columns. For features of clicks, the events are filtered before the join. Categories are compared by their codes.
Strings are hashed once per distinct string. A single request has no lazy plan, because the optimiser alone would take
longer than the work.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from rivals.feature_list import (
    AGE_LIMITS,
    DECAY,
    DEVICES,
    ITEM_AGE_LIMITS,
    ITEM_FEATURES,
    PAIR_FEATURES,
    PRICE_LIMITS,
    REQUEST_FEATURES,
    WEEK_MS,
    cosines,
    cross_ids,
    dots,
    item_buckets,
    known_string_id,
    squares,
)
from tackboard.bench.features.data import TABLES, WIDTH, World

VECTOR = pl.Array(pl.Float64, WIDTH)
PAIR_INPUTS = ("price", "item_born", "category")
"""Attributes of an item that features of a pair need."""


# ---- expressions that a batch and a single request share ----


def item_expressions() -> list[pl.Expr]:
    """Returns the features that depend on the item alone."""
    price, list_price = pl.col("price"), pl.col("list_price")
    views = pl.col("views").fill_null(0)
    ctr = (pl.col("clicks").fill_null(0) + 1) / (views + 20)
    title, brand = pl.col("title").cast(pl.String), pl.col("brand").cast(pl.String)
    return [
        ctr.alias("ctr"),
        pl.when(price < list_price).then(1.0 - price / list_price).otherwise(0.0).alias("discount"),
        price.is_null().alias("price_missing"),
        pl.coalesce("rating", "editor_rating", 3.0).alias("rating"),
        hashed(pl.col("category").cast(pl.String)).alias("category_id"),
        price.fill_null(0.0).log1p().alias("log_price"),
        ((price - 35.0) / 40.0).clip(-3.0, 3.0).fill_null(0.0).alias("price_z"),
        bucketized(price.fill_null(0.0), PRICE_LIMITS).alias("price_bucket"),
        views.log1p().alias("log_views"),
        (ctr / (1.0 - ctr)).log().alias("ctr_log_odds"),
        (pl.col("embedding").cast(VECTOR) * pl.col("embedding").cast(VECTOR)).arr.sum().sqrt().fill_null(0.0)
        .alias("embedding_norm"),
        hashed(brand.str.strip_chars().str.to_lowercase().str.normalize("NFC")).alias("brand_id"),
        title.str.to_lowercase().str.contains("sale", literal=True).fill_null(value=False).alias("is_sale"),
    ]  # fmt: skip


def request_expressions() -> list[pl.Expr]:
    """Returns the features that depend on the request and its user, but not on events."""
    clock = pl.from_epoch("request_ms", time_unit="ms").dt.replace_time_zone("UTC")
    weekday = clock.dt.convert_time_zone("America/New_York").dt.weekday().cast(pl.Int64) - 1
    device = pl.col("device").cast(pl.String).str.to_lowercase()
    return [
        (weekday >= 5).alias("is_weekend"),
        hashed(pl.col("country").cast(pl.String)).alias("country_id"),
        device.replace_strict(DEVICES, default=0, return_dtype=pl.Int64).alias("device_index"),
        bucketized(pl.col("age").fill_null(0), AGE_LIMITS).alias("age_bucket"),
        clock.dt.convert_time_zone("Europe/Berlin").dt.hour().cast(pl.Int64).alias("hour"),
        weekday.alias("weekday"),
        ((pl.col("request_ms") - pl.col("born")) / 1000.0 / 86400.0).fill_null(0.0).alias("user_age_days"),
    ]


def history_expressions() -> list[pl.Expr]:
    """Returns the features that depend on aggregated events and on other features of the request."""
    rate, top = pl.col("saves") / pl.col("events_7d"), pl.col("top_items")
    return [
        pl.when(rate.is_finite()).then(rate).otherwise(0.0).alias("save_rate"),
        top.list.len().cast(pl.Int64).alias("num_top"),
        top.list.get(0, null_on_oob=True).alias("favourite"),
        crossed("device_index", "hour").alias("device_x_hour"),
    ]


def pair_expressions() -> list[pl.Expr]:
    """Returns the features that depend on both the request and the candidate."""
    days = (pl.col("request_ms") - pl.col("item_born")) / 1000.0 / 86400.0
    return [
        (days < 7.0).fill_null(value=False).alias("is_new"),
        (pl.col("price") <= pl.col("budget")).fill_null(value=False).alias("affordable"),
        pl.col("item_id").map_batches(item_buckets, return_dtype=pl.Int64).alias("item_bucket"),
        crossed("country_id", "category_id").alias("country_x_category"),
        bucketized(days.fill_null(-1.0), ITEM_AGE_LIMITS).alias("item_age_bucket"),
        days.fill_null(0.0).alias("item_age_days"),
        pl.col("top_items").list.contains(pl.col("item_id")).alias("in_top"),
    ]


def click_expressions() -> list[pl.Expr]:
    """Returns the aggregations of clicks, which must be in the order of the events.

    `age_ms` is the age of a click at the time of the request.
    """
    dwell = pl.col("dwell_ms").fill_null(0)
    return [
        pl.col("item_id").last().alias("last_click"),
        pl.col("category").drop_nulls().n_unique().alias("categories"),
        dwell.filter(pl.col("age_ms") < WEEK_MS).sum().alias("dwell_7d"),
        (dwell * (pl.col("age_ms") * DECAY).exp()).sum().alias("decayed_dwell"),
    ]


def frequent_then_new(position: str) -> pl.Expr:
    """Returns a number to sort by: it is larger for a more frequent value.

    Among equally frequent values, it is larger for a newer value. Sorting by one number is twice as fast as by two.
    """
    return pl.len().cast(pl.Int64) * (1 << 32) + pl.col(position).max()


def hashed(texts: pl.Expr) -> pl.Expr:
    """Returns the ids of strings. A missing string counts as "". Each distinct string is hashed once."""
    return texts.fill_null("").map_batches(_hash_distinct, return_dtype=pl.Int64)


def _hash_distinct(texts: pl.Series) -> pl.Series:
    distinct = texts.unique()
    ids = pl.Series([known_string_id(text) for text in distinct], dtype=pl.Int64)
    return texts.replace_strict(distinct, ids, return_dtype=pl.Int64)


def bucketized(value: pl.Expr, limits: Iterable[float]) -> pl.Expr:
    """Returns the number of `limits` that are not larger than the value."""
    return pl.sum_horizontal((value >= limit).cast(pl.Int64) for limit in limits)


def crossed(one: str, other: str) -> pl.Expr:
    """Returns an id for each pair of ids of two columns."""
    return pl.map_batches([one, other], _cross, return_dtype=pl.Int64)


def _cross(columns: list[pl.Series]) -> pl.Series:
    return pl.Series(cross_ids(columns[0].to_numpy(), columns[1].to_numpy()))


def to_arrow(answer: tuple[pl.DataFrame, pl.DataFrame]) -> tuple[pa.Table, pa.Table]:
    """Returns the answer as Arrow tables for the comparison. This call is not timed."""
    return answer[0].to_arrow(), answer[1].to_arrow()


# ---- batch ----


class BatchContender:
    """Computes many requests with few candidates each."""

    def __init__(self, world: World) -> None:
        frames = {name: pl.from_arrow(getattr(world, name)) for name in TABLES}
        self.users = frames["users"].with_row_index("user")
        self.requests = frames["requests"].with_row_index("request")
        self.rows = frames["rows"].with_columns(pl.col("request").cast(pl.UInt32)).with_row_index("row")
        # Events are as in a store: sorted by user, with the position of the user. The last item is an unknown item.
        self.events = frames["events"].join(
            self.users.select("user_id", "user"), on="user_id", how="left", maintain_order="left"
        ).with_row_index("position")  # fmt: skip
        self.items = pl.concat([frames["items"], frames["items"].clear(1)]).rename({"born": "item_born"})

    def compute(self) -> tuple[pl.DataFrame, pl.DataFrame]:
        """Computes the features of the requests and of the rows. This call is timed."""
        users = self.users.lazy().drop("taste")
        requests = self.requests.lazy().join(users, on="user_id", how="left", maintain_order="left")
        of_requests, of_items, index = pl.collect_all(
            [
                self._with_history(requests).with_columns(history_expressions()),
                self.items.lazy().with_columns(item_expressions()),
                self.rows.lazy().select("item_id").join(
                    self.items.lazy().select("item_id").with_row_index("index"),
                    on="item_id", how="left", maintain_order="left",
                ).select(pl.col("index").fill_null(len(self.items) - 1)),
            ]
        )  # fmt: skip
        request, item = self.rows["request"], index["index"]
        gathered = pl.concat(
            [
                self.rows.select("row", "item_id"),
                of_items.select(pl.col(*ITEM_FEATURES, *PAIR_INPUTS).gather(item)),
                of_requests.select(pl.col("request_ms", "budget", "country_id", "top_items", "user").gather(request)),
            ],
            how="horizontal",
        )
        of_rows = gathered.lazy().with_columns(pair_expressions()).collect()
        of_rows = of_rows.with_columns(
            same_category=self._same_category(gathered),
            taste_match=self._taste_match(gathered["user"].to_numpy(), item.to_numpy()),
        )
        return of_requests.select(*REQUEST_FEATURES), of_rows.select(*ITEM_FEATURES, *PAIR_FEATURES)

    def _with_history(self, requests: pl.LazyFrame) -> pl.LazyFrame:
        """Adds to each request all aggregations of the events that the request sees."""
        asked = requests.select("request", "user", "request_ms")
        events, seen = self.events.lazy(), pl.col("received_ms") < pl.col("request_ms")
        age_ms = pl.col("request_ms") - pl.col("time_ms")
        of_all = (
            asked.join(events.select("user", "time_ms", "received_ms", "action"), on="user")
            .filter(seen)
            .select("request", save=pl.col("action") == "save", recent=age_ms < WEEK_MS)
            .group_by("request")
            .agg(events_7d=pl.col("recent").sum().cast(pl.Int64), saves=pl.col("save").sum().cast(pl.Int64))
        )
        clicks = (
            asked.join(
                events.filter(pl.col("action") == "click").select(
                    "user", "position", "item_id", "time_ms", "received_ms", "dwell_ms", "category"
                ),
                on="user",
                maintain_order="left_right",
            )
            .filter(seen)
            .with_columns(age_ms=age_ms)
        )
        top = (
            clicks.group_by("request", "item_id")
            .agg(rank=frequent_then_new("position"))
            .group_by("request")
            .agg(top_items=pl.col("item_id").sort_by("rank", descending=True).head(5))
        )
        for aggregated in (of_all, clicks.group_by("request").agg(click_expressions()), top):
            requests = requests.join(aggregated, on="request", how="left", maintain_order="left")
        return requests.with_columns(
            pl.col("events_7d", "saves", "categories", "dwell_7d").cast(pl.Int64).fill_null(0),
            pl.col("decayed_dwell").fill_null(0.0),
            pl.col("top_items").fill_null([]),
            *request_expressions(),
        )

    def _taste_match(self, user: NDArray[Any], item: NDArray[Any]) -> pl.Series:
        """Returns the cosines of the vectors of users and items, in NumPy, which is three times faster than Polars."""
        taste, embedding = vectors(self.users["taste"]), vectors(self.items["embedding"])
        product = dots(taste[user], embedding[item])
        return pl.Series(cosines(product, squares(taste)[user], squares(embedding)[item]))

    def _same_category(self, gathered: pl.DataFrame) -> pl.Series:
        """Returns, for each row, the number of events of its category that its request sees."""
        key = pl.col("user").cast(pl.Int64) * (1 << 20) + pl.col("category").to_physical()
        counted = (
            gathered.lazy()
            .select("row", "request_ms", key=key)
            .join(self.events.lazy().select("received_ms", key=key), on="key")
            .filter(pl.col("received_ms") < pl.col("request_ms"))
            .group_by("row")
            .agg(times=pl.len().cast(pl.Int64))
            .collect()
        )
        return pl.zeros(len(gathered), dtype=pl.Int64, eager=True).scatter(counted["row"], counted["times"])

    to_arrow = staticmethod(to_arrow)


def vectors(column: pl.Series) -> NDArray[np.float32]:
    """Returns vectors as an array [n, width]. Missing vectors are zeros."""
    flat = column.fill_null(pl.Series([[0.0] * WIDTH], dtype=pl.Array(pl.Float32, WIDTH))).explode()
    return np.asarray(flat.to_numpy()).reshape(-1, WIDTH)


# ---- one request ----


class OnlineContender:
    """Computes one request at a time. If `prepared`, features that depend on an item alone are computed beforehand."""

    def __init__(self, world: World, *, prepared: bool) -> None:
        items = pl.from_arrow(world.items)
        items = pl.concat([items, items.clear(1)]).rename({"born": "item_born"}).rechunk()
        place = items.select("item_id").with_row_index("index")
        self.items: pl.DataFrame | None = None
        if prepared:
            self.items = items.with_columns(item_expressions()).select(*ITEM_FEATURES, *PAIR_INPUTS).rechunk()
            self.embedding = vectors(items["embedding"])
            self.embedding_square = squares(self.embedding)
            self.place = place
        users, events, rows = pl.from_arrow(world.users), pl.from_arrow(world.events), pl.from_arrow(world.rows)
        self.requests: list[tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]] = []
        for number, asked in enumerate(pl.from_arrow(world.requests).iter_slices(1)):
            candidates = rows.filter(pl.col("request") == number).select("item_id").rechunk()
            if not prepared:
                index = candidates.join(place, on="item_id", how="left", maintain_order="left")["index"]
                candidates = items[index.fill_null(len(items) - 1)].with_columns(candidates["item_id"]).rechunk()
            history = events.filter(pl.col("user_id") == asked.item(0, "user_id")).rechunk()
            self.requests.append((asked.join(users, on="user_id"), history, candidates))

    def compute(self, number: int) -> tuple[pl.DataFrame, pl.DataFrame]:
        """Computes the features of one request and of its candidates. This call is timed."""
        asked, events, candidates = self.requests[number]
        request_ms = asked.item(0, "request_ms")
        age_ms = request_ms - pl.col("time_ms")
        clicks = events.filter(pl.col("action") == "click").with_columns(age_ms=age_ms)
        top = clicks.group_by("item_id").agg(rank=frequent_then_new("order"))
        asked = pl.concat(
            [
                asked.with_columns(request_expressions()),
                events.select(
                    events_7d=(age_ms < WEEK_MS).sum().cast(pl.Int64),
                    saves=(pl.col("action") == "save").sum().cast(pl.Int64),
                ),
                clicks.select(click_expressions()),
                top.select(top_items=pl.col("item_id").sort_by("rank", descending=True).head(5).implode()),
            ],
            how="horizontal",
        ).with_columns(pl.col("categories").cast(pl.Int64), *history_expressions())
        rows, embedding, embedding_square = self._of_items(candidates)
        taste = vectors(asked["taste"])
        rows = rows.with_columns(
            *(pl.lit(asked[name]).first() for name in ("request_ms", "budget", "country_id", "top_items")),
            taste_match=pl.Series(cosines(dots(taste, embedding), squares(taste), embedding_square)),
        )
        of_category = events.group_by("category").agg(same_category=pl.len().cast(pl.Int64))
        rows = rows.join(of_category, on="category", how="left", maintain_order="left")
        rows = rows.select(*ITEM_FEATURES, "taste_match", pl.col("same_category").fill_null(0), *pair_expressions())
        return asked.select(*REQUEST_FEATURES), rows

    def _of_items(self, candidates: pl.DataFrame) -> tuple[pl.DataFrame, NDArray[Any], NDArray[Any]]:
        """Returns the candidates with the features of items, their vectors, and the squared lengths of the vectors."""
        if self.items is None:
            embedding = vectors(candidates["embedding"])
            return candidates.with_columns(item_expressions()), embedding, squares(embedding)
        index = candidates.join(self.place, on="item_id", how="left", maintain_order="left")["index"]
        place = index.fill_null(len(self.items) - 1)
        rows, positions = self.items[place].with_columns(candidates["item_id"]), place.to_numpy()
        return rows, self.embedding[positions], self.embedding_square[positions]

    to_arrow = staticmethod(to_arrow)
