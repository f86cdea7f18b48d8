"""What two models must have in common before one takes parameters of the other, and how a difference is told."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tackboard.bundle.signature import KIND, read_bundle, write_signature
from tackboard.checkpoint.store import find_checkpoint
from tackboard.core.config import to_dict
from tackboard.core.errors import CorruptFileError, DataError, UsageError
from tackboard.core.manifest import MANIFEST, write_manifest
from tackboard.core.rundir import RunDirectory
from tackboard.core.vocabulary import Vocabulary
from tackboard.export.exporter import export_bundle
from tackboard.models.changed_rows import whole_tensor
from tackboard.train.config import RunConfig
from tackboard.train.start import open_source
from tackboard.train.start_point import StartPoint, check_same_meaning

Config = Callable[..., RunConfig]
GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.fixture
def training_bundle(trained_run: RunDirectory, tmp_path: Path) -> Path:
    export_bundle(find_checkpoint(trained_run.path), tmp_path / "bundle", name="b", version="1", for_training=True)
    return tmp_path / "bundle"


def test_a_run_a_checkpoint_and_a_bundle_say_the_same(trained_run: RunDirectory, training_bundle: Path) -> None:
    latest = trained_run.path.parent / "latest"
    places = (trained_run.path, find_checkpoint(trained_run.path), latest, training_bundle)
    first, *others = (StartPoint.find(str(place)) for place in places)
    for other in others:
        for name in ("settings", "vocabulary", "id_type", "fresh_rows", "lineage"):
            assert getattr(other, name) == getattr(first, name)
        assert first.features is not None and other.features is not None
        assert other.features.hash == first.features.hash
        for verify in (True, False):
            one, two = first.parameters(verify=verify), other.parameters(verify=verify)
            assert one.keys() == two.keys()
            assert all(torch.equal(whole_tensor(one[n], first.path), whole_tensor(two[n], first.path)) for n in one)
        assert other.fresh("item_tables.weight") == first.fresh("item_tables.weight")
    assert first.fresh("another") is None


@pytest.mark.parametrize(
    ("setting", "said", "fix"),
    [
        ("model.tables.num_rows=64", "tables.num_rows is 64, but RUN was trained with 16", "tables.num_rows=16"),
        ("model.tables.num_hashes=3", "tables.num_hashes is 3, but RUN was trained with 2", "tables.num_hashes=2"),
        ("model.tables.seed=5", "tables.seed is 5, but RUN was trained with 0", "--set model.tables.seed=0"),
        ("model.tables.dim=8", "tables.dim is 8, but RUN was trained with 4", "--set model.tables.dim=4"),
        ("model.tables.storage=fp16", "tables.storage is fp16, but RUN was trained with fp32", "storage=fp32"),
        ("model.backbone.num_heads=4", "backbone.num_heads is 4, but RUN was trained with 2", "num_heads=2"),
        ("model.backbone.positions=rotary", "positions is rotary, but RUN was trained with learned", "=learned"),
        ("model.num_time_buckets=11", "num_time_buckets is 11, but RUN was trained with 12", "num_time_buckets=12"),
        ("model.num_positions=20", "num_positions is 20, but RUN was trained with 9", "--set model.num_positions=9"),
        ("model.max_history=7", "num_positions is 8, but RUN was trained with 9", "--set model.num_positions=9"),
        ("model.loss.streaming_frequencies=true", "streaming_frequencies is true, but RUN", "frequencies=false"),
    ],
)
def test_a_setting_that_changes_the_meaning_is_named_with_what_to_type(
    tiny_config: Config, trained_run: RunDirectory, setting: str, said: str, fix: str
) -> None:
    overrides = (setting, "data.max_length=7") if "max_history" in setting else (setting,)
    config, point = tiny_config(*overrides), StartPoint.find(str(trained_run.path))
    with pytest.raises(UsageError) as caught:
        check_same_meaning(config, open_source(config), point, "")
    assert said in caught.value.got.replace(str(trained_run.path), "RUN")
    assert fix in caught.value.fix
    if "max_history" not in setting:
        repaired = tiny_config(setting, caught.value.fix.removeprefix("--set "))
        check_same_meaning(repaired, open_source(repaired), point, "")


def test_a_longer_history_is_refused_and_a_shorter_one_keeps_the_positions(
    ranker_config: Config, trained_run: RunDirectory
) -> None:
    point = StartPoint.find(str(trained_run.path))
    longer = ranker_config("model.max_history=9", "data.max_history=9", f"start.run={trained_run.path}")
    with pytest.raises(UsageError, match="max_history is 9, but .* was trained with 8") as caught:
        check_same_meaning(longer, open_source(longer), point, "pinfm.")
    assert caught.value.fix == "--set model.max_history=8 --set data.max_history=8"
    shorter = ranker_config(
        "model.max_history=5", "data.max_history=5", "model.num_positions=9", f"start.run={trained_run.path}"
    )
    check_same_meaning(shorter, open_source(shorter), point, "pinfm.")


def test_what_only_training_reads_may_differ(ranker_config: Config, trained_run: RunDirectory) -> None:
    settings = ("model.dropout=0.3", "model.loss.initial_temperature=0.2", "model.tables.init_std=0.5")
    config = ranker_config(*settings, "model.loss.mask_same_user=false", f"start.run={trained_run.path}")
    check_same_meaning(config, open_source(config), StartPoint.find(str(trained_run.path)), "pinfm.")


@pytest.mark.parametrize("kind", ["vectors", "ids"])
def test_the_order_of_a_rankers_features_is_compared(
    ranker_config: Config, trained_run: RunDirectory, kind: str
) -> None:
    """The features of a candidate lie end to end, so in another order each weight would meet another feature."""
    before = ranker_config(f'model.features.{kind}={{"one": 3, "two": 3}}').model
    point = dataclasses.replace(StartPoint.find(str(trained_run.path)), settings=to_dict(before))
    source = open_source(ranker_config())
    point = dataclasses.replace(
        point, features=source.features, vocabulary=source.vocabulary, id_type=source.dataset.item_type
    )
    check_same_meaning(dataclasses.replace(ranker_config(), model=before), source, point, "")
    after = ranker_config(f'model.features.{kind}={{"two": 3, "one": 3}}')
    with pytest.raises(UsageError, match=f"model.features.{kind} is .*two.*was trained with .*one"):
        check_same_meaning(after, source, point, "")


def test_a_ranker_may_go_on_with_anchors_and_without_dcat(ranker_config: Config, trained_run: RunDirectory) -> None:
    early = ("model.fusion.kind=early", "model.num_positions=10")
    before, after = ranker_config(*early), ranker_config(*early, "model.fusion.anchor_stride=4")
    source = open_source(before)
    point = dataclasses.replace(
        StartPoint.find(str(trained_run.path)),
        settings=to_dict(before.model),
        features=source.features,
        vocabulary=source.vocabulary,
        id_type=source.dataset.item_type,
    )
    check_same_meaning(after, open_source(after), point, "")
    slow = ranker_config(*early, "model.fusion.dcat=false")
    check_same_meaning(slow, open_source(slow), point, "")
    fixed = ranker_config(*early, "model.fusion.fixed_length=4")
    with pytest.raises(UsageError, match="fixed_length is 4"):
        check_same_meaning(fixed, open_source(fixed), point, "")
    other = ranker_config("model.fusion.kind=early", "model.num_positions=11", "model.fusion.learnable_token=true")
    with pytest.raises(UsageError, match="learnable_token is true"):
        check_same_meaning(other, open_source(other), point, "")


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


def test_another_feature_names_and_ids_are_named(
    tiny_config: Config, trained_run: RunDirectory, tmp_path: Path
) -> None:
    point = StartPoint.find(str(trained_run.path))
    (tmp_path / "features.py").write_text(FEATURES)
    config = tiny_config(f"data.features={tmp_path / 'features.py'}")
    with pytest.raises(
        UsageError, match=r"feature history\.action is computed in another way \(\w{12}\) than"
    ) as caught:
        check_same_meaning(config, open_source(config), point, "")
    assert f"--set data.features={trained_run.path}" in caught.value.fix
    config = tiny_config(f"data.features={trained_run.path}")
    source = open_source(config)
    check_same_meaning(config, source, point, "")
    other = dataclasses.replace(point, vocabulary=Vocabulary(actions=("click",), surfaces=("home",)))
    with pytest.raises(UsageError, match=r"names click, hide, save / home, search, but .* trained with click / home"):
        check_same_meaning(config, source, other, "")
    with pytest.raises(UsageError, match="has item ids of type int64, but .* was trained with string"):
        check_same_meaning(config, source, dataclasses.replace(point, id_type="string"), "")


def test_of_a_users_own_model_tables_and_features_are_compared(tiny_config: Config, trained_run: RunDirectory) -> None:
    config, point = tiny_config(), StartPoint.find(str(trained_run.path))

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class OwnConfig:
        tables: object = config.model.tables
        max_history: int = 8
        width: int = 99

    own, source = SimpleNamespace(model=OwnConfig(), data=config.data, start=config.start), open_source(config)
    check_same_meaning(own, source, point, "encoder.")  # type: ignore[arg-type]
    own.model = OwnConfig(tables=dataclasses.replace(config.model.tables, seed=4))
    with pytest.raises(UsageError, match="tables.seed is 4"):
        check_same_meaning(own, source, point, "encoder.")  # type: ignore[arg-type]


def test_a_bundle_for_serving_and_other_folders_are_refused(
    tiny_bundle: Path, tiny_dataset: Path, tmp_path: Path
) -> None:
    for bundle in (tiny_bundle, GOLDEN / "bundle-v1", GOLDEN / "bundle-v2"):
        with pytest.raises(UsageError, match="is a bundle made for serving") as caught:
            StartPoint.find(str(bundle))
        assert caught.value.fix == "tackboard export RUN --out BUNDLE --for-training"
    with pytest.raises(DataError, match="is a dataset"):
        StartPoint.find(str(tiny_dataset))
    with pytest.raises(DataError, match="does not exist"):
        StartPoint.find(str(tmp_path / "none"))


def test_every_older_checkpoint_can_be_started_from() -> None:
    older = ("checkpoint-v1", "checkpoint-v1-flat-pinfm", "checkpoint-v1-features", "checkpoint-v2", "checkpoint-v3")
    for name in older:
        point = StartPoint.find(str(GOLDEN / name))
        assert point.features is not None
        assert point.settings["tables"]["num_rows"] == point.num_rows > 0
        # A dry run reads without verifying; version 3 has parts of several processes.
        assert point.parameters(verify=True).keys() == point.parameters(verify=False).keys() != set()
        assert "adagrad.item_tables" in point.parameters(verify=True, with_sums=True)


def test_a_damaged_or_malformed_bundle_is_named(training_bundle: Path, tmp_path: Path) -> None:
    signature = read_bundle(training_bundle)
    broken = tmp_path / "broken"
    shutil.copytree(training_bundle, broken)
    data = bytearray((broken / "dense.safetensors").read_bytes())
    data[-3] ^= 1
    (broken / "dense.safetensors").write_bytes(data)
    point = StartPoint.find(str(broken))
    with pytest.raises(CorruptFileError, match=r"dense\.safetensors is corrupt"):
        point.parameters(verify=True)
    for changes, said in (
        ({"lineage": {}}, "KeyError: 'run'"),
        ({"model": {"config_class": "tackboard.models.pinfm:PinFMConfig", "config": {"width": 0}}}, "width = 0"),
    ):
        write_signature(broken, dataclasses.replace(signature, **changes))
        (broken / MANIFEST).unlink()
        write_manifest(broken, KIND)
        with pytest.raises(CorruptFileError, match=rf"signature\.json is malformed: .*{said}"):
            StartPoint.find(str(broken))
