"""A run that goes on with another one: which events it predicts, what it takes over, and how names and tables grow."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tackboard.batch import item_rows
from tackboard.checkpoint.store import find_checkpoint, load_checkpoint
from tackboard.checkpoint.trained import read_state, stored_optimizer, stored_parameters
from tackboard.core.config import apply_overrides
from tackboard.core.errors import ConfigError, DataError, UsageError
from tackboard.core.manifest import MANIFEST, write_manifest
from tackboard.core.rundir import RunDirectory
from tackboard.core.vocabulary import Vocabulary
from tackboard.data.loader import TrainingSteps
from tackboard.data.time_split import parse_instant, shown_instant
from tackboard.events.dataset import open_dataset
from tackboard.export.exporter import export_bundle
from tackboard.features.standard import standard_features
from tackboard.models.changed_rows import whole_tensor
from tackboard.models.interface import ModelConfig, build_model
from tackboard.models.sequential import PlainTableConfig, SequentialConfig
from tackboard.models.tables import TableConfig
from tackboard.parallel.training_world import ALONE
from tackboard.train.config import RunConfig, StartConfig, config_to_json
from tackboard.train.continuation import check_alone, with_instant
from tackboard.train.resume import find_unfinished
from tackboard.train.start import check_start, open_source, take_parameters
from tackboard.train.trainer import Trainer

Config = Callable[..., RunConfig]
pytestmark = pytest.mark.usefixtures("torch_settings")

START_MS = 1_700_006_400_000
DAY_MS = 86_400_000
DAYS = 4


def day(number: int) -> str:
    return shown_instant(START_MS + number * DAY_MS)


def events_until(num_days: int) -> list[tuple[Any, ...]]:
    """Events of 16 users. From the third day on, there are a new action, a new surface, new items and new users."""
    draws = np.random.default_rng(5)
    events = []
    for number in range(DAYS):
        for user in range(12 + number):
            for hour in sorted(draws.choice(24, size=4, replace=False).tolist()):
                item, draw = int(draws.integers(0, 20 + 8 * (number >= 2))), draws.random()
                action = "share" if draw < 0.3 and number >= 2 else "save" if draw < 0.5 else "click"
                surface = "app" if draws.random() < 0.4 and number >= 2 else "home"
                time = START_MS + number * DAY_MS + hour * 3_600_000 + user
                if number < num_days:
                    events.append((user, item, action, surface, time))
    return events


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory, make_dataset: Callable[..., Path]) -> Path:
    """The log of all days. Do not change it."""
    return make_dataset(tmp_path_factory.mktemp("log"), events_until(DAYS))


@pytest.fixture(scope="module")
def short_log(tmp_path_factory: pytest.TempPathFactory, make_dataset: Callable[..., Path]) -> Path:
    """The log of the first two days, which knows fewer names. Do not change it."""
    return make_dataset(tmp_path_factory.mktemp("short"), events_until(2))


@pytest.fixture
def on(tiny_config: Config) -> Callable[..., RunConfig]:
    """`on(dataset, cut, …)`: a run that reads the log until a day, or leaves the last events out."""

    def config(dataset: Path, cut: int | None, *overrides: str) -> RunConfig:
        split = [] if cut is None else ["data.split=time", f"data.cut={day(cut)}"]
        more = ["data.positive_actions=[]", "training.steps=2", "training.checkpoint_every=1", *split, *overrides]
        return apply_overrides(tiny_config(), [f"data.dataset={dataset}", *more])

    return config


def train(config: RunConfig, folder: Path) -> Trainer:
    config = with_instant(config)
    run = RunDirectory.create(folder / "runs", config.name, config_to_json(config))
    trainer = Trainer(config, run, open_source(config))
    trainer.train(quiet=True)
    return trainer


def continued(config: RunConfig, run: RunDirectory | Path) -> RunConfig:
    place = run.path if isinstance(run, RunDirectory) else run
    return dataclasses.replace(config, start=StartConfig(run=str(place), is_continued=True))


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    """The parameters and Adagrad sums of a checkpoint, or of the newest checkpoint of a run."""
    checkpoint = load_checkpoint(find_checkpoint(path))
    optimizer = {name: one for name, one in stored_optimizer(checkpoint).items() if name.startswith("adagrad.")}
    return {name: whole_tensor(one, path) for name, one in (stored_parameters(checkpoint) | optimizer).items()}


def begun(config: RunConfig) -> tuple[Trainer, dict[str, torch.Tensor]]:
    """The first state of a run that goes on with another one: parameters, buffers and sums, before any step."""
    config = with_instant(config)
    trainer = Trainer(config, RunDirectory(Path("/nowhere")), open_source(config))
    sums = {name: table.sums for name, table in trainer.optimizers.tables.items()}
    take_parameters(trainer.model, trainer.config, trainer.source, sums)
    return trainer, trainer.model.state_dict() | {f"adagrad.{name}": values for name, values in sums.items()}


def predicted(config: RunConfig) -> Counter[tuple[int, int]]:
    """(user, time) of every event that an epoch predicts."""
    source = config.data.open(standard_features)  # Unlike the model's own features, these hold the times of events.
    steps = config.data.steps(source, config.model.tables, config.seed)
    assert isinstance(steps, TrainingSteps)
    found: Counter[tuple[int, int]] = Counter()
    for step in range(steps.plan.steps_per_epoch):
        batch = steps[step]
        assert batch.is_positive is not None
        users = torch.repeat_interleave(batch.users, batch.lengths())[batch.is_positive]
        found.update(zip(users.tolist(), batch.times_ms[batch.is_positive].tolist(), strict=True))
    return found


def events_between(dataset: Path, first: int, end: int) -> Counter[tuple[int, int]]:
    table = open_dataset(dataset).read_events(["user_id", "time_ms"])
    rows = zip(table["user_id"].to_pylist(), table["time_ms"].to_pylist(), strict=True)
    return Counter(row for row in rows if START_MS + first * DAY_MS <= row[1] < START_MS + end * DAY_MS)


@pytest.mark.parametrize("storage", ["fp32", "fp16"])
def test_the_start_has_every_bit_of_the_run(on: Config, short_log: Path, tmp_path: Path, storage: str) -> None:
    settings = (f"model.tables.storage={storage}", "model.tables.num_rows=4096")
    first = train(on(short_log, 1, *settings), tmp_path)
    again = continued(
        on(short_log, 1, *settings, "data.predict_from=2001-01-01", "seed=7", "training.steps=1"), first.run
    )
    trainer = train(again, tmp_path)
    before = tensors_of(first.run.path)
    now = tensors_of(trainer.run.checkpoints / "step-00000000")
    assert before.keys() == now.keys() and "adagrad.item_tables" in now
    assert all(torch.equal(now[name], tensor) for name, tensor in before.items())
    assert int((before["adagrad.item_tables"] > 0).sum()) > 10
    state = read_state(find_checkpoint(trainer.run.path))
    assert state["started_from"] == {
        "run": first.run.path.name,
        "step": 2,
        "snapshot": read_state(find_checkpoint(first.run.path))["lineage"]["snapshot"],
        "prefix": "",
        "parameters": sum(tensor.numel() for name, tensor in before.items() if not name.startswith("adagrad.")),
        "is_continued": True,
    }
    assert "item_tables.weight:rows" in load_checkpoint(find_checkpoint(trainer.run.path)).tensors["tables"]


def test_names_are_appended_and_their_rows_are_fresh(
    on: Config, short_log: Path, log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = train(on(short_log, None), tmp_path)
    old = first.source.vocabulary
    assert old == Vocabulary(actions=("click", "save"), surfaces=("home",))
    config = continued(on(log, None, "seed=3"), first.run)
    trainer, now = begun(config)
    assert trainer.source.vocabulary == Vocabulary(actions=("click", "save", "share"), surfaces=("home", "app"))
    said = capsys.readouterr().err
    assert "does not know these actions, which are added: share" in said
    assert "does not know these surfaces, which are added: app" in said
    before = tensors_of(first.run.path)
    for name, tensor in before.items():
        assert torch.equal(now[name][: len(tensor)] if tensor.dim() else now[name], tensor), name
    grown = {name for name, tensor in before.items() if now[name].shape != tensor.shape}
    assert grown == {"actions.weight", "surfaces.weight"}
    torch.manual_seed(3)
    fresh = build_model(trainer.config.model, trainer.source.vocabulary).state_dict()
    for name in grown:
        assert torch.equal(now[name][-1], fresh[name][-1]), "a function of the seed and the names"
    # Names that only later events have are not read before their time.
    assert open_source(with_instant(continued(on(log, 2), first.run))).vocabulary == old
    assert open_source(with_instant(continued(on(log, 3), first.run))).vocabulary == trainer.source.vocabulary


@pytest.mark.parametrize(
    ("before", "after", "settings"),
    [
        (16, 16, ()),
        (16, 64, ()),
        (16, 48, ()),
        (16, 64, ("model.tables.storage=fp16",)),
        (16, 32, ("model.loss.streaming_frequencies=true",)),
        (32, 40, ("model.tables.method=modulo", "model.tables.num_hashes=1", "model.loss.streaming_frequencies=true")),
        (32, 40, ("model.tables.method=modulo", "model.tables.num_hashes=1", "model.tables.storage=bf16")),
    ],
    ids=str,
)
def test_every_item_keeps_its_vector_in_larger_tables(
    on: Config, short_log: Path, log: Path, tmp_path: Path, before: int, after: int, settings: tuple[str, ...]
) -> None:
    first = train(on(short_log, None, *settings, f"model.tables.num_rows={before}"), tmp_path)
    config = continued(on(log, None, *settings, f"model.tables.num_rows={after}", "seed=8"), first.run)
    trainer, now = begun(config)
    is_plain = "model.tables.method=modulo" in settings
    ids = np.arange(before) if is_plain else np.random.default_rng(1).integers(-(2**62), 2**62, 3000)
    old_rows, new_rows = (item_rows(ids, each.config.model.tables) for each in (first, trainer))
    torch.testing.assert_close(trainer.model.item_tables(new_rows), first.model.item_tables(old_rows), rtol=0, atol=0)
    sums = (first.optimizers.tables["item_tables"].sums, now["adagrad.item_tables"])
    for hash_, (old_M, new_M) in enumerate(zip(old_rows.T, new_rows.T, strict=True)):
        assert torch.equal(sums[0][old_M + hash_ * before], sums[1][new_M + hash_ * after])
    assert sums[0].any()
    if trainer.model.frequencies is not None:
        assert int(trainer.model.frequencies.step) == 2
        old_log, new_log = (
            first.model.frequencies.log_expected(old_rows),
            trainer.model.frequencies.log_expected(new_rows),
        )
        assert torch.equal(old_log, new_log)


@pytest.mark.parametrize(("method", "is_whole"), [("mix", True), ("modulo", False)])
def test_copied_rows_are_stored_and_fresh_rows_are_not(
    on: Config, short_log: Path, log: Path, tmp_path: Path, method: str, is_whole: bool
) -> None:
    settings = (f"model.tables.method={method}", "model.tables.num_hashes=1")
    first = train(on(short_log, None, *settings, "model.tables.num_rows=512"), tmp_path)
    grown = train(continued(on(log, None, *settings, "model.tables.num_rows=1024"), first.run), tmp_path)
    for trainer, expected in ((first, False), (grown, is_whole)):
        held = load_checkpoint(find_checkpoint(trainer.run.path))
        assert ("item_tables.weight" in held.tensors["tables"]) == expected
        stored = whole_tensor(stored_parameters(held)["item_tables.weight"], trainer.run.path)
        assert torch.equal(stored, trainer.model.item_tables.weight)


def test_a_plain_table_grows_by_fresh_rows(on: Config, short_log: Path, log: Path, tmp_path: Path) -> None:
    """SASRec's items are one dense matrix: it grows with the catalogue, and the old items keep their rows."""
    model = SequentialConfig(tables=PlainTableConfig(num_rows=24), width=8, max_history=8)
    larger = dataclasses.replace(model, tables=dataclasses.replace(model.tables, num_rows=30))
    settings = ("data.uniform_negatives=64",)
    first = train(dataclasses.replace(on(short_log, None, *settings), model=model), tmp_path)
    trainer, now = begun(continued(dataclasses.replace(on(log, None, *settings), model=larger), first.run))
    assert now["items.weight"].shape == (30, 8)
    assert torch.equal(now["items.weight"][:24], first.model.items.weight)
    torch.manual_seed(0)
    assert torch.equal(now["items.weight"][24:], build_model(larger, trainer.source.vocabulary).items.weight[24:])  # type: ignore[union-attr, index]


