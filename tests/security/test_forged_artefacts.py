"""Sealed but malformed: whatever a dataset, a checkpoint or a bundle says, it works or a file of it is named.

Everybody who can write a folder can write its manifest. So one thing at a time is changed in an artefact that was good,
its manifest is made anew, and every command that reads it is asked: allowed are an answer, or an error for users that
names a file of the artefact. Anything else would be shown as a bug in tackboard.
"""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file, save_file

from tackboard.batch import HashConfig
from tackboard.checkpoint.store import load_checkpoint
from tackboard.checkpoint.trained import read_state
from tackboard.cli.evaluate import evaluate_run
from tackboard.cli.inspect import verify
from tackboard.core.errors import CorruptFileError, DataError, UsageError
from tackboard.core.manifest import MANIFEST, read_manifest, seal, write_manifest
from tackboard.data.loader import DataConfig, TrainingSteps
from tackboard.data.request_layout import read_labels
from tackboard.data.request_loader import RequestConfig, RequestSource, RequestSteps
from tackboard.data.source import load_sequences, open_sequences, snapshot_path
from tackboard.evaluation.judged_events import held_out_events
from tackboard.evaluation.truth import oracle
from tackboard.events.synthetic.world_config import WorldConfig
from tackboard.events.synthetic.world_dataset import write_world
from tackboard.export.exporter import export_bundle
from tackboard.scoring.scorer import Scorer
from tackboard.serve.model import ServedModel

GOLDEN = Path(__file__).parents[1] / "golden"
NEVER_EQUAL = float("nan")
STRANGE: tuple[Any, ...] = (None, True, -1, 1 << 40, 10**30, NEVER_EQUAL, 1.5, "x", "../x", [], ["x"], {}, {"x": 1})
"""What a value of a document is replaced by."""
PETABYTE_ROWS = 1 << 30


def read_bundle(folder: Path) -> None:
    """`score --offline`, and what `serve` does before it listens."""
    scorer = Scorer.load(folder, num_threads=1)
    ServedModel(scorer, max_candidates=10).warm_up()


def read_checkpoint(folder: Path) -> None:
    """`export`, `evaluate`, and what `train --resume` asks of a checkpoint first."""
    for path in (folder.parent / "exported", folder.parent.parent / "eval"):
        shutil.rmtree(path, ignore_errors=True)
    evaluate_run(folder, dataset=GOLDEN / "dataset-v1", quiet=True)
    export_bundle(folder, folder.parent / "exported", name="x", version="1", tables="fp32")
    load_checkpoint(folder)
    snapshot_path(read_state(folder)["lineage"])


def read_dataset(folder: Path) -> None:
    """`train` until its first step, and `evaluate` of a model that was trained on another one."""
    config = DataConfig(dataset=str(folder), max_length=8, tokens_per_step=16, num_workers=0)
    source = open_sequences(folder)
    assert TrainingSteps(source, config, HashConfig(num_hashes=2, num_rows=16), 0)[0].num_events
    shutil.rmtree(folder.parent / "run", ignore_errors=True)
    checkpoint = folder.parent / "run" / "checkpoints" / "step-00000003"
    shutil.copytree(GOLDEN / "checkpoint-v1", checkpoint)
    evaluate_run(checkpoint, dataset=folder, quiet=True)


def read_requests(folder: Path) -> None:
    """What a ranker's training reads."""
    read_dataset(folder)
    read_labels(folder)
    config = RequestConfig(
        dataset=str(folder), max_history=4, tokens_per_step=30, window_buckets=2, validation_share=0.0, test_share=0.0
    )
    assert len(RequestSteps(RequestSource(config), config, HashConfig(num_hashes=2, num_rows=100), seed=0)[0].labels)


READERS: dict[str, Callable[[Path], None]] = {
    "bundle-v1": read_bundle,
    "bundle-v2": read_bundle,
    "checkpoint-v1": read_checkpoint,
    "checkpoint-v1-features": read_checkpoint,
    "checkpoint-v2": read_checkpoint,
    "checkpoint-v3": read_checkpoint,
    "dataset-v1": read_dataset,
    "dataset-v1-requests": read_requests,
}
DOCUMENTS = [(name, file.name) for name in READERS for file in sorted((GOLDEN / name).glob("*.json"))]
TABLES = [(name, file.name) for name in READERS for file in sorted((GOLDEN / name).glob("*.parquet"))]
TENSORS = [
    (name, str(f.relative_to(GOLDEN / name))) for name in READERS for f in (GOLDEN / name).rglob("*.safetensors")
]


