"""The listening socket, with real connections and a real lack of descriptors."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tackboard.serve.listener import Listener


class Echo(asyncio.Protocol):
    """Says back what it hears."""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    """Lowers the limit to the descriptors that are open, so that `accept` gets none."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open(os.devnull, os.O_RDONLY)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


class Bench:
    """A listener, its address and what it reported."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.num_errors = 0
        self.droppable: list[socket.socket] = []
        self.listener = Listener(self.socket, Echo, drop_one=self.drop_one, on_error=self.count)
        self.listener.start()

    def count(self) -> None:
        self.num_errors += 1

    def drop_one(self) -> bool:
        if not self.droppable:
            return False
        self.droppable.pop().close()
        return True

    def client(self) -> socket.socket:
        made = socket.socket()
        made.setblocking(False)
        return made

    async def hears(self, client: socket.socket, timeout_s: float = 5.0) -> bool:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(client, b"hello")
        try:
            return await asyncio.wait_for(loop.sock_recv(client, 10), timeout_s) == b"hello"
        except TimeoutError:
            return False

    async def end(self) -> None:
        self.listener.stop()
        self.socket.close()
        await asyncio.sleep(0.01)


def test_every_connection_is_accepted() -> None:
    async def use() -> None:
        bench = Bench()
        clients = [bench.client() for _ in range(50)]
        for client in clients:
            await asyncio.get_running_loop().sock_connect(client, bench.socket.getsockname())
        assert all([await bench.hears(client) for client in clients])
        for client in clients:
            client.close()
        await bench.end()

    asyncio.run(use())


def test_without_descriptors_it_waits_and_says_so_once_a_second(caplog: pytest.LogCaptureFixture) -> None:
    async def use() -> None:
        bench = Bench()
        first, second = bench.client(), bench.client()
        await asyncio.get_running_loop().sock_connect(first, bench.socket.getsockname())
        assert await bench.hears(first)
        with no_descriptor_left():
            await asyncio.get_running_loop().sock_connect(second, bench.socket.getsockname())
            assert not await bench.hears(second, 0.5)
            assert await bench.hears(first), "an established connection is served meanwhile"
        assert 2 <= bench.num_errors <= 10
        assert await asyncio.get_running_loop().sock_recv(second, 10) == b"hello", "it recovers by itself"
        first.close()
        second.close()
        await bench.end()

    with caplog.at_level(logging.WARNING):
        asyncio.run(use())
    assert [record.getMessage() for record in caplog.records] == [
        f"cannot accept a connection: {os.strerror(errno.EMFILE)} (1 times since the start)"
    ]
    assert caplog.records[0].exc_info is None


def test_what_can_be_missed_is_dropped_for_a_newcomer() -> None:
    async def use() -> None:
        bench = Bench()
        bench.droppable = [bench.client(), bench.client()]
        client = bench.client()
        with no_descriptor_left():
            await asyncio.get_running_loop().sock_connect(client, bench.socket.getsockname())
            assert await bench.hears(client)
        assert (bench.num_errors, len(bench.droppable)) == (1, 1)
        bench.droppable.pop().close()
        client.close()
        await bench.end()

    asyncio.run(use())


def test_nothing_is_accepted_after_the_stop_not_even_from_a_pause() -> None:
    async def use() -> None:
        bench = Bench()
        client = bench.client()
        with no_descriptor_left():
            await asyncio.get_running_loop().sock_connect(client, bench.socket.getsockname())
            assert not await bench.hears(client, 0.05)
            bench.listener.stop()
        assert bench.num_errors == 1
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 10), 0.3)
        client.close()
        await bench.end()

    asyncio.run(use())