def test_days_follow_each_other_without_gap_or_overlap(on: Config, log: Path, tmp_path: Path) -> None:
    """Three runs on one log: each predicts exactly the events between its cut and the cut of the run before."""
    run, total = train(on(log, 1), tmp_path).run, predicted(on(log, 1))
    assert total == events_between(log, 0, 1)
    for until in (2, 3):
        config = with_instant(continued(on(log, until), run))
        assert config.data.predict_from == day(until - 1)
        assert predicted(config) == events_between(log, until - 1, until)
        total += predicted(config)
        trained = train(config, tmp_path)
        assert json.loads((trained.run.path / "config.json").read_text())["data"]["predict_from"] == day(until - 1)
        assert trained.started_from["run"] == run.path.name
        run = trained.run
    assert total == events_between(log, 0, 3)
    assert read_state(find_checkpoint(run.path))["vocabulary"]["actions"] == ["click", "save", "share"]


def test_a_newer_snapshot_follows_the_last_event_of_the_older_one(
    on: Config, short_log: Path, log: Path, tmp_path: Path
) -> None:
    first = train(on(short_log, None), tmp_path)
    config = with_instant(continued(on(log, 3), first.run))
    last_ms = max(time for *_, time in events_until(2))
    assert parse_instant(config.data.predict_from, "") == last_ms + 1
    assert predicted(config) == events_between(log, 2, 3)
    everything = with_instant(continued(on(log, 3, "data.predict_from=2001-01-01"), first.run))
    assert predicted(everything) == events_between(log, 0, 3)
    # An older version did not record the end of its data.
    older = tmp_path / "older"
    shutil.copytree(find_checkpoint(first.run.path), older)
    state = json.loads((older / "state.json").read_text())
    del state["lineage"]["end_ms"]
    seal(older, state)
    assert with_instant(continued(on(log, 3), older)) == dataclasses.replace(
        config, start=StartConfig(run=str(older), is_continued=True)
    )
    state["lineage"]["snapshot"] = "20200101T000000Z-gone"
    seal(older, state)
    with pytest.raises(
        UsageError, match=r"does not say when its data ended, and its snapshot .*-gone is gone"
    ) as caught:
        with_instant(continued(on(log, 3), older))
    assert caught.value.fix == "name the instant from which events are new: --set data.predict_from=INSTANT"
    assert with_instant(continued(on(log, 3, f"data.predict_from={day(2)}"), older)).data.predict_from == day(2)


