"""Defines the ranker: it predicts, for each candidate of a request, whether the user will do each of several actions.

    history, candidate ─ pinfm, fusion ─►  outputs of PinFM     ┐ dropped for young items in training
    history, candidate ─ recent ────────►  the newest events    ├─ x₀ ─ cross layers ─ an MLP per action ─► log odds
    request, item      ─ features ──────►  numbers, vectors, ids┘

`fusion` says how PinFM enters, `recent` is a sequence module without pretraining, and `features` are columns of the
batch. With `start.run` and `start.prefix=pinfm.` the PinFM starts from the parameters of a pretraining run.
`optimizer.multipliers={"pinfm.": 0.1}` gives the PinFM a tenth of the ranker's learning rates; 0 freezes the PinFM.

The loss is the mean log-loss of the actions, plus the terms of `extra_loss`: the next-token loss of pretraining on the
histories, the log-loss of a prediction from PinFM's outputs alone, the distance between this prediction and the
ranker's, and the distance of content tokens to id tokens. For new items, `cold_start` trains with random ids and drops
PinFM's outputs of young items.

Shapes: U requests, C candidates, M distinct items, K actions, D width, E width of an item's rows, F width of features.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
from torch import nn
from torch.nn import functional

from tackboard.batch import RequestBatch
from tackboard.batch.batches import Batch
from tackboard.core.config import check
from tackboard.core.errors import ConfigError
from tackboard.core.vocabulary import Vocabulary
from tackboard.models.cross_network import CrossNetwork
from tackboard.models.decoder import KeptTokens
from tackboard.models.fusion import Fused, Fusion, FusionConfig, FusionLayouts
from tackboard.models.interface import LossOutput
from tackboard.models.losses import Targets, with_targets
from tackboard.models.pinfm import PinFM, PinFMConfig
from tackboard.models.recent_events import RecentEvents, RecentEventsConfig
from tackboard.models.tables import HashedTables

READS = ("outputs", "hidden")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """The actions that are predicted, and the layers that predict them."""

    labels: tuple[str, ...] = ()
    """The actions whose labels are predicted; empty if the data has only one label."""
    utilities: dict[str, float] = dataclasses.field(default_factory=dict)
    """Weight of each action's probability in a candidate's score. If empty, a score is the first action's log odds."""
    num_cross_layers: int = 0
    """Number of DCN-v2's cross layers in front of the MLPs."""
    reads: Literal["outputs", "hidden"] = "outputs"
    """What late fusion gives: with `outputs`, the unit vectors that PinFM compares; with `hidden`, also the vectors
    from which the unit vectors are computed."""
    dropout: float = 0.1
    """Share of the hidden layer of each MLP that training drops, 0 to below 1."""

    def __post_init__(self) -> None:
        check(self.reads in READS, "model.head.reads", self.reads, ", ".join(READS))
        check(0.0 <= self.dropout < 1.0, "model.head.dropout", self.dropout, "0 to below 1")
        check(0 <= self.num_cross_layers <= 8, "model.head.num_cross_layers", self.num_cross_layers, "0 to 8")
        distinct = len(set(self.labels)) == len(self.labels)
        check(distinct, "model.head.labels", self.labels, "each action once")
        for action in self.utilities:
            check(action in self.labels, f"model.head.utilities.{action}", action, f"one of {', '.join(self.labels)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankerFeaturesConfig:
    """The features of requests and candidates that the cross layers read. They are columns of the feature set."""

    numbers: tuple[str, ...] = ()
    """Features that are numbers, of about -3 to 3."""
    vectors: dict[str, int] = dataclasses.field(default_factory=dict)
    """Features that are vectors, and their widths."""
    ids: dict[str, int] = dataclasses.field(default_factory=dict)
    """Features that are whole numbers without an order, and the number of rows of each feature's embedding. A value
    takes the row `value mod rows`."""
    id_width: int = 8
    """Width of the embedding of each of `ids`."""

    def __post_init__(self) -> None:
        for name, size in [*self.vectors.items(), *self.ids.items(), ("id_width", self.id_width)]:
            check(size >= 1, f"model.features.{name}", size, "1 or more")

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.numbers, *self.vectors, *self.ids)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ColdStartConfig:
    """Training for new items, whose rows say nothing yet."""

    random_id_share: float = 0.0
    """Share of the candidates whose id is replaced by a random id in training. The published value is 0.1."""
    age_feature: str = ""
    """Name of the feature that holds a candidate's age in days at the time of the request, below 0 if unknown. An empty
    name turns `young_dropout` and `middle_dropout` off."""
    young_dropout: float = 0.7
    """Probability that training drops PinFM's outputs of an item younger than 7 days, or of unknown age."""
    middle_dropout: float = 0.5
    """Probability that training drops PinFM's outputs of an item of 7 to 28 days."""
    unit: Literal["vector", "element"] = "vector"
    """Whether all outputs of a candidate are dropped together, or each number alone."""

    def __post_init__(self) -> None:
        for name in ("random_id_share", "young_dropout", "middle_dropout"):
            check(0.0 <= getattr(self, name) < 1.0, f"model.cold_start.{name}", getattr(self, name), "0 to below 1")
        check(self.unit in ("vector", "element"), "model.cold_start.unit", self.unit, "vector, element")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExtraLossConfig:
    """The weights of further losses; weight 0 leaves a loss out. The log-loss of the ranker has weight 1."""

    next_token: float = 0.0
    """The next-token loss of pretraining, on the histories of the requests. It does not read model.request_features,
    because these are known for requests only."""
    outputs: float = 0.0
    """The log-loss of a linear prediction from PinFM's outputs alone."""
    agreement: float = 0.0
    """The squared difference between the prediction of `outputs` and the ranker's prediction, as probabilities."""
    alignment: float = 0.0
    """The distance of content tokens to id tokens, 1 − cosine; needs fusion.content."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            check(value >= 0.0, f"model.extra_loss.{field.name}", value, "0 or more")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankerConfig(PinFMConfig):
    """The settings of a PinFM, and of the ranker around it. `loss` has an effect only with extra_loss.next_token."""

    batch_type: ClassVar[type[Batch]] = RequestBatch

    head: HeadConfig = dataclasses.field(default_factory=HeadConfig)
    """The actions that are predicted."""
    fusion: FusionConfig = dataclasses.field(default_factory=FusionConfig)
    """How PinFM enters the ranker."""
    recent: RecentEventsConfig = dataclasses.field(default_factory=RecentEventsConfig)
    """The ranker's own sequence module."""
    features: RankerFeaturesConfig = dataclasses.field(default_factory=RankerFeaturesConfig)
    """The features of requests and candidates."""
    cold_start: ColdStartConfig = dataclasses.field(default_factory=ColdStartConfig)
    """Training for new items."""
    extra_loss: ExtraLossConfig = dataclasses.field(default_factory=ExtraLossConfig)
    """The losses beside the log-loss."""

    def __post_init__(self) -> None:
        super().__post_init__()
        added = self.fusion.num_added_tokens
        if self.backbone.positions == "learned" and self.fusion.kind == "early":
            room = self.max_positions - 1 - added
            if self.max_history > room:
                raise ConfigError(
                    f"model.max_history is {self.max_history}; early fusion needs {added + 1} of the "
                    f"{self.max_positions} positions itself",
                    allowed=f"allowed: up to {room}",
                    fix=f"--set model.max_history={room} --set data.max_history={room} "
                    f"--set model.num_positions={self.max_positions}",
                )
        stride, most = self.fusion.anchor_stride, self.max_history
        check(stride <= most, "model.fusion.anchor_stride", stride, f"at most model.max_history = {most}")
        if self.fusion.kind == "none":
            for name in ("next_token", "outputs", "agreement"):
                value = getattr(self.extra_loss, name)
                check(not value, f"model.extra_loss.{name}", value, "0, because model.fusion.kind is none")
        next_token = self.extra_loss.next_token
        if next_token and not self.loss.in_batch_negatives:
            raise ConfigError(
                f"model.extra_loss.next_token is {next_token}, but model.loss.in_batch_negatives is off",
                allowed="allowed: in-batch negatives, because batches of requests have no drawn negatives",
                fix="--set model.loss.in_batch_negatives=true",
            )
        has_content = bool(self.fusion.content) or not self.extra_loss.alignment
        check(has_content, "model.extra_loss.alignment", self.extra_loss.alignment, "0 without model.fusion.content")
        alone = self.recent.num_events or self.features.names or self.fusion.kind != "none"
        check(bool(alone), "model.fusion.kind", "none", "none only with model.recent or model.features")

    @classmethod
    def on(
        cls, pinfm: PinFMConfig, head: HeadConfig, fusion: FusionConfig | None = None, **parts: object
    ) -> RankerConfig:
        """Puts a ranker around the settings of a PinFM, so that it can start from a run with these settings.

        Early fusion needs positions after the events. So the history becomes shorter by the number of these positions.
        """
        settings = {field.name: getattr(pinfm, field.name) for field in dataclasses.fields(pinfm)}
        fusion = fusion or FusionConfig()
        if fusion.kind == "early" and pinfm.backbone.positions == "learned":
            settings |= {"num_positions": pinfm.max_positions}
            settings["max_history"] = min(pinfm.max_history, pinfm.max_positions - 1 - fusion.num_added_tokens)
        return cls(**settings, head=head, fusion=fusion, **parts)  # type: ignore[arg-type]

    @property
    def reads(self) -> tuple[str, ...]:
        content = (self.fusion.content,) if self.fusion.content else ()
        age = (self.cold_start.age_feature,) if self.cold_start.age_feature else ()
        return tuple(dict.fromkeys((*super().reads, *self.features.names, *content, *age)))

    @property
    def anchor_stride(self) -> int:
        return self.fusion.anchor_stride

    @property
    def needs_drawn_negatives(self) -> bool:
        """Always False: the ranker learns from items that were shown and not chosen."""
        return False

    @property
    def meaning_of_scores(self) -> str:
        labels, utilities = self.head.labels, self.head.utilities
        logistic = "1 / (1 + e^-s) is the predicted probability"
        if utilities:
            sums = " + ".join(f"{weight:g} × {name}" for name, weight in utilities.items())
            of_actions = f"The heads give the log odds of {', '.join(labels)}"
            meaning = f"A score is {sums}, the weighted sum of predicted probabilities. {of_actions}."
        elif len(labels) > 1:
            meaning = f"A score s is the log odds of {labels[0]}: {logistic}. Other heads: {', '.join(labels[1:])}."
        else:
            meaning = f"A score s is the log odds of {labels[0] if labels else 'the predicted action'}: {logistic}."
        return f"{meaning} `tackboard evaluate` measures how well the probabilities are calibrated."

    def check_labels(self, known: Sequence[str]) -> None:
        self.labels_of(known)

    def labels_of(self, known: Sequence[str]) -> tuple[str, ...]:
        """Returns the labels to predict: head.labels, or the only label of the data. `known` lists the data's labels.

        Raises ConfigError if the data lacks a label, or if it has several labels and head.labels names none.
        """
        wanted = self.head.labels
        if not wanted and len(known) == 1:
            return tuple(known)
        missing = [label for label in wanted if label not in known]
        if wanted and not missing:
            return wanted
        names = ", ".join(known)
        raise ConfigError(
            f"model.head.labels names {missing[0]!r}, which is not a label of the data"
            if missing
            else "model.head.labels names no label of the data",
            allowed=f"allowed: {names or 'none, the data has no labels'}",
            fix="name labels of the data: --set 'model.head.labels=[\"NAME\"]'",
        )

    def serving(self) -> RankerConfig:
        """Returns the same config without the features that only training reads."""
        served = super().serving()
        return dataclasses.replace(served, cold_start=dataclasses.replace(self.cold_start, age_feature=""))

    def build(self, vocabulary: Vocabulary) -> Ranker:  # type: ignore[override]
        return Ranker(self, vocabulary)


