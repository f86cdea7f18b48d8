"""This module defines the standard features, which every sequence model can read, in the feature language.

`history` is the sequence of the user's newest events. It has the columns item, time, action, surface and gap, and a
model need not read all of them. Actions and surfaces are given by their positions in the vocabulary, counted from 1;
0 stands for an unknown action or surface. The gap is the time since the previous event, on a logarithmic scale of
whole numbers. `since_last` is the time from the newest event to the request, in seconds. A custom set may define
another `history` and add features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from tackboard.core.errors import ConfigError, CorruptFileError, DataError
from tackboard.core.vocabulary import SINCE_LAST, Vocabulary
from tackboard.features.column import Column
from tackboard.features.entities import Events, Request
from tackboard.features.expressions import sequence
from tackboard.features.feature_set import FeatureSet
from tackboard.features.plan import CANDIDATE, LEVELS, REQUEST, Node, Plan

HISTORY = "history"
ITEM = "item"
GAP_BOUNDARIES_MS = [((1 << power) - 1) * 1000 for power in range(1, 54)]
"""The column `gap` holds floor(log2(1 + s)) for a gap of s seconds."""
ALL_EVENTS = 1_000_000
NEVER = -1.0
"""The value of `since_last` for a user without events."""


def standard_features(vocabulary: Vocabulary, max_history: int = ALL_EVENTS, anchor_stride: int = 1) -> FeatureSet:
    """Returns a feature set with only `history`, which holds the newest `max_history` events.

    With an `anchor_stride` above 1, the history begins at an anchor, one of the oldest `anchor_stride` of these events.
    """
    events = Events()
    recent = events.newest(max_history) if anchor_stride == 1 else events.anchored(max_history, anchor_stride)
    return FeatureSet(
        "standard",
        history=sequence(
            item=recent.collect(events.item),
            action=recent.collect(events.action.index_in(vocabulary.actions)),
            surface=recent.collect(events.surface.index_in(vocabulary.surfaces)),
            time=recent.collect(events.time),
            gap=recent.collect(events.time).differences().bucketize(GAP_BOUNDARIES_MS),
        ).described("What the user did last, oldest first."),
    )


def request_features() -> FeatureSet:
    """Returns a feature set with only `since_last`, which depends on the time of the request."""
    events, request = Events(), Request()
    since_last = request.time.seconds_since(events.last(events.time)).fill_missing(NEVER)
    return FeatureSet(
        "standard",
        since_last=since_last.described(f"Seconds from the newest event to the request; {NEVER:g} without events."),
    )


def features_for_model(
    reads: Sequence[str],
    vocabulary: Vocabulary,
    max_history: int,
    own: FeatureSet | None = None,
    *,
    of_requests: bool = False,
    anchor_stride: int = 1,
) -> FeatureSet:
    """Returns the features that `reads` names. A feature comes from `own`, or from the standard set if `own` lacks it.

    Raises ConfigError if the model cannot use a feature.
    """
    standard = standard_features(vocabulary, max_history, anchor_stride)
    if SINCE_LAST in reads:
        standard = standard.merged(request_features())
    unknown = [read for read in reads if read.partition(".")[0] not in standard.plan.features]
    if own is None and unknown:
        raise ConfigError(
            f"the model reads {unknown[0]}, which is not a standard feature",
            allowed=f"without a file of features: {', '.join(standard.reads())}",
            fix="name the file that defines the feature: --set data.features=features.py",
        )
    features = (standard if own is None else own.merged(standard)).reading(reads)
    check_readable(features, max_history, of_requests=of_requests, anchor_stride=anchor_stride)
    return features


def check_readable(
    features: FeatureSet, max_history: int, *, of_requests: bool = False, anchor_stride: int = 1
) -> None:
    """Raises ConfigError unless the set has a history with items and all other features fit into the model's batch.

    Besides the history, a model trained on histories reads only numbers, one per request. A model trained on requests
    (`of_requests`) reads features of the request or of its candidates, of every type except text and sequence. The
    history must hold the items of the newest `max_history` events, without a filter. Training relies on this, because
    it predicts an item from earlier events, or reads the events that were received before each request. With an
    `anchor_stride` above 1, the history must begin at an anchor of this stride.
    """
    for feature in features.features():
        node = features.plan.nodes[features.plan.features[feature.name]]
        named = f"feature {feature.name} ({feature.place}), which the model reads,"
        if feature.name == HISTORY:
            if feature.type.kind != "sequence" or ITEM not in dict(feature.type.columns):
                raise ConfigError(f"{named} is {feature.type}", allowed="allowed: a sequence with a column item")
            for column, type_ in feature.type.columns:
                if type_.element == "string":
                    raise ConfigError(f"{named} has text in {column}", fix="use .index_in([…]) or .hash_id()")
            if not _is_newest(features.plan, node, max_history, anchor_stride):
                anchor, call = "", "newest(model.max_history)"
                if anchor_stride > 1:
                    anchor = f" from an anchor of stride {anchor_stride} on"
                    call = "anchored(model.max_history, model.fusion.anchor_stride)"
                raise ConfigError(
                    f"{named} is not the user's newest {max_history} events{anchor}",
                    allowed=f"allowed: newest = events.{call}, with item=newest.collect(events.item)",
                )
            continue
        if of_requests:
            fits = feature.type.kind != "sequence" and "string" not in (feature.type.kind, feature.type.element)
            types, levels = "a number, id, time or vector, or a list of numbers, ids or times", [REQUEST, CANDIDATE]
        else:
            fits = feature.type.is_number
            types, levels = "a number (bool, int or float)", [REQUEST]
        if not fits:
            raise ConfigError(f"{named} is {feature.type}", allowed=f"allowed: {types}")
        if feature.type.nullable:
            value = {"list": "[]", "float": "0.0", "bool": "False"}.get(feature.type.kind, "0")
            raise ConfigError(f"{named} may be missing", fix=f"choose a value for it: .fill_missing({value})")
        if node.level not in levels:
            allowed = " or ".join(LEVELS[level] for level in levels)
            raise ConfigError(f"{named} is one value per {feature.level}", allowed=f"allowed: one value per {allowed}")
    if HISTORY not in features.plan.features:
        raise ConfigError("the model does not read history.item", allowed="every sequence model reads history.item")


def check_reads(reads: Sequence[str], features: FeatureSet, where: Path) -> None:
    """Raises CorruptFileError unless `features`, which was read from `where`, has everything that `reads` names."""
    known = features.reads()
    if missing := [read for read in reads if read not in known]:
        raise CorruptFileError(
            f"{where} lacks {missing[0]}, which the model reads", allowed=f"it has {', '.join(known)}"
        )


def by_level(features: FeatureSet, columns: Mapping[str, Column]) -> tuple[dict[str, Column], dict[str, Column]]:
    """Returns (columns with a value per request, columns with a value per candidate), both without the history."""
    plan = features.plan
    of_candidates = {name for name, index in plan.features.items() if plan.nodes[index].level == CANDIDATE}
    return (
        {name: column for name, column in columns.items() if name not in of_candidates and name != HISTORY},
        {name: column for name, column in columns.items() if name in of_candidates},
    )


def check_finite(features: FeatureSet, columns: Mapping[str, Column]) -> None:
    """Raises a DataError that names the feature and its line if a number is NaN or infinite as a 32-bit float."""
    for feature in features.features():
        column = columns.get(feature.name)
        if column is None or column.fields is not None or column.values.dtype.kind != "f":
            continue
        with np.errstate(over="ignore"):
            good = np.isfinite(column.values.astype(np.float32))
        if not good.all():
            raise DataError(
                f"feature {feature.name} ({feature.place}) is {column.values[~good][0]}; {int((~good).sum()):,} "
                f"of {good.size:,} values are not finite in 32 bits",
                allowed="allowed: finite 32-bit numbers; check that the time of the request is in ms",
                fix="replace such values: .finite().fill_missing(0.0)",
            )


def only_carries_items(plan: Plan) -> bool:
    """Whether the plan only copies the events' items into the history's column `item` and computes nothing from them.

    If so, the history may carry any other number in place of an item's id.
    """
    place = plan.features[HISTORY]
    history = plan.nodes[place]
    carried = history.args[[name for name, _ in history.type.columns].index(ITEM)]
    items = [i for i, node in plan.sources() if (node.params["entity"], node.params["column"]) == ("event", ITEM)]
    if len(items) != 1 or plan.nodes[carried].op != "collect" or plan.nodes[carried].args[1] != items[0]:
        return False
    is_checked = {"minimum", "maximum"}.intersection(plan.nodes[items[0]].params)
    uses = [argument for node in plan.nodes for argument in node.args] + [*plan.features.values()]
    return not is_checked and uses.count(items[0]) == uses.count(carried) == uses.count(place) == 1


def history_stride(features: FeatureSet) -> int:
    """Returns the stride of the anchors of the history; 1 means that the history has no anchors."""
    strides = {node.params["stride"] for node in features.plan.trimmed([HISTORY]).nodes if node.op == "anchored"}
    return max(strides, default=1)


def _is_newest(plan: Plan, history: Node, count: int, stride: int) -> bool:
    """Whether the item column of a sequence holds the items of `events.newest(count)` or, with a stride above 1, of
    `events.anchored(count, stride)`."""
    place = [name for name, _ in history.type.columns].index(ITEM)
    item = plan.nodes[history.args[place]]
    if item.op != "collect":
        return False
    view, column = (plan.nodes[argument] for argument in item.args)
    wanted = ("newest", {"count": count}) if stride == 1 else ("anchored", {"count": count, "stride": stride})
    from_all = (view.op, dict(view.params)) == wanted and plan.nodes[view.args[0]].op == "events"
    return from_all and column.op == "source" and column.params["column"] == ITEM