def seal(folder: Path, state: dict[str, Any]) -> None:
    (folder / "state.json").write_text(json.dumps(state))
    (folder / MANIFEST).unlink()
    write_manifest(folder, "checkpoint", {"step": state["step"]})


def test_a_stopped_run_ends_in_the_same_bits_without_the_run_before(
    on: Config, log: Path, tmp_path: Path, make_dataset: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """`--resume auto` finds it though the run before and its snapshot are gone. A finished run ends the search."""
    old = make_dataset(tmp_path / "old", events_until(2))
    first = train(on(old, None), tmp_path / "first").run
    asked = continued(on(log, 3, "model.tables.num_rows=32"), first)
    unbroken = train(asked, tmp_path / "whole")
    config = with_instant(asked)
    run = RunDirectory.create(tmp_path / "again", config.name, config_to_json(config))
    stopped = Trainer(config, run, open_source(config))
    stopped.on_checkpoint = lambda trainer: (_ for _ in ()).throw(KeyboardInterrupt) if trainer.step == 1 else None
    with pytest.raises(KeyboardInterrupt):
        stopped.train(quiet=True)
    capsys.readouterr()
    open_source(with_instant(continued(on(log, 3, "data.predict_from=2001-01-01"), run)))
    assert "is not finished (failed: KeyboardInterrupt" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "first")
    shutil.rmtree(tmp_path / "old")
    found, sentence = find_unfinished(tmp_path / "again", asked)
    assert found is not None, sentence
    config = with_instant(asked, found.config)
    again = Trainer(config, found, open_source(config, load_checkpoint(run.checkpoints / "latest")))
    again.train(quiet=True)
    assert again.started_from == unbroken.started_from
    one, other = (tensors_of(trainer.run.path) for trainer in (unbroken, again))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert find_unfinished(tmp_path / "again", asked)[0] is None
    stale = RunDirectory(run.path.with_name(f"1999-01-01_{config.name}_a"))
    stale.write(config_to_json(config))
    assert find_unfinished(tmp_path / "again", asked)[0] is None, "a later night is finished"


