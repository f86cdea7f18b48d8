"""Sends real requests to a running server, with the unmodified public `tritonclient`.

The requests come from a dataset: events of some of its users become histories, and items of its catalogue become
candidates, with the attributes that the served model reads. This module returns scores and latencies, and compares
scores with those of `tackboard score --offline`. The draw of users and candidates has a fixed seed, so two runs over
one dataset send the same requests.
"""

import importlib.util
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tackboard.core.errors import TackboardError, UsageError
from tackboard.core.keyed_random import permutation
from tackboard.features.feature_set import read_features
from tackboard.scoring.request import HISTORY_FIELDS, PREFIXES

DRAW_SEED = 20_240_917
TOLERANCE = 1e-5
DTYPES: dict[str, type] = {"INT64": np.int64, "FP32": np.float32, "FP64": np.float64}


class UnansweredError(TackboardError):
    """The server refused a request or did not answer."""


@dataclass(frozen=True, kw_only=True)
class UserRequest:
    """The known events of a user at the time of a request, oldest first, and the items to score.

    The ids of users and items are the original ids of the dataset.
    """

    user: Any
    request_time_ms: int
    history: dict[str, list[Any]]
    """The lists item, action, surface and time_ms, all of the same length."""
    candidates: list[Any]
    attributes: dict[str, list[Any]] = field(default_factory=dict)
    """Attributes of the candidates. A key is an attribute's name in a request, for example candidate_content; its list
    has one value per candidate. No value is missing."""

    def document(self) -> dict[str, Any]:
        """The request in the format of the files that `tackboard score` reads."""
        columns = zip(*(self.history[name] for name in HISTORY_FIELDS), strict=True)
        events = [dict(zip(HISTORY_FIELDS, values, strict=True)) for values in columns]
        return {
            "user": self.user,
            "request_time_ms": self.request_time_ms,
            "history": events,
            "candidates": self.candidates,
            **({"attributes": self.attributes} if self.attributes else {}),
        }


@dataclass(frozen=True, kw_only=True)
class ServerAnswers:
    """Scores of requests, in the order of the requests, and the latency of each request at the client."""

    scores: list[NDArray[np.float32]]
    latencies_ms: list[float]


def attributes_of_items(bundle: Path) -> tuple[str, ...]:
    """Returns the columns of the items' attributes that the model of a bundle reads."""
    features = read_features(bundle)
    sources = [] if features is None else [node.params for _, node in features.plan.sources()]
    return tuple(sorted({str(one["column"]) for one in sources if one["entity"] == "item" and one["column"] != "id"}))


def draw_requests(
    dataset: Path, *, num_requests: int, num_candidates: int, attributes: Sequence[str] = ()
) -> list[UserRequest]:
    """Draws `num_requests` users, or takes all users if there are fewer, and makes one request for each user.

    `attributes` names the columns of items.parquet that a request holds for each candidate.

    The request time is 1 ms after the user's last event. A history holds the events that had been received before the
    request, so late events are left out. The candidates of a request are distinct, unless the catalogue is smaller than
    `num_candidates`; then the catalogue is repeated.
    """
    import pyarrow.parquet as parquet

    columns = ["user_id", "user", "received_ms", *HISTORY_FIELDS]
    events = parquet.read_table(dataset / "events.parquet", columns=columns)
    items = parquet.read_table(dataset / "items.parquet", columns=["item", *attributes])
    user_ids = events["user_id"].to_numpy()
    # Events are sorted by user, so the events of a user are one slice.
    starts = np.concatenate([[0], np.flatnonzero(np.diff(user_ids)) + 1])
    ends = np.append(starts[1:], len(user_ids))
    requests = []
    for user in permutation(len(starts), DRAW_SEED)[:num_requests]:
        own = events.slice(int(starts[user]), int(ends[user] - starts[user]))
        now_ms = own["time_ms"][len(own) - 1].as_py() + 1
        known = own.filter(own["received_ms"].to_numpy() < now_ms)
        chosen = items.take(np.resize(permutation(len(items), DRAW_SEED, int(user)), num_candidates))
        requests.append(
            UserRequest(
                user=own["user"][0].as_py(),
                request_time_ms=now_ms,
                history={name: known[name].to_pylist() for name in HISTORY_FIELDS},
                candidates=chosen["item"].to_pylist(),
                attributes={PREFIXES["item"] + name: chosen[name].to_pylist() for name in attributes},
            )
        )
    return requests


