"""Parses the URL of a store on Redis, names the store's keys, connects a client and explains the client's errors.

Decided: the option `?prefix=` belongs to Tackboard and is not sent to the client library. No error shows a password.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import re
import sys
import urllib.parse
from collections.abc import Iterator
from typing import Any

from tackboard.core.errors import StorageError, TackboardError, UsageError
from tackboard.events.sequence_store.codec import FORMAT_VERSION

DEFAULT_PREFIX = "tackboard"
TIMEOUT_S = 30.0
PARTS = ("head", "recent", "columns")
"""Each user has three keys, which end with these names."""
SCAN_COUNT = 1000
"""Number of keys or fields that one step of a scan asks the server for."""
_VERSION_1 = {
    "registry": "users",
    "gone": "forgotten",
    "words:action": "names:action",
    "words:surface": "names:surface",
}
"""Maps a key to its name in version 1. New names keep an older tackboard from writing to a migrated store."""


@dataclasses.dataclass(frozen=True)
class Keys:
    """Names of keys under one prefix."""

    prefix: str
    version: int = FORMAT_VERSION

    def of(self, name: str) -> str:
        """Returns the key `name`, which belongs to the whole store."""
        return f"{self.prefix}:{name if self.version == FORMAT_VERSION else _VERSION_1.get(name, name)}"

    def user(self, user_id: int, part: str) -> str:
        """Returns the key of one part (see PARTS) of a user."""
        return f"{self.prefix}:{{{user_id}}}:{part}"

    def users_of(self, client: Any) -> Iterator[int]:
        """Yields the users who have keys on the server. A user with several keys occurs several times."""
        prefix = re.sub(r"([\\*?\[\]])", r"\\\1", self.prefix)
        for key in client.scan_iter(f"{prefix}:{{*}}:*", count=SCAN_COUNT):
            found = re.fullmatch(rb"\{(-?\d+)\}:(?:head|recent|columns)", key[len(self.prefix.encode()) + 1 :])
            if found:
                yield int(found[1])


@dataclasses.dataclass(frozen=True)
class RedisAddress:
    """The address of a store: the server's URL without `?prefix=`, and the prefix of the store's keys."""

    server: str
    prefix: str
    shown: str
    """The URL as errors show it, without a password."""

    @classmethod
    def of(cls, url: str) -> RedisAddress:
        """Parses a URL."""
        if importlib.util.find_spec("redis") is None:
            raise UsageError(
                "a store on Redis needs the package redis, which is not installed",
                fix=f"{sys.executable} -m pip install 'redis>=7'",
            )
        parts = urllib.parse.urlsplit(url)
        options = urllib.parse.parse_qsl(parts.query)
        prefix = dict(options).get("prefix", DEFAULT_PREFIX)
        rest = urllib.parse.urlencode([option for option in options if option[0] != "prefix"])
        try:
            shown = f"{parts.scheme}://{parts.hostname or 'localhost'}:{parts.port or 6379}{parts.path}?prefix={prefix}"
        except ValueError:
            raise UsageError(
                "the port of the Redis URL is not a number up to 65535", allowed="redis://host:port/db?prefix=name"
            ) from None
        return cls(urllib.parse.urlunsplit(parts._replace(query=rest)), prefix, shown)

    def __str__(self) -> str:
        return self.shown

    def connect(self) -> Any:
        """Returns a client of the server. Nothing is sent yet."""
        import redis

        try:
            return redis.Redis.from_url(self.server, socket_timeout=TIMEOUT_S, socket_connect_timeout=5.0)
        except (ValueError, TypeError) as error:
            raise UsageError(f"{self}: {error}", allowed="allowed: redis://host:port/db?prefix=name") from None

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Turns errors of the client library into Tackboard errors."""
        from redis import exceptions

        try:
            yield
        except exceptions.AuthenticationError as error:
            raise UsageError(f"{self}: {error}", fix="give redis://user:password@host:port/db") from error
        except (exceptions.BusyLoadingError, exceptions.ConnectionError, exceptions.TimeoutError) as error:
            raise UsageError(
                f"no Redis server answers at {self}: {error}", fix="start one with `redis-server`, or correct the URL"
            ) from error
        except exceptions.OutOfMemoryError as error:
            raise StorageError(f"{self}: {error}", fix="raise maxmemory of the server") from error
        except exceptions.RedisError as error:
            raise TackboardError(f"{self}: {type(error).__name__}: {error}") from error
