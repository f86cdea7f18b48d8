r"""Defines features of a feed over the dataset that `tackboard data synth` makes.

tackboard features check examples/features.py --data datasets/demo
tackboard features explain examples/features.py --feature like_rate
tackboard features backfill examples/features.py --data datasets/demo
tackboard train demo --set data.features=examples/features.py \
  --set 'model.request_features=["like_rate","interest","recency"]'
"""

from tackboard.features.language import Events, FeatureSet, Int, Item, Request, Time, cross, days, feature, hours

# These are the columns of the data. Attributes may be missing, for example if the table of items lacks an item.
item = Item(topic=Int(minimum=0), style=Int(minimum=0), birth_ms=Time())
events = Events()
request = Request()

# Views of events. A request sees only events that were received before the request.
likes = events.where(events.action.is_in(["click", "save", "share"]))
of_this_item = events.matching(events.item, item.id)
away_s = request.time.seconds_since(events.last(events.time)).fill_missing(30 * 86_400.0)

# This set defines no `history`, so a model that is trained with the set reads the standard history.
features = FeatureSet(
    "feed",
    version=1,
    # These features have one value per request, of magnitude about 1. A model may read them (model.request_features).
    like_rate=(feature("likes_7d") / feature("events_7d")).finite().fill_missing(0.0),
    interest=likes.decayed_sum(1.0, half_life=hours(12)).log1p(),
    recency=(away_s.log1p() / 8.0).described("Time since the last event, on a logarithmic scale."),
    # Some of the following features are parts of the features above. The others are for other models.
    hour=request.time.hour("Europe/Berlin"),
    likes_7d=likes.within(days(7)).count(),
    events_7d=events.within(days(7)).count(),
    surfaces=events.distinct(events.surface),
    favourites=likes.top(events.item, 5),
    age_days=(request.time.seconds_since(item.birth_ms) / 86_400)
    .fill_missing(0.0)
    .clip(0.0, 365.0)
    .described("How long the item has existed; 0 if this is unknown."),
    topic=item.topic.fill_missing(-1),
    look=cross(item.topic.fill_missing(-1), item.style.fill_missing(-1)).bucket_hash(1_000),
    seen=of_this_item.count(),
    minutes_since=(request.time.seconds_since(of_this_item.last(events.time)) / 60).fill_missing(-1.0),
)
