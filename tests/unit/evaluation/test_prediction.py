"""Scores in files are those of evaluation and of the server, in the rows of the requests, whatever kills the job."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tackboard.batch import RequestBatch
from tackboard.checkpoint.store import find_checkpoint
from tackboard.core.errors import DataError, TackboardError, UsageError
from tackboard.core.locks import try_lock
from tackboard.core.manifest import verify_manifest
from tackboard.core.rundir import RunDirectory
from tackboard.data.labels import Label, LabelConfig
from tackboard.data.request_layout import label_dataset, read_requests
from tackboard.evaluation import prediction
from tackboard.evaluation.labelled_requests import answer
from tackboard.evaluation.prediction import open_for_prediction, predict
from tackboard.events.dataset import Dataset, open_dataset
from tackboard.export.exporter import export_bundle
from tackboard.scoring.scorer import Scorer
from tackboard.train.config import RunConfig, config_to_json
from tackboard.train.start import open_source
from tackboard.train.trainer import Trainer

Config = Callable[..., RunConfig]
SCORES = ["score", "score_click"]
"""The score of the ranker, and of its only head."""


@pytest.fixture(scope="module")
def bundle(ranker_config: Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A ranker of two steps."""
    threads = torch.get_num_threads()
    config = ranker_config("training.steps=2")
    folder = tmp_path_factory.mktemp("ranker")
    run = RunDirectory.create(folder, config.name, config_to_json(config))
    Trainer(config, run, open_source(config)).train(quiet=True)
    export_bundle(find_checkpoint(run.path), folder / "bundle", name="ranker", version="1", tables="fp32")
    yield folder / "bundle"
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def scorer(bundle: Path) -> Scorer:
    return Scorer.load(bundle, num_threads=1)


@pytest.fixture
def dataset(labelled_dataset: Path) -> Dataset:
    return open_dataset(labelled_dataset)


def write(dataset: Dataset, scorer: Scorer, bundle: Path, out: Path, **more: Any) -> dict[str, Any]:
    return predict(open_for_prediction(dataset, scorer), scorer, bundle, out, quiet=True, **more)


def rows_of(out: Path) -> pa.Table:
    return pq.read_table(out / "scores")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_rows_are_the_candidates_in_the_order_of_the_requests(
    dataset: Dataset, scorer: Scorer, bundle: Path, tmp_path: Path
) -> None:
    result = write(dataset, scorer, bundle, tmp_path / "out")
    rows, requests = rows_of(tmp_path / "out"), read_requests(dataset)
    assert rows.column_names == ["request", "user_id", "time_ms", "item_id", "position", *SCORES]
    flat = [
        {name: row[name] for name in ("request", "user_id", "time_ms")} | {"item_id": item, "position": position}
        for row in requests.to_pylist()
        for item, position in zip(row["item_id"], row["position"], strict=True)
    ]
    assert rows.drop_columns(SCORES).to_pylist() == flat
    assert rows.schema.field("request").type == requests.schema.field("request").type
    assert (result["num_requests"], result["num_candidates"]) == (requests.num_rows, len(flat))
    assert result["num_parts"] == dataset.layout.num_buckets > 3
    manifest = verify_manifest(tmp_path / "out", "predictions")
    assert manifest["inputs"]["snapshot"].startswith("asked/") and manifest["num_candidates"] == len(flat)


