"""What older versions wrote is read today. One small folder of each kind and format version stays here for ever.

They were made by `tackboard init`, `train` and `export` from nine events of three users. A reader that fails here
would lose people's data: give the new format a new version and teach the reader both.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

GOLDEN = Path(__file__).parent
HOUR_MS = 3_600_000
SCORES_V1 = [3.375640630722046, 1.8154712915420532, -1.4119033813476562, 3.30361008644104]
"""Scores of request.json's candidates by bundle-v1 on the day it was made."""
SCORES_V2 = [2.217665672302246, 1.5355850458145142, 0.7574293613433838, 1.8943089246749878]
"""By bundle-v2, of a request one hour after the last event."""
SCORES_FLAT = {
    "pinfm": [7.508135795593262, 3.073918342590332, 2.235879898071289, -0.7151152491569519],
    "sasrec": [-2.450416088104248, 3.446748733520508, -4.1351542472839355, -0.1898886263370514],
}
"""By bundle-v2-flat-pinfm and -sasrec, of a request one hour after the last event. Their models were described by flat
settings, nearly all of them other than the defaults."""
SCORES_CHANGED_ROWS = [-8.101639747619629, -7.960319995880127, -7.106776714324951, -7.772748947143555]
"""By checkpoint-v2, of a request one hour after the last event. It holds 20 or fewer of its table's 400 rows."""
SCORES_V3 = [6.901406288146973, 6.7190985679626465, 5.4969305992126465, 7.659078598022461]
"""By bundle-v3, which was made for training, of a request one hour after the last event."""
FEATURES_HASH = "d3b30c919600d1bf3e72a38edfb017e9a8bef0188a63a2df25b01bafa19df760"
"""Of bundle-v2's features.json, format version 1."""


def test_dataset_version_1() -> None:
    from tackboard.data.source import load_sequences
    from tackboard.events.dataset import open_dataset

    sequences = load_sequences(GOLDEN / "dataset-v1", ("view", "save"))
    assert len(sequences.item_ids) == 9
    assert sequences.source.vocabulary.actions == ("hide", "save", "view")
    assert sequences.source.dataset.item_type == "string"
    assert sorted(np.diff(sequences.offsets).tolist()) == [2, 3, 4]
    dataset = open_dataset(GOLDEN / "dataset-v1")
    assert dataset.fields == {}
    assert dataset.read_history("item") is None
    assert dataset.read_items().num_rows == dataset.num_items


def test_labelled_dataset_with_buckets() -> None:
    """layout.json 1, labels.json 1: fourteen requests of four users, in buckets of five events."""
    from tackboard.batch import HashConfig
    from tackboard.data.request_layout import read_labels
    from tackboard.data.request_loader import RequestConfig, RequestSource, RequestSteps
    from tackboard.events.dataset import open_dataset

    path = GOLDEN / "dataset-v1-requests"
    assert open_dataset(path).layout.num_buckets == 4
    labels = read_labels(path)
    assert labels is not None
    assert (labels.counts.requests, labels.counts.candidates, labels.counts.labels["view"].positives) == (14, 29, 9)
    config = RequestConfig(
        dataset=str(path), max_history=4, tokens_per_step=30, window_buckets=2, validation_share=0.0, test_share=0.0
    )
    steps = RequestSteps(RequestSource(config), config, HashConfig(num_hashes=2, num_rows=100), seed=0)
    batch = steps[0]
    assert batch.labels["view"].tolist() == [1, 0, 1, 0, 1, 0, 0, 0]
    assert batch.known["save"].tolist() == [False] * 6 + [True, False]
    assert batch.weights.tolist() == [1, 2, 1, 2, 1, 2, 1, 2]
    assert batch.histories.lengths().tolist() == [2, 1, 1, 2]
    assert batch.request_ms.tolist() == [1_700_000_000_000 + 60_000 * minute for minute in (2, 1, 5, 6)]


def scores_of(scorer: Any, after_ms: int | None = None) -> Any:
    """Scores of request.json's candidates, for a request this long after the last event, or at no given time."""
    request = json.loads((GOLDEN / "request.json").read_text())
    history = {field: [event[field] for event in request["history"]] for field in request["history"][0]}
    time = {} if after_ms is None else {"request_ms": max(history["time_ms"]) + after_ms}
    return scorer.score(scorer.reader.read(history, request["candidates"], **time))


