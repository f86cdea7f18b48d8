"""Defines the features of the synthetic world's rankers: those of the demo, and the age and content of each candidate.

A real log may not say when items were created, and may lack content vectors. `tackboard data attributes` then computes
stand-ins from the log.
"""

from tackboard.events.synthetic.world_items import CONTENT_WIDTH
from tackboard.features.language import Events, FeatureSet, Item, Request, Time, Vector, days

events, request = Events(), Request()
item = Item(birth_ms=Time(), content=Vector(CONTENT_WIDTH))
away_s = request.time.seconds_since(events.last(events.time)).fill_missing(30 * 86_400.0)
age_days = (request.time.seconds_since(item.birth_ms) / 86_400.0).clip(0.0, None)

features = FeatureSet(
    "ranking",
    recency=(away_s.log1p() / 8.0).described("Time since the last event, on a logarithmic scale."),
    actions_1d=events.within(days(1)).count().log1p().described("Events in the last 24 hours, as log(1 + n)."),
    saves_7d=(
        events.where(events.action == "save").within(days(7)).count().log1p().described("Saves in 7 days, log(1 + n).")
    ),
    item_age_days=age_days.fill_missing(-1.0).described("Days since the birth; 0 before it, -1 if it is unknown."),
    content=item.content.fill_missing(0.0).described("Content vector of the item; zeros if it is unknown."),
)
