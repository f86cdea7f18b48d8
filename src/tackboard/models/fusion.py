"""Connects a PinFM to a ranker: PinFM reads a user's history and the candidates, and gives one vector per candidate.

    late-last, late-mean   the user vector u comes from the last hidden vector, or from the mean of all hidden vectors;
                           it is computed once per request; the ranker gets u, the item vector z and u ∘ z
    early                  the candidate becomes a token after the user's events, so PinFM reads both together;
                           the ranker gets the hidden vector of this token and the candidate's rows

In early fusion the events of a user are read once for all candidates (DCAT): the candidates attend to the keys and
values of this context. The result equals a model that runs every candidate through the whole sequence (`dcat = false`).

    context     ▷ a b c L     start token, events, and with `learnable_token` a learned token
    candidate             p   its rows through φ_in, plus its content vector; neither action nor surface nor gap

Shapes: U requests, C candidates, T context tokens, D width, E width of an item's rows, F width of the outputs.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from tackboard.batch import RequestBatch, SequenceBatch
from tackboard.batch.cross_layout import CrossLayout
from tackboard.batch.row_layout import RowLayout
from tackboard.core.config import check
from tackboard.core.errors import ConfigError
from tackboard.core.vocabulary import SINCE_LAST
from tackboard.models.decoder import KeptTokens, ReadContext
from tackboard.models.pinfm import PinFM, Tokens
from tackboard.models.targets import TokenPlaces

FUSIONS = ("none", "late-last", "late-mean", "early")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FusionConfig:
    """How a ranker uses PinFM."""

    kind: Literal["none", "late-last", "late-mean", "early"] = "late-last"
    """`none`: no PinFM; `late-last`: a user vector from the last hidden vector; `late-mean`: a user vector from the
    mean of all hidden vectors; `early`: the candidate is a token after the user's events."""
    content: str = ""
    """Name of a vector feature of the candidate that early fusion adds to the candidate's token; empty means none."""
    content_width: int = 0
    """Width of the vectors of `content`."""
    learnable_token: bool = False
    """Whether early fusion puts a learned token before the candidate."""
    dcat: bool = True
    """Whether early fusion reads the events of a user once for all candidates. False runs every candidate through the
    whole sequence. This gives the same scores, but slowly; it is meant for comparisons."""
    fixed_length: int = 0
    """Number of slots for context and candidate together. If they need more slots, the candidate overwrites the oldest
    tokens. 0 means no limit."""
    anchor_stride: int = 1
    """If this is 1, a history has the newest model.max_history events. With a larger number n (early fusion only), it
    begins at one of the oldest n of these events, drawn by a hash of times. So the first event stays the same for
    longer, and a server can extend contexts that it kept. But a history then has up to n - 1 events less."""

    def __post_init__(self) -> None:
        check(self.kind in FUSIONS, "model.fusion.kind", self.kind, ", ".join(FUSIONS))
        check(self.fixed_length >= 0, "model.fusion.fixed_length", self.fixed_length, "0 or more")
        is_allowed = self.anchor_stride == 1 or (self.anchor_stride > 1 and self.kind == "early")
        allowed = "1 or more; 1 unless model.fusion.kind is early"
        check(is_allowed, "model.fusion.anchor_stride", self.anchor_stride, allowed)
        width = self.content_width
        check(
            (width > 0) == bool(self.content), "model.fusion.content_width", width, "the width of model.fusion.content"
        )
        for name in ("content", "learnable_token", "fixed_length"):
            is_used = self.kind == "early" or not getattr(self, name)
            check(
                is_used,
                f"model.fusion.{name}",
                getattr(self, name),
                f"nothing, because model.fusion.kind is {self.kind}",
            )
        check(self.dcat or not self.fixed_length, "model.fusion.fixed_length", self.fixed_length, "0 with dcat = false")

    @property
    def num_added_tokens(self) -> int:
        """The number of tokens after the user's events."""
        return (1 + self.learnable_token) if self.kind == "early" else 0


@dataclasses.dataclass(frozen=True)
class FusionLayouts:
    """Where tokens and candidates lie; the host computes this before a batch is copied to a device."""

    rows: RowLayout
    crossing: CrossLayout | None


