"""Defines the model as clients see it: a scorer with a name, a version, input tensors and descriptions.

The features of a model decide which tensors the model takes (see `inputs`). The server and the offline command make a
`ScoreRequest` with the same `RequestReader`, so both apply the same rules to ids, actions and lengths. The computed
features can be logged for `tackboard features replay`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tackboard.core.errors import DataError, UsageError
from tackboard.features.column import Column
from tackboard.features.serving_log import FeatureLog
from tackboard.scoring.context_cache import ContextCache, share_extended
from tackboard.scoring.request import ScoreRequest
from tackboard.serve.errors import RequestError, bad_request
from tackboard.serve.inputs import MAX_EVENTS, OUTPUT_NAME, ModelInputs
from tackboard.serve.routes import is_plain_name

if TYPE_CHECKING:  # Only the type is needed here, and importing a scorer imports torch.
    from tackboard.scoring.scorer import Scorer

PLATFORM = "tackboard"


class ServedModel:
    """Wraps a scorer so that it takes the tensors of the protocol. `log`, if given, gets the computed features.

    With `context_cache_bytes` above 0, contexts of users are kept (`scoring.context_cache`).
    """

    def __init__(
        self,
        scorer: Scorer,
        *,
        max_candidates: int,
        max_events: int = MAX_EVENTS,
        log: FeatureLog | None = None,
        context_cache_bytes: int = 0,
    ) -> None:
        self.scorer = scorer
        self.signature = scorer.signature
        self.name = self.signature.name
        if not is_plain_name(self.name) or not is_plain_name(self.signature.version):
            raise DataError(
                "the name or version of the bundle cannot be part of a URL",
                allowed="allowed: printable characters without '/', '\\' and '..', and not '.' alone",
                fix="export the bundle again with another --name or --version",
            )
        self.version = self.signature.version
        self.max_candidates = max_candidates
        self.log = log
        self.contexts = ContextCache(scorer, context_cache_bytes) if context_cache_bytes else None
        self._num_unlogged = 0
        self.inputs = ModelInputs(scorer.reader, max_candidates=max_candidates, max_events=max_events)

    def metadata(self) -> dict[str, Any]:
        """Returns the protocol's description of the model."""
        return {
            "name": self.name,
            "versions": [self.version],
            "platform": PLATFORM,
            "inputs": [
                {"name": name, "datatype": tensor.datatypes[0], "shape": tensor.shape}
                for name, tensor in self.inputs.inputs.items()
            ],
            "outputs": [{"name": OUTPUT_NAME, "datatype": "FP32", "shape": [-1]}],
        }

    def config(self) -> dict[str, Any]:
        """Returns a description like Triton's ModelConfig; load generators read name, platform and max_batch_size."""
        return {
            "name": self.name,
            "platform": PLATFORM,
            "backend": PLATFORM,
            "version_policy": {"latest": {"num_versions": 1}},
            "max_batch_size": 0,
            "input": [
                {**_config_entry(name, tensor.datatypes[0], tensor.shape), "optional": tensor.optional}
                for name, tensor in self.inputs.inputs.items()
            ],
            "output": [_config_entry(OUTPUT_NAME, "FP32", [-1])],
            "instance_group": [{"name": self.name, "kind": "KIND_CPU", "count": 1, "gpus": []}],
            "parameters": {
                "max_history": {"string_value": str(self.signature.max_history)},
                "max_candidates": {"string_value": str(self.max_candidates)},
            },
        }

    def score(self, request: ScoreRequest) -> npt.NDArray[np.float32]:
        """Returns the scores of the candidates; runs on the model's thread. Raises 500 if a score is not finite."""
        features, scores = self._compute(request)
        if self.log is not None:
            self._log(self.log, request, features)
        return scores

    def log_counts(self) -> dict[str, int]:
        """Returns how many requests were logged, were dropped, or lacked a user or time. Empty if there is no log."""
        if self.log is None:
            return {}
        return {
            "logged": self.log.num_logged,
            "dropped": self.log.num_dropped,
            "without_user_or_time": self._num_unlogged,
        }

    def context_figures(self) -> dict[str, Any]:
        """Returns the figures of the cache of contexts: requests by outcome, users, bytes. Empty without a cache."""
        if self.contexts is None:
            return {}
        counts = self.contexts.counts
        figures = {"num_users": len(self.contexts), "bytes": self.contexts.num_bytes}
        return {"requests": counts, "share_extended": round(share_extended(counts), 6), **figures}

    def warm_up(self) -> None:
        """Scores small and large made-up requests, so that no client has to wait for work that is done only once."""
        for num_events, num_candidates in ((0, 1), (self.signature.max_history, min(1000, self.max_candidates))):
            for _ in range(2):
                try:
                    self._compute(self._made_up_request(num_events, num_candidates))
                except RequestError as error:
                    # The features may refuse a made-up value, but the model itself must not fail.
                    if error.status != 400:
                        raise
        if self.contexts is not None:
            self.contexts.clear()

    def _compute(self, request: ScoreRequest) -> tuple[Mapping[str, Column], npt.NDArray[np.float32]]:
        try:
            features = self.scorer.compute_features(request)
        except (UsageError, DataError) as error:
            # The request is wrong, not the model. For example, a value lies outside its declared range.
            raise bad_request(str(error).replace("\n", "; ")) from None
        if self.contexts is None:
            found = self.scorer.score_features(features, request.candidate_items)
        else:
            found = self.contexts.score_features(features, request.candidate_items, request.user_id)
        scores = np.asarray(found, dtype=np.float32)
        if scores.shape != request.candidate_items.shape or not np.isfinite(scores).all():
            raise RequestError(500, "the model did not give one finite score for each candidate")
        return features, scores

    def _log(self, log: FeatureLog, request: ScoreRequest, features: Mapping[str, Column]) -> None:
        if request.user_id is None or request.request_ms is None:
            # Replay cannot compute features again without the user and the time.
            self._num_unlogged += 1
            return
        log.offer(
            user_id=request.user_id,
            request_ms=request.request_ms,
            item_ids=request.candidate_items,
            features=features,
            context=request.attributes.get("context"),
        )

    def _made_up_request(self, num_events: int, num_candidates: int) -> ScoreRequest:
        as_text = self.signature.id_type == "string"

        def ids(count: int) -> list[Any]:
            return [str(number) if as_text else number for number in range(count)]

        user = "1" if (self.signature.user_type or self.signature.id_type) == "string" else 1
        actions, surfaces = self.signature.actions or ("",), self.signature.surfaces or ("",)
        history = {
            "item": ids(num_events),
            "action": [actions[-1]] * num_events,
            "surface": [surfaces[-1]] * num_events,
            "time_ms": [60_000 * number for number in range(num_events)],
        }
        return self.scorer.reader.read(history, ids(num_candidates), request_ms=60_000 * num_events, user=user)


def _config_entry(name: str, datatype: str, shape: list[int]) -> dict[str, Any]:
    kind = "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"
    return {"name": name, "data_type": kind, "dims": shape}
