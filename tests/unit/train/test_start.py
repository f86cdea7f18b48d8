"""What a run starts with: parameters by name, the vocabulary they belong to, and what moves how fast."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tackboard.checkpoint.store import find_checkpoint, load_checkpoint
from tackboard.checkpoint.trained import stored_parameters
from tackboard.core.errors import ConfigError, UsageError
from tackboard.core.rundir import RunDirectory
from tackboard.core.vocabulary import Vocabulary
from tackboard.export.exporter import export_bundle
from tackboard.models.changed_rows import whole_tensor
from tackboard.models.interface import build_model
from tackboard.models.table_pieces import Piece
from tackboard.models.tables import HashedTables
from tackboard.train.config import RunConfig, StartConfig, config_from_json, config_to_json
from tackboard.train.start import check_start, open_source, take_parameters
from tackboard.train.trainer import Trainer

Config = Callable[..., RunConfig]

pytestmark = pytest.mark.usefixtures("torch_settings")


def tensors_of(run: RunDirectory) -> dict[str, torch.Tensor]:
    checkpoint = load_checkpoint(find_checkpoint(run.path))
    return {name: whole_tensor(stored, run.path) for name, stored in stored_parameters(checkpoint).items()}


def train(config: RunConfig, folder: Path) -> Trainer:
    run = RunDirectory.create(folder / "runs", config.name, config_to_json(config))
    trainer = Trainer(config, run, open_source(config))
    trainer.train(quiet=True)
    return trainer


def test_a_ranker_begins_with_the_parameters_of_a_pretrained_model(
    ranker_config: Config, trained_run: RunDirectory
) -> None:
    config = ranker_config()
    source = open_source(dataclasses.replace(config, start=StartConfig(run=str(trained_run.path))))
    stored = load_checkpoint(find_checkpoint(trained_run.path))
    assert source.vocabulary == Vocabulary.from_dict(stored.state["vocabulary"]), "not the new dataset's own"
    config = dataclasses.replace(config, start=StartConfig(run=str(trained_run.path)))
    model = build_model(config.model, source.vocabulary)
    head = model.heads[0][0].weight.clone()  # type: ignore[union-attr, index]
    origin = take_parameters(model, config, source)
    parameters = model.state_dict()
    for name, tensor in tensors_of(trained_run).items():
        assert torch.equal(parameters[f"pinfm.{name}"], tensor)
    assert torch.equal(parameters["heads.0.0.weight"], head), "the head is as it was drawn"
    assert origin == {
        "run": trained_run.path.name,
        "step": 6,
        "snapshot": stored.state["lineage"]["snapshot"],
        "prefix": "pinfm.",
        "parameters": sum(tensor.numel() for tensor in tensors_of(trained_run).values()),
    }
    assert take_parameters(model, ranker_config(), source) == {}


def test_a_recipe_that_needs_a_run_is_refused_without_one(ranker_config: Config, trained_run: RunDirectory) -> None:
    with pytest.raises(UsageError, match=r"begins with a pretrained model, but no run was named\n.*\nadd --from RUN"):
        open_source(ranker_config("start.needs_run=true"))
    open_source(ranker_config("start.needs_run=true", f"start.run={trained_run.path}"))


@pytest.mark.parametrize(
    ("setting", "prefix", "said"),
    [
        ("model.width=16", "pinfm.", r"model\.width is 16, but .* was trained with 8"),
        ("model.request_time=true", "", r"model\.request_time is true, but .* was trained with false"),
        ("training.steps=6", "encoder.", r"start\.prefix = encoder\. fits no parameter"),
        ("training.steps=6", "fusion.", r"start\.prefix = fusion\. fits no parameter"),
        ("training.steps=6", "heads.", "cannot start from 0.0.weight of .*, which lacks it"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_taken(
    ranker_config: Config, trained_run: RunDirectory, setting: str, prefix: str, said: str
) -> None:
    config = ranker_config(setting, f"start.run={trained_run.path}", f"start.prefix={prefix}")
    source = open_source(config)
    model = build_model(config.model, source.vocabulary)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for call in (take_parameters, check_start):
        with pytest.raises(UsageError, match=said):
            call(model, config, source)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_another_size_of_what_is_not_compared_is_found_by_the_sizes(
    ranker_config: Config, trained_run: RunDirectory
) -> None:
    """A user's own model may have settings that nobody else knows."""
    config = ranker_config(f"start.run={trained_run.path}")
    source = open_source(config)
    model = build_model(config.model, source.vocabulary)
    model.pinfm.start = torch.nn.Parameter(torch.zeros(9))  # type: ignore[union-attr]
    with pytest.raises(UsageError, match=r"pinfm\.start \(9\) cannot start from start of .* where it has size 8"):
        take_parameters(model, config, source)


class Shards(nn.Module):
    """A table of which this process holds rows 5 to 19 and the last 10 rows, outside of the module's state."""

    def __init__(self, table: HashedTables) -> None:
        super().__init__()
        self.fresh, self.num_rows_in_all, self.dim = table.fresh, table.num_rows_in_all, table.dim
        self.dtype = table.dtype
        places = ((5, 20), (table.num_rows_in_all - 10, table.num_rows_in_all))
        self.pieces = [
            Piece(start, torch.zeros(end - start, self.dim, dtype=self.dtype), None) for start, end in places
        ]


