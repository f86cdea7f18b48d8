"""Defines the features of a request that the demo's model reads in addition to the user's history."""

from tackboard.features.language import Events, FeatureSet, Request, days

events, request = Events(), Request()
away_s = request.time.seconds_since(events.last(events.time)).fill_missing(30 * 86_400.0)

features = FeatureSet(
    "demo",
    recency=(away_s.log1p() / 8.0).described("Time since the last event, on a logarithmic scale."),
    actions_1d=events.within(days(1)).count().log1p().described("Events in the last 24 hours, as log(1 + n)."),
    saves_7d=(
        events.where(events.action == "save").within(days(7)).count().log1p().described("Saves in 7 days, log(1 + n).")
    ),
)
