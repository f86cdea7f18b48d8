"""Loads a bundle and scores requests: the user part once, every candidate against it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from tackboard.batch import item_rows, make_batch
from tackboard.bundle.signature import Signature, read_bundle
from tackboard.core.errors import CorruptFileError
from tackboard.core.machine import usable_cores
from tackboard.models.interface import build_model, restore_config
from tackboard.scoring.request import ScoreRequest


class Scorer:
    """A bundle's model, ready to score. One call at a time."""

    def __init__(self, signature: Signature, model: Any, hashing: Any) -> None:
        self.signature = signature
        self.model = model
        self.hashing = hashing

    @classmethod
    def load(cls, bundle: Path, code_file: Path | None = None, num_threads: int | None = None) -> Scorer:
        """Verifies and loads a bundle. `code_file` is needed only for a model of a user's own."""
        torch.set_num_threads(num_threads or usable_cores())
        signature = read_bundle(bundle)
        config = restore_config(signature.model, code_file)
        model = build_model(config, signature.vocabulary)
        tensors = load_file(bundle / "dense.safetensors")
        for table in signature.tables.values():
            tensors |= {name: weight.float() for name, weight in load_file(bundle / table["file"]).items()}
        try:
            model.load_state_dict(tensors)
        except RuntimeError as error:
            reason = str(error).split("\n")[1].strip() if "\n" in str(error) else str(error)
            raise CorruptFileError(f"{bundle} does not fit its model: {reason[:160]}") from None
        model.eval()
        return cls(signature, model, config.hashing)

    @torch.inference_mode()
    def score(self, request: ScoreRequest) -> NDArray[np.float32]:
        """Scores of the candidates [C], in their order."""
        history = make_batch(
            lengths=np.array([len(request.history_items)], dtype=np.int64),
            users=np.zeros(1, dtype=np.int64),
            item_ids=request.history_items,
            actions=request.history_actions,
            surfaces=request.history_surfaces,
            times_ms=request.history_times_ms,
            hashing=self.hashing,
        )
        user = self.model.encode_users(history)
        items = self.model.encode_items(item_rows(request.candidate_items, self.hashing))
        scores: NDArray[np.float32] = self.model.score(user, items)[0].float().numpy()
        return scores
