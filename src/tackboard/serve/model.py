"""The model as clients see it: a scorer in; names, tensors and descriptions out.

Inputs are one user's history as four columns and the candidates as a fifth; the output is one score per candidate.
The same `RequestReader` that the offline command uses turns the columns into a `ScoreRequest`, so both agree on every
rule about ids, actions and lengths.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tackboard.bundle.signature import Signature
from tackboard.core.errors import DataError, UsageError
from tackboard.scoring.request import HISTORY_FIELDS, RequestReader, ScoreRequest
from tackboard.serve.errors import RequestError, bad_request, shown
from tackboard.serve.protocol import InferRequest
from tackboard.serve.routes import is_plain_name

OUTPUT_NAME = "score"
PLATFORM = "tackboard"


class ScorerLike(Protocol):
    """What the server needs of a scorer: a signature, and scores for a request."""

    signature: Signature
    reader: RequestReader

    def score(self, request: ScoreRequest) -> npt.NDArray[np.float32]:
        """One score per candidate."""


class ServedModel:
    """A scorer with a name and a version, behind the five input tensors of the protocol."""

    def __init__(self, scorer: ScorerLike, *, max_candidates: int) -> None:
        self.scorer = scorer
        self.signature = scorer.signature
        self.name = self.signature.name
        if not is_plain_name(self.name) or not is_plain_name(self.signature.version):
            raise DataError(
                "the bundle's name or version cannot stand in a URL",
                allowed="allowed: one or more printable characters without slashes and '..'",
                fix="export it again under another --name",
            )
        self.version = self.signature.version
        self.max_candidates = max_candidates
        id_datatype = "BYTES" if self.signature.id_type == "string" else "INT64"
        # History columns beyond the item may be left out; what is then assumed is the parser's business.
        self.optional_inputs = ("history_action", "history_surface", "history_time_ms")
        self.inputs = {
            "history_item": id_datatype,
            "history_action": "BYTES",
            "history_surface": "BYTES",
            "history_time_ms": "INT64",
            "candidate_item": id_datatype,
        }

    def metadata(self) -> dict[str, Any]:
        """The protocol's description of the model."""
        return {
            "name": self.name,
            "versions": [self.version],
            "platform": PLATFORM,
            "inputs": [_tensor_entry(name, datatype) for name, datatype in self.inputs.items()],
            "outputs": [_tensor_entry(OUTPUT_NAME, "FP32")],
        }

    def config(self) -> dict[str, Any]:
        """The description in Triton's ModelConfig shape; load tools read name, platform and max_batch_size from it."""
        return {
            "name": self.name,
            "platform": PLATFORM,
            "backend": PLATFORM,
            "version_policy": {"latest": {"num_versions": 1}},
            "max_batch_size": 0,
            "input": [
                {**_config_entry(name, datatype), "optional": name in self.optional_inputs}
                for name, datatype in self.inputs.items()
            ],
            "output": [_config_entry(OUTPUT_NAME, "FP32")],
            "instance_group": [{"name": self.name, "kind": "KIND_CPU", "count": 1, "gpus": []}],
            "parameters": {
                "max_history": {"string_value": str(self.signature.max_history)},
                "max_candidates": {"string_value": str(self.max_candidates)},
            },
        }

    def read(self, request: InferRequest) -> ScoreRequest:
        """The tensors of a request as one `ScoreRequest`; 400 where they are not what the model takes."""
        for name in request.inputs:
            if name not in self.inputs:
                raise bad_request(f"there is no input {shown(name)}; allowed: {', '.join(self.inputs)}")
        columns: dict[str, Any] = {}
        for name, datatype in self.inputs.items():
            tensor = request.inputs.get(name)
            if tensor is None:
                if name in self.optional_inputs:
                    continue
                raise bad_request(f"input {name} is missing")
            if tensor.datatype != datatype:
                raise bad_request(f"input {name} is {tensor.datatype}; this model takes {datatype}")
            if len(tensor.shape) != 1:
                raise bad_request(f"input {name} has {len(tensor.shape)} dimensions; this model takes one")
            columns[name] = tensor.values
        num_candidates = len(columns["candidate_item"])
        if not 1 <= num_candidates <= self.max_candidates:
            raise bad_request(f"candidate_item has {num_candidates} values; allowed: 1 to {self.max_candidates}")
        history = {column: columns[f"history_{column}"] for column in HISTORY_FIELDS if f"history_{column}" in columns}
        try:
            return self.scorer.reader.read(history, columns["candidate_item"])
        except (UsageError, DataError) as error:
            raise bad_request(str(error).replace("\n", "; ")) from None

    def score(self, request: ScoreRequest) -> npt.NDArray[np.float32]:
        """Scores of the candidates; runs on the model's thread. 500 where a score is not a finite number."""
        scores = np.asarray(self.scorer.score(request), dtype=np.float32)
        if scores.shape != request.candidate_items.shape or not np.isfinite(scores).all():
            raise RequestError(500, "the model gave scores that are not finite numbers, one per candidate")
        return scores

    def warm_up(self) -> None:
        """Scores made-up requests of the smallest and a large size, so that no client pays for first-time work."""
        for num_events, num_candidates in ((0, 1), (self.signature.max_history, min(1000, self.max_candidates))):
            for _ in range(2):
                self.score(self._made_up_request(num_events, num_candidates))

    def _made_up_request(self, num_events: int, num_candidates: int) -> ScoreRequest:
        as_text = self.signature.id_type == "string"

        def ids(count: int) -> list[Any]:
            return [str(number) if as_text else number for number in range(count)]

        actions, surfaces = self.signature.actions or ("",), self.signature.surfaces or ("",)
        history = {
            "item": ids(num_events),
            "action": [actions[-1]] * num_events,
            "surface": [surfaces[-1]] * num_events,
            "time_ms": [60_000 * number for number in range(num_events)],
        }
        return self.scorer.reader.read(history, ids(num_candidates))


def _tensor_entry(name: str, datatype: str) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": [-1]}


def _config_entry(name: str, datatype: str) -> dict[str, Any]:
    kind = "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"
    return {"name": name, "data_type": kind, "dims": [-1]}