@pytest.mark.parametrize(
    ("settings", "said", "fix"),
    [
        (("model.tables.num_rows=8",), "tables.num_rows is 8, but RUN was trained with 16", "num_rows=16"),
        (("model.tables.num_rows=40",), "tables.num_rows is 40, but RUN was trained with 16", "num_rows=16"),
        (("model.tables.num_rows=32", "model.tables.seed=5"), "tables.seed is 5, but RUN", "--set model.tables.seed=0"),
        (("model.tables.dim=8",), "tables.dim is 8, but RUN was trained with 4", "--set model.tables.dim=4"),
        (("model.width=16",), "model.width is 16, but RUN was trained with 8", "--set model.width=8"),
        (("model.num_time_buckets=11",), "num_time_buckets is 11, but RUN", "num_time_buckets=12"),
    ],
    ids=str,
)
def test_what_may_not_grow_is_named(
    on: Config, log: Path, trained_run: RunDirectory, settings: tuple[str, ...], said: str, fix: str
) -> None:
    config = continued(on(log, 3, *settings, "data.predict_from=2001-01-01"), trained_run)
    source = open_source(config)
    model = build_model(config.model, source.vocabulary)
    for call in (take_parameters, check_start):
        with pytest.raises(UsageError) as caught:
            call(model, config, source)
        assert said in caught.value.got.replace(str(trained_run.path), "RUN")
        assert fix in caught.value.fix
    if "num_rows=40" in settings[0]:
        assert caught.value.allowed == "allowed: 16, or a multiple of it, so that every item keeps its rows"