def exported(checkpoint: Path, folder: Path) -> Any:
    """A scorer of the bundle that the checkpoint is exported to."""
    from tackboard.export.exporter import export_bundle
    from tackboard.scoring.scorer import Scorer

    export_bundle(checkpoint, folder / "bundle", name="new", version="1", tables="fp16")
    return Scorer.load(folder / "bundle", num_threads=1)


def test_bundle_version_1_and_a_checkpoint_of_version_1(tmp_path: Path) -> None:
    """They say nothing of features: the model reads the standard ones, and scores as it did."""
    from tackboard.cli.evaluate import evaluate_run
    from tackboard.scoring.scorer import Scorer

    scorer = Scorer.load(GOLDEN / "bundle-v1", num_threads=1)
    assert (scorer.signature.format_version, scorer.signature.reads) == (1, ())
    assert np.allclose(scores_of(scorer), SCORES_V1, atol=1e-5)
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000003"
    shutil.copytree(GOLDEN / "checkpoint-v1", checkpoint)
    scorer = exported(checkpoint, tmp_path)
    assert scorer.signature.reads == ("history.item", "history.action", "history.surface", "history.gap")
    assert np.allclose(scores_of(scorer), SCORES_V1, atol=1e-5)
    table = evaluate_run(checkpoint, dataset=GOLDEN / "dataset-v1", quiet=True)
    baselines = ["popularity", "item-to-item", "recently seen", "recent, live"]
    assert [row["name"] for row in table["rows"]] == [*baselines, "model"]


def test_bundle_version_2_with_features_version_1(tmp_path: Path) -> None:
    """Its model reads a window, a filter, a time zone and the gaps of its history. Its checkpoint is exported too."""
    from tackboard.scoring.scorer import Scorer

    scorer = Scorer.load(GOLDEN / "bundle-v2", num_threads=1)
    assert scorer.signature.format_version == 2
    assert scorer.signature.reads[-3:] == ("away", "saves_7d", "hour")
    request = json.loads((GOLDEN / "request.json").read_text())
    history = {field: [event[field] for event in request["history"]] for field in request["history"][0]}
    read = scorer.reader.read(history, request["candidates"], request_ms=max(history["time_ms"]) + HOUR_MS)
    assert scorer.compute_features(read)["hour"].to_pylist() == [(2 - 11.5) / 6.9]  # 01:00 UTC in the winter of 1970
    for one in (scorer, exported(GOLDEN / "checkpoint-v1-features", tmp_path)):
        assert one.features.hash == FEATURES_HASH
        assert np.allclose(scores_of(one, HOUR_MS), SCORES_V2, atol=1e-5)


def test_bundle_version_3_is_served_and_starts_a_run() -> None:
    """It was made with --for-training: fp16 tables as they were trained, streaming frequencies, fresh rows."""
    from tackboard.data.loader import DataConfig
    from tackboard.models.description import restore_config
    from tackboard.models.interface import build_model
    from tackboard.scoring.scorer import Scorer
    from tackboard.train.config import RunConfig, StartConfig
    from tackboard.train.start import open_source, take_parameters

    scorer = Scorer.load(GOLDEN / "bundle-v3", num_threads=1)
    assert (scorer.signature.format_version, scorer.signature.purpose) == (3, "training")
    assert np.allclose(scores_of(scorer, HOUR_MS), SCORES_V3, atol=1e-5)
    data = DataConfig(dataset=str(GOLDEN / "dataset-v1"), positive_actions=("view", "save"), max_length=4)
    start = StartConfig(run=str(GOLDEN / "bundle-v3"))
    config = RunConfig(name="new", data=data, model=restore_config(scorer.signature.model), start=start)
    source = open_source(config)
    model = build_model(config.model, source.vocabulary)
    assert take_parameters(model, config, source)["step"] == 3
    assert all((scorer.model.state_dict()[name] == tensor).all() for name, tensor in model.state_dict().items())
    assert model.item_tables.fresh.key == scorer.signature.fresh_rows["item_tables.weight"]["key"]  # type: ignore[union-attr]


def test_checkpoint_version_2_with_changed_rows(tmp_path: Path) -> None:
    """Its other rows are made from the key in state.json, so this also fixes the values of fresh rows for ever."""
    from tackboard.checkpoint.trained import load_trained, stored_optimizer, stored_tables
    from tackboard.models.changed_rows import ChangedRows

    checkpoint = load_trained(GOLDEN / "checkpoint-v2", ("dense", "tables", "optimizer"))
    stored = stored_tables(checkpoint)["item_tables.weight"], stored_optimizer(checkpoint)["adagrad.item_tables"]
    assert all(isinstance(each, ChangedRows) and 0 < len(each.rows_N) <= 20 for each in stored)
    assert [tuple(each.shape) for each in stored] == [(400, 4), (400,)]
    scorer = exported(GOLDEN / "checkpoint-v2", tmp_path)
    assert np.allclose(scores_of(scorer, HOUR_MS), SCORES_CHANGED_ROWS, atol=1e-5)


