from __future__ import annotations

import json
import re
from pathlib import Path

from tackboard.serve.errors import RequestError, bad_request, error_body, shown


def test_the_body_has_the_one_key_that_clients_read() -> None:
    assert json.loads(error_body("no such model")) == {"error": "no such model"}


def test_text_that_is_not_unicode_still_makes_a_body() -> None:
    assert json.loads(error_body("lone \ud800 surrogate")) == {"error": "lone ? surrogate"}


def test_headers_follow_the_refusal() -> None:
    assert RequestError(429, "full", retry_after_s=3).headers() == [(b"retry-after", b"3")]
    assert RequestError(503, "draining", close=True).headers() == [(b"connection", b"close")]
    assert RequestError(405, "no", allow="GET").headers() == [(b"allow", b"GET")]
    assert RequestError(401, "no").headers() == [(b"www-authenticate", b"Bearer")]
    assert bad_request("no").headers() == []


def test_every_status_used_is_in_the_table() -> None:
    root = Path(__file__).resolve().parents[3]
    sources = "".join(path.read_text() for path in (root / "src/tackboard/serve").glob("*.py"))
    used = set(re.findall(r"(?:RequestError|_stop_parser|_refuse|_end)\((\d{3})", sources))
    page = (root / "docs" / "serving.md").read_text(encoding="utf-8")
    assert len(used) >= 12 and not [status for status in used if status not in page]


def test_a_name_is_shown_short_and_harmless() -> None:
    assert shown("score") == "'score'"
    assert shown("a\r\nb") == "'a\\r\\nb'"
    assert len(shown("x" * 10_000)) <= 70
    assert shown(12) == "'int'"