def test_nothing_new_names_both_instants(on: Config, log: Path, short_log: Path, tmp_path: Path) -> None:
    first = train(on(short_log, None), tmp_path).run
    with pytest.raises(
        DataError, match=r"has nothing new for .*: training would predict events from (\S+) on"
    ) as caught:
        open_source(with_instant(continued(on(short_log, None), first)))
    assert caught.value.got.count("2023-11-16") == 2
    # There are later events, but none that is predicted.
    config = with_instant(continued(on(log, 3, f"data.predict_from={day(3)[:10]}T00:00:00"), first))
    with pytest.raises(DataError, match="has nothing new"):
        open_source(config)
    config = with_instant(continued(on(short_log, None, "data.predict_from=2023-11-16T23:00:00"), first))
    with pytest.raises(DataError, match="no event for training") as caught:
        config.data.steps(open_source(config), config.model.tables, 0)
    assert "predict_from 2023-11-16T23:00:00, end of the log 2023-11-16T2" in caught.value.allowed


def test_what_cannot_go_on_is_refused(
    on: Config,
    ranker_config: Config,
    log: Path,
    trained_run: RunDirectory,
    tmp_path: Path,
    make_dataset: Callable[..., Path],
) -> None:
    with pytest.raises(UsageError, match="cannot go on with .*: data is a RequestConfig") as caught:
        with_instant(continued(ranker_config(), trained_run))
    assert caught.value.fix.endswith(f"--from {trained_run.path}")
    bundle = tmp_path / "bundle"
    export_bundle(find_checkpoint(trained_run.path), bundle, name="b", version="1", for_training=True)
    with pytest.raises(UsageError, match="is a bundle, which lacks the states of the optimisers"):
        with_instant(continued(on(log, 3), bundle))
    with pytest.raises(UsageError, match="is a bundle"):
        open_source(continued(on(log, 3, "data.predict_from=2001-01-01"), bundle))
    for wrong in ({"is_continued": True}, {"is_continued": True, "run": "r", "prefix": "pinfm."}):
        with pytest.raises(ConfigError, match=r"start\.is_continued is true, but"):
            StartConfig(**wrong)  # type: ignore[arg-type]
    config = continued(on(log, 3), trained_run)
    check_alone(config, ALONE)
    with pytest.raises(UsageError, match="3 processes cannot go on with"):
        check_alone(config, dataclasses.replace(ALONE, size=3))
    texts = [(f"u{user}", f"i{item}", *rest) for user, item, *rest in events_until(3)]
    other = make_dataset(tmp_path, texts, name="texts")
    config = with_instant(continued(on(other, None), trained_run))
    source = open_source(config)
    with pytest.raises(UsageError, match="has item ids of type string, but"):
        check_start(build_model(config.model, source.vocabulary), config, source)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OddConfig(ModelConfig):
    """A model with a parameter that grows in a way that nobody can know."""

    def build(self, vocabulary: Vocabulary) -> nn.Module:
        return Odd(vocabulary)


