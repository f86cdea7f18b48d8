"""Scores every candidate of a dataset's labelled requests with a bundle, and writes the scores as Parquet.

    <out>/inputs.json                   the bundle, the snapshot, the code and the device that the scores are made with
          scores/part-00000.parquet …   one row per candidate, one file per bucket of the dataset that has requests
          MANIFEST.json                 the size and SHA-256 of every file, written last

The rows have the order and the ids of requests.parquet. Histories and features are the same as in evaluation: they are
made from only the events that were received strictly before the request. A part appears under its name only when it is
complete. So if a job was killed, the next job with the same inputs writes only the parts that are missing, and the
files are the same as if one job had written all of them. All scores in a folder come from the same bundle, snapshot,
code and type of device. Memory depends on the size of a bucket, not on the size of the dataset.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from tackboard.batch import RequestBatch
from tackboard.core.documents import blaming, read_document
from tackboard.core.errors import DataError, TackboardError, UsageError
from tackboard.core.files import LOCK_SUFFIX, remove_leftovers, sha256_file, write_bytes_atomic, write_json_atomic
from tackboard.core.locks import try_lock
from tackboard.core.manifest import MANIFEST, read_manifest, verify_manifest, write_manifest
from tackboard.core.progress import Progress
from tackboard.data.prefetch import on_device
from tackboard.data.request_loader import RequestConfig, RequestSource, RequestTable, RequestWindow
from tackboard.evaluation.labelled_requests import all_scores
from tackboard.events.columns import one_array
from tackboard.events.dataset import REQUESTS, Dataset
from tackboard.events.layout import RowReader
from tackboard.events.stored_tables import reading
from tackboard.scoring.scorer import Scorer

KIND = "predictions"
INPUTS = "inputs.json"
SCORES = "scores"
"""Folder of the Parquet files. It holds nothing else, because readers of a folder expect only Parquet files in it."""
VERSION = 1
TOKENS_AT_ONCE = 65_536
"""About this number of tokens (events of histories, and candidates) is scored at once; one request may have more."""
FIELDS = dict.fromkeys(("bundle", "bundle_sha256", "snapshot", "snapshot_sha256", "code_sha256", "device"), str)
"""The fields of inputs.json other than `version`, with their types."""
OF_REQUESTS, OF_CANDIDATES = ("request", "user_id", "time_ms"), ("item_id", "position")
"""Columns of requests.parquet with one value per request, and with one value per candidate."""


def open_for_prediction(dataset: Dataset, scorer: Scorer) -> RequestSource:
    """Opens the labelled requests of a dataset for the model of a bundle.

    Raises DataError if there are no labelled requests, or if the bundle was made for ids of another type.
    """
    signature = scorer.signature
    pairs = [("item", signature.id_type, dataset.item_type)]
    if scorer.reader.needs_user and signature.user_type:
        pairs.append(("user", signature.user_type, dataset.user_type))
    for kind, known, found in pairs:
        if known != found:
            raise DataError(
                f"{kind} ids of {dataset.path} are {found}, but the bundle {signature.name} was made for {known} ids",
                fix="give the dataset that the model was trained on, or a later snapshot of it",
            )
    config = RequestConfig(dataset=str(dataset.path), max_history=signature.max_history)
    return RequestSource(config, dataset=dataset, vocabulary=signature.vocabulary, features=lambda _: scorer.features)


def predict(
    source: RequestSource,
    scorer: Scorer,
    bundle: Path,
    out: Path,
    *,
    code_file: Path | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Writes the scores of all candidates into the folder `out` and returns a summary.

    `scorer` was loaded from the folder `bundle`. If an earlier call with the same inputs was killed, its parts are
    kept. If the earlier call has finished, nothing is written. Raises UsageError if `out` holds anything else, or if
    another process is writing there.
    """
    place = out.resolve()
    place.parent.mkdir(parents=True, exist_ok=True)
    with try_lock(place.with_name(f".{place.name}.predict{LOCK_SUFFIX}")) as is_ours:
        if not is_ours:
            raise UsageError(
                f"another process is writing predictions into {out}", fix="wait for it, or choose another --out"
            )
        inputs = _inputs(source.dataset, scorer, bundle, code_file)
        is_done = _begin(out, inputs)
        started = time.perf_counter()
        num_parts, num_new = (0, 0) if is_done else _write_parts(source, scorer, out, quiet=quiet)
        if not is_done:
            parts = sorted((out / SCORES).glob("*.parquet"))
            counts = {"num_requests": _num_requests(source), "num_candidates": sum(map(_num_rows, parts))}
            names = [f"{SCORES}/{part.name}" for part in parts]
            write_manifest(out, KIND, {"inputs": inputs} | counts, meant=[INPUTS, *names])
    manifest = read_manifest(out)
    parts = [entry for entry in manifest["files"] if entry["name"] != INPUTS]
    with blaming(out / MANIFEST):
        counts = {name: int(manifest[name]) for name in ("num_requests", "num_candidates")}
    seconds = time.perf_counter() - started
    return {
        "out": str(out),
        "bundle": inputs["bundle"],
        "snapshot": source.snapshot,
        **counts,
        "num_parts": len(parts),
        "num_parts_kept": len(parts) - num_parts,
        "was_finished": is_done,
        "seconds": round(seconds, 3),
        "rows_per_s": round(num_new / seconds, 1),
    }


def _inputs(dataset: Dataset, scorer: Scorer, bundle: Path, code_file: Path | None) -> dict[str, Any]:
    return {
        "version": VERSION,
        "bundle": f"{scorer.signature.name} version {scorer.signature.version}",
        "bundle_sha256": read_manifest(bundle)["sha256_of_the_above"],
        "snapshot": f"{dataset.name}/{dataset.path.name}",
        "snapshot_sha256": dataset.manifest["sha256_of_the_above"],
        "code_sha256": "" if code_file is None else sha256_file(code_file),
        "device": _device(scorer).type,
    }


