"""Migrates a store of version 1 to the present version. Each block gets a seal (see `sealing`); no event changes.

The store is verified first, so that contradictory data does not get a seal. An SQLite file is rewritten in one
transaction. If the command is killed, the file is unchanged, and the next call starts from the beginning. On Redis,
each user is rewritten all or nothing. If the command is killed, the store cannot be opened until the same command runs
again and migrates the remaining users. On Redis the command needs memory for the events of one user. For a file, the
command needs memory for SQLite's cache. Until the command ends, it also needs free disk space of twice the file's size.
The notes on the progress of an unfinished correction (correction.py) are dropped, so the next correction starts from
the beginning.

Decided: migration is an explicit command, because an older tackboard cannot read the store afterwards. A process that
still runs an older version gets an error. In a file, this is because the tables have new names. On Redis, it is because
a key that older versions read has a different type.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tackboard.core.files import reach
from tackboard.events.sequence_store.codec import FORMAT_VERSION
from tackboard.events.sequence_store.config import StoreConfig
from tackboard.events.sequence_store.interface import NAMED
from tackboard.events.sequence_store.opening import is_redis, open_store
from tackboard.events.sequence_store.redis import MIGRATING, RedisStore, registry_entry
from tackboard.events.sequence_store.redis_address import PARTS, SCAN_COUNT, Keys, RedisAddress
from tackboard.events.sequence_store.sealing import (
    UNSEALED_VERSION,
    Seals,
    event_key,
    open_settings,
    seal_settings,
    split_event_key,
)
from tackboard.events.sequence_store.sqlite import SCHEMA, SqliteStore
from tackboard.events.sequence_store.verification import Verified, verify_store

Row = tuple[Any, ...]


def migrate_store(url: str | Path) -> Verified | None:
    """Migrates the store at `url`; returns the counts of `verify_store`, or None if no migration is needed."""
    if is_redis(url) and _is_half_done(RedisAddress.of(str(url))):
        _migrate_redis(RedisAddress.of(str(url)))
    else:
        with open_store(url) as store:
            if store.seals.version == FORMAT_VERSION:
                return None
            verify_store(store)
            if isinstance(store, SqliteStore):
                _migrate_sqlite(store)
            elif isinstance(store, RedisStore):
                _migrate_redis(store.place)
    with open_store(url) as store:
        return verify_store(store)


# ---- a file ----


def _migrate_sqlite(store: SqliteStore) -> None:
    seals = Seals(store.url, store.seals.salt)
    with store.rewriting() as db:
        if db.execute("PRAGMA user_version").fetchone() != (UNSEALED_VERSION,):
            return  # Another process has migrated the store already.
        for statement in SCHEMA.split(";"):
            db.execute(statement.replace("CREATE TABLE ", "CREATE TABLE main."))
        for table, rows in _sealed_tables(db, seals, store.config).items():
            for row in rows:
                db.execute(f"INSERT INTO main.{table} VALUES ({', '.join('?' * len(row))})", row)
                reach(f"migration:{table}")
        for table in ("meta", "names", "forgotten", "users", "recent", "columns"):
            db.execute(f"DROP TABLE main.{table}")
        db.execute(f"PRAGMA user_version = {FORMAT_VERSION}")


def _sealed_tables(db: sqlite3.Connection, seals: Seals, config: StoreConfig) -> dict[str, Iterator[Row]]:
    """Returns the rows of each table of the present version. The views `temp.*` show the old tables."""
    names = list(config.columns)
    settings = seal_settings(seals.where, seals.salt, config.to_json())
    words = db.execute("SELECT kind, name, code FROM temp.words")
    counts = db.execute("SELECT kind, CAST('' AS BLOB), count(*) FROM temp.words GROUP BY kind")
    gone = db.execute("SELECT digest, forgotten_ms FROM temp.gone")
    heads = db.execute("SELECT user_id, head FROM temp.heads ORDER BY user_id")
    old = Seals(seals.where, seals.salt, UNSEALED_VERSION)
    buffer = db.execute("SELECT user_id, time_ms, event, value FROM temp.buffer")
    blocks = db.execute("SELECT user_id, number, chunk, data FROM temp.blocks")
    return {
        "settings": iter(settings.items()),
        "words": (
            (kind, name, seals.seal_name(kind, name, code)) for rows in (words, counts) for kind, name, code in rows
        ),
        "gone": ((digest, seals.seal_forgotten(digest, at_ms)) for digest, at_ms in gone),
        "heads": ((user, seals.seal_head(user, old.open_head(user, head))) for user, head in heads),
        "buffer": ((row[0], *seals.seal_recent(row[0], old.open_recent(row[0], [row[1:]], 1)[0])) for row in buffer),
        "blocks": (
            (user, number, chunk, seals.seal_column(user, names[number], chunk, data))
            for user, number, chunk, data in blocks
        ),
    }


# ---- a server ----


def _is_half_done(place: RedisAddress) -> bool:
    with place.explained(), contextlib.closing(place.connect()) as client:
        return bool(client.hexists(Keys(place.prefix).of("meta"), MIGRATING))


def _migrate_redis(place: RedisAddress) -> None:
    """Migrates a store, or continues after a kill: finished steps are skipped or give the same result again."""
    new, old = Keys(place.prefix), Keys(place.prefix, UNSEALED_VERSION)
    with place.explained(), contextlib.closing(place.connect()) as client:
        settings = {key.decode(): value for key, value in client.hgetall(new.of("meta")).items()}
        seals, text = open_settings(str(place), UNSEALED_VERSION, settings)
        sealed = Seals(str(place), seals.salt)
        names = list(StoreConfig.from_json(text).columns)
        # From here on, neither an older tackboard nor this version opens the store.
        client.hset(new.of("meta"), mapping={"format_version": FORMAT_VERSION, MIGRATING: 1})
        reach("migration:begun")
        if client.type(old.of("gone")) == b"hash":
            for digest, value in client.hscan_iter(old.of("gone"), count=SCAN_COUNT):
                client.hset(new.of("gone"), digest, sealed.seal_forgotten(digest, int(value)))
        # An older client reads this key before it writes. So the older client gets an error and writes nothing.
        client.set(old.of("gone"), f"this store has format version {FORMAT_VERSION}")
        reach("migration:gone")
        for kind in NAMED:
            held = seals.open_names(kind, client.hgetall(old.of(f"words:{kind}")))
            codes = [(name.encode("utf-8", "surrogatepass"), code) for code, name in enumerate(held)]
            for name, code in [*codes, (b"", len(codes))] if codes else []:
                client.hset(new.of(f"words:{kind}"), name, sealed.seal_name(kind, name, code))
        reach("migration:words")
        for member in client.sscan_iter(old.of("registry"), count=SCAN_COUNT):
            _migrate_user(client, new, old, seals, sealed, int(member), names)
            reach("migration:user")
        with client.pipeline() as pipe:
            pipe.delete(old.of("registry"), *(old.of(f"words:{kind}") for kind in NAMED), new.of("notes"))
            pipe.hset(new.of("meta"), mapping=seal_settings(str(place), seals.salt, text))
            pipe.hdel(new.of("meta"), MIGRATING)
            reach("migration:before-commit")
            pipe.execute()


def _migrate_user(client: Any, new: Keys, old: Keys, seals: Seals, sealed: Seals, user: int, names: list[str]) -> None:
    """Rewrites a user and moves it from the old list of users to the new list, in one transaction."""
    head, recent, columns = (new.user(user, part) for part in PARTS)
    with client.pipeline() as pipe:
        directory = client.hget(head, "directory")
        pipe.delete(head)
        if directory is not None:
            pipe.hset(head, "directory", sealed.seal_head(user, seals.open_head(user, directory)))
        held = [(*split_event_key(key), value) for key, value in client.hgetall(recent).items()]
        rows = seals.open_recent(user, held, len(held))
        pipe.hset(head, "recent", len(rows))
        # In the present version, arrival numbers begin at 0.
        for number, (time_ms, event, received_ms, _) in enumerate(sorted(rows, key=lambda row: row[3])):
            _, _, value = sealed.seal_recent(user, (time_ms, event, received_ms, number))
            pipe.hset(recent, event_key(time_ms, event), value)
        for field, data in client.hgetall(columns).items():
            column, _, chunk = field.partition(b":")
            pipe.hset(columns, field, sealed.seal_column(user, names[int(column)], int(chunk), data))
        pipe.hset(new.of("registry"), user, registry_entry(sealed, user))
        pipe.srem(old.of("registry"), user)
        pipe.execute()