def test_a_process_takes_the_rows_of_its_pieces(ranker_config: Config, trained_run: RunDirectory) -> None:
    config = dataclasses.replace(ranker_config(), start=StartConfig(run=str(trained_run.path)))
    source = open_source(config)
    one, many = (build_model(config.model, source.vocabulary) for _ in range(2))
    many.pinfm.item_tables = table = Shards(many.pinfm.item_tables)  # type: ignore[union-attr, arg-type]
    check_start(many, config, source)
    taken = [take_parameters(model, config, source)["parameters"] for model in (one, many)]
    whole = one.pinfm.item_tables  # type: ignore[union-attr]
    for piece in table.pieces:
        end = piece.first_row + len(piece.rows_Rd)
        assert torch.equal(piece.rows_Rd, whole.weight[piece.first_row : end])  # type: ignore[union-attr, index]
    assert table.fresh == whole.fresh and taken[0] == taken[1]  # type: ignore[union-attr]
    dense = many.state_dict()
    assert dense and all(torch.equal(dense[name], one.state_dict()[name]) for name in dense if "heads" not in name)
    table.dim += 1
    with pytest.raises(UsageError, match=r"pinfm\.item_tables\.weight .* cannot start from item_tables\.weight"):
        take_parameters(many, config, source)


def test_a_ranker_continues_a_ranker_whole(ranker_config: Config, trained_run: RunDirectory, tmp_path: Path) -> None:
    first = train(ranker_config("training.steps=2", f"start.run={trained_run.path}"), tmp_path)
    config = ranker_config(f"start.run={first.run.path}")
    source = open_source(config)
    model = build_model(config.model, source.vocabulary)
    assert take_parameters(model, config, source)["prefix"] == "", "all of its parameters, not those of its pinfm"
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in tensors_of(first.run).items())
    with pytest.raises(UsageError, match=r"pinfm\.start .* which lacks it") as caught:
        take_parameters(model, ranker_config(f"start.run={first.run.path}", "start.prefix=pinfm."), source)
    assert "--set start.prefix=" in caught.value.fix
    other = ranker_config(f"start.run={first.run.path}", 'model.head.labels=["save"]')
    with pytest.raises(UsageError, match=r'model\.head\.labels is \["save"\], but'):
        take_parameters(model, other, source)


def test_names_that_only_the_new_data_has_are_told(
    ranker_config: Config, trained_run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    open_source(ranker_config(f"start.run={trained_run.path}"))
    said = capsys.readouterr().err
    assert "does not know these actions, which count as unknown: share" in said
    assert "does not know these surfaces, which count as unknown: related" in said


@pytest.mark.parametrize("setting", ["model.tables.storage=fp32", "model.tables.storage=fp16"])
def test_a_run_and_its_bundle_start_the_same(
    tiny_config: Config, ranker_config: Config, tmp_path: Path, setting: str
) -> None:
    """Bit for bit: parameters, streaming frequencies, everything after two steps, and the rows that are stored."""
    streaming = "model.loss.streaming_frequencies=true"
    first = train(tiny_config(setting, streaming, "model.tables.num_rows=4096"), tmp_path / "first").run
    export_bundle(find_checkpoint(first.path), tmp_path / "b", name="b", version="1", for_training=True)
    settings = (setting, streaming, "model.tables.num_rows=4096", "training.steps=2", "model.extra_loss.next_token=0.5")
    of_run, of_bundle = (
        train(ranker_config(*settings, f"start.run={place}"), tmp_path / name)
        for name, place in (("run", first.path), ("bundle", tmp_path / "b"))
    )
    assert of_run.started_from == of_bundle.started_from
    for step in (0, 2):
        one, other = (
            load_checkpoint(trainer.run.checkpoints / f"step-{step:08d}").tensors for trainer in (of_run, of_bundle)
        )
        for group, tensors in one.items():
            assert tensors.keys() == other[group].keys(), "the same rows count as fresh"
            assert all(torch.equal(tensor, other[group][name]) for name, tensor in tensors.items())
    taken = load_checkpoint(of_run.run.checkpoints / "step-00000000").tensors["dense"]
    assert int(taken["pinfm.frequencies.step"]) == 6
    assert "item_tables.weight:rows" in load_checkpoint(find_checkpoint(first.path)).tensors["tables"]


@pytest.mark.parametrize("share", [0.1, 0.0])
def test_a_pretrained_part_moves_as_fast_as_its_multiplier_says(
    ranker_config: Config, trained_run: RunDirectory, tmp_path: Path, share: float
) -> None:
    start = StartConfig(run=str(trained_run.path), prefix="pinfm.")
    base = dataclasses.replace(ranker_config("training.steps=3"), start=start)
    slow = dataclasses.replace(base, optimizer=dataclasses.replace(base.optimizer, multipliers={"pinfm.": share}))
    before = {f"pinfm.{name}": tensor for name, tensor in tensors_of(trained_run).items()}

    def moved(config: RunConfig, folder: str) -> float:
        parameters = train(config, tmp_path / folder).model.state_dict()
        return sum(float((parameters[name] - tensor).abs().sum()) for name, tensor in before.items())

    whole, part = moved(base, "whole"), moved(slow, "part")
    assert whole > 0
    assert part == 0 if share == 0 else 0.03 * whole < part < 0.3 * whole


def test_a_frozen_part_drops_nothing_out(ranker_config: Config, tmp_path: Path) -> None:
    config = ranker_config("training.steps=1", "model.dropout=0.5")
    frozen = dataclasses.replace(config.optimizer, multipliers={"pinfm.": 0.0})
    trainer = train(dataclasses.replace(config, optimizer=frozen), tmp_path)
    assert not any(module.training for module in trainer.model.pinfm.modules())
    assert trainer.model.heads.training
    assert not any(parameter.requires_grad for parameter in trainer.model.pinfm.parameters())


def test_a_multiplier_that_no_parameter_has_is_refused(ranker_config: Config, tmp_path: Path) -> None:
    config = ranker_config()
    wrong = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, multipliers={"pinm.": 0.1}))
    with pytest.raises(ConfigError, match="no parameter begins with that") as caught:
        train(wrong, tmp_path)
    assert caught.value.allowed == "parameters begin with: heads, pinfm"


