"""A small client that asks a running server for scores. It needs only the standard library and NumPy.

The client speaks the Open Inference Protocol, as JSON or with binary tensors, and leaves nearly all checks to the
server. The server applies the same rules as offline scoring, and the user sees the server's error message.
"""

from __future__ import annotations

import http.client
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

import numpy as np
import numpy.typing as npt

from tackboard.core.config import suggest
from tackboard.core.errors import TackboardError, UsageError
from tackboard.scoring.request import HISTORY_FIELDS, PRESENT_SUFFIX

DEFAULT_PORT = 8000
REQUEST_SHAPE = 'allowed: {"history": [{"item", "action", "surface", "time_ms"}, ...], "candidates": [item, ...]}'
OPTIONAL_KEYS = ("request_time_ms", "user", "attributes")


class RequestDocument(NamedTuple):
    """Holds a request file: history columns, candidates, and further arguments of `RequestReader.read` by name."""

    history: dict[str, list[Any]]
    candidates: list[Any]
    more: dict[str, Any]


def read_request(text: str | bytes) -> RequestDocument:
    """Reads the text of a request file. Raises UsageError if the text is not a request.

    In addition to history and candidates, a request may hold the user, the request time, and a list per attribute.
    """
    try:
        request = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the request is not JSON: {error}", allowed=REQUEST_SHAPE) from None
    if not isinstance(request, dict):
        raise UsageError("the request is not a JSON object", allowed=REQUEST_SHAPE)
    needed = ("history", "candidates")
    _check_keys(request, (*needed, *OPTIONAL_KEYS), "the request", needed=needed)
    history, candidates = request["history"], request["candidates"]
    if not isinstance(candidates, list) or not isinstance(history, list):
        raise UsageError("history and candidates must be lists", allowed=REQUEST_SHAPE)
    for position, event in enumerate(history):
        if not isinstance(event, dict):
            raise UsageError(f"history event {position} is not an object", allowed=REQUEST_SHAPE)
        # A field must be given for every event or for none, because half a column of times would have no meaning. The
        # user's own fields may have any name; the server knows the model and refuses unknown names.
        known = (*HISTORY_FIELDS, *history[0])
        _check_keys(event, known, f"history event {position}", needed=("item", *history[0]))
    fields = list(history[0]) if history else list(HISTORY_FIELDS)
    columns = {field: [event[field] for event in history] for field in fields}
    attributes = request.get("attributes", {})
    if not isinstance(attributes, dict) or not all(isinstance(values, list) for values in attributes.values()):
        raise UsageError("attributes must map each name to a list", allowed='e.g. {"user_country": ["de"]}')
    more = {"request_ms": request.get("request_time_ms"), "user": request.get("user"), "attributes": attributes}
    return RequestDocument(columns, candidates, {name: value for name, value in more.items() if value is not None})