@dataclasses.dataclass(frozen=True)
class RankerTargets:
    """What the host computes from a batch before it is copied."""

    layouts: FusionLayouts | None
    """Where tokens and candidates lie; None without PinFM."""
    next_token: Targets | None
    """The targets of the next-token loss."""
    replaced: torch.Tensor | None
    """The candidates that get a random id [R]."""
    random_rows: torch.Tensor | None
    """The rows of the random ids [R, k]."""
    dropout_seed: int | None
    """The seed of the draws that drop PinFM's outputs of young items. Draws from torch's default generator would repeat
    the draws of random ids, because the trainer seeds both generators alike. Then every young item with a random id
    would be dropped."""


class Ranker(nn.Module):
    """See the module's docstring."""

    def __init__(self, config: RankerConfig, vocabulary: Vocabulary) -> None:
        super().__init__()
        self.config = config
        self.fusion: Fusion | None = None
        if config.fusion.kind == "none":
            self.item_tables = HashedTables(config.tables)
            self.item_norm = nn.LayerNorm(self.item_tables.width)
            width = self.item_tables.width
        else:
            self.pinfm = PinFM(config, vocabulary)
            self.fusion = Fusion(config.fusion, self.pinfm, reads_hidden=config.head.reads == "hidden")
            width = self.fusion.width
        self.recent = None
        if config.recent.num_events:
            self.recent = RecentEvents(config.recent, vocabulary, self.tables.width)
            width += self.recent.width
        read = config.features
        self.ids = nn.ModuleList(nn.Embedding(num_rows, read.id_width) for num_rows in read.ids.values())
        width += len(read.numbers) + sum(read.vectors.values()) + len(read.ids) * read.id_width
        self.cross = CrossNetwork(width, config.head.num_cross_layers)
        num_heads = max(1, len(config.head.labels))
        self.heads = nn.ModuleList(_head(width, config) for _ in range(num_heads))
        extra = config.extra_loss
        self.outputs_head = None
        if self.fusion is not None and (extra.outputs or extra.agreement):
            self.outputs_head = nn.Linear(self.fusion.width, num_heads)

    @property
    def tables(self) -> HashedTables:
        """The tables of items: PinFM's, or the ranker's own."""
        return self.item_tables if self.fusion is None else self.pinfm.item_tables

    def prepare(self, batch: RequestBatch, generator: torch.Generator | None = None) -> RequestBatch:
        """Returns the batch with layouts, the targets of the next-token loss, and the draws of cold start."""
        config = self.config
        next_token = None
        if config.extra_loss.next_token:
            frequencies = self.pinfm.frequencies
            next_token = with_targets(batch.histories, config.loss, generator, frequencies=frequencies).targets
        replaced = random_rows = None
        if config.cold_start.random_id_share:
            draw_C = torch.rand(batch.num_candidates, generator=generator)
            replaced = (draw_C < config.cold_start.random_id_share).nonzero().squeeze(1).to(batch.request_of.device)
            # Random ids hash to random rows. Most of them are rows that training has not touched, as for a new item.
            shape = (len(replaced), config.tables.num_hashes)
            random_rows = torch.randint(0, config.tables.num_rows, shape, generator=generator).to(replaced.device)
        dropout_seed = None
        if config.cold_start.age_feature:
            dropout_seed = int(torch.randint(1 << 62, (), generator=generator))
        layouts = None if self.fusion is None else self.fusion.layouts(batch)
        return batch.with_targets(RankerTargets(layouts, next_token, replaced, random_rows, dropout_seed))

    def loss(self, batch: RequestBatch) -> LossOutput:
        """Returns the weighted mean log-loss of the candidates whose label is known, plus the extra losses."""
        batch = self.prepare(batch) if batch.targets is None else batch
        labels = self.config.labels_of(sorted(batch.labels))
        needs_hidden = bool(self.config.extra_loss.next_token)
        logits_CK, fused, items_ME = self._logits(batch, needs_hidden=needs_hidden)
        known_CK = torch.stack([batch.weights * batch.known[label] for label in labels], dim=1)
        truth_CK = torch.stack([batch.labels[label] for label in labels], dim=1)
        weight = known_CK.sum()

        def mean(values_CK: torch.Tensor) -> torch.Tensor:
            return (values_CK * known_CK).sum() / weight.clamp_min(1e-9)

        losses_CK = functional.binary_cross_entropy_with_logits(logits_CK.float(), truth_CK, reduction="none")
        total = mean(losses_CK)
        metrics: dict[str, torch.Tensor] = {}
        extra = self.config.extra_loss
        if fused is not None and self.outputs_head is not None:
            alone_CK = self.outputs_head(fused.outputs_CF).float()
            of_outputs = functional.binary_cross_entropy_with_logits(alone_CK, truth_CK, reduction="none")
            apart_CK = (alone_CK.sigmoid() - logits_CK.detach().float().sigmoid()) ** 2
            metrics |= {"loss_outputs": mean(of_outputs), "loss_agreement": mean(apart_CK)}
            total = total + extra.outputs * metrics["loss_outputs"] + extra.agreement * metrics["loss_agreement"]
        if fused is not None and extra.alignment:
            metrics["loss_alignment"] = fused.misalignment
            total = total + extra.alignment * fused.misalignment
        if fused is not None and extra.next_token:
            assert fused.hidden_TD is not None
            histories = batch.histories.with_targets(batch.targets.next_token)
            following = self.pinfm.loss_of_hidden(histories, fused.hidden_TD, items_ME, has_requests=False).loss
            metrics["loss_next_token"] = following
            total = total + extra.next_token * following
        return LossOutput(total, {name: value.detach() for name, value in metrics.items()}, weight)

    def scores(self, batch: RequestBatch) -> torch.Tensor:
        """Returns one score per candidate [C]: the log odds of the first action, or the sum of `head.utilities`."""
        return self.score_of_actions(self.scores_by_action(batch))

    @property
    def can_keep_contexts(self) -> bool:
        """Whether `scores_and_context` works: only early fusion with DCAT reads histories apart from candidates."""
        return self.fusion is not None and self.fusion.is_early and self.config.fusion.dcat

    def scores_and_context(
        self, batch: RequestBatch, kept: KeptTokens | None = None
    ) -> tuple[torch.Tensor, KeptTokens]:
        """Returns the scores of one request [C], and the tokens of its history that a later request can use.

        The history has n events, n ≥ 1. The returned tokens are the start token and the first n - 1 events: the token
        of the newest event may depend on the request. `kept` holds such tokens of an earlier request whose history
        begins with the same `kept.num_tokens` events; it may hold at most n tokens. The scores are those of `scores`,
        within rounding.
        """
        logits_CK, fused, _ = self._logits(self.prepare(batch), kept)
        scores_C = self.score_of_actions(self._by_action(logits_CK))
        assert fused is not None and fused.context is not None, "only early fusion with DCAT keeps contexts"
        return scores_C, fused.context.keep(batch.histories.num_events)

    def score_of_actions(self, by_action: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Returns the score of each candidate [C] from the results of `scores_by_action`."""
        utilities = self.config.head.utilities
        if not utilities:
            return next(iter(by_action.values()))
        return torch.stack([weight * by_action[name].sigmoid() for name, weight in utilities.items()]).sum(dim=0)

    def scores_by_action(self, batch: RequestBatch) -> dict[str, torch.Tensor]:
        """Returns the log odds [C] of each action of `head.labels`, or of an action without a name."""
        return self._by_action(self._logits(self.prepare(batch) if batch.targets is None else batch)[0])

    def _by_action(self, logits_CK: torch.Tensor) -> dict[str, torch.Tensor]:
        return dict(zip(self.config.head.labels or ("",), logits_CK.unbind(dim=1), strict=True))

    def _logits(
        self, batch: RequestBatch, kept: KeptTokens | None = None, *, needs_hidden: bool = False
    ) -> tuple[torch.Tensor, Fused | None, torch.Tensor]:
        """Returns log odds [C, K], what PinFM gave, and the rows of the distinct items [M, E].

        With `needs_hidden`, PinFM also gives the hidden vectors of the histories, which the next-token loss reads.
        """
        targets: RankerTargets = batch.targets
        items_ME = self.tables(batch.histories.item_rows)
        candidates_CE = functional.embedding(batch.candidates, items_ME)
        if self.training and targets.replaced is not None:
            candidates_CE = candidates_CE.index_copy(0, targets.replaced, self.tables(targets.random_rows))
        parts, fused = [], None
        if self.fusion is None:
            parts.append(self.item_norm(candidates_CE))
        else:
            assert targets.layouts is not None
            fused = self.fusion(
                self.pinfm, batch, items_ME, candidates_CE, targets.layouts, needs_hidden=needs_hidden, kept=kept
            )
            if self.training and targets.dropout_seed is not None:
                fused = fused._replace(outputs_CF=self._dropped(batch, fused.outputs_CF, targets.dropout_seed))
            parts.append(fused.outputs_CF)
        if self.recent is not None:
            parts.append(self.recent(batch, items_ME, candidates_CE))
        parts += self._features(batch)
        crossed_CF = self.cross(torch.cat(parts, dim=1))
        return torch.cat([head(crossed_CF) for head in self.heads], dim=1), fused, items_ME

    def _features(self, batch: RequestBatch) -> list[torch.Tensor]:
        """Returns the features of the candidates, each as numbers [C, w]."""
        read = self.config.features
        parts = [self._column(batch, name).float()[:, None] for name in read.numbers]
        parts += [self._column(batch, name).float() for name in read.vectors]
        for table, (name, num_rows) in zip(self.ids, read.ids.items(), strict=True):
            parts.append(table(self._column(batch, name).long() % num_rows))
        return parts

    def _column(self, batch: RequestBatch, name: str) -> torch.Tensor:
        values = batch.of_candidates(name)
        width = self.config.features.vectors.get(name)
        if not isinstance(values, torch.Tensor) or values.shape[1:] != (() if width is None else (width,)):
            shape = tuple(values.shape[1:]) if isinstance(values, torch.Tensor) else "a list"
            raise ConfigError(
                f"the feature {name} has the shape {shape} for each candidate",
                allowed="allowed: () for model.features.numbers and ids, (width,) for model.features.vectors",
                fix="list the feature under the setting for its type, and give vectors their widths",
            )
        return values

    def _dropped(self, batch: RequestBatch, outputs_CF: torch.Tensor, seed: int) -> torch.Tensor:
        """Returns PinFM's outputs with those of some young items, drawn by `seed`, set to 0.

        The other outputs of young items are scaled up, as usual in dropout.
        """
        cold = self.config.cold_start
        days_C = self._column(batch, cold.age_feature).float()
        middle_C = torch.where(days_C < 28.0, cold.middle_dropout, 0.0)
        share_C1 = torch.where(days_C < 7.0, cold.young_dropout, middle_C)[:, None]
        shape = outputs_CF.shape if cold.unit == "element" else share_C1.shape
        generator = torch.Generator(outputs_CF.device).manual_seed(seed)
        is_kept = torch.rand(shape, device=outputs_CF.device, generator=generator) >= share_C1
        return outputs_CF * (is_kept / (1.0 - share_C1)).to(outputs_CF.dtype)


def _head(width: int, config: RankerConfig) -> nn.Sequential:
    hidden = 2 * config.width
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Dropout(config.head.dropout), nn.Linear(hidden, 1))
