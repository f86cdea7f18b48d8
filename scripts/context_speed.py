"""Measures the CPU time of requests with a cache of users' contexts, and of the same requests without this cache.

One user has a long history and sends a request after each new event. A ranker with early fusion and fresh parameters
scores each request twice, with and without the cache, and the scores are compared. The time covers the whole request:
features, batch and model, on one thread. For each stride of anchors the script prints the share of requests that
extended a kept context, the mean number of events that a request reads, and the mean of both times:

    python scripts/context_speed.py
    python scripts/context_speed.py --history 1024 --layers 8 --width 256 --candidates 100
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch

from tackboard.bundle.signature import Signature
from tackboard.core.vocabulary import Vocabulary
from tackboard.features.standard import HISTORY, features_for_model
from tackboard.models.backbone import BackboneConfig
from tackboard.models.fusion import FusionConfig
from tackboard.models.pinfm import PinFMConfig
from tackboard.models.ranker import HeadConfig, RankerConfig
from tackboard.models.tables import TableConfig
from tackboard.scoring.context_cache import ContextCache, share_extended
from tackboard.scoring.scorer import Scorer

VOCABULARY = Vocabulary.from_names(["click", "save"], ["home", "search"])
NUM_ITEMS = 100_000


def make_scorer(asked: argparse.Namespace, stride: int) -> Scorer:
    """Returns a scorer of an untrained ranker."""
    pinfm = PinFMConfig(
        tables=TableConfig(num_hashes=4, num_rows=1 << 16, dim=32),
        width=asked.width,
        max_history=asked.history + 1,
        backbone=BackboneConfig(num_layers=asked.layers, num_heads=4),
    )
    fusion = FusionConfig(kind="early", anchor_stride=stride)
    config = RankerConfig.on(pinfm, HeadConfig(labels=("click",), num_cross_layers=2), fusion)
    torch.manual_seed(0)
    model = config.build(VOCABULARY).eval()
    signature = Signature(
        format_version=1,
        name="contexts",
        version="1",
        id_type="int64",
        actions=VOCABULARY.actions,
        surfaces=VOCABULARY.surfaces,
        max_history=config.max_history,
        model={},
        tables={},
        lineage={},
    )
    features = features_for_model(
        config.reads, VOCABULARY, config.max_history, of_requests=True, anchor_stride=config.anchor_stride
    )
    return Scorer(signature, model, config.tables, features)


def measure(asked: argparse.Namespace, stride: int) -> None:
    """Prints the figures of one stride."""
    scorer = make_scorer(asked, stride)
    cache = ContextCache(scorer, 1 << 30)
    random = np.random.default_rng(0)
    num_events = asked.history + asked.requests
    items = random.integers(NUM_ITEMS, size=num_events)
    times = np.cumsum(random.integers(1_000, 10**6, size=num_events))
    kept_ms, computed_ms, lengths, differences = [], [], [], []
    for number in range(asked.history, num_events):
        sent = {"item": items[:number].tolist(), "time_ms": times[:number].tolist()}
        candidates = random.integers(NUM_ITEMS, size=asked.candidates)
        request = scorer.reader.read(sent, candidates.tolist(), user=1)
        begin = time.process_time()
        found = cache.score_features(scorer.compute_features(request), request.candidate_items, request.user_id)
        middle = time.process_time()
        features = scorer.compute_features(request)
        expected = scorer.score_features(features, request.candidate_items)
        computed_ms.append(1000 * (time.process_time() - middle))
        kept_ms.append(1000 * (middle - begin))
        lengths.append(len(features[HISTORY].to_pylist()[0]["item"]))
        differences.append(float(np.abs(found - expected).max() / np.ptp(expected)))
    assert max(differences) < 1e-3, f"scores differ by {max(differences):.1e} of their range"
    kept, computed = statistics.fmean(kept_ms), statistics.fmean(computed_ms)
    share, memory = share_extended(cache.counts), cache.num_bytes / 2**20
    print(
        f"{stride:6} {share:9.1%} {statistics.fmean(lengths):7.1f} {computed:11.2f} {kept:9.2f} {computed / kept:6.2f} "
        f"{memory:8.2f} {max(differences):11.1e}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measure requests with kept contexts.")
    parser.add_argument("--history", type=int, default=256, help="largest number of events of a history")
    parser.add_argument("--layers", type=int, default=4, help="number of layers of the backbone")
    parser.add_argument("--width", type=int, default=128, help="width of the backbone")
    parser.add_argument("--candidates", type=int, default=100, help="number of candidates of a request")
    parser.add_argument("--requests", type=int, default=400, help="number of requests, one after each new event")
    parser.add_argument("--strides", type=int, nargs="+", default=[1, 16, 64, 128], help="strides of anchors")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print("stride  extended  events computed_ms   kept_ms  ratio  kept_MiB  difference")
    for each in given.strides:
        measure(given, each)
