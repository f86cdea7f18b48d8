"""Puts the keys of a sequence store of some version, as a server held them then, into a server."""

from __future__ import annotations

import json
from base64 import b64decode
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parent


def load_redis(client: Any, version: int, prefix: str) -> None:
    """The store of a format version, under `prefix`."""
    content = json.loads((GOLDEN / f"sequences-v{version}-redis.json").read_text())
    for name, held in content.items():
        key = prefix + name.removeprefix("golden")
        if isinstance(held, dict):
            client.hset(key, mapping={b64decode(field): b64decode(value) for field, value in held.items()})
        else:
            client.sadd(key, *map(b64decode, held))