def test_checkpoint_version_3_of_three_processes(tmp_path: Path) -> None:
    """It has the content of checkpoint-v2: three processes loaded that checkpoint and saved it again."""
    from tackboard.checkpoint.trained import load_trained, stored_optimizer, stored_parameters
    from tackboard.models.changed_rows import ChangedRows, whole_tensor

    groups = ("dense", "tables", "optimizer")
    one, three = (load_trained(GOLDEN / f"checkpoint-v{version}", groups) for version in (2, 3))
    assert (three.state["format_version"], three.state["num_parts"]) == (3, 3)
    for read in (stored_parameters, stored_optimizer):
        before, after = read(one), read(three)
        assert before.keys() == after.keys()
        for name, stored in after.items():
            assert whole_tensor(stored, tmp_path).equal(whole_tensor(before[name], tmp_path))
    table = stored_parameters(three)["item_tables.weight"]
    assert isinstance(table, ChangedRows) and [len(part.rows_N) > 0 for part in table.parts] == [True] * 3
    scorer = exported(GOLDEN / "checkpoint-v3", tmp_path)
    assert np.allclose(scores_of(scorer, HOUR_MS), SCORES_CHANGED_ROWS, atol=1e-5)


@pytest.mark.parametrize("kind", SCORES_FLAT)
def test_a_model_that_was_described_by_flat_settings_scores_as_it_did(tmp_path: Path, kind: str) -> None:
    from tackboard.scoring.scorer import Scorer

    stored = Scorer.load(GOLDEN / f"bundle-v2-flat-{kind}", num_threads=1)
    for scorer in (stored, exported(GOLDEN / f"checkpoint-v1-flat-{kind}", tmp_path)):
        assert np.allclose(scores_of(scorer, HOUR_MS), SCORES_FLAT[kind], atol=1e-5)


def test_flat_settings_are_read_to_the_last_one() -> None:
    from tackboard.core.config import to_dict
    from tackboard.models.description import restore_config
    from tackboard.models.losses import LossConfig

    def described(kind: str) -> dict[str, Any]:
        state: dict[str, Any] = json.loads((GOLDEN / f"checkpoint-v1-flat-{kind}" / "state.json").read_text())
        return state["model"]

    pinfm = to_dict(restore_config(described("pinfm")))
    assert pinfm["tables"] == {
        "num_hashes": 2, "num_rows": 16, "seed": 3, "method": "mix", "dim": 4, "init_std": 0.2, "storage": "fp16"
    }  # fmt: skip
    assert pinfm["backbone"] == {
        "kind": "gpt", "num_layers": 1, "num_heads": 1, "head_width": 0, "mlp_ratio": 2, "ffn_width": 50,
        "positions": "rotary", "time_bias": 5,
    }  # fmt: skip
    flat = described("pinfm")["config"]
    assert pinfm["loss"] == {name: flat[name] for name in pinfm["loss"]}
    top = ("width", "maps", "max_history", "num_time_buckets", "request_time", "request_features", "dropout")
    assert {name: pinfm[name] for name in top} == {name: flat[name] for name in top}
    rival, flat = to_dict(restore_config(described("sasrec"))), described("sasrec")["config"]
    assert rival["tables"]["num_rows"] == 16
    assert rival["backbone"] == {
        "kind": "sasrec", "num_layers": 1, "num_heads": 2, "head_width": 0, "mlp_ratio": 4, "ffn_width": 6,
        "positions": "learned", "time_bias": 0,
    }  # fmt: skip
    stored = {"kind": "sampled", "num_negatives": 3, "temperature": 0.1}
    assert rival["loss"] == to_dict(LossConfig()) | stored, "PinFM's loss came later, and its settings are unset"
    same = set(rival) - {"tables", "backbone", "loss"}
    assert {name: rival[name] for name in same} == {name: flat[name] for name in same}
    unread = {**described("pinfm"), "config": described("pinfm")["config"] | {"backbone": "hstu"}}
    assert to_dict(restore_config(unread))["backbone"]["time_bias"] == 0, (
        "flat settings that HSTU never read were allowed"
    )
