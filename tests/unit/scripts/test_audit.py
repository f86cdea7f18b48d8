"""The audit reads licences from metadata, asks for advisories where it can, and says loudly where it cannot."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import audit
from lock import Pin

PACKAGES = [audit.Package("good", "1.0", "MIT"), audit.Package("bad", "2.0", "MIT"), audit.Package("old", "1.0", "MIT")]


def page(version: str, *found: dict[str, Any]) -> dict[str, Any]:
    return {"info": {"version": version}, "vulnerabilities": list(found)}


# `good` has a page for its version, `bad` only one for its newest version, which it is; `old` is not the newest.
PAGES = {
    "/pypi/good/1.0/json": page("1.0", {"id": "PYSEC-0", "fixed_in": [], "withdrawn": "2026-01-01T00:00:00Z"}),
    "/pypi/bad/json": page("2.0", {"id": "PYSEC-1", "fixed_in": ["2.1"]}, {"id": "PYSEC-2", "fixed_in": []}),
    "/pypi/old/json": page("3.0", {"id": "PYSEC-3", "fixed_in": []}),
}


class Pages(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path in PAGES else 404)
        self.end_headers()
        self.wfile.write(json.dumps(PAGES.get(self.path)).encode())

    def log_message(self, *_words: object) -> None:
        pass


@pytest.fixture
def source() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Pages) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/pypi"
        server.shutdown()


@pytest.mark.parametrize(
    ("expression", "text", "classifiers", "licence"),
    [
        ("Apache-2.0 AND MIT", "", ["License :: OSI Approved :: BSD License"], "Apache-2.0 AND MIT"),
        ("", "Apache 2.0", [], "Apache-2.0"),
        ("", "BSD 3-Clause License\n\nCopyright (c) 2008", [], "BSD-3-Clause"),
        ("", "", ["Topic :: X", "License :: OSI Approved :: MIT License"], "MIT"),
        (
            "",
            "",
            ["License :: OSI Approved :: GNU General Public License v3 (GPLv3)"],
            "GNU General Public License v3 (GPLv3)",
        ),
        ("", "", ["License :: DFSG approved"], "not stated"),
    ],
)
def test_licence_is_read_from_the_metadata(expression: str, text: str, classifiers: list[str], licence: str) -> None:
    assert audit.licence_of("x", expression, text, classifiers) == licence


def test_what_nvidia_does_not_state_is_taken_for_its_own_terms() -> None:
    assert audit.licence_of("nvidia-nccl-cu13", "", "", []) == "LicenseRef-NVIDIA-Proprietary"


@pytest.mark.parametrize(
    ("licence", "allowed"),
    [
        ("MPL-2.0 AND (Apache-2.0 OR MIT)", True),
        ("Apache-2.0 AND Apache-2.0 WITH LLVM-exception AND BSD", True),
        ("MIT AND GPL-3.0-only", False),
        ("MIT OR AGPL-3.0-only", False),
        ("GNU General Public License v3 (GPLv3)", False),
        ("not stated", False),
        ("", False),
    ],
)
def test_every_licence_of_an_expression_must_be_on_the_list(licence: str, allowed: bool) -> None:
    assert audit.is_allowed(licence) is allowed


def test_advisories_speak_of_the_installed_version_or_are_unknown(
    source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit.report_advisories(PACKAGES, source)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "VULNERABLE: bad 2.0: PYSEC-1 (fixed in 2.1); PYSEC-2 (fixed in no version)",
        "advisories: 2 packages looked up, 1 with a known vulnerability",
        "ADVISORIES UNKNOWN for 1 (no page for the version, or no time left): old",
    ]


def test_what_is_not_answered_in_time_is_unknown(
    source: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "ADVISORY_LIMIT_S", -1)
    assert not audit.report_advisories(PACKAGES, source)
    assert "ADVISORIES UNKNOWN for 3" in capsys.readouterr().out


def prepared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, packages: list[audit.Package], pin: Pin) -> None:
    """An audit of these packages, all of them in a lock with this pin, and in the table."""
    monkeypatch.setattr(audit, "installed_packages", lambda: packages)
    monkeypatch.setattr(audit, "read_locks", lambda: {package.name: pin for package in packages})
    monkeypatch.setattr(audit, "TABLE", tmp_path / "licences.md")
    audit.TABLE.write_text(audit.table(packages))


def test_a_vulnerability_is_an_error_only_if_asked_for(
    source: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    prepared(monkeypatch, tmp_path, PACKAGES[1:2], Pin("2.0", frozenset("a")))
    assert audit.audit(source, strict=False) == 0
    assert audit.audit(source, strict=True) == 1


def test_without_a_network_the_rest_is_checked_and_the_gap_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nobody = "http://127.0.0.1:9/pypi"
    prepared(monkeypatch, tmp_path, PACKAGES, Pin("1.0", frozenset("a")))
    assert audit.audit(nobody, strict=True) == 0
    assert "ADVISORIES SKIPPED" in capsys.readouterr().out

    prepared(monkeypatch, tmp_path, [audit.Package("x", "1.0", "GPL-3.0-only")], Pin("1.0", frozenset("a")))
    assert audit.audit(nobody, strict=False) == 1
    output = capsys.readouterr()
    assert "GPL-3.0-only   <- NOT ON THE LIST" in output.out
    assert "error: licence not on the list: x" in output.err


def test_a_lock_without_a_hash_and_an_old_table_are_errors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nobody = "http://127.0.0.1:9/pypi"
    prepared(monkeypatch, tmp_path, PACKAGES[:1], Pin("1.0", frozenset("a")))
    audit.TABLE.write_text(audit.table([audit.Package("good", "1.0", "ISC")]))
    assert audit.audit(nobody, strict=False) == 1
    assert "docs/licences.md is outdated: good" in capsys.readouterr().err

    monkeypatch.setattr(audit, "outdated_rows", lambda _packages: [])
    for group in (*audit.RESOLVED, *audit.BY_HAND):
        (tmp_path / f"{group}.txt").write_text("x==1.0\n" if group == "dev" else "")
    monkeypatch.setattr(audit, "REQUIREMENTS", tmp_path)
    assert audit.audit(nobody, strict=False) == 1
    assert "no hash in the lock: dev.txt: x" in capsys.readouterr().err


def test_the_table_is_not_written_from_half_an_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared(monkeypatch, tmp_path, PACKAGES, Pin("1.0", frozenset("a")))
    before = audit.TABLE.read_text()
    assert audit.write_table(PACKAGES) == 2
    assert "not installed: torch" in capsys.readouterr().err
    assert audit.TABLE.read_text() == before
    assert audit.write_table([*PACKAGES, audit.Package("torch", "2.13.0", "BSD")]) == 0
    assert "| torch | 2.13.0 | BSD |" in audit.TABLE.read_text()


def test_this_environment_is_read() -> None:
    packages = {package.name: package for package in audit.installed_packages()}
    assert "tackboard" not in packages
    assert "+" not in packages["torch"].version
    assert packages["numpy"].licence.startswith("BSD-3-Clause")
