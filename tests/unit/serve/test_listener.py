"""The listening socket, with real connections and a real lack of descriptors."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import socket
import threading
import time
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


@pytest.fixture(autouse=True)
def _nobody_else_closes_descriptors(stopping: list[threading.Thread]) -> None:
    """Servers of earlier tests may still be stopping in this process, which would make descriptors free."""
    for thread in stopping:
        thread.join(10)


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


class WithoutBuffers(socket.socket):
    """A socket whose `accept` fails, as it does when the machine, not this process, lacks something."""

    error = errno.ENOBUFS

    def accept(self) -> Any:
        raise OSError(self.error, os.strerror(self.error))


class Bench:
    """A listener, its address and what it reported."""

    def __init__(self, kind: type[socket.socket] = socket.socket) -> None:
        self.socket = kind()
        self.socket.bind(("127.0.0.1", 0))
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
    lasted_s: list[float] = []

    async def use() -> None:
        bench = Bench()
        first, second = bench.client(), bench.client()
        await asyncio.get_running_loop().sock_connect(first, bench.socket.getsockname())
        assert await bench.hears(first)
        started_s = time.monotonic()
        with no_descriptor_left():
            await asyncio.get_running_loop().sock_connect(second, bench.socket.getsockname())
            assert not await bench.hears(second, 0.5)
            assert await bench.hears(first), "an established connection is served meanwhile"
        lasted_s.append(time.monotonic() - started_s)
        assert 2 <= bench.num_errors <= lasted_s[0] / 0.1 + 2
        assert await asyncio.get_running_loop().sock_recv(second, 10) == b"hello", "it recovers by itself"
        first.close()
        second.close()
        await bench.end()

    with caplog.at_level(logging.WARNING):
        asyncio.run(use())
    assert caplog.records[0].getMessage() == (
        f"cannot accept a connection: {os.strerror(errno.EMFILE)} (1 times since the start)"
    )
    assert len(caplog.records) <= lasted_s[0] + 1
    assert not [record for record in caplog.records if record.exc_info]


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


@pytest.mark.parametrize(("error", "can_drop"), [(errno.ENFILE, True), (errno.ENOBUFS, True), (errno.EPERM, False)])
def test_a_lack_that_dropping_may_not_end_costs_one_connection_at_a_time(
    monkeypatch: pytest.MonkeyPatch, error: int, can_drop: bool
) -> None:
    monkeypatch.setattr(WithoutBuffers, "error", error)

    async def use() -> None:
        bench = Bench(WithoutBuffers)
        bench.droppable = [bench.client() for _ in range(50)]
        client = bench.client()
        await asyncio.get_running_loop().sock_connect(client, bench.socket.getsockname())
        started_s = time.monotonic()
        await asyncio.sleep(0.35)
        lasted_s = time.monotonic() - started_s
        assert 1 <= bench.num_errors <= lasted_s / 0.1 + 1, "there is a pause after each failure"
        assert 50 - len(bench.droppable) == (bench.num_errors if can_drop else 0)
        for left in (client, *bench.droppable):
            left.close()
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
        assert bench.num_errors >= 1
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 10), 0.3)
        client.close()
        await bench.end()

    asyncio.run(use())
