r"""Defines features of a ranker that knows how new a candidate is and how often it was read lately.

tackboard data synth --world news --set num_users=300 --set num_items=1000
tackboard data attributes datasets/news --live-counts reads_1h=1h --live-counts reads_24h=24h
tackboard features check examples/live_counts.py --data datasets/news
tackboard data pseudo-requests datasets/news --candidates 20 --per-user 8 --also save
tackboard train finetune-none --set data.dataset=datasets/news --set data.features=examples/live_counts.py \
  --set 'model.features.numbers=["age","reads_1h","reads_24h"]' --set 'model.features.vectors={}' \
  --set 'model.request_features=[]' --set training.steps=30

A log without births has a stand-in: `tackboard data attributes … --first-event birth_ms`.
"""

from tackboard.features.language import FeatureSet, Int, Item, Request, Time

item = Item(birth_ms=Time(), reads_1h=Int(minimum=0), reads_24h=Int(minimum=0))
request = Request()
age_h = (request.time.seconds_since(item.birth_ms) / 3_600).clip(0.0, None)

features = FeatureSet(
    "live_counts",
    age=age_h.log1p().fill_missing(-1.0).described("Hours since the birth, as log(1 + h); -1 if it is unknown."),
    reads_1h=item.reads_1h.fill_missing(0).log1p().described("Events of the last hour, as log(1 + n)."),
    reads_24h=item.reads_24h.fill_missing(0).log1p().described("Events of the last 24 hours, as log(1 + n)."),
)
