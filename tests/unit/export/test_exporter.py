"""Export: the bundle holds the checkpoint's model and nothing that runs; what cannot be served is never left behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tackboard.bundle.signature import read_bundle
from tackboard.checkpoint.store import CheckpointStore, find_checkpoint, load_checkpoint
from tackboard.checkpoint.trained import stored_tables
from tackboard.core.errors import DataError, UsageError
from tackboard.core.rundir import RunDirectory
from tackboard.export.exporter import export_bundle
from tackboard.features.feature_set import read_features
from tackboard.models.changed_rows import whole_tensor
from tackboard.models.frequencies import StreamingFrequencies
from tackboard.scoring.scorer import Scorer


@pytest.fixture
def remake(trained_run: RunDirectory, tmp_path: Path) -> Callable[..., Path]:
    """`remake(state=…, table=…)`: a copy of the trained checkpoint with a changed state or item table."""

    def make(state: dict[str, Any] | None = None, table: torch.Tensor | None = None) -> Path:
        checkpoint = load_checkpoint(find_checkpoint(trained_run.path))
        if table is not None:
            checkpoint.tensors["tables"] = {"item_tables.weight": table}
        store = CheckpointStore(tmp_path / "copy" / "checkpoints")
        return store.save(6, checkpoint.tensors, checkpoint.state | (state or {}))

    return make


def test_the_bundle_holds_the_checkpoints_parameters(trained_run: RunDirectory, tiny_bundle: Path) -> None:
    checkpoint = load_checkpoint(find_checkpoint(trained_run.path))
    dense = load_file(tiny_bundle / "dense.safetensors")
    assert set(dense) == set(checkpoint.tensors["dense"])
    assert all(torch.equal(dense[name], tensor) for name, tensor in checkpoint.tensors["dense"].items())
    table = load_file(tiny_bundle / "tables" / "item_tables.weight.safetensors")["item_tables.weight"]
    assert torch.equal(table, whole_tensor(stored_tables(checkpoint)["item_tables.weight"], checkpoint.path))


def test_the_signature_says_where_it_came_from(trained_run: RunDirectory, tiny_bundle: Path) -> None:
    signature = read_bundle(tiny_bundle)
    assert (signature.name, signature.version, signature.id_type) == ("tiny", "3", "int64")
    assert (signature.actions, signature.surfaces) == (("click", "hide", "save"), ("home", "search"))
    assert signature.max_history == 8
    assert signature.lineage["run"] == trained_run.path.name
    assert signature.lineage["step"] == 6
    card = (tiny_bundle / "card.md").read_text()
    assert "# tiny, version 3" in card
    assert "128 table parameters" in card


def test_only_data_lies_in_a_bundle_and_nothing_of_this_machine(trained_run: RunDirectory, tiny_bundle: Path) -> None:
    files = {path.relative_to(tiny_bundle).as_posix() for path in tiny_bundle.rglob("*") if path.is_file()}
    assert files == {
        "MANIFEST.json",
        "card.md",
        "dense.safetensors",
        "features.json",
        "signature.json",
        "tables/item_tables.weight.safetensors",
    }
    for name in ("signature.json", "features.json"):
        assert str(trained_run.path.parent) not in (tiny_bundle / name).read_text()
        assert "/" not in (tiny_bundle / "features.json").read_text()  # no path of anybody's file of features


def test_the_bundle_says_what_its_model_reads(trained_run: RunDirectory, tiny_bundle: Path) -> None:
    signature, features = read_bundle(tiny_bundle), read_features(tiny_bundle)
    trained_with = read_features(find_checkpoint(trained_run.path))
    assert features is not None and trained_with is not None
    assert features.hash == trained_with.hash
    assert (signature.format_version, signature.purpose) == (3, "serving")
    assert signature.reads == ("history.item", "history.action", "history.surface", "history.gap")
    assert tuple(features.reads()) == signature.reads
    assert features.plan.newest_events == signature.max_history


def test_a_checkpoint_from_before_features_is_exported_with_the_standard_ones(
    remake: Callable[..., Path], tiny_bundle: Path, tmp_path: Path
) -> None:
    path = remake()
    assert read_features(path) is None
    export_bundle(path, tmp_path / "out", name="tiny", version="3", tables="fp32")
    assert (tmp_path / "out" / "features.json").read_bytes() == (tiny_bundle / "features.json").read_bytes()
    assert read_bundle(tmp_path / "out").reads == read_bundle(tiny_bundle).reads


def test_values_beyond_fp16_are_refused_and_leave_nothing(remake: Callable[..., Path], tmp_path: Path) -> None:
    path = remake(table=torch.full((32, 4), 1e6))
    with pytest.raises(DataError, match=r"item_tables\.weight does not fit into fp16"):
        export_bundle(path, tmp_path / "out", name="x", version="1", tables="fp16")
    assert [entry.name for entry in tmp_path.iterdir()] == ["copy"]
    export_bundle(path, tmp_path / "out", name="x", version="1", tables="fp32")


def test_an_existing_folder_is_never_overwritten(trained_run: RunDirectory, tiny_bundle: Path) -> None:
    before = (tiny_bundle / "MANIFEST.json").read_bytes()
    with pytest.raises(UsageError, match="exists already"):
        export_bundle(find_checkpoint(trained_run.path), tiny_bundle, name="x", version="9", tables="fp32")
    assert (tiny_bundle / "MANIFEST.json").read_bytes() == before


@pytest.mark.parametrize(
    ("setting", "expected"), [({"tables": "f16"}, "did you mean fp16"), ({"version": "1.0"}, "a whole number")]
)
def test_wrong_settings_are_refused(
    trained_run: RunDirectory, tmp_path: Path, setting: dict[str, str], expected: str
) -> None:
    arguments = {"name": "x", "version": "1", "tables": "fp32"} | setting
    with pytest.raises(UsageError, match=expected):
        export_bundle(find_checkpoint(trained_run.path), tmp_path / "out", **arguments)


def test_what_only_training_needs_stays_behind(trained_run: RunDirectory, tmp_path: Path) -> None:
    """Streaming frequencies are as large as a table; a server has no use for them."""
    checkpoint = load_checkpoint(find_checkpoint(trained_run.path))
    model = checkpoint.state["model"]
    config = model["config"] | {"loss": model["config"]["loss"] | {"streaming_frequencies": True}}
    frequencies = StreamingFrequencies(2, config["tables"]["num_rows"])
    checkpoint.tensors["dense"] |= {f"frequencies.{name}": value for name, value in frequencies.state_dict().items()}
    state = checkpoint.state | {"model": {**model, "config": config}}
    path = CheckpointStore(tmp_path / "copy" / "checkpoints").save(6, checkpoint.tensors, state)
    export_bundle(path, tmp_path / "bundle", name="tiny", version="3", tables="fp32")
    assert not any(name.startswith("frequencies.") for name in load_file(tmp_path / "bundle" / "dense.safetensors"))
    assert read_bundle(tmp_path / "bundle").model["config"]["loss"]["streaming_frequencies"] is False
    Scorer.load(tmp_path / "bundle")
    summary = export_bundle(path, tmp_path / "whole", name="tiny", version="3", for_training=True)
    assert (summary["tables"], summary["purpose"]) == ("fp32", "training")
    dense = load_file(tmp_path / "whole" / "dense.safetensors")
    assert all(torch.equal(dense[name], tensor) for name, tensor in checkpoint.tensors["dense"].items())
    assert dense.keys() == checkpoint.tensors["dense"].keys() and "log_inverse_temperature" in dense
    assert read_bundle(tmp_path / "whole").model["config"]["loss"]["streaming_frequencies"] is True
    Scorer.load(tmp_path / "whole")


def test_a_bundle_for_training_has_every_bit_and_can_be_served(
    trained_run: RunDirectory, tiny_bundle: Path, tmp_path: Path
) -> None:
    checkpoint = load_checkpoint(find_checkpoint(trained_run.path))
    export_bundle(checkpoint, tmp_path / "bundle", name="tiny", version="3", for_training=True)
    signature, table = read_bundle(tmp_path / "bundle"), "item_tables.weight"
    assert (signature.purpose, signature.tables[table]["dtype"]) == ("training", "fp32")
    assert signature.fresh_rows == checkpoint.state["fresh_rows"]
    rows = load_file(tmp_path / "bundle" / "tables" / f"{table}.safetensors")[table]
    assert torch.equal(rows, whole_tensor(stored_tables(checkpoint)[table], checkpoint.path))
    assert "tackboard train RECIPE --from BUNDLE" in (tmp_path / "bundle" / "card.md").read_text()
    assert "--from" not in (tiny_bundle / "card.md").read_text()
    one, other = Scorer.load(tmp_path / "bundle"), Scorer.load(tiny_bundle)
    request = one.reader.read({}, [100, 101, 102])
    assert one.score(request).tolist() == other.score(request).tolist()
    with pytest.raises(UsageError, match="--tables fp16 and --for-training contradict each other"):
        export_bundle(checkpoint, tmp_path / "x", name="x", version="1", tables="fp16", for_training=True)


def test_a_half_precision_run_stays_half_for_training(
    tiny_config: Callable[..., Any], tmp_path: Path, torch_settings: None
) -> None:
    from tackboard.train.config import config_to_json
    from tackboard.train.start import open_source
    from tackboard.train.trainer import Trainer

    config = tiny_config("model.tables.storage=bf16", "training.steps=2")
    run = RunDirectory.create(tmp_path / "runs", "half", config_to_json(config))
    Trainer(config, run, open_source(config)).train(quiet=True)
    summary = export_bundle(find_checkpoint(run.path), tmp_path / "bundle", name="h", version="1", for_training=True)
    assert summary["tables"] == "bf16"
    assert Scorer.load(tmp_path / "bundle").model.item_tables.weight.dtype == torch.bfloat16


def test_the_card_says_from_which_run_the_parameters_came(remake: Callable[..., Path], tmp_path: Path) -> None:
    origin = {"run": "first", "step": 4, "snapshot": "20260101T000000Z-abc", "prefix": "pinfm.", "parameters": 8}
    path = remake(state={"started_from": origin})
    export_bundle(path, tmp_path / "bundle", name="x", version="1")
    assert read_bundle(tmp_path / "bundle").lineage["started_from"] == origin
    card = (tmp_path / "bundle" / "card.md").read_text()
    assert "The parameters under `pinfm.` were initialised from step 4 of run `first`, which was trained on" in card
