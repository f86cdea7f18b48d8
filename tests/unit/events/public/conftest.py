"""Files in the formats of publishers, made by hand: no row of a publisher's dataset is in this project."""

from __future__ import annotations

import dataclasses
import os
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tackboard.events.dataset import Dataset, open_dataset
from tackboard.events.public.publisher import PublicDataset, PublishedCounts, import_public

ROOT = Path(__file__).resolve().parents[4]
VARIABLE = "TACKBOARD_PUBLIC_DATA"
"""Names the folder of downloaded datasets; without it, one beside the checkout is looked for."""


@pytest.fixture(scope="session")
def public_data() -> Path:
    """The folder of real downloads; skips where there is none."""
    folder = Path(os.environ.get(VARIABLE) or ROOT.parent / "shared" / "data")
    if not folder.is_dir():
        pytest.skip(f"no public datasets in {folder}: set {VARIABLE} to the folder of your downloads")
    return folder


@pytest.fixture
def import_tiny(tmp_path: Path) -> Callable[..., Dataset]:
    """`import_tiny(public, files, counts, zipped=…)` imports files given as name → content as that dataset."""

    def run(
        public: PublicDataset, files: Mapping[str, str | bytes], counts: tuple[int, int, int], *, zipped: bool = True
    ) -> Dataset:
        contents = {name: text.encode() if isinstance(text, str) else text for name, text in files.items()}
        if zipped:
            given = tmp_path / "download.zip"
            with zipfile.ZipFile(given, "w") as archive:
                for name, data in contents.items():
                    archive.writestr(name, data)
        else:
            given = tmp_path / "download"
            for name, data in contents.items():
                (given / name).parent.mkdir(parents=True, exist_ok=True)
                (given / name).write_bytes(data)
        small = dataclasses.replace(public, counts=PublishedCounts(*counts))
        path, _ = import_public(small, [given], tmp_path / "datasets")
        return open_dataset(path)

    return run
