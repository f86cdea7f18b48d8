"""Defines the ladder of `tackboard bench dcat`: four ways to compute a ranker (lines), each of which adds one thing.

    whole   the rival: every candidate runs through its whole sequence, with packed attention (`fusion.dcat = false`)
    dcat    the context is read once per user, and the candidates attend to its keys and values
    skip    the last layer computes nothing for the context except keys and values
    fixed   context and candidate have a fixed number of slots; the candidate overwrites the oldest slots

`skip` is what the ranker always does if nothing reads the context's hidden vectors. So for the line `dcat`, the bench
makes the last layer compute these vectors. The rival is fair: it uses the same packed attention, tables, ranker and
batches as the other lines.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from tackboard.bench.pretrain.ladder import Off, replaced
from tackboard.core.config import apply_overrides
from tackboard.models.decoder import LayerStack, ReadContext
from tackboard.ops.packed_attention import SOFTMAX, Weighing, packed_attention
from tackboard.train.config import RunConfig

_read_context: Callable[..., ReadContext] = LayerStack.read_context


def _with_last_layer(stack: LayerStack, *parts: Any, **options: Any) -> ReadContext:
    return _read_context(stack, *parts, **{**options, "needs_hidden": True})


@dataclasses.dataclass(frozen=True)
class DcatRung:
    """A line of the ladder."""

    name: str
    words: str
    settings: Callable[[int], tuple[str, ...]] = lambda _max_history: ()
    """Takes the length of histories and returns settings of the form `a.b=c`."""
    change: Off | None = None
    """Returns a context in which the code is changed for this line; None if no code has to change."""
    is_exact: bool = True
    """Whether the scores equal those of the first line."""

    def config(self, config: RunConfig) -> RunConfig:
        """Returns the config of a run of this line."""
        return apply_overrides(config, self.settings(config.model.max_history))

    def active(self) -> AbstractContextManager[Any]:
        """Returns a context in which this line runs."""
        return nullcontext() if self.change is None else self.change()


WHOLE, DCAT, SKIP, FIXED = "whole", "dcat", "skip", "fixed"
RUNGS = (
    DcatRung(WHOLE, "every candidate through its whole sequence", lambda _: ("model.fusion.dcat=false",)),
    DcatRung(
        DCAT,
        "context once per user, candidates attend to it (DCAT)",
        change=replaced("tackboard.models.decoder:LayerStack.read_context", _with_last_layer),
    ),
    DcatRung(SKIP, "last layer skipped for the context"),
    DcatRung(
        FIXED,
        "fixed length, candidates overwrite the oldest slots",
        lambda max_history: (f"model.fusion.fixed_length={max_history}",),
        is_exact=False,
    ),
)
"""The lines of the ladder, in order."""


def hiding(fixed_length: int) -> AbstractContextManager[None]:
    """Returns a context in which the last token of each row sees only the newest `fixed_length` tokens of its row.

    In the first line of the ladder, the last token of a row is its candidate. So with this context, the first line is
    the model that the line `fixed` must equal: appended candidates that may not see the slots that they overwrote.
    """

    def hidden_attention(
        q_THd: torch.Tensor,
        k_THd: torch.Tensor,
        v_THd: torch.Tensor,
        layout: Any,
        weighing: Weighing = SOFTMAX,
    ) -> torch.Tensor:
        assert weighing is SOFTMAX, "the bench measures a backbone without biases"
        read_THd = packed_attention(q_THd, k_THd, v_THd, layout, weighing)
        ends, parts = layout.offsets[1:].tolist(), []
        for first, end in zip(layout.offsets.tolist(), ends, strict=False):
            seen = slice(max(first, end - fixed_length), end)
            scores_HS = torch.einsum("hd,shd->hs", q_THd[end - 1], k_THd[seen]) * q_THd.shape[2] ** -0.5
            parts.append(torch.einsum("hs,shd->hd", scores_HS.softmax(dim=1), v_THd[seen]))
        last_B = torch.tensor(ends, device=q_THd.device) - 1
        return read_THd.index_copy(0, last_B, torch.stack(parts).to(read_THd.dtype))

    return replaced("tackboard.models.decoder:packed_attention", hidden_attention)()
