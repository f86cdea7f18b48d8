"""Defines what a client is told when its request is not answered with scores.

A `RequestError` carries an HTTP status and one sentence. The application sends `{"error": sentence}`, the only shape
that Open Inference Protocol clients can decode. Decided: overload is 429 and never 503, because a 5xx makes load
balancers eject a healthy host and makes some clients retry at once; 503 means that the server shuts down or is stuck.
"""

from __future__ import annotations

import orjson


class RequestError(Exception):
    """Says why a request gets no scores. docs/serving.md lists each `status`; `message` is a sentence for the client.

    `retry_after_s` and `allow` become headers. `close` ends the connection after the answer. If a full, late or
    draining server refuses a request, `reason` is the label under which a metric counts this refusal.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        reason: str = "",
        retry_after_s: int | None = None,
        allow: str = "",
        close: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.reason = reason
        self.retry_after_s = retry_after_s
        self.allow = allow
        self.close = close

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Returns the HTTP headers of this refusal, in addition to the headers of every answer."""
        found: list[tuple[bytes, bytes]] = []
        if self.retry_after_s is not None:
            found.append((b"retry-after", str(self.retry_after_s).encode()))
        if self.allow:
            found.append((b"allow", self.allow.encode()))
        if self.status == 401:
            found.append((b"www-authenticate", b"Bearer"))
        if self.close:
            found.append((b"connection", b"close"))
        return found


def bad_request(message: str) -> RequestError:
    """Returns a refusal with status 400."""
    return RequestError(400, message)


def error_body(message: str) -> bytes:
    """Returns `{"error": message}` as bytes; characters that UTF-8 cannot encode are replaced."""
    return orjson.dumps({"error": message.encode("utf-8", "replace").decode("utf-8")})


def shown(name: object) -> str:
    """Makes a name from the client safe to repeat: cut to 64 characters, then quoted and escaped."""
    text = name if isinstance(name, str) else type(name).__name__
    cut = text if len(text) <= 64 else text[:61] + "..."
    return ascii(cut)