def test_scores_are_those_of_evaluation(
    dataset: Dataset, scorer: Scorer, bundle: Path, tmp_path: Path, ranker_config: Config
) -> None:
    write(dataset, scorer, bundle, tmp_path / "out")
    config = ranker_config("data.validation_share=0", "data.test_share=1")
    steps = config.data.steps(open_source(config), config.model.tables, 0, part="test")
    answers = answer(scorer.model, steps)
    assert answers.request_ms is not None
    found = rows_of(tmp_path / "out")
    keys = zip(answers.users.tolist(), answers.request_ms.tolist(), answers.items.tolist(), strict=True)
    expected = dict(zip(keys, answers.scores.tolist(), strict=True))
    assert len(expected) == found.num_rows
    same = zip(*(found[name].to_pylist() for name in ("user_id", "time_ms", "item_id")), strict=True)
    assert found["score"].to_pylist() == pytest.approx([expected[key] for key in same], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("kind", ["ranker", "retrieval model"])
def test_scores_are_those_of_the_server(
    kind: str, dataset: Dataset, bundle: Path, tiny_bundle: Path, tmp_path: Path
) -> None:
    chosen = bundle if kind == "ranker" else tiny_bundle
    model = Scorer.load(chosen, num_threads=1)
    write(dataset, model, chosen, tmp_path / "out")
    events = dataset.read_events().to_pylist()
    rows = rows_of(tmp_path / "out").to_pylist()
    lengths = set()
    for request in {row["request"]: row for row in rows[:: len(rows) // 25]}.values():
        mine = [row for row in rows if row["request"] == request["request"]]
        seen = [
            event
            for event in events
            if event["user_id"] == request["user_id"] and event["received_ms"] < request["time_ms"]
        ]
        names = {"item": "item_id", "action": "action", "surface": "surface", "time_ms": "time_ms"}
        asked = model.reader.read(
            {name: [event[column] for event in seen] for name, column in names.items()},
            [row["item_id"] for row in mine],
            request_ms=request["time_ms"],
        )
        assert [row["score"] for row in mine] == pytest.approx(model.score(asked).tolist(), rel=1e-4, abs=1e-5)
        lengths.add(min(len(seen), 8))
    assert {0, 8} <= lengths, "users without a history, and histories that are cut"


def test_every_head_has_a_column(
    dataset: Dataset, scorer: Scorer, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def heads(batch: RequestBatch) -> dict[str, torch.Tensor]:
        return {"save": batch.request_ms[batch.request_of].float(), "click": -own(batch)["click"]}

    own = scorer.model.scores_by_action
    monkeypatch.setattr(scorer.model, "scores_by_action", heads)
    monkeypatch.setattr(scorer.model, "score_of_actions", lambda by_action: -by_action["click"])
    write(dataset, scorer, bundle, tmp_path / "out")
    rows = rows_of(tmp_path / "out")
    assert rows.column_names[-3:] == ["score", "score_save", "score_click"]
    assert rows["score_click"].to_pylist() == [-score for score in rows["score"].to_pylist()]
    assert np.array_equal(rows["score_save"].to_numpy(), rows["time_ms"].to_numpy().astype(np.float32))


def test_batches_of_any_size_give_the_same_rows(
    dataset: Dataset, scorer: Scorer, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(dataset, scorer, bundle, tmp_path / "whole")
    for tokens in (25, 300):
        monkeypatch.setattr(prediction, "TOKENS_AT_ONCE", tokens)
        write(dataset, scorer, bundle, tmp_path / str(tokens))
        one, other = rows_of(tmp_path / "whole"), rows_of(tmp_path / str(tokens))
        assert one.drop_columns(SCORES).equals(other.drop_columns(SCORES))
        assert one["score"].equals(one["score_click"])
        assert one["score"].to_pylist() == pytest.approx(other["score"].to_pylist(), rel=1e-5, abs=1e-6)


def test_a_stopped_job_goes_on_and_a_finished_one_says_so(
    dataset: Dataset, scorer: Scorer, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    first = write(dataset, scorer, bundle, whole)
    with monkeypatch.context() as patch:
        scored, score = [], prediction._score

        def interrupted(source: Any, model: Any, bucket: int, count: Any) -> Any:
            if bucket == 2:
                raise KeyboardInterrupt
            scored.append(bucket)
            return score(source, model, bucket, count)

        patch.setattr(prediction, "_score", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write(dataset, scorer, bundle, out)
        assert scored == [0, 1] and not (out / "MANIFEST.json").exists()
    parts = out / "scores"
    kept = {part.name: part.stat().st_mtime_ns for part in parts.iterdir()}
    assert sorted(kept) == ["part-00000.parquet", "part-00001.parquet"]
    (parts / ".part-00002.parquet.tmp-abc").write_text("left by a killed writer")
    result = write(dataset, scorer, bundle, out)
    assert (result["num_parts_kept"], result["num_parts"], result["was_finished"]) == (2, first["num_parts"], False)
    assert kept == {name: (parts / name).stat().st_mtime_ns for name in kept}
    assert contents(out) == contents(whole)
    again = write(dataset, scorer, bundle, out)
    assert again["was_finished"] and again["num_candidates"] == first["num_candidates"]
    assert not list(tmp_path.glob(".*")), "the lock is gone"
    (parts / "part-00001.parquet").write_bytes((parts / "part-00000.parquet").read_bytes())
    with pytest.raises(DataError, match=r"part-00001\.parquet"):
        write(dataset, scorer, bundle, out)


@pytest.mark.parametrize("is_done", [True, False])
def test_other_inputs_are_refused(
    dataset: Dataset, scorer: Scorer, bundle: Path, tiny_bundle: Path, tmp_path: Path, is_done: bool
) -> None:
    out, code = tmp_path / "out", tmp_path / "code.py"
    write(dataset, scorer, bundle, out)
    if not is_done:
        (out / "MANIFEST.json").unlink()
    before = contents(out)
    other = Scorer.load(tiny_bundle, num_threads=1)
    with pytest.raises(UsageError, match=r"holds predictions with another bundle \(ranker version 1\)"):
        write(dataset, other, tiny_bundle, out)
    code.write_text("")
    with pytest.raises(UsageError, match="with another code"):
        write(dataset, scorer, bundle, out, code_file=code)
    copy = tmp_path / "datasets" / "asked"
    shutil.copytree(dataset.path.parent, copy, symlinks=True)
    label_dataset(open_dataset(copy), LabelConfig(labels=(Label("click", 1),)), quiet=True)
    with pytest.raises(UsageError, match=r"with another snapshot \(asked/") as refused:
        write(open_dataset(copy), scorer, bundle, out)
    assert len(str(refused.value).splitlines()) == 3
    assert contents(out) == before


def test_a_folder_of_something_else_is_refused(dataset: Dataset, scorer: Scorer, bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match="mine is not empty and holds no predictions"):
        write(dataset, scorer, bundle, tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]
    with pytest.raises(UsageError, match="thesis.txt is a file"):
        write(dataset, scorer, bundle, tmp_path / "mine" / "thesis.txt")
    with try_lock(tmp_path / ".out.predict.lock") as held:
        assert held
        with pytest.raises(UsageError, match="another process is writing predictions"):
            write(dataset, scorer, bundle, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_bundle_for_other_ids_is_refused(dataset: Dataset, scorer: Scorer, monkeypatch: pytest.MonkeyPatch) -> None:
    signature = dataclasses.replace(scorer.signature, id_type="string", user_type="string")
    other = Scorer(signature, scorer.model, scorer.hashing, scorer.features)
    with pytest.raises(DataError, match="item ids of .* are int64, but the bundle ranker was made for string ids"):
        open_for_prediction(dataset, other)
    other.signature = dataclasses.replace(signature, id_type="int64")
    open_for_prediction(dataset, other)  # The model does not read the user's id.
    monkeypatch.setattr(other.reader, "needs_user", True)
    with pytest.raises(DataError, match="user ids of .* are int64"):
        open_for_prediction(dataset, other)


def test_a_dataset_without_labels_is_refused(scorer: Scorer, tiny_config: Config) -> None:
    with pytest.raises(DataError, match="holds no labelled requests\n.*pseudo-requests.*\ntackboard data label"):
        open_for_prediction(open_dataset(tiny_config().data.dataset), scorer)


def test_scores_that_are_not_finite_are_no_predictions(
    dataset: Dataset, scorer: Scorer, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        scorer.model, "score_of_actions", lambda by_action: torch.full_like(by_action["click"], torch.nan)
    )
    with pytest.raises(TackboardError, match="one finite score for each candidate"):
        write(dataset, scorer, bundle, tmp_path / "out")
    assert not list((tmp_path / "out" / "scores").iterdir())