class Odd(nn.Module):
    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__()
        self.pairs = nn.Parameter(torch.zeros(vocabulary.num_actions * vocabulary.num_surfaces, 2))

    def loss(self, batch: object) -> None: ...

    def scores(self, batch: object) -> None: ...


def test_a_tensor_that_grows_in_another_way_is_refused(on: Config, log: Path, trained_run: RunDirectory) -> None:
    config = continued(on(log, 3, "data.predict_from=2001-01-01"), trained_run)
    config = dataclasses.replace(
        config, model=OddConfig(tables=TableConfig(num_hashes=2, num_rows=16, dim=4), max_history=8)
    )
    source = open_source(config)
    with pytest.raises(UsageError, match="pairs would have size .* × 2, but has size 12 × 2"):
        check_start(build_model(config.model, source.vocabulary), config, source)


FEATURES = """
from tackboard.features.language import Events, FeatureSet, sequence
events = Events()
recent = events.newest(8)
features = FeatureSet("own", history=sequence(
    item=recent.collect(events.item), action=recent.collect(events.action.index_in(["save", "hide", "click"])),
    surface=recent.collect(events.surface.index_in(["home", "search"])),
    gap=recent.collect(events.time).differences().bucketize([1000, 2000]),
))
"""


def test_features_may_know_more_names_but_not_be_computed_otherwise(
    on: Config, log: Path, trained_run: RunDirectory, tmp_path: Path
) -> None:
    config = continued(on(log, 3, "data.predict_from=2001-01-01"), trained_run)
    source = open_source(config)
    model = build_model(config.model, source.vocabulary)
    check_start(model, config, source)
    features = load_checkpoint(find_checkpoint(trained_run.path)).path / "features.json"
    assert json.loads(features.read_text())["hash"] != source.features.hash, "the names are part of the features"
    (tmp_path / "features.py").write_text(FEATURES)
    config = apply_overrides(config, [f"data.features={tmp_path / 'features.py'}"])
    with pytest.raises(UsageError, match=r"feature history\.action is computed in another way"):
        check_start(model, config, open_source(config))
