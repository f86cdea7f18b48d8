"""A tiny dataset and a tiny run that many tests share. torch and Arrow are imported inside: not all tests need them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tackboard.core.keyed_random import uniform
from tackboard.core.rundir import RunDirectory

if TYPE_CHECKING:
    from tackboard.data.sequences import Sequences
    from tackboard.data.source import SequenceSource
    from tackboard.features.column import Column
    from tackboard.scoring.scorer import Scorer
    from tackboard.train.config import RunConfig

Event = tuple[Any, Any, str, str, int]
"""user, item, action, surface, time in ms."""
NUM_USERS, NUM_ITEMS = 14, 25


def write_events(
    root: Path,
    events: Sequence[Event],
    name: str = "tiny",
    *,
    received_ms: Sequence[int] | None = None,
    fields: Mapping[str, Sequence[Any]] | None = None,
    **attributes: Any,
) -> Path:
    """A dataset of the given events under `root`; returns the folder that holds its snapshots.

    An event was received when it happened unless `received_ms` says when. `fields` are further columns of the events,
    `attributes` the attribute tables of `write_dataset`.
    """
    import pyarrow as pa

    from tackboard.events.dataset import write_dataset

    users, items, actions, surfaces, times = (list(column) for column in zip(*events, strict=True))

    def ids(values: list[Any]) -> pa.Array:
        return pa.array(values).dictionary_encode() if isinstance(values[0], str) else pa.array(values, type=pa.int64())

    columns = {
        "user": ids(users),
        "item": ids(items),
        "action": pa.array(actions).dictionary_encode(),
        "surface": pa.array(surfaces).dictionary_encode(),
        "time_ms": pa.array(times, type=pa.int64()),
        "received_ms": pa.array(times if received_ms is None else received_ms, type=pa.int64()),
        "order": pa.array(range(len(times)), type=pa.int64()),
    }
    write_dataset(root, name, pa.table(columns | dict(fields or {})), **attributes)
    return root / name


def tiny_events() -> list[Event]:
    """Users with 5 to 16 events over 25 items, of which 24 occur; one event in six is a hide."""
    events: list[Event] = []
    for user in range(NUM_USERS):
        for number in range(5 + user % 12):
            draw = uniform(1, user, number, np.arange(3))
            action = "hide" if draw[1] < 1 / 6 else "save" if draw[1] < 1 / 3 else "click"
            surface = "home" if draw[2] < 0.7 else "search"
            events.append((user + 100, int(draw[0] ** 2 * NUM_ITEMS), action, surface, 1_000_000 * number + user))
    return events


def standard_history(
    lengths: Sequence[int],
    items: Sequence[int],
    actions: Sequence[int],
    surfaces: Sequence[int],
    times_ms: Sequence[int],
) -> Column:
    """The feature `history` with all of its standard columns, of events given as ids and indices."""
    from tackboard.features.column import Column, sequence_column
    from tackboard.features.kernels.lists import differences
    from tackboard.features.kernels.scaling import bucketize
    from tackboard.features.standard import GAP_BOUNDARIES_MS
    from tackboard.features.types import ID, INT, TIME

    counts = np.array(lengths, dtype=np.int64)
    times = sequence_column(counts, time=Column.of(TIME, times_ms)).fields
    assert times is not None
    return sequence_column(
        counts,
        item=Column.of(ID, items),
        action=Column.of(INT, actions),
        surface=Column.of(INT, surfaces),
        time=Column.of(TIME, times_ms),
        gap=bucketize(differences(times["time"]).flat(), boundaries=GAP_BOUNDARIES_MS),
    )


@pytest.fixture(scope="session")
def make_history() -> Callable[..., Column]:
    """`make_history(lengths, items, actions, surfaces, times_ms)`: a `history` with all standard columns."""
    return standard_history


@pytest.fixture(scope="session")
def make_dataset() -> Callable[..., Path]:
    """`make_dataset(root, events, name=…, …)` writes a dataset of (user, item, action, surface, time_ms) rows."""
    return write_events


HOUR_MS = 3_600_000
START_MS = 1_714_521_600_000
CUT_MS = START_MS + 60 * HOUR_MS
"""2024-05-03T12:00:00, the cut of a `timed_log`."""
NUM_OLD, NUM_ALL = 15, 25
"""Items 0 to 14 appear at once; the others only after the cut. There can be up to four more, as `seed_after` says."""


def timed_log(seed: int, seed_after: int | None = None) -> tuple[list[Event], list[int]]:
    """Events of 26 users in 100 hours, and when they were received.

    What happened or was received at or after the cut depends on `seed_after` alone.
    """
    seed_after = seed + 1000 if seed_after is None else seed_after
    draws, later = np.random.default_rng(seed), np.random.default_rng(seed_after)
    events: list[Event] = [(99, item, "click", "home", START_MS) for item in range(NUM_OLD)]
    received = [START_MS] * NUM_OLD

    def add(user: int, item: int, draw: float, time_ms: int, late_ms: int) -> None:
        # From the cut on, there are also names that training must not know.
        is_after = time_ms + late_ms >= CUT_MS
        action = "hide" if draw < 0.2 else "save" if draw < 0.4 else "share" if is_after and draw < 0.5 else "click"
        events.append((user, item, action, f"new-{seed_after}" if is_after and draw > 0.8 else "home", time_ms))
        received.append(time_ms + late_ms)

    for user in range(25):
        if user % 5 != 1:  # the others have no event before the cut
            for hour in draws.integers(1, 60, draws.integers(3, 12)).tolist():
                late_ms = int(draws.integers(1, 30) * HOUR_MS) if draws.random() < 0.2 else 0
                time_ms = START_MS + hour * HOUR_MS
                item, kind = int(draws.random() ** 2 * NUM_OLD), draws.random()
                if time_ms + late_ms >= CUT_MS:
                    item, kind = int(later.integers(NUM_OLD)), later.random()
                add(user, item, kind, time_ms, late_ms)
        if user % 5 != 0:  # the others have no event after the cut
            for hour in later.integers(0, 40, later.integers(1, 7)).tolist():
                late_ms = int(later.integers(1, 30) * HOUR_MS) if later.random() < 0.2 else 0
                add(
                    user,
                    int(later.integers(NUM_ALL + seed_after % 5)),
                    later.random(),
                    CUT_MS + hour * HOUR_MS,
                    late_ms,
                )
    return events, received


@pytest.fixture(scope="session")
def make_timed() -> Callable[..., Path]:
    """`make_timed(root, seed, seed_after=None)` writes a `timed_log` and returns its folder."""

    def make(root: Path, seed: int, seed_after: int | None = None) -> Path:
        events, received = timed_log(seed, seed_after)
        return write_events(root, events, name="timed", received_ms=received)

    return make


@pytest.fixture(scope="session")
def tiny_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """datasets/tiny: 14 users, 24 items, 137 events. Do not change it."""
    return write_events(tmp_path_factory.mktemp("datasets"), tiny_events())


@pytest.fixture(scope="session")
def bucketed_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny events in buckets of two or three users."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tackboard.events.dataset.ROWS_PER_BUCKET", 24)
        return write_events(tmp_path_factory.mktemp("buckets"), tiny_events())


@pytest.fixture(scope="session")
def tiny_source(tiny_dataset: Path, tiny_config: Callable[..., RunConfig]) -> SequenceSource:
    """The tiny dataset in memory, with hides as negatives: what the model of `tiny_config` reads of it."""
    from tackboard.data.source import open_sequences
    from tackboard.train.config import features_for

    return open_sequences(tiny_dataset, ("click", "save"), features=features_for(tiny_config()))


@pytest.fixture(scope="session")
def tiny_sequences(tiny_source: SequenceSource) -> Sequences:
    """All sequences of `tiny_source`."""
    return tiny_source.read()


@pytest.fixture(scope="session")
def tiny_config(tiny_dataset: Path) -> Callable[..., RunConfig]:
    """`tiny_config("training.steps=3", …)`: a run of seconds on the tiny dataset, with overrides."""
    return lambda *overrides: _config(tiny_dataset, overrides)


def _config(dataset: Path, overrides: Sequence[str]) -> RunConfig:
    from tackboard.core.config import apply_overrides
    from tackboard.data.loader import DataConfig
    from tackboard.evaluation.ranking import EvaluationConfig
    from tackboard.models.backbone import BackboneConfig
    from tackboard.models.pinfm import PinFMConfig
    from tackboard.models.tables import TableConfig
    from tackboard.train.config import RunConfig, TrainingConfig
    from tackboard.train.optimizers import OptimizerConfig

    config = RunConfig(
        name="tiny",
        data=DataConfig(dataset=str(dataset), positive_actions=("click", "save"), max_length=8, tokens_per_step=48),
        model=PinFMConfig(
            tables=TableConfig(num_hashes=2, num_rows=16, dim=4),
            backbone=BackboneConfig(num_layers=1),
            width=8,
            max_history=8,
            num_time_buckets=12,
            dropout=0.1,
        ),
        optimizer=OptimizerConfig(warmup_steps=2),
        training=TrainingConfig(steps=6, checkpoint_every=2, log_every=1, num_threads=1, device="cpu"),
        evaluation=EvaluationConfig(cutoffs=(1, 5)),
    )
    return apply_overrides(config, overrides)


@pytest.fixture
def torch_settings() -> Iterator[None]:
    """Puts back what a trainer or scorer sets for the whole process."""
    with kept_torch_settings():
        yield


def kept_torch_settings() -> Any:
    """The context manager behind `torch_settings`."""
    import contextlib

    import torch

    @contextlib.contextmanager
    def keep() -> Iterator[None]:
        threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            torch.use_deterministic_algorithms(deterministic)

    return keep()


@pytest.fixture(scope="session")
def trained_run(
    tiny_config: Callable[..., RunConfig], tiny_source: SequenceSource, tmp_path_factory: pytest.TempPathFactory
) -> RunDirectory:
    """A finished run of six steps on the tiny dataset. Do not change it."""
    from tackboard.train.config import config_to_json
    from tackboard.train.trainer import Trainer

    config = tiny_config()
    run = RunDirectory.create(tmp_path_factory.mktemp("runs"), config.name, config_to_json(config))
    with kept_torch_settings():
        Trainer(config, run, tiny_source).train(quiet=True)
    return run


@pytest.fixture(scope="session")
def tiny_bundle(trained_run: RunDirectory, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The finished run as a bundle with fp32 tables. Do not change it."""
    from tackboard.checkpoint.store import find_checkpoint
    from tackboard.export.exporter import export_bundle

    bundle = tmp_path_factory.mktemp("bundles") / "tiny"
    export_bundle(find_checkpoint(trained_run.path), bundle, name="tiny", version="3", tables="fp32")
    return bundle


