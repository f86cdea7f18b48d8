from __future__ import annotations

import time

import pytest

from tackboard.bench.redis_server import RedisServer
from tackboard.core.errors import UsageError
from tackboard.events.sequence_store.redis_address import Keys, RedisAddress


def test_a_url_is_taken_apart_and_its_password_is_not_shown() -> None:
    place = RedisAddress.of("redis://me:secret@host:7000/2?prefix=users&protocol=3")
    assert (place.server, place.prefix) == ("redis://me:secret@host:7000/2?protocol=3", "users")
    assert str(place) == "redis://host:7000/2?prefix=users"
    assert RedisAddress.of("redis://host").prefix == "tackboard"
    with pytest.raises(UsageError, match="is not a number"):
        RedisAddress.of("redis://host:port/0")


def test_keys_of_each_version() -> None:
    assert Keys("a").of("gone") == "a:gone" and Keys("a", 1).of("gone") == "a:forgotten"
    assert Keys("a").user(-7, "head") == Keys("a", 1).user(-7, "head") == "a:{-7}:head"


def test_users_are_found_by_their_keys_and_others_are_not(redis_server: RedisServer) -> None:
    place = RedisAddress.of(f"{redis_server.url}?prefix=odd*[x]-{time.time_ns()}")
    keys = Keys(place.prefix)
    client = place.connect()
    for key in (keys.user(1, "head"), keys.user(-2, "columns"), keys.user(-2, "recent"), keys.of("{x}:head")):
        client.set(key, "")
    client.set(f"odd-y-{place.prefix[7:]}:{{3}}:head", "")
    assert sorted(keys.users_of(client)) == [-2, -2, 1]
    client.close()
