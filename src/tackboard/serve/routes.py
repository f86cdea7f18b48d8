"""Finds the call that a path names: takes the raw path and returns a `Route`.

Each segment is unquoted exactly once, after the path was split, so that an encoded slash never makes a new segment.
Names are looked up among the loaded models and never touch a file system. A segment with a slash, a backslash, `..` or
a control character is refused anyway.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

from tackboard.serve.errors import RequestError, bad_request

_MODEL_CALLS = {"": ("metadata", "GET"), "ready": ("ready", "GET"), "infer": ("infer", "POST")}
_MODEL_CALLS |= {"config": ("config", "GET"), "stats": ("stats", "GET")}
_SERVER_CALLS = {
    ("v2",): "server_metadata",
    ("v2", "health", "live"): "live",
    ("v2", "health", "ready"): "server_ready",
    ("v2", "models", "stats"): "all_stats",
    ("metrics",): "metrics",
}


@dataclass(frozen=True, slots=True)
class Route:
    """One call; `model` and `version` may be empty."""

    call: str
    model: str = ""
    version: str = ""


def find_route(method: str, raw_path: bytes) -> Route:
    """Finds the call of a method and path. Raises 404 for unknown paths, 405 for wrong methods, 400 for bad names."""
    segments = tuple(_unquote(part) for part in raw_path.strip(b"/").split(b"/"))
    if segments in _SERVER_CALLS:
        return _checked(method, "GET", Route(_SERVER_CALLS[segments]))
    if len(segments) >= 3 and segments[:2] == ("v2", "models") and segments[2]:
        model, rest = segments[2], segments[3:]
        version = ""
        if len(rest) >= 2 and rest[0] == "versions":
            version, rest = rest[1], rest[2:]
        if len(rest) <= 1 and (rest[0] if rest else "") in _MODEL_CALLS:
            call, allowed = _MODEL_CALLS[rest[0] if rest else ""]
            return _checked(method, allowed, Route(call, model, version))
    raise RequestError(404, "this path does not exist; GET /v2 describes the server")


def is_plain_name(text: str) -> bool:
    """Returns whether `text`, as the name of a model or version, can be part of a URL."""
    return text.isprintable() and text not in ("", ".") and not any(part in text for part in ("/", "\\", ".."))


def _checked(method: str, allowed: str, route: Route) -> Route:
    # HEAD is GET without the body; load balancers probe a server with HEAD.
    if method != allowed and (method, allowed) != ("HEAD", "GET"):
        raise RequestError(405, f"this path takes {allowed} only", allow=allowed)
    return route


def _unquote(part: bytes) -> str:
    try:
        text = unquote_to_bytes(part).decode("utf-8")
    except UnicodeDecodeError:
        raise bad_request("a name in the path is not UTF-8") from None
    if text and not is_plain_name(text):
        raise bad_request("a name in the path is '.', or holds a slash, a backslash, '..' or a control character")
    return text