def test_a_resumed_run_does_not_start_again(ranker_config: Config, trained_run: RunDirectory, tmp_path: Path) -> None:
    config = dataclasses.replace(
        ranker_config("training.steps=4"), start=StartConfig(run=str(trained_run.path), prefix="pinfm.")
    )
    unbroken = train(config, tmp_path / "whole")
    whole = unbroken.model.state_dict()
    run = RunDirectory.create(tmp_path / "again", config.name, config_to_json(config))
    stopped = Trainer(config, run, open_source(config))
    stopped.on_checkpoint = lambda trainer: (_ for _ in ()).throw(KeyboardInterrupt) if trainer.step == 2 else None
    with pytest.raises(KeyboardInterrupt):
        stopped.train(quiet=True)
    # What it began with may be gone by now: the checkpoint holds the parameters and the words.
    config = dataclasses.replace(config, start=StartConfig(run="gone", prefix="pinfm."))
    source = open_source(config, load_checkpoint(run.checkpoints / "latest"))
    assert source.dataset.path.name == load_checkpoint(run.checkpoints / "latest").state["lineage"]["snapshot"]
    again = Trainer(config, RunDirectory.open(run.path), source)
    again.train(quiet=True)
    assert again.started_from == unbroken.started_from, "the checkpoint says where the parameters came from"
    assert all(torch.equal(whole[name], tensor) for name, tensor in again.model.state_dict().items())


def test_a_config_round_trips_with_its_kind_of_data(ranker_config: Config, tiny_config: Config) -> None:
    for config, kind in ((ranker_config(), "requests"), (tiny_config(), "segments")):
        written = config_to_json(config)
        assert written["data"]["kind"] == kind
        assert config_from_json(written) == config
    older = config_to_json(tiny_config())
    del older["data"]["kind"]
    assert config_from_json(older) == tiny_config(), "a config without a kind is one of segments"
    with pytest.raises(ConfigError, match=r"data.kind = 'rows'"):
        config_from_json({**older, "data": {"kind": "rows"}})


def test_data_and_model_must_speak_of_the_same_batch(ranker_config: Config, tiny_config: Config) -> None:
    with pytest.raises(ConfigError, match="DataConfig gives a SequenceBatch, but the model RankerConfig reads"):
        dataclasses.replace(ranker_config(), data=tiny_config().data)
    with pytest.raises(ConfigError, match="RequestConfig gives a RequestBatch, but the model PinFMConfig reads"):
        dataclasses.replace(ranker_config(), model=tiny_config().model)
    with pytest.raises(ConfigError, match=r"data.max_history is 4"):
        ranker_config("data.max_history=4")


def test_another_snapshot_that_judges_is_no_longer_the_same_run(ranker_config: Config, tmp_path: Path) -> None:
    config = ranker_config("training.steps=2", "training.validate_every=1")
    judges = tmp_path / "judges"
    shutil.copytree(config.data.dataset, judges, symlinks=True)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, judged_on=str(judges)))
    trainer = train(config, tmp_path)
    checkpoint = load_checkpoint(trainer.run.checkpoints / "latest")
    first = (judges / "latest").resolve()
    assert checkpoint.state["lineage"]["judged_snapshot"] == first.name
    newer = first.with_name("20990101T000000Z-newer")
    shutil.copytree(first, newer)
    (judges / "latest").unlink()
    (judges / "latest").symlink_to(newer.name)
    source = open_source(config, checkpoint)
    assert source.lineage()["judged_snapshot"] == first.name, "the one that has judged so far"
    Trainer(config, trainer.run, source).train(quiet=True)
    with pytest.raises(UsageError, match="was started on snapshot"):
        Trainer(config, trainer.run, open_source(config)).train(quiet=True)