QUICK = ("bundle-v2", "checkpoint-v2", "dataset-v1-requests")
"""Those whose files are changed in every run of the tests; the others have files of the same kinds."""


def quick(files: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [each for each in files if each[0] in QUICK]


@pytest.fixture
def forge(tmp_path: Path) -> Callable[[str], Path]:
    def copied(name: str) -> Path:
        place = tmp_path / "run" / "checkpoints" if name.startswith("checkpoint") else tmp_path
        folder = place / name
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(GOLDEN / name, folder)
        return folder

    return copied


def reseal(folder: Path) -> None:
    """A new manifest over whatever is there, with the notes of the old one."""
    old = json.loads((folder / MANIFEST).read_text())
    notes = {key: old[key] for key in old if key not in ("kind", "format_version", "files", "sha256_of_the_above")}
    (folder / MANIFEST).unlink()
    write_manifest(folder, old["kind"], notes)


def outcome(folder: Path, name: str) -> str:
    """What an artefact's readers say: nothing, or the error. Fails where it is no answer for a user."""
    try:
        READERS.get(name, load_checkpoint)(folder)
    except (DataError, UsageError) as error:
        # A model of a user's own wants an option, and another dataset may not have the actions of a recipe.
        if error.fix.startswith("name the file: --code") or error.got.startswith("data.positive_actions names"):
            return str(error)
        assert str(folder) in error.got, f"unnamed: {error}"
        return str(error)
    return ""


def places_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value of a document; of lists, to the first and last entry."""
    if path:
        yield path
    entries: list[Any] = []
    if isinstance(value, dict):
        entries = list(value)
    elif isinstance(value, list):
        entries = sorted({0, len(value) - 1}) if value else []
    for entry in entries:
        yield from places_of(value[entry], (*path, entry))


def mutants(document: Any) -> Iterator[tuple[str, Any]]:
    """Copies of a document with one value dropped or replaced, each with words for it."""
    for path in places_of(document):
        for new in ("drop", *STRANGE):
            changed = copy.deepcopy(document)
            place = changed
            for step in path[:-1]:
                place = place[step]
            if new == "drop":
                del place[path[-1]]
            else:
                place[path[-1]] = new
            yield f"{'.'.join(map(str, path))} = {new!r}", changed
    for whole in STRANGE:
        yield f"all = {whole!r}", whole


def check_documents(forge: Callable[[str], Path], name: str, file: str, at_most: int) -> None:
    """Tries `at_most` mutants of a document, from all over it."""
    folder = forge(name)
    changes = [change for change in mutants(json.loads((folder / file).read_text())) if isinstance(change[1], dict)]
    for words, changed in changes[:: max(1, len(changes) // at_most)]:
        if file == MANIFEST:
            (folder / file).write_bytes(seal({key: changed[key] for key in changed if key != "sha256_of_the_above"}))
        else:
            (folder / file).write_text(json.dumps(changed))
            reseal(folder)
        try:
            outcome(folder, name)
        except Exception as error:
            raise AssertionError(f"{name}/{file}: {words}: {type(error).__name__}: {error}") from error


@pytest.mark.parametrize(("name", "file"), quick(DOCUMENTS))
def test_a_document_of_another_shape_is_read_or_named(forge: Callable[[str], Path], name: str, file: str) -> None:
    check_documents(forge, name, file, at_most=5)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "file"), DOCUMENTS)
def test_more_documents_of_another_shape(forge: Callable[[str], Path], name: str, file: str) -> None:
    check_documents(forge, name, file, at_most=15)


@pytest.mark.parametrize(("name", "file"), [each for each in quick(DOCUMENTS) if each[1] != MANIFEST])
def test_a_document_that_is_no_object_is_named(forge: Callable[[str], Path], name: str, file: str) -> None:
    folder = forge(name)
    for whole in (5, [], {}):
        (folder / file).write_text(json.dumps(whole))
        reseal(folder)
        assert file in outcome(folder, name), whole


# ---- Parquet ----


def changed_tables(table: pa.Table) -> Iterator[tuple[str, pa.Table]]:
    """Copies of a table with one thing changed, each with words for it."""
    for place, name in enumerate(table.column_names):
        column = table[name]
        yield f"without {name}", table.drop_columns([name])
        kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
        nulls = pa.array([None, *column.to_pylist()[1:]], kind)
        yield f"a null in {name}", table.set_column(place, name, nulls)
        for other in (pa.int64(), pa.float64(), pa.string(), pa.list_(pa.int64()), pa.bool_()):
            if other != column.type and not (other == pa.string() and pa.types.is_dictionary(column.type)):
                filled = {"string": "5", "bool": True, "list<item: int64>": [5]}.get(str(other), 5)
                yield f"{name} as {other}", table.set_column(place, name, pa.array([filled] * len(table), other))
        if column.type == pa.int64():
            for number in (0, -(1 << 63), (1 << 63) - 1):
                yield f"{name} = {number}", table.set_column(place, name, pa.array([number] * len(table), pa.int64()))
    yield "reversed", table.take(list(range(len(table)))[::-1])
    yield "empty", table.slice(0, 0)
    yield "cut", table.slice(1)
    yield "twice", pa.concat_tables([table, table])


def check_tables(forge: Callable[[str], Path], name: str, file: str, at_most: int) -> set[str]:
    """Tries `at_most` changes of a table, of all kinds; says which were refused."""
    folder, refused = forge(name), set()
    changes = list(changed_tables(pq.read_table(folder / file)))
    for words, table in changes[:: max(1, len(changes) // at_most)]:
        pq.write_table(table, folder / file)
        reseal(folder)
        try:
            refused |= {words} if outcome(folder, name) else set()
        except Exception as error:
            raise AssertionError(f"{name}/{file}: {words}: {type(error).__name__}: {error}") from error
    return refused


@pytest.mark.parametrize(("name", "file"), quick(TABLES))
def test_a_table_of_another_shape_is_read_or_named(forge: Callable[[str], Path], name: str, file: str) -> None:
    check_tables(forge, name, file, at_most=5)


def test_events_without_a_key_are_refused(forge: Callable[[str], Path]) -> None:
    keys = ("user_id", "item_id", "time_ms", "action", "surface")
    wanted = {
        "reversed",
        "empty",
        "cut",
        "twice",
        *(f"{how} {key}" for key in keys for how in ("without", "a null in")),
    }
    assert wanted <= check_tables(forge, "dataset-v1", "events.parquet", at_most=1000)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "file"), TABLES)
def test_more_tables_of_another_shape(forge: Callable[[str], Path], name: str, file: str) -> None:
    check_tables(forge, name, file, at_most=15)


@pytest.mark.parametrize(("column", "sorted_by"), [("time_ms", "user_id and time_ms"), ("user_id", "user_id")])
def test_train_refuses_events_that_are_not_sorted(forge: Callable[[str], Path], column: str, sorted_by: str) -> None:
    folder = forge("dataset-v1")
    table = pq.read_table(folder / "events.parquet")
    place = table.column_names.index(column)
    values = table[column].to_numpy().copy()
    values[[0, 1]] = (values[1] + 1, values[0]) if column == "time_ms" else (values[-1], values[0])
    pq.write_table(table.set_column(place, column, pa.array(values)), folder / "events.parquet")
    reseal(folder)
    with pytest.raises(CorruptFileError, match=rf"events\.parquet is not sorted by {sorted_by}"):
        read_dataset(folder)


def test_a_file_that_is_no_parquet_is_named(forge: Callable[[str], Path]) -> None:
    for name, file in quick(TABLES):
        folder = forge(name)
        whole = (folder / file).read_bytes()
        for data in (
            b"",
            b"PAR1",
            whole[:-9],
            whole[: len(whole) // 2] + whole[-200:],
            b"PAR1" + b"\xff" * 64 + b"PAR1",
        ):
            (folder / file).write_bytes(data)
            reseal(folder)
            outcome(folder, name)
        if file == "events.parquet":
            assert file in outcome(folder, name)


# ---- safetensors ----


def write_header(path: Path, header: bytes, data: bytes) -> None:
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


@pytest.mark.parametrize(("name", "file"), quick(TENSORS))
def test_a_lying_header_of_tensors_is_named(forge: Callable[[str], Path], name: str, file: str) -> None:
    folder = forge(name)
    whole = (folder / file).read_bytes()
    length = struct.unpack("<Q", whole[:8])[0]
    header, data = json.loads(whole[8 : 8 + length]), whole[8 + length :]
    first = next(key for key in header if key != "__metadata__")
    entry = header[first]
    others = {key: value for key, value in header.items() if key != first}
    lies: list[Any] = [
        {},
        [],
        others,
        others | {"another": entry},
        others | {"../x": entry},
        header | {"more": {"dtype": "F32", "shape": [0], "data_offsets": [len(data), len(data)]}},
        *(
            others | {first: entry | {"shape": shape}}
            for shape in ([], [1], [-1], [1 << 40, 1 << 40], [10**30], "x", None)
        ),
        *(others | {first: entry | {"dtype": kind}} for kind in ("F64", "I8", "BOOL", "F8_E5M2", "C64", "x", None)),
        *(others | {first: entry | {"data_offsets": at}} for at in ([0, 1 << 50], [5, 1], [-1, 4], [], None)),
        header | {"__metadata__": 5},
    ]
    for lie in lies:
        write_header(folder / file, json.dumps(lie).encode(), data)
        reseal(folder)
        message = outcome(folder, "optimizer" if "optimizer" in file else name)
        assert message or "optimizer" in file or lie == lies[-1] or "F8" in str(lie), lie
    for broken in (
        b"",
        whole[:7],
        struct.pack("<Q", 1 << 62) + whole[8:],
        whole[:8] + b"{" * length + data,
        whole[:-4],
    ):
        (folder / file).write_bytes(broken)
        reseal(folder)
        assert outcome(folder, "optimizer" if "optimizer" in file else name)


@pytest.mark.parametrize("name", ["bundle-v1", "bundle-v2"])
def test_numbers_that_are_not_finite_are_named(forge: Callable[[str], Path], name: str) -> None:
    folder = forge(name)
    tensors = load_file(folder / "dense.safetensors")
    tensors[min(tensors)].view(-1)[0] = np.nan
    save_file(tensors, folder / "dense.safetensors")
    reseal(folder)
    assert f"{min(tensors)} holds numbers that are not finite" in outcome(folder, name)


# ---- sizes and names ----


@pytest.mark.parametrize(
    "setting", ["hashing.num_rows", "table_dim", "width", "num_layers", "num_time_buckets", "mlp_ratio"]
)
@pytest.mark.parametrize(("name", "file"), [("bundle-v2", "signature.json"), ("checkpoint-v1", "state.json")])
def test_a_config_cannot_ask_for_more_than_is_stored(
    forge: Callable[[str], Path], name: str, file: str, setting: str
) -> None:
    """Nothing of that size is made: neither a petabyte of a table nor a million layers."""
    folder = forge(name)
    content = json.loads((folder / file).read_text())
    for described in [content["model"], *([content["config"]["model"]] if "config" in content else [])]:
        place = described["config"]
        *tables, last = setting.split(".")
        for table in tables:
            place = place[table]
        place[last] = PETABYTE_ROWS
    (folder / file).write_text(json.dumps(content))
    reseal(folder)
    message = outcome(folder, name)
    assert str(folder / file) in message


def test_a_table_by_its_changed_rows_cannot_ask_for_more_than_the_memory(forge: Callable[[str], Path]) -> None:
    folder = forge("checkpoint-v2")
    content = json.loads((folder / "state.json").read_text())
    content["fresh_rows"]["item_tables.weight"]["num_rows"] = 2 * PETABYTE_ROWS
    for described in (content["model"], content["config"]["model"]):
        described["config"]["tables"]["num_rows"] = PETABYTE_ROWS
        described["config"]["tables"]["dim"] = 4
    (folder / "state.json").write_text(json.dumps(content))
    reseal(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tackboard.models.changed_rows.available_memory_bytes", lambda: 1 << 33)
        assert "holds a table of 2147483648 × 4, which needs 17.2 GB" in outcome(folder, "checkpoint-v2")


@pytest.mark.parametrize("rows", [[0, 0], [-5, 0], [0, 400], [3, 1]])
def test_positions_of_rows_are_checked_before_they_are_used(forge: Callable[[str], Path], rows: list[int]) -> None:
    folder = forge("checkpoint-v2")
    for file in ("tables.safetensors", "optimizer.safetensors"):
        tensors = load_file(folder / file)
        name = next(name for name in tensors if name.endswith(":rows"))
        tensors[name][0], tensors[name][-1] = rows
        save_file(tensors, folder / file)
    reseal(folder)
    assert str(folder / "tables.safetensors") in outcome(folder, "checkpoint-v2")


@pytest.mark.parametrize(
    "place",
    ["/etc/passwd", "../bundle-v2/dense.safetensors", "tables/../dense.safetensors", "dense.safetensors\0", "", None],
)
def test_a_signature_names_files_of_its_bundle_only(forge: Callable[[str], Path], place: Any) -> None:
    folder = forge("bundle-v2")
    content = json.loads((folder / "signature.json").read_text())
    content["tables"]["item_tables.weight"]["file"] = place
    (folder / "signature.json").write_text(json.dumps(content))
    reseal(folder)
    assert "signature.json is malformed: it names the file" in outcome(folder, "bundle-v2")


ODD_NAMES = [
    "/etc/passwd",
    "../dense.safetensors",
    "a/../b",
    "a//b",
    "./a",
    "a/",
    "",
    "a\\b",
    "a\0b",
    "a\nb",
    5,
    None,
    [],
    MANIFEST,
]


@pytest.mark.parametrize("name", ["bundle-v2", "checkpoint-v1", "dataset-v1"])
def test_odd_names_in_a_manifest_are_refused(
    forge: Callable[[str], Path], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = forge(name)
    content = {key: value for key, value in read_manifest(folder).items() if key != "sha256_of_the_above"}
    for odd in [*ODD_NAMES, content["files"][0]["name"]]:
        (folder / MANIFEST).write_bytes(
            seal(content | {"files": [*content["files"], content["files"][-1] | {"name": odd}]})
        )
        for read in (READERS[name], lambda path: verify(str(path), json_output=False)):
            with pytest.raises(CorruptFileError, match=r"MANIFEST\.json is malformed: it lists"):
                read(folder)


def test_what_is_sealed_may_be_no_json(forge: Callable[[str], Path]) -> None:
    folder = forge("bundle-v2")
    for text in (b"{", b"[" * 100_000, b'{"kind": ' + b"1" * 5000):
        sealed = seal({})
        body = text + sealed[2 : sealed.rindex(b": ") + 3]
        (folder / MANIFEST).write_bytes(body + hashlib.sha256(body).hexdigest().encode() + b'"\n}\n')
        with pytest.raises(CorruptFileError, match=r"MANIFEST\.json is corrupt"):
            Scorer.load(folder)
    number = b'{"format_version": ' + b"1" * 5000 + b"}"
    fresh = forge("bundle-v2")
    (fresh / "signature.json").write_bytes(number)
    reseal(fresh)
    assert "signature.json cannot be read as JSON" in outcome(fresh, "bundle-v2")


@pytest.mark.parametrize("snapshot", ["../dataset-v1", "/etc", "a/b", "", ".."])
def test_the_snapshot_of_a_lineage_is_one_folder(forge: Callable[[str], Path], snapshot: str) -> None:
    folder = forge("checkpoint-v1")
    content = json.loads((folder / "state.json").read_text())
    content["lineage"]["snapshot"] = snapshot
    (folder / "state.json").write_text(json.dumps(content))
    reseal(folder)
    assert "state.json is malformed: lineage.snapshot" in outcome(folder, "checkpoint-v1")


@pytest.mark.parametrize(
    "change", [{"num_items": 1 << 40}, {"num_items": 31}, {"num_users": 1}, {"num_styles": 1 << 50}, {"x": 1}]
)
def test_a_world_that_is_not_the_datasets_is_named(tmp_path: Path, change: dict[str, Any]) -> None:
    """The oracle makes as many items as truth.json says."""
    folder = write_world(WorldConfig(num_users=9, num_items=30, num_topics=3), tmp_path, "small")
    truth = json.loads((folder / "truth.json").read_text())
    (folder / "truth.json").write_text(json.dumps(truth | change))
    reseal(folder)
    sequences = load_sequences(folder)
    with pytest.raises(CorruptFileError, match=r"truth\.json is malformed"):
        score = oracle(sequences)
        assert score is not None
        score(held_out_events(sequences))
