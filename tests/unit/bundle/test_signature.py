"""The signature of a bundle: verified before it is believed, readable without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tackboard.bundle.signature import (
    FORMAT_VERSION,
    KIND,
    Signature,
    read_bundle,
    read_signature,
    write_signature,
)
from tackboard.core.errors import CorruptFileError, DataError
from tackboard.core.manifest import MANIFEST, write_manifest

SIGNATURE = Signature(
    format_version=FORMAT_VERSION,
    name="small",
    version="2",
    id_type="string",
    actions=("click", "save"),
    surfaces=("home",),
    max_history=8,
    model={"config_class": "tackboard.models.pinfm:PinFMConfig", "config": {}},
    tables={},
    lineage={"step": 3},
    reads=("history.item", "hour"),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "bundle"
    path.mkdir()
    write_signature(path, SIGNATURE)
    write_manifest(path, KIND)
    return path


def rewrite(folder: Path, changes: dict[str, Any]) -> None:
    """Changes the signature as its maker could: with a manifest that fits."""
    data = json.loads((folder / "signature.json").read_text()) | changes
    (folder / "signature.json").write_text(json.dumps({key: value for key, value in data.items() if value != "drop"}))
    (folder / MANIFEST).unlink()
    write_manifest(folder, KIND)


def test_round_trip(folder: Path) -> None:
    assert read_bundle(folder) == SIGNATURE


def test_version_1_says_nothing_of_what_it_reads(folder: Path) -> None:
    rewrite(folder, {"format_version": 1, "reads": "drop"})
    signature = read_bundle(folder)
    assert (signature.format_version, signature.reads) == (1, ())


def test_version_2_was_made_for_serving(folder: Path) -> None:
    rewrite(folder, {"format_version": 2, "purpose": "drop", "fresh_rows": "drop"})
    assert read_bundle(folder).purpose == "serving"


def test_the_signature_alone_is_read_without_the_other_files(folder: Path) -> None:
    (folder / "card.md").write_text("# small")
    with pytest.raises(CorruptFileError, match="not in the manifest"):
        read_bundle(folder)
    assert read_signature(folder) == SIGNATURE


def test_a_damaged_signature_is_named(folder: Path) -> None:
    text = (folder / "signature.json").read_text()
    (folder / "signature.json").write_text(text.replace("save", "save"[::-1]))
    with pytest.raises(CorruptFileError, match=r"signature\.json"):
        read_bundle(folder)


def test_a_newer_signature_is_refused_even_with_fields_we_do_not_know(folder: Path) -> None:
    rewrite(folder, {"format_version": 4, "quantum": True})
    with pytest.raises(DataError, match="signature version 4") as caught:
        read_bundle(folder)
    assert caught.value.fix == "use a newer tackboard"


@pytest.mark.parametrize(
    "changes",
    [
        {"quantum": True},
        {"id_type": "uuid"},
        {"max_history": "8"},
        {"actions": "click"},
        {"name": "drop"},
        {"version": 2},
        {"reads": "history.item"},
        {"reads": [3]},
        {"purpose": "fun"},
        {"fresh_rows": 3},
        {"tables": {"a.weight": {"file": "../../secret.safetensors"}}},
    ],
)
def test_what_is_no_signature_is_refused_by_name(folder: Path, changes: dict[str, Any]) -> None:
    rewrite(folder, changes)
    with pytest.raises(CorruptFileError, match=r"signature\.json is malformed"):
        read_bundle(folder)


def test_a_folder_that_is_no_bundle_is_refused(tmp_path: Path) -> None:
    write_manifest(tmp_path, "dataset")
    with pytest.raises(DataError, match="is a dataset"):
        read_bundle(tmp_path)
    with pytest.raises(DataError, match="is not a folder"):
        read_bundle(tmp_path / "absent")


def test_reading_needs_no_torch(folder: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tackboard.bundle.signature import read_bundle;"
        f"read_bundle(Path({str(folder)!r})); sys.exit('torch' in sys.modules)"
    )
    source = Path(__file__).parents[3] / "src"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(source)}, check=False).returncode == 0


def test_a_run_given_as_a_bundle_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(DataError, match="is a run") as caught:
        read_bundle(tmp_path)
    assert "tackboard export" in caught.value.fix
