"""Defines the sizes that `tackboard bench dcat` measures, and makes up requests and logs for them.

A preset holds the sizes of a ranker with early fusion and the numbers of requests, candidates and repeats. Every
history has `max_history` events; the published system has 256. Requests to score are made up in memory. For training, a
synthetic log is written, and each user's newest event becomes a request (`data/pseudo_requests.py`). So a batch has one
request per user, and its ratio of unique users to candidates is 1 to the number of candidates of a request. Decided:
training has no dropout, because all lines of the ladder must have equal losses, and random draws would depend on the
number of tokens.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from tackboard.batch import RequestBatch
from tackboard.batch.builder import make_requests
from tackboard.batch.items import distinct_items
from tackboard.bench.loader.data import ACTIONS, START_MS, SURFACES, made_up_events
from tackboard.core.errors import UsageError
from tackboard.core.vocabulary import Vocabulary
from tackboard.data.pseudo_requests import PseudoRequestConfig, make_pseudo_requests
from tackboard.data.request_loader import RequestConfig
from tackboard.events.dataset import open_dataset, write_dataset
from tackboard.features.column import Column, sequence_column
from tackboard.features.kernels.lists import differences
from tackboard.features.kernels.scaling import bucketize
from tackboard.features.standard import GAP_BOUNDARIES_MS
from tackboard.features.types import ID, INT, TIME
from tackboard.models.backbone import BackboneConfig
from tackboard.models.fusion import FusionConfig
from tackboard.models.pinfm import PinFMConfig
from tackboard.models.ranker import HeadConfig, RankerConfig
from tackboard.models.recent_events import RecentEventsConfig
from tackboard.models.tables import TableConfig
from tackboard.train.config import RunConfig, TrainingConfig
from tackboard.train.optimizers import OptimizerConfig

LABEL = "next"
VOCABULARY = Vocabulary(actions=ACTIONS, surfaces=SURFACES)
GAP_MS = 60_000
SEED = 20261119


@dataclasses.dataclass(frozen=True, kw_only=True)
class DcatPreset:
    """A size to measure."""

    words: str
    width: int
    layers: int
    heads: int
    tables: tuple[int, int, int]
    """Number of sub-tables, rows of each, and width of a row."""
    max_history: int = 256
    """Events of every history; also the fixed length."""
    num_items: int = 20_000
    precision: str = "fp32"
    serving: dict[int, int]
    """Candidates of a request → number of requests, each of another user, that are scored together."""
    at_once: int
    """Largest number of candidates that the whole-sequence model scores together. More candidates are scored in parts,
    because every candidate carries a whole sequence. On a CPU, small parts are faster than the largest parts that fit
    in memory, because small parts stay in the caches (docs/log.md)."""
    training: tuple[int, ...] = (10, 16)
    """Candidates of a request in training."""
    requests_per_step: int = 8
    warmup: int = 1
    timed: int = 3
    rounds: int = 3
    """Number of rounds. Every contender is measured once in each round."""
    least_s: float = 0.1
    """A contender's work is repeated until this much time has passed, at least once."""

    def config(self, dataset: str = "", num_candidates: int = 10) -> RunConfig:
        """Returns a run of the ranker with early fusion by DCAT, without a fixed length."""
        num_hashes, num_rows, dim = self.tables
        pinfm = PinFMConfig(
            tables=TableConfig(num_hashes=num_hashes, num_rows=num_rows, dim=dim),
            backbone=BackboneConfig(num_layers=self.layers, num_heads=self.heads),
            width=self.width,
            max_history=self.max_history,
            num_positions=self.max_history + 2,
        )
        model = RankerConfig.on(
            pinfm,
            HeadConfig(labels=(LABEL,), num_cross_layers=2, dropout=0.0),
            FusionConfig(kind="early"),
            recent=RecentEventsConfig(num_events=32, num_layers=1),
        )
        # A step leaves room for one request more, see data/step_plan.py.
        tokens = (self.requests_per_step + 1) * (self.max_history + num_candidates)
        return RunConfig(
            name="bench-dcat",
            data=RequestConfig(
                dataset=dataset,
                labels=(LABEL,),
                max_history=self.max_history,
                tokens_per_step=tokens,
                validation_share=0.0,
                test_share=0.0,
            ),
            model=model,
            optimizer=OptimizerConfig(warmup_steps=1, multipliers={"pinfm.": 0.1}),
            # Compilation covers whole layers, which only the whole-sequence model calls. So both sides run without it.
            training=TrainingConfig(precision=self.precision, compile="off"),
        )


