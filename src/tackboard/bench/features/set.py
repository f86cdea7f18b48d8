"""Defines the 40 features that `tackboard bench features` computes, in the way a user of Tackboard defines features.

Eight of the features aggregate the user's events. The other features are typical inputs of a ranking model and cover
all families of operators. The rivals in `benchmarks/rivals/` compute the same features from the same tables, and a test
compares their names and values with ours. Features that do not depend on an item have one value per request. All other
features have one value per candidate.
"""

from __future__ import annotations

from tackboard.features.language import (
    Context,
    Events,
    FeatureSet,
    Float,
    Int,
    Item,
    Request,
    String,
    Time,
    User,
    Vector,
    coalesce,
    cross,
    days,
    feature,
    if_else,
)

item = Item(
    price=Float(minimum=0),
    list_price=Float(minimum=0),
    rating=Float(),
    editor_rating=Float(),
    views=Int(minimum=0, default=0),
    clicks=Int(minimum=0, default=0),
    category=String(),
    brand=String(),
    title=String(),
    born=Time(),
    embedding=Vector(16),
)
user = User(country=String(), age=Int(), budget=Float(), born=Time(), taste=Vector(16))
events = Events(dwell_ms=Int(minimum=0), category=String())
context = Context(device=String())
request = Request()

clicks = events.where(events.action == "click")
dwell_ms = events.dwell_ms.fill_missing(0)
item_age_days = request.time.seconds_since(item.born) / 86400.0

features = FeatureSet(
    "bench",
    version=1,
    # Events: count in a window, filtered count, last item, distinct categories, sum, decayed sum, top k, and count of
    # events with the candidate's category.
    events_7d=events.within(days(7)).count(),
    saves=events.where(events.action == "save").count(),
    last_click=clicks.last(events.item),
    categories=clicks.distinct(events["category"]),
    dwell_7d=clicks.within(days(7)).sum(dwell_ms),
    decayed_dwell=clicks.decayed_sum(dwell_ms, half_life=days(3)),
    top_items=clicks.top(events.item, 5),
    same_category=events.matching(events["category"], item.category).count(),
    # Arithmetic and comparison.
    save_rate=(feature("saves") / feature("events_7d")).finite().fill_missing(0.0),
    ctr=(item.clicks + 1) / (item.views + 20),
    is_new=(item_age_days < 7.0).fill_missing(False),
    is_weekend=feature("weekday") >= 5,
    affordable=(item.price <= user.budget).fill_missing(False),
    discount=if_else(item.price < item.list_price, 1.0 - item.price / item.list_price, 0.0).fill_missing(0.0),
    # Missing values.
    price_missing=item.price.is_missing(),
    rating=coalesce(item.rating, item.editor_rating).fill_missing(3.0),
    # Ids.
    country_id=user.country.fill_missing("").hash_id(),
    category_id=item.category.fill_missing("").hash_id(),
    item_bucket=item.id.bucket_hash(100_000),
    country_x_category=cross(user.country.fill_missing(""), item.category.fill_missing("")),
    device_x_hour=cross(feature("device_index"), feature("hour")),
    device_index=context.device.lower().index_in(["phone", "tablet", "desktop"]).fill_missing(0),
    # Scaling.
    log_price=item.price.fill_missing(0.0).log1p(),
    price_z=item.price.normalise(mean=35.0, std=40.0).clip(-3.0, 3.0).fill_missing(0.0),
    price_bucket=item.price.fill_missing(0.0).bucketize([5.0, 10.0, 20.0, 50.0, 100.0, 200.0]),
    log_views=item.views.log1p(),
    ctr_log_odds=(feature("ctr") / (1.0 - feature("ctr"))).log(),
    age_bucket=user.age.fill_missing(0).bucketize([18, 25, 35, 45, 55, 65]),
    item_age_bucket=item_age_days.fill_missing(-1.0).bucketize([0.0, 1.0, 7.0, 30.0, 90.0, 365.0]),
    # Vectors.
    taste_match=user.taste.cosine(item.embedding).fill_missing(0.0),
    embedding_norm=item.embedding.norm().fill_missing(0.0),
    # Text.
    brand_id=item.brand.strip().lower().nfc().fill_missing("").hash_id(),
    is_sale=item.title.lower().contains_text("sale").fill_missing(False),
    # Time.
    hour=request.time.hour("Europe/Berlin"),
    weekday=request.time.weekday("America/New_York"),
    user_age_days=(request.time.seconds_since(user.born) / 86400.0).fill_missing(0.0),
    item_age_days=item_age_days.fill_missing(0.0),
    # Lists.
    in_top=feature("top_items").has(item.id),
    num_top=feature("top_items").length(),
    favourite=feature("top_items").at(0),
)