class Fused(NamedTuple):
    """What a ranker gets from PinFM."""

    outputs_CF: torch.Tensor
    """The outputs for each candidate."""
    hidden_TD: torch.Tensor | None
    """The hidden vectors of the histories' tokens (start token and events), if they were computed."""
    misalignment: torch.Tensor
    """1 − cosine of content token and id token, averaged over the candidates with content."""
    context: ReadContext | None = None
    """The context that the candidates read, in early fusion with DCAT."""


class Fusion(nn.Module):
    """Computes outputs for the ranker from a PinFM. The PinFM is a part of the ranker, not of this module."""

    def __init__(self, config: FusionConfig, pinfm: PinFM, *, reads_hidden: bool) -> None:
        """With `reads_hidden`, late fusion also gives the vectors from which u and z are computed."""
        super().__init__()
        self.config = config
        width, item_width = pinfm.config.width, pinfm.item_tables.width
        self.is_early, self.reads_hidden = config.kind == "early", reads_hidden
        self.width = width + item_width if self.is_early else 3 * width
        if reads_hidden and not self.is_early:
            self.width += width + item_width
        needs_norms = self.is_early or reads_hidden
        self.norms = nn.ModuleList([nn.LayerNorm(size) for size in ((width, item_width) if needs_norms else ())])
        self.token = nn.Parameter(torch.randn(width)) if config.learnable_token else None
        self.content = nn.Linear(config.content_width, width, bias=False) if config.content else None

    def layouts(self, batch: RequestBatch) -> FusionLayouts:
        """Returns the layouts of a batch, on the batch's device.

        Call this before the batch is copied to a GPU. After the copy, the host would wait for the lengths.
        """
        lengths_U = batch.histories.lengths().cpu() + 1 + (1 if self.token is not None else 0)
        rows = RowLayout.of_lengths(lengths_U)
        crossing = None
        if self.is_early and self.config.dcat:
            crossing = CrossLayout.of(rows.offsets, batch.request_of.cpu(), self.config.fixed_length)
        device = batch.request_of.device
        return FusionLayouts(rows.to(device), None if crossing is None else crossing.to(device))

    def forward(
        self,
        pinfm: PinFM,
        batch: RequestBatch,
        items_ME: torch.Tensor,
        candidates_CE: torch.Tensor,
        layouts: FusionLayouts,
        *,
        needs_hidden: bool,
        kept: KeptTokens | None = None,
    ) -> Fused:
        """Returns the outputs for candidates with the rows `candidates_CE`; with `needs_hidden`, also hidden vectors.

        `kept` holds the first tokens of the history of the only request, from an earlier request. They must not include
        the token of the newest event. Only early fusion with DCAT can use `kept`, and only without `needs_hidden`.
        """
        histories = batch.histories
        since_last_U = histories.of_request(SINCE_LAST) if pinfm.config.request_time else None
        if self.is_early:
            tokens = _tokens_after(kept, pinfm, histories, items_ME, since_last_U)
            return self._early(pinfm, batch, tokens, candidates_CE, layouts, needs_hidden=needs_hidden, kept=kept)
        tokens = pinfm.tokens_of(histories, items_ME, since_last_U)
        hidden_TD = pinfm.decoder(tokens.x_TD, histories.lengths() + 1, tokens.times_T, tokens.asked_T, layouts.rows)
        if self.config.kind == "late-last":
            hidden_UD = hidden_TD.index_select(0, TokenPlaces.of(histories).lasts)
        else:
            hidden_UD = _row_means(hidden_TD, histories.lengths() + 1)
        hidden_UD = pinfm.with_request(hidden_UD, histories)
        users_CD = batch.expand(pinfm.project_users(hidden_UD))
        items_CD = pinfm.project_items(candidates_CE)
        # Entries of unit vectors are about 1/√D. The scale raises the entries and their products to about 1.
        scale = math.sqrt(users_CD.shape[1])
        parts = [users_CD * scale, items_CD * scale, users_CD * items_CD * scale**2]
        if self.reads_hidden:
            read = (batch.expand(hidden_UD), candidates_CE)
            parts += [norm(part) for norm, part in zip(self.norms, read, strict=True)]
        return Fused(torch.cat(parts, dim=1), hidden_TD, hidden_TD.new_zeros(()))

    def _early(
        self,
        pinfm: PinFM,
        batch: RequestBatch,
        tokens: Tokens,
        candidates_CE: torch.Tensor,
        layouts: FusionLayouts,
        *,
        needs_hidden: bool,
        kept: KeptTokens | None,
    ) -> Fused:
        """`tokens` holds the tokens of the histories, without those of `kept`."""
        num_kept = 0 if kept is None else kept.num_tokens
        lengths_U = batch.histories.lengths() + 1 - num_kept
        last_U = lengths_U.cumsum(0) - 1
        # A candidate has the time of the request. Without the request's time, it has the time of the last event.
        asked_T = tokens.times_T if tokens.asked_T is None else tokens.asked_T
        times_C = None if asked_T is None else batch.expand(asked_T.index_select(0, last_U))
        candidates_CD, misalignment = self._candidate_tokens(pinfm, batch, candidates_CE)
        context_tokens = tokens if self.token is None else _with_last(tokens, lengths_U, last_U, self.token)
        decoder: Any = pinfm.decoder
        context: ReadContext | None = None
        if layouts.crossing is not None:
            x_TD, times_T, asked_T = context_tokens.x_TD, context_tokens.times_T, context_tokens.asked_T
            if kept is None:
                context = decoder.read_context(x_TD, layouts.rows, times_T, asked_T, needs_hidden=needs_hidden)
            else:
                context = decoder.extend_context(kept, x_TD, layouts.rows, times_T, asked_T)
            assert context is not None
            hidden_CD = decoder.cross(candidates_CD, context, layouts.crossing, times_C)
            hidden_TD = context.hidden_TD
        else:
            lengths_U = lengths_U + (1 if self.token is not None else 0)
            hidden_CD = _read_appended(
                pinfm.decoder, context_tokens, lengths_U, candidates_CD, batch.request_of, times_C
            )
            hidden_TD = None
            if needs_hidden:
                hidden_TD = pinfm.decoder(
                    context_tokens.x_TD, lengths_U, context_tokens.times_T, context_tokens.asked_T, layouts.rows
                )
        if hidden_TD is not None and self.token is not None:
            places_T = torch.arange(len(tokens.x_TD), device=hidden_TD.device)
            hidden_TD = hidden_TD.index_select(0, places_T + _row_of(batch.histories.lengths() + 1, len(places_T)))
        if pinfm.request is not None:
            zeros_UD = hidden_CD.new_zeros(batch.num_requests, hidden_CD.shape[1])
            hidden_CD = hidden_CD + batch.expand(pinfm.with_request(zeros_UD, batch.histories))
        outputs = [norm(part) for norm, part in zip(self.norms, (hidden_CD, candidates_CE), strict=True)]
        return Fused(torch.cat(outputs, dim=1), hidden_TD, misalignment, context)

    def _candidate_tokens(
        self, pinfm: PinFM, batch: RequestBatch, candidates_CE: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the tokens of the candidates [C, D], and `Fused.misalignment`."""
        ids_CD = pinfm.enter(candidates_CE)
        if self.content is None:
            return ids_CD, ids_CD.new_zeros(())
        content_Cw = batch.of_candidates(self.config.content)
        if not isinstance(content_Cw, torch.Tensor) or content_Cw.shape[1:] != (self.config.content_width,):
            shape = tuple(content_Cw.shape[1:]) if isinstance(content_Cw, torch.Tensor) else "a list"
            raise ConfigError(
                f"the feature {self.config.content} has the shape {shape}",
                allowed=f"allowed: vectors of model.fusion.content_width = {self.config.content_width} numbers",
                fix="--set model.fusion.content_width=WIDTH",
            )
        # A candidate without content has a zero vector, and then nothing is added.
        content_CD = functional.normalize(self.content(content_Cw.float()), dim=-1) * math.sqrt(ids_CD.shape[1])
        has_content_C = (content_CD != 0).any(dim=1).float()
        apart_C = 1.0 - functional.cosine_similarity(content_CD, ids_CD.detach(), dim=1)
        return ids_CD + content_CD, (apart_C * has_content_C).sum() / has_content_C.sum().clamp_min(1.0)


def _tokens_after(
    kept: KeptTokens | None,
    pinfm: PinFM,
    histories: SequenceBatch,
    items_ME: torch.Tensor,
    since_last_U: torch.Tensor | None,
) -> Tokens:
    """Returns the tokens of the histories. With `kept`, there is one history, and its kept tokens are left out."""
    if kept is None:
        return pinfm.tokens_of(histories, items_ME, since_last_U)
    first = kept.num_tokens - 1  # One of the kept tokens is the start token.
    columns = {name: values[first:] for name, values in histories.columns.items()}
    later = dataclasses.replace(
        histories,
        offsets=(histories.offsets - first).clamp_min(0),
        items=histories.items[first:],
        columns=columns,
        is_positive=histories.is_positive[first:],
    )
    tokens = pinfm.tokens_of(later, items_ME, since_last_U)
    rest = [None if part is None else part[1:] for part in (tokens.times_T, tokens.asked_T)]
    return Tokens(tokens.x_TD[1:], *rest)


def _row_of(lengths_U: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Returns the row of each token [T]."""
    rows_U = torch.arange(len(lengths_U), device=lengths_U.device)
    return torch.repeat_interleave(rows_U, lengths_U, output_size=num_tokens)


def _row_means(hidden_TD: torch.Tensor, lengths_U: torch.Tensor) -> torch.Tensor:
    """Returns the mean of each row's tokens [U, D]."""
    sums_UD = hidden_TD.new_zeros(len(lengths_U), hidden_TD.shape[1])
    sums_UD = sums_UD.index_add(0, _row_of(lengths_U, len(hidden_TD)), hidden_TD)
    return sums_UD / lengths_U[:, None]


def _with_last(tokens: Tokens, lengths_U: torch.Tensor, last_U: torch.Tensor, added_D: torch.Tensor) -> Tokens:
    """Returns the tokens with a token added at the end of each row. It has the times of the row's last token."""
    num_tokens, num_rows = len(tokens.x_TD), len(lengths_U)
    rows_U = torch.arange(num_rows, device=lengths_U.device)
    places_T = torch.arange(num_tokens, device=lengths_U.device) + _row_of(lengths_U, num_tokens)
    added_U = last_U + rows_U + 1

    def joined(old_T: torch.Tensor, new_U: torch.Tensor) -> torch.Tensor:
        every = old_T.new_empty((num_tokens + num_rows, *old_T.shape[1:]))
        return every.index_copy(0, places_T, old_T).index_copy(0, added_U, new_U)

    def times(old_T: torch.Tensor | None) -> torch.Tensor | None:
        return None if old_T is None else joined(old_T, old_T.index_select(0, last_U))

    x_TD = joined(tokens.x_TD, added_D.to(tokens.x_TD.dtype).expand(num_rows, -1))
    return Tokens(x_TD, times(tokens.times_T), times(tokens.asked_T))


def _read_appended(
    decoder: nn.Module,
    tokens: Tokens,
    lengths_U: torch.Tensor,
    candidates_CD: torch.Tensor,
    request_of_C: torch.Tensor,
    times_C: torch.Tensor | None,
) -> torch.Tensor:
    """Returns the hidden vectors of candidates [C, D]; every candidate runs through its whole sequence."""
    lengths_C = lengths_U[request_of_C]
    ends_C = (lengths_C + 1).cumsum(0) - 1
    starts_U = lengths_U.cumsum(0) - lengths_U
    total = int(lengths_C.sum())
    of_C = _row_of(lengths_C, total)
    # Each candidate gets a copy of its row, and each copy ends with the candidate. So in the joined tokens, the copy
    # for candidate c begins c places later than it would without candidates.
    places = torch.arange(total, device=of_C.device)
    sources = places - (lengths_C.cumsum(0) - lengths_C)[of_C] + starts_U[request_of_C][of_C]

    def joined(old_T: torch.Tensor, new_C: torch.Tensor) -> torch.Tensor:
        every = old_T.new_empty((total + len(new_C), *old_T.shape[1:]))
        return every.index_copy(0, places + of_C, old_T.index_select(0, sources)).index_copy(0, ends_C, new_C)

    def times(old_T: torch.Tensor | None) -> torch.Tensor | None:
        return None if old_T is None or times_C is None else joined(old_T, times_C)

    hidden = decoder(joined(tokens.x_TD, candidates_CD), lengths_C + 1, times(tokens.times_T), times(tokens.asked_T))
    return hidden.index_select(0, ends_C)
