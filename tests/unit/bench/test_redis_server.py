from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tackboard.bench.redis_server import RedisServer
from tackboard.core.errors import UsageError


def test_a_server_answers_survives_a_crash_and_ends(tmp_path: Path) -> None:
    if not RedisServer.is_installed():
        pytest.skip("NOT TESTED: there is no redis-server (apt-get install redis-server)")
    with RedisServer(tmp_path, appendfsync="always") as server:
        port = server.port
        for command in (b"SET a 1\r\n", b"GET a\r\n"):
            with socket.create_connection(("127.0.0.1", port), 5) as connection:
                connection.sendall(command)
                answer = connection.recv(64)
            server.kill()
            server.start()
        assert answer == b"$1\r\n1\r\n"
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), 5)


def test_no_server_says_how_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not RedisServer.is_installed()
    with pytest.raises(UsageError, match="apt-get install redis-server"):
        RedisServer(tmp_path)