def require_client() -> None:
    """Raises UsageError with the install command if `tritonclient` is missing."""
    if importlib.util.find_spec("tritonclient") is None:
        raise UsageError(
            "the demo sends its requests through tritonclient, which is not installed",
            fix=f"{sys.executable} -m pip install 'tritonclient[http]>=2.60'",
        )


def connect(port: int) -> Any:
    """Returns a client of the server on this machine."""
    require_client()
    from tritonclient.http import InferenceServerClient

    return InferenceServerClient(f"127.0.0.1:{port}", connection_timeout=30.0, network_timeout=60.0)


def is_ready(port: int) -> bool:
    """Returns whether a server answers on this port and says that it is ready."""
    client = connect(port)
    try:
        return bool(client.is_server_ready())
    except OSError:
        return False
    finally:
        client.close()


def send(
    client: Any,
    model: str,
    requests: Sequence[UserRequest],
    *,
    binary: bool,
    watch: Callable[[int, float], None] | None = None,
) -> ServerAnswers:
    """Sends the requests one after another. Requests and answers are raw tensors if `binary`, else JSON.

    After each answer `watch` is called with the number of answered requests and the newest latency in ms. Raises
    UnansweredError if the server refuses a request or does not answer.
    """
    from tritonclient.http import InferRequestedOutput
    from tritonclient.utils import InferenceServerException

    scores, latencies_ms = [], []
    try:
        metadata = client.get_model_metadata(model)
        datatypes = {entry["name"]: entry["datatype"] for entry in metadata["inputs"]}
        for number, request in enumerate(requests, start=1):
            inputs = _inputs(request, datatypes, binary=binary)
            output = InferRequestedOutput("score", binary_data=binary)
            begin = time.perf_counter()
            score = client.infer(model, inputs, outputs=[output]).as_numpy("score")
            latencies_ms.append((time.perf_counter() - begin) * 1000)
            scores.append(np.asarray(score, dtype=np.float32))
            if watch is not None:
                watch(number, latencies_ms[-1])
    except (InferenceServerException, OSError) as error:
        raise UnansweredError(f"request {len(scores) + 1} of {len(requests)} failed: {error}") from error
    return ServerAnswers(scores=scores, latencies_ms=latencies_ms)


def whole_request(model: str, request: UserRequest, datatypes: dict[str, str], *, timeout_us: int) -> bytes:
    """Returns a complete HTTP request as bytes: a head and a body of binary tensors, with `timeout_us` as deadline."""
    from tritonclient.http import InferenceServerClient, InferRequestedOutput

    body, json_length = InferenceServerClient.generate_request_body(
        _inputs(request, datatypes, binary=True),
        outputs=[InferRequestedOutput("score", binary_data=True)],
        timeout=timeout_us,
    )
    head = (
        f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        f"Inference-Header-Content-Length: {json_length}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + bytes(body)


def scores_in_order(ranked: Sequence[Mapping[str, Any]], candidates: Sequence[Any]) -> NDArray[np.float32]:
    """Puts the ranking that `tackboard score` prints into the order of `candidates`. A missing score becomes NaN."""
    by_item = {entry["item"]: entry["score"] for entry in ranked}
    return np.array([by_item.get(item, np.nan) for item in candidates], dtype=np.float32)


def largest_difference(left: NDArray[Any], right: NDArray[Any]) -> float:
    """Returns the largest difference of two score vectors, as a share of the largest absolute score. The result is
    infinite if the shapes differ or a score is not finite."""
    if left.shape != right.shape or not (np.isfinite(left).all() and np.isfinite(right).all()):
        return float("inf")
    scale = max(float(np.abs(left).max(initial=0.0)), float(np.abs(right).max(initial=0.0)))
    return float(np.abs(left.astype(np.float64) - right.astype(np.float64)).max(initial=0.0)) / (scale or 1.0)


def _inputs(request: UserRequest, datatypes: dict[str, str], *, binary: bool) -> list[Any]:
    from tritonclient.http import InferInput

    columns = {f"history_{name}": request.history[name] for name in HISTORY_FIELDS}
    columns |= {"candidate_item": request.candidates, "user": [request.user]}
    columns["request_time_ms"] = [request.request_time_ms]
    # User ids may be strings even if item ids are numbers, so the type of the user id itself decides.
    datatypes = datatypes | {"user": "INT64" if isinstance(request.user, int) else "BYTES"}
    inputs = []
    for name, values in (columns | request.attributes).items():
        array: NDArray[Any] = np.array(values, dtype=DTYPES.get(datatypes[name], np.object_))
        tensor = InferInput(name, list(array.shape), datatypes[name])
        tensor.set_data_from_numpy(array, binary_data=binary)
        inputs.append(tensor)
    return inputs