@pytest.fixture(scope="session")
def labelled_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small world whose requests are labelled click and save, in several buckets. Do not change it."""
    from tackboard.data.labels import Label, LabelConfig
    from tackboard.data.request_layout import label_dataset
    from tackboard.events.dataset import open_dataset
    from tackboard.events.synthetic.world_config import WorldConfig
    from tackboard.events.synthetic.world_dataset import write_world

    root = tmp_path_factory.mktemp("labelled")
    world = WorldConfig(num_users=60, num_items=40, num_topics=4, median_events=10.0, max_events=30)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tackboard.events.dataset.ROWS_PER_BUCKET", 200)
        write_world(world, root, "asked")
    labels = LabelConfig(labels=(Label("click", 3_600_000), Label("save", 86_400_000)))
    label_dataset(open_dataset(root / "asked"), labels, quiet=True)
    return root / "asked"


@pytest.fixture(scope="session")
def ranker_config(labelled_dataset: Path) -> Callable[..., RunConfig]:
    """`ranker_config("training.steps=3", …)`: a ranker's run of seconds, with the model of `tiny_config` inside."""
    return lambda *overrides: _ranker_config(labelled_dataset, overrides)


def _ranker_config(dataset: Path, overrides: Sequence[str]) -> RunConfig:
    from tackboard.core.config import apply_overrides
    from tackboard.data.request_loader import RequestConfig
    from tackboard.models.ranker import HeadConfig, RankerConfig

    tiny = _config(dataset, ())
    config = dataclasses.replace(
        tiny,
        name="ranker",
        data=RequestConfig(
            dataset=str(dataset),
            max_history=8,
            tokens_per_step=400,
            window_buckets=2,
            validation_share=0.2,
            test_share=0.2,
        ),
        model=RankerConfig.on(tiny.model, HeadConfig(labels=("click",))),
    )
    return apply_overrides(config, overrides)


