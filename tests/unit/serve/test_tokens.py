from __future__ import annotations

from pathlib import Path

import pytest

from tackboard.core.errors import UsageError
from tackboard.serve.tokens import TOKEN_VARIABLE, check_token, read_token


def test_the_file_comes_before_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    assert read_token(None) is None
    monkeypatch.setenv(TOKEN_VARIABLE, "from-the-environment")
    assert read_token(None) == "from-the-environment"
    (tmp_path / "token").write_text("from-the-file-0123\n")
    assert read_token(tmp_path / "token") == "from-the-file-0123"


def test_unusable_files_are_told(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name in ("absent", "empty", "binary"):
        with pytest.raises(UsageError, match=name):
            read_token(tmp_path / name)


def test_weak_tokens_are_refused_without_being_shown() -> None:
    check_token("0123456789abcdef")
    for token in ("short", "with a space in it", "not-ascii-täcken-xx", "line\nbreak-0123456789"):
        with pytest.raises(UsageError) as caught:
            check_token(token)
        assert token not in str(caught.value)