def _device(scorer: Scorer) -> torch.device:
    return torch.device(next(scorer.model.parameters()).device)


def _begin(out: Path, inputs: dict[str, Any]) -> bool:
    """Prepares the folder and returns whether it is already finished.

    Raises UsageError if the folder holds anything but predictions made with the same inputs.
    """
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out} is a file", allowed="allowed: a folder", fix="choose another --out")
    out.mkdir(exist_ok=True)
    remove_leftovers(out, INPUTS)
    path = out / INPUTS
    if not path.exists():
        if any(out.iterdir()):
            raise UsageError(f"--out {out} is not empty and holds no predictions", fix="choose another --out")
        write_json_atomic(path, inputs)
    stored = read_document(path, {"version": int, **FIELDS})
    for name, value in inputs.items():
        if stored[name] != value:
            what = name.removesuffix("_sha256")
            known = f" ({stored[what]})" if what in stored else ""
            raise UsageError(
                f"--out {out} holds predictions with another {what}{known}",
                allowed="allowed: an empty folder, or predictions with the same bundle, snapshot, code and device",
                fix="choose another --out",
            )
    if (out / MANIFEST).exists():
        verify_manifest(out, KIND)
        return True
    (out / SCORES).mkdir(exist_ok=True)
    for folder in (out, out / SCORES):
        remove_leftovers(folder)
    return False


def _write_parts(source: RequestSource, scorer: Scorer, out: Path, *, quiet: bool) -> tuple[int, int]:
    """Writes the parts that are missing. Returns (number of these parts, number of their rows)."""
    num_parts = num_rows = 0
    started = time.perf_counter()
    with (
        contextlib.closing(RowReader(source.dataset.path / REQUESTS)) as reader,
        Progress("scoring", total=_num_requests(source), unit="requests", quiet=quiet) as progress,
    ):

        def count(num_requests: int, num_candidates: int) -> None:
            nonlocal num_rows
            num_rows += num_candidates
            progress.advance(num_requests, f"{num_rows / (time.perf_counter() - started):,.0f} rows/s")

        for bucket in range(source.num_buckets):
            first, last = source.dataset.layout.rows_of("requests", bucket)
            part = out / SCORES / f"part-{bucket:05}.parquet"
            if first == last:
                continue
            if part.exists():
                progress.advance(last - first)
                continue
            scores = _score(source, scorer, bucket, count)
            rows = _flat_rows(reader.read([(first, last)], [*OF_REQUESTS, *OF_CANDIDATES]))
            sink = pa.BufferOutputStream()
            pq.write_table(pa.table({name: rows[name] for name in rows.column_names} | scores), sink)
            write_bytes_atomic(part, sink.getvalue())
            num_parts += 1
    return num_parts, num_rows


def _num_requests(source: RequestSource) -> int:
    return int(source.dataset.layout.offsets["requests"][-1])


def _num_rows(part: Path) -> int:
    """Returns the number of rows of a part, from its footer."""
    with reading(part):
        return int(pq.read_metadata(part).num_rows)


def _flat_rows(requests: pa.Table) -> pa.Table:
    """Takes rows of requests.parquet, one per request; returns one row per candidate."""
    lists = {name: one_array(requests[name]) for name in OF_CANDIDATES}
    request_of = np.repeat(np.arange(requests.num_rows), lists["item_id"].value_lengths().to_numpy())
    columns = {name: one_array(requests[name]).take(pa.array(request_of)) for name in OF_REQUESTS}
    return pa.table(columns | {name: array.flatten() for name, array in lists.items()})


def _score(
    source: RequestSource, scorer: Scorer, bucket: int, count: Callable[[int, int], None]
) -> dict[str, NDArray[np.float32]]:
    """Returns the scores of all candidates of a bucket by column name, in the order of requests.parquet.

    Calls `count` with the number of requests and of candidates of each batch.
    """
    parts: list[dict[str, NDArray[np.float32]]] = []
    for _, batch in on_device(_batches(source, scorer, bucket), _device(scorer)):
        with torch.inference_mode():
            given, heads = all_scores(scorer.model, batch)
            columns = {"score": given} | {f"score_{action}": head for action, head in heads.items()}
        parts.append({name: scores.float().cpu().numpy() for name, scores in columns.items()})
        for name, scores in parts[-1].items():
            if scores.shape != (batch.num_candidates,) or not np.isfinite(scores).all():
                raise TackboardError(
                    f"the model did not give one finite {name} for each candidate",
                    fix="check whether the model was trained to the end",
                )
        count(batch.num_requests, batch.num_candidates)
    return {name: np.concatenate([columns[name] for columns in parts]) for name in parts[0]}


def _batches(source: RequestSource, scorer: Scorer, bucket: int) -> Iterator[tuple[int, RequestBatch]]:
    """Yields (index of the batch, batch) for all batches of a bucket's requests; the requests keep their order.

    A batch has about `TOKENS_AT_ONCE` tokens.
    """
    num_batches = 0

    def deal(lengths: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        nonlocal num_batches
        _, starts = np.unique((np.cumsum(lengths) - lengths) // TOKENS_AT_ONCE, return_index=True)
        num_batches = len(starts)
        return np.arange(len(lengths)), np.append(starts, len(lengths))

    def choose(requests: RequestTable) -> NDArray[np.bool_]:
        return np.ones(len(requests.times), dtype=np.bool_)

    window = RequestWindow(source, np.array([bucket]), deal, scorer.hashing, choose)
    yield from ((place, window.batch(place)) for place in range(num_batches))