@pytest.fixture(scope="session")
def make_scorer() -> Callable[..., Scorer]:
    """`make_scorer(kind="early", anchor_stride=4, request_time=True, …)`: a scorer of an untrained ranker."""
    return _make_scorer


def _make_scorer(kind: str = "early", anchor_stride: int = 1, **settings: Any) -> Scorer:
    import torch

    from tackboard.bundle.signature import Signature
    from tackboard.core.vocabulary import Vocabulary
    from tackboard.features.standard import features_for_model
    from tackboard.models.fusion import FusionConfig
    from tackboard.models.pinfm import PinFMConfig
    from tackboard.models.ranker import HeadConfig, RankerConfig
    from tackboard.models.tables import TableConfig
    from tackboard.scoring.scorer import Scorer

    vocabulary = Vocabulary.from_names(["click", "save"], ["home", "search"])
    tables = TableConfig(num_hashes=2, num_rows=64, dim=8)
    pinfm = PinFMConfig(tables=tables, width=16, max_history=10, **settings)
    fusion = FusionConfig(kind=kind, anchor_stride=anchor_stride)  # type: ignore[arg-type]
    config = dataclasses.replace(RankerConfig.on(pinfm, HeadConfig(labels=("click",)), fusion), max_history=8)
    torch.manual_seed(1)
    model = config.build(vocabulary).eval()
    for parameter in model.pinfm.decoder.parameters():  # Fresh weights are so small that a wrong context would pass.
        torch.nn.init.normal_(parameter, std=0.4)
    signature = Signature(
        format_version=1,
        name="small",
        version="1",
        id_type="int64",
        actions=vocabulary.actions,
        surfaces=vocabulary.surfaces,
        max_history=config.max_history,
        model={},
        tables={},
        lineage={},
    )
    features = features_for_model(
        config.reads, vocabulary, config.max_history, of_requests=True, anchor_stride=anchor_stride
    )
    return Scorer(signature, model, config.tables, features)
