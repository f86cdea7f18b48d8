from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tackboard.core.hashing import string_id
from tackboard.events.sequence_store import StoreConfig, create_store


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "s.db"
    with create_store(path, StoreConfig(fields={"dwell": "float"})) as opened:
        for user in (42, string_id("ann")):
            opened.append(
                user,
                [
                    {"item_id": n, "action": "click", "surface": "home", "time_ms": n * 1000, "received_ms": 9000 - n}
                    for n in range(10)
                ],
            )
    return path


@pytest.mark.parametrize(
    ("options", "items"),
    [
        ((), list(range(10))),
        (("--last", "2"), [8, 9]),
        (("--since", "3000", "--until", "5000"), [3, 4]),
        (("--since", "1970-01-01T00:00:07Z"), [7, 8, 9]),
        (("--since", "1970-01-01T00:00:08"), [8, 9]),
        (("--received-before", "8993"), [8, 9]),
    ],
)
def test_a_user_by_number_or_name(
    tackboard: Callable[..., Any], store: Path, options: tuple[str, ...], items: list[int]
) -> None:
    for user in ("42", "ann"):
        answer = tackboard("sequences", "read", store, "--user", user, "--fields", "item_id", "--json", *options)
        assert answer.json() == {"num_events": len(items), "columns": {"item_id": items}}


def test_a_table_for_people(tackboard: Callable[..., Any], store: Path) -> None:
    answer = tackboard("sequences", "read", store, "--user", "ann", "--last", "1")
    assert [line.split() for line in answer.out.splitlines()] == [
        ["item_id", "action", "surface", "time_ms", "received_ms", "dwell"],
        ["9", "click", "home", "9000", "8991"],
    ]


def test_a_user_who_is_not_known_has_no_events(tackboard: Callable[..., Any], store: Path) -> None:
    answer = tackboard("sequences", "read", store, "--user", "nobody", "--json")
    assert answer.code == 0 and answer.json()["num_events"] == 0


def test_mistakes(tackboard: Callable[..., Any], store: Path, tmp_path: Path) -> None:
    for arguments, says in (
        ((store, "--user", "ann", "--since", "yesterday"), "--since 'yesterday'"),
        ((store, "--user", "ann", "--fields", "dwel"), "did you mean dwell?"),
        ((store, "--user", "ann", "--last", "0"), "--last"),
        ((tmp_path / "no.db", "--user", "ann"), "does not exist"),
    ):
        answer = tackboard("sequences", "read", *arguments)
        assert answer.code == 2 and says in answer.err and "ann" not in answer.err, answer
