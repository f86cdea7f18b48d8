"""Half-precision tables through the whole path: training, resuming, export and scoring."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tackboard.checkpoint.store import find_checkpoint, load_checkpoint
from tackboard.core.rundir import RunDirectory
from tackboard.data.source import SequenceSource
from tackboard.evaluation.judged_events import JudgedEvents
from tackboard.evaluation.ranking import rank_model
from tackboard.export.exporter import export_bundle
from tackboard.models.tables import STORAGES
from tackboard.scoring.scorer import Scorer
from tackboard.train.config import RunConfig, config_to_json
from tackboard.train.dry_run import estimate_run
from tackboard.train.trainer import Trainer

Config = Callable[..., RunConfig]
TABLE = "item_tables.weight"

pytestmark = pytest.mark.usefixtures("torch_settings")


@pytest.fixture
def make_trainer(tmp_path: Path, tiny_config: Config, tiny_source: SequenceSource) -> Callable[..., Trainer]:
    """`make_trainer("fp16", run=None)`: a trainer with tables in this storage, on a new run or on an old one."""

    def make(storage: str, run: RunDirectory | None = None) -> Trainer:
        config = tiny_config(f"model.tables.storage={storage}")
        run = run or RunDirectory.create(tmp_path / "runs", config.name, config_to_json(config))
        return Trainer(config, RunDirectory.open(run.path), tiny_source)

    return make


def stored(run: RunDirectory) -> dict[str, torch.Tensor]:
    groups = load_checkpoint(find_checkpoint(run.path)).tensors
    return {f"{group}/{name}": tensor for group, named in groups.items() for name, tensor in named.items()}


@pytest.mark.parametrize(("storage", "tables"), [("fp16", "fp16"), ("bf16", "fp32")])
def test_half_tables_are_exported_evaluated_and_scored(
    storage: str, tables: str, make_trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    trainer = make_trainer(storage)
    trainer.train(quiet=True)
    export_bundle(find_checkpoint(trainer.run.path), tmp_path / "bundle", name="half", version="1", tables=tables)
    table = load_file(tmp_path / "bundle" / "tables" / f"{TABLE}.safetensors")[TABLE]
    assert table.dtype == STORAGES[tables]
    assert torch.allclose(table.float(), trainer.model.item_tables.weight.float(), rtol=0, atol=2.0**-25)
    scorer = Scorer.load(tmp_path / "bundle", num_threads=1)
    assert scorer.model.item_tables.weight.dtype == STORAGES[tables]
    sequences, config = trainer.source.read(), trainer.config.model
    judged = JudgedEvents(np.arange(5), sequences.train_ends[:5])
    trained, served = (
        np.asarray(rank_model(model, sequences, config.tables, config.max_history)(judged))
        for model in (trainer.model, scorer.model)
    )
    assert trained.dtype == np.float32
    assert served == pytest.approx(trained, abs=1e-5)
    scores = scorer.score(scorer.reader.read({"item": [3, 17], "time_ms": [0, 1000]}, [5, 3, 5]))
    assert np.isfinite(scores).all()
    assert len(np.unique(scores.round(4))) == 2


def test_the_estimate_before_a_run_knows_the_storage(
    make_trainer: Callable[..., Trainer], tiny_source: SequenceSource, tmp_path: Path
) -> None:
    trainer = make_trainer("fp16")
    trainer.train(quiet=True)
    estimate = estimate_run(trainer.config, tiny_source, tmp_path)
    sizes = {name: tensor.nbytes for name, tensor in stored(trainer.run).items()}
    assert estimate["checkpoint_bytes"] == sum(size for name, size in sizes.items() if not name.endswith(".step"))
