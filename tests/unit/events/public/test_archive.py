from __future__ import annotations

import gzip
import zipfile
from pathlib import Path

import pyarrow as pa
import pytest

from tackboard.core.errors import DataError, UsageError
from tackboard.events.public.archive import Download


def zstd(data: bytes) -> bytes:
    return pa.Codec("zstd").compress(data, asbytes=True)


@pytest.fixture
def download(tmp_path: Path) -> Download:
    """An archive, a folder and two single files."""
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("set/one.txt", "first\n")
        archive.writestr("set/packed.csv.gz", gzip.compress(b"x,y\n"))
    (tmp_path / "more" / "deep").mkdir(parents=True)
    (tmp_path / "more" / "deep" / "two.txt").write_text("second\n")
    (tmp_path / "three.txt").write_bytes("dritter, Stück\n".encode("latin-1"))
    (tmp_path / "names.txt.zst").write_bytes(zstd(b"@a_1\n@b_2\n"))
    return Download([tmp_path / name for name in ("a.zip", "more", "three.txt", "names.txt.zst")])


def test_files_are_found_by_name_and_decompressed(download: Download, tmp_path: Path) -> None:
    assert download.names() == ["set/one.txt", "set/packed.csv", "more/deep/two.txt", "three.txt", "names.txt"]
    assert download.read("one.txt") == b"first\n"
    assert download.read("set/packed.csv") == b"x,y\n"
    assert download.text("deep/two.txt") == "second\n"
    assert download.text("names.txt") == "@a_1\n@b_2\n"
    assert download.text("three.txt", "latin-1") == "dritter, Stück\n"
    assert download.has("two.txt")
    assert not download.has("wo.txt")
    assert download.find("two.txt") == tmp_path / "more" / "deep" / "two.txt"
    assert download.find("one.txt") is None


def test_what_is_missing_twice_or_not_text_is_named(download: Download, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no file four.txt"):
        download.read("four.txt")
    (tmp_path / "more" / "one.txt").touch()
    with pytest.raises(DataError, match="holds 2 files one.txt"):
        Download(download.paths).read("one.txt")
    with pytest.raises(DataError, match="three.txt .*is not utf-8 text in line 1"):
        download.text("three.txt")
    with pytest.raises(UsageError, match="gone.zip does not exist"):
        Download([tmp_path / "gone.zip"])
    with pytest.raises(UsageError, match="no file"):
        Download([])


@pytest.mark.parametrize("kind", ["zip", "gz", "zst"])
def test_a_torn_file_is_named(tmp_path: Path, kind: str) -> None:
    content = bytes(range(256)) * 40
    if kind == "zip":
        path = tmp_path / "a.zip"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("one.bin", content)
        data = bytearray(path.read_bytes())
        data[2000] ^= 1
        path.write_bytes(data)
    else:
        path = tmp_path / f"one.bin.{kind}"
        path.write_bytes((gzip.compress(content) if kind == "gz" else zstd(content))[:-10])
    with pytest.raises(DataError, match=r"one\.bin.*cannot be read"):
        Download([path]).read("one.bin")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.zip", b"PK\x03\x04 torn"),
        ("download", b"PK\x03\x04 torn"),
        ("a.zip", b""),
        ("a.zip", b"<html>sign in</html>"),
    ],
)
def test_an_archive_that_ends_early_or_is_none_is_called_damaged(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"is damaged: .* ends early \({len(content)} bytes") as caught:
        Download([tmp_path / name])
    assert caught.value.fix == "download it again"