class ScoringClient:
    """Talks to one server. `timeout_s` bounds each call; `token` is sent as a bearer token."""

    def __init__(self, url: str, *, token: str | None = None, timeout_s: float = 30.0) -> None:
        self._host, self._port = _address(url)
        self.url = f"http://{f'[{self._host}]' if ':' in self._host else self._host}:{self._port}"
        self._timeout_s = timeout_s
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._datatypes: dict[str, str] = {}
        self._shapes: dict[str, list[int]] = {}
        self.model = ""

    def score(
        self,
        history: Mapping[str, Sequence[Any]],
        candidates: Sequence[Any],
        *,
        binary: bool = False,
        request_ms: int | None = None,
        user: int | str | None = None,
        attributes: Mapping[str, Sequence[Any]] | None = None,
    ) -> npt.NDArray[np.float32]:
        """Returns one score per candidate, in the order of `candidates`.

        A value of a field or an attribute may be None, which means missing. If the server refuses the request, raises
        UsageError with the server's message. If the server fails (status 500), raises TackboardError.
        """
        if not self.model:
            self._find_model()
        columns = {f"history_{field}": history[field] for field in history if field not in HISTORY_FIELDS}
        columns |= attributes or {}
        columns |= {
            name + PRESENT_SUFFIX: [value is not None for value in values]
            for name, values in columns.items()
            if any(value is None for value in values)
        }
        columns |= {f"history_{field}": history[field] for field in history if field in HISTORY_FIELDS}
        columns["candidate_item"] = candidates
        columns |= {} if request_ms is None else {"request_time_ms": [request_ms]}
        columns |= {} if user is None else {"user": [user]}
        datatypes = {name: self._datatypes.get(name, "BYTES") for name in columns}
        shapes = {name: [len(values), *self._shapes.get(name, [])[1:]] for name, values in columns.items()}
        if user is not None:
            datatypes["user"] = "BYTES" if isinstance(user, str) else "INT64"
        inputs: list[dict[str, Any]] = []
        chunks: list[bytes] = []
        for name, given in columns.items():
            entry: dict[str, Any] = {"name": name, "datatype": datatypes[name], "shape": shapes[name]}
            values = _flat(given, datatypes[name], shapes[name])
            if binary:
                chunks.append(_to_binary(name, datatypes[name], values))
                entry["parameters"] = {"binary_data_size": len(chunks[-1])}
            else:
                entry["data"] = values
            inputs.append(entry)
        head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": binary}}).encode()
        headers = {"Inference-Header-Content-Length": str(len(head))} if binary else {}
        body, answer_headers = self._call(
            "POST", f"/v2/models/{quote(self.model, safe='')}/infer", b"".join((head, *chunks)), headers
        )
        return _read_scores(body, answer_headers.get("inference-header-content-length"))

    def _find_model(self) -> None:
        stats = json.loads(self._call("GET", "/v2/models/stats")[0])
        self.model = stats["model_stats"][0]["name"]
        metadata = json.loads(self._call("GET", f"/v2/models/{quote(self.model, safe='')}")[0])
        self._datatypes = {tensor["name"]: tensor["datatype"] for tensor in metadata["inputs"]}
        self._shapes = {tensor["name"]: tensor["shape"] for tensor in metadata["inputs"]}

    def _call(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[bytes, Mapping[str, str]]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        try:
            connection.request(method, path, body=body, headers={**self._headers, **(headers or {})})
            response = connection.getresponse()
            answer = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise UsageError(
                f"no tackboard server answers at {self.url} ({type(error).__name__})",
                fix="start a server with `tackboard serve BUNDLE`, or score with --offline --bundle BUNDLE",
            ) from None
        finally:
            connection.close()
        if response.status == 200:
            return answer, {name.lower(): value for name, value in response.headers.items()}
        raise _refusal(response.status, answer)


def _address(url: str) -> tuple[str, int]:
    """Returns host and port of `url`. The error message shows the URL unless the URL may hold a password."""
    shown = "" if "@" in url else f" {url}"
    wrong = UsageError(f"--url{shown} is not an address of a server", allowed="allowed: http://HOST:PORT, without user")
    try:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        host, port = parts.hostname, parts.port or DEFAULT_PORT
    except ValueError:
        raise wrong from None
    if parts.scheme != "http" or not host or "@" in parts.netloc or not host.isascii() or any(c <= " " for c in host):
        raise wrong
    return host, port


def _check_keys(given: Mapping[str, Any], known: Sequence[str], where: str, needed: Sequence[str]) -> None:
    for key in given:
        if key not in known:
            close = suggest(key, known)
            raise UsageError(
                f"{where} has the unknown key {key!r}", fix=f"did you mean {close!r}?" if close else REQUEST_SHAPE
            )
    missing = [key for key in needed if key not in given]
    if missing:
        raise UsageError(f"{where} lacks {', '.join(missing)}", allowed=REQUEST_SHAPE)


_WIRE_TYPES: dict[str, tuple[type, str, str]] = {
    "INT64": (int, "a whole number", "q"),
    "FP64": (float, "a number", "d"),
    "FP32": (float, "a number", "f"),
    "BOOL": (bool, "true or false", "?"),
}


def _flat(values: Sequence[Any], datatype: str, shape: Sequence[int]) -> list[Any]:
    """Flattens values: vectors are laid end to end, lists become JSON text, missing values become 0, False or empty."""
    nothing: Any = {"BYTES": "", "BOOL": False, "FP32": 0.0, "FP64": 0.0}.get(datatype, 0)
    if len(shape) == 2:
        return [part for value in values for part in ([nothing] * shape[1] if value is None else value)]
    texts = (json.dumps(value) if isinstance(value, list) else value for value in values)
    return [nothing if value is None else value for value in texts]


def _to_binary(name: str, datatype: str, values: Sequence[Any]) -> bytes:
    kind, wanted, letter = _WIRE_TYPES.get(datatype, (str, "a string", ""))
    if any(type(value) is not kind and not (kind is float and type(value) is int) for value in values):
        raise UsageError(f"{name} holds a value of the wrong type", allowed=f"allowed: every value is {wanted}")
    try:
        if letter:
            return struct.pack(f"<{len(values)}{letter}", *values)
        encoded = [value.encode("utf-8") for value in values]
    except (struct.error, UnicodeEncodeError):
        raise UsageError(f"{name} holds a value that does not fit {datatype}") from None
    return b"".join(struct.pack("<I", len(text)) + text for text in encoded)


def _read_scores(body: bytes, json_length: str | None) -> npt.NDArray[np.float32]:
    head = json.loads(body if json_length is None else body[: int(json_length)])
    output = head["outputs"][0]
    if json_length is None:
        return np.array(output["data"], dtype=np.float32)
    return np.frombuffer(body[int(json_length) :], dtype="<f4").astype(np.float32)


def _refusal(status: int, answer: bytes) -> TackboardError:
    try:
        sentence = str(json.loads(answer)["error"])
    except (ValueError, KeyError, TypeError):
        sentence = "the answer is not from a tackboard server"
    if status == 500:
        return TackboardError(f"the server failed: {sentence}", fix="see the server's log")
    return UsageError(f"the server refused the request ({status}): {sentence}")