PRESETS = {
    "cpu": DcatPreset(
        words="width 64 × 2 layers, 4 tables × 65,536 × 16, histories of 256 events",
        width=64,
        layers=2,
        heads=2,
        tables=(4, 65_536, 16),
        serving={1: 32, 10: 8, 16: 8, 100: 1, 1000: 1},
        at_once=16,
    ),
    "h200": DcatPreset(
        words="width 512 × 8 layers, 8 tables × 1M × 32, histories of 256 events, bf16",
        width=512,
        layers=8,
        heads=8,
        tables=(8, 1 << 20, 32),
        num_items=200_000,
        precision="bf16",
        serving={1: 1024, 10: 128, 16: 64, 100: 16, 1000: 4},
        at_once=1024,
        requests_per_step=64,
        warmup=10,
        timed=20,
        least_s=1.0,
    ),
    "tiny": DcatPreset(
        words="width 16 × 2 layers, histories of 24 events, only to see that it works",
        width=16,
        layers=2,
        heads=2,
        tables=(2, 1024, 8),
        max_history=24,
        num_items=500,
        serving={1: 8, 10: 2, 40: 1},
        at_once=8,
        requests_per_step=4,
        timed=2,
        rounds=1,
        least_s=0.0,
    ),
}


def find_dcat_preset(name: str) -> DcatPreset:
    """Returns a preset by name. Raises UsageError if there is no preset of this name."""
    if name not in PRESETS:
        raise UsageError(f"there is no size {name!r}", allowed=f"allowed: {', '.join(PRESETS)}")
    return PRESETS[name]


@dataclasses.dataclass(frozen=True)
class Asked:
    """Requests as they reach a scorer: U histories, and the item and the request of each of C candidates."""

    history: Column
    candidates: NDArray[np.int64]
    request_of: NDArray[np.int64]

    def batch(self, config: RankerConfig) -> RequestBatch:
        """Builds the batch: finds distinct items and computes their table rows, as for every request."""
        assert self.history.fields is not None
        items = distinct_items(np.concatenate([self.history.fields["item"].values, self.candidates]), config.tables)
        return make_requests(history=self.history, items=items, request_of=self.request_of)

    def parts(self, at_once: int) -> list[Asked]:
        """Cuts the requests into parts of at most `at_once` candidates, each with the histories that it needs."""
        parts: list[Asked] = []
        for first in range(0, len(self.candidates), at_once):
            some = slice(first, first + at_once)
            requests, request_of = np.unique(self.request_of[some], return_inverse=True)
            parts.append(Asked(self.history.take(requests), self.candidates[some], request_of))
        return parts


def made_up_requests(preset: DcatPreset, num_candidates: int, num_requests: int, seed: int = SEED) -> Asked:
    """Makes up requests of different users; every history has `max_history` events."""
    random = np.random.default_rng([seed, num_candidates, num_requests])
    num_events, lengths = num_requests * preset.max_history, np.full(num_requests, preset.max_history)
    time = Column(TIME, START_MS + GAP_MS * (1 + np.arange(num_events, dtype=np.int64)))
    times = sequence_column(lengths, time=time).fields
    assert times is not None
    history = sequence_column(
        lengths,
        item=Column(ID, random.integers(0, preset.num_items, num_events)),
        action=Column(INT, random.integers(0, len(ACTIONS), num_events)),
        surface=Column(INT, random.integers(0, len(SURFACES), num_events)),
        time=time,
        gap=bucketize(differences(times["time"]).flat(), boundaries=GAP_BOUNDARIES_MS),
    )
    candidates = random.integers(0, preset.num_items, num_requests * num_candidates)
    return Asked(history, candidates, np.repeat(np.arange(num_requests), num_candidates))


def requests_dataset(preset: DcatPreset, num_candidates: int, folder: Path) -> Path:
    """Writes a log with one request per user, each with `num_candidates` candidates, and returns the snapshot. There
    are enough requests for all steps of a measurement."""
    num_users = preset.requests_per_step * (preset.warmup + preset.timed + 1)
    # One event more than a history holds: the newest event becomes the request. Its item must be new to the user, so
    # items are drawn evenly from a catalogue that is larger than a history.
    per_user = preset.max_history + 1
    events: pa.Table = made_up_events(num_users * per_user, preset.num_items, per_user, SEED)
    users, places = np.divmod(np.arange(events.num_rows), per_user)
    items = 1 + (users * 7919 + places) % preset.num_items
    times = START_MS + GAP_MS * places
    for name, values in (("user", users), ("item", items), ("time_ms", times), ("received_ms", times)):
        events = events.set_column(events.schema.get_field_index(name), name, [values])
    name = f"requests-{num_candidates}"
    write_dataset(folder, name, events)
    rules = PseudoRequestConfig(candidates=num_candidates - 1, pool="all", per_user=1, label=LABEL, seed=SEED)
    return make_pseudo_requests(open_dataset(folder / name), rules, quiet=True).path


def device_word(device: torch.device) -> str:
    """Returns the name of the size that is measured on a device by default."""
    return "h200" if device.type == "cuda" else "cpu"
