"""Loads a bundle and scores requests. The model reads a request's history once and then scores all candidates."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tackboard.batch import RequestBatch
from tackboard.batch.builder import make_request
from tackboard.bundle.signature import FILE_NAME, Signature, read_bundle
from tackboard.core.documents import blaming
from tackboard.core.errors import CorruptFileError, DataError
from tackboard.core.machine import usable_cores
from tackboard.features.column import Column
from tackboard.features.feature_set import FILE_NAME as FEATURES
from tackboard.features.feature_set import FeatureSet, read_features
from tackboard.features.online_executor import OnlineExecutor
from tackboard.features.standard import HISTORY, by_level, check_finite, check_readable, check_reads, features_for_model
from tackboard.models.decoder import KeptTokens
from tackboard.models.description import restore_config
from tackboard.models.stored_parameters import find_non_finite, load_tensors, restore_model
from tackboard.scoring.request import RequestReader, ScoreRequest


class Scorer:
    """Scores requests with a bundle's model. Only one call may run at a time."""

    def __init__(self, signature: Signature, model: Any, hashing: Any, features: FeatureSet) -> None:
        self.signature = signature
        self.model = model
        self.hashing = hashing
        self.features = features
        self.reader = RequestReader(signature, features)
        self._executor = OnlineExecutor(features.plan)

    @classmethod
    def load(cls, bundle: Path, code_file: Path | None = None, num_threads: int | None = None) -> Scorer:
        """Verifies a bundle and memory-maps its tables. Only a user's own model needs `code_file`."""
        torch.set_num_threads(num_threads or usable_cores())
        signature = read_bundle(bundle)
        described = bundle / FILE_NAME
        features = read_features(bundle)
        with blaming(described):
            config = restore_config(signature.model, code_file)
            if features is None:
                # The bundle was made before features.json existed, so its model reads the standard features.
                features = features_for_model(config.reads, signature.vocabulary, config.max_history)
            if signature.max_history != config.max_history:
                raise DataError(f"max_history is {signature.max_history}, but the model has {config.max_history}")
        with blaming(bundle / FEATURES):
            check_readable(
                features,
                config.max_history,
                of_requests=config.batch_type is RequestBatch,
                anchor_stride=config.anchor_stride,
            )
        check_reads(config.reads, features, bundle / FEATURES)
        files = [bundle / name for name in ("dense.safetensors", *(t["file"] for t in signature.tables.values()))]
        stored = {name: tensor for file in files for name, tensor in load_tensors(file).items()}
        model = restore_model(config, signature.vocabulary, stored, described)
        if name := find_non_finite(model):
            raise CorruptFileError(f"{bundle}: {name} holds numbers that are not finite", fix="export the bundle again")
        model.eval()
        return cls(signature, model, config.tables, features)

    def score(self, request: ScoreRequest) -> NDArray[np.float32]:
        """Returns the scores of the candidates [C], in the order of the candidates."""
        return self.score_features(self.compute_features(request), request.candidate_items)

    def compute_features(self, request: ScoreRequest) -> dict[str, Column]:
        """Computes the features that the model reads, for one request. Training computes them with the same kernels."""
        columns = self._executor.compute(
            history=request.history,
            request_ms=request.request_ms,
            user_id=request.user_id or 0,
            item_ids=request.candidate_items,
            **request.attributes,
        )
        check_finite(self.features, columns)
        return columns

    def score_features(self, features: Mapping[str, Column], candidate_items: NDArray[np.int64]) -> NDArray[np.float32]:
        """Returns the scores of the candidates [C], given the features of the request and of the candidates."""
        return self.score_batch(self.batch_of(features, candidate_items))

    def batch_of(self, features: Mapping[str, Column], candidate_items: NDArray[np.int64]) -> RequestBatch:
        """Returns the batch of one request, given the features of the request and of the candidates."""
        of_request, of_candidates = by_level(self.features, features)
        return make_request(
            history=features[HISTORY],
            candidates=candidate_items,
            hashing=self.hashing,
            request=of_request,
            features=of_candidates,
        )

    @torch.inference_mode()
    def score_batch(self, batch: RequestBatch) -> NDArray[np.float32]:
        """Returns the scores of the candidates of a batch [C]."""
        scores: NDArray[np.float32] = self.model.scores(batch).float().numpy()
        return scores

    @torch.inference_mode()
    def score_after(self, batch: RequestBatch, kept: KeptTokens | None) -> tuple[NDArray[np.float32], KeptTokens]:
        """Returns the scores of one request, and the tokens to keep; see `Ranker.scores_and_context`."""
        scores, context = self.model.scores_and_context(batch, kept)
        return scores.float().numpy(), context
