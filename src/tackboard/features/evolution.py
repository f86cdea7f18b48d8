"""Lists the changes between two versions of a feature set, and tells which changes need a new version number.

A model or a file of stored values knows a feature by its name, so the name must keep its meaning. The set needs a
higher version if a feature is removed, if its type or its computation changes, if a declared range becomes narrower, or
if the set is renamed. The version may stay the same if a feature is added, is described in other words or moves to
another line, or if a range becomes wider. In these cases, everything that was valid stays valid.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from tackboard.core.errors import UsageError
from tackboard.features.feature_set import Feature, FeatureSet, node_digests
from tackboard.features.plan import Plan, column_name
from tackboard.features.types import FeatureType

BOUNDS = ("minimum", "maximum")
Range = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class FeatureChange:
    """One difference between two versions of a set. `feature` is empty if the difference is about the set itself.

    `moved` means that the feature is now on another line of the code.
    """

    feature: str
    place: str
    sentence: str
    needs_version: bool
    moved: bool = False


def sentences(changes: Sequence[FeatureChange]) -> list[str]:
    """Returns the changes as sentences for people. The last sentence gives the number of features that moved."""
    moved = sum(1 for change in changes if change.moved)
    count = [f"{moved} feature{'s' if moved > 1 else ''} moved to another line"] if moved else []
    return [*(change.sentence for change in changes if not change.moved), *count]


def compare(old: FeatureSet, new: FeatureSet) -> list[FeatureChange]:
    """Returns every change from `old` to `new`: a new name of the set, then removed features, then other changes."""
    changes = []
    if new.name != old.name:
        changes.append(FeatureChange("", "", f"the set {old.name} is now called {new.name}", needs_version=True))
    before, after = ({feature.name: feature for feature in features.features()} for features in (old, new))
    old_digests, new_digests = _digests_without_ranges(old.plan), _digests_without_ranges(new.plan)
    for name, feature in before.items():
        if name not in after:
            place = feature.place
            changes.append(FeatureChange(name, place, f"feature {name} ({place}) is removed", needs_version=True))
    for name, feature in after.items():
        if name not in before:
            sentence = f"feature {name} ({feature.place}) is added"
            changes.append(FeatureChange(name, feature.place, sentence, needs_version=False))
            continue
        same_computation = old_digests[old.plan.features[name]] == new_digests[new.plan.features[name]]
        changes += _changes_of(before[name], feature, same_computation=same_computation)
        changes += _range_changes(feature, _ranges(old.plan, name), _ranges(new.plan, name))
    return changes


def check_evolution(old: FeatureSet, new: FeatureSet) -> list[FeatureChange]:
    """Returns the changes from `old` to `new`. Raises UsageError if the new version is too low."""
    changes = compare(old, new)
    if new.version < old.version:
        raise UsageError(
            f"feature set {new.name} has version {new.version}, which is below the old version {old.version}",
            allowed=f"allowed: {old.version}, or a higher version if the set changed",
        )
    breaking = [change for change in changes if change.needs_version]
    if breaking and new.version == old.version:
        more = f", and {len(breaking) - 1} more such changes" if len(breaking) > 1 else ""
        raise UsageError(
            f"{breaking[0].sentence}{more}",
            allowed=f"this change needs a new version of feature set {new.name}",
            fix=f"write version={old.version + 1}, or give the changed feature a new name",
        )
    return changes


def _changes_of(old: Feature, new: Feature, *, same_computation: bool) -> list[FeatureChange]:
    what = f"feature {new.name} ({new.place})"
    changes = []
    if old.type != new.type:
        sentence = f"{what} has another {_difference(old.type, new.type)}: {old.type} became {new.type}"
        changes.append(FeatureChange(new.name, new.place, sentence, needs_version=True))
    elif not same_computation:
        changes.append(FeatureChange(new.name, new.place, f"{what} is computed in another way", needs_version=True))
    if old.description != new.description:
        changes.append(FeatureChange(new.name, new.place, f"{what} is described in other words", needs_version=False))
    if old.place != new.place:
        sentence = f"feature {new.name} moved from {old.place} to {new.place}"
        changes.append(FeatureChange(new.name, new.place, sentence, needs_version=False, moved=True))
    return changes


def _difference(old: FeatureType, new: FeatureType) -> str:
    """Returns the word that names the difference between two types: type, width or nullability."""
    if old.kind != new.kind or old.element != new.element or old.columns != new.columns:
        return "type"
    return "width" if old.width != new.width else "nullability"


def _range_changes(feature: Feature, old: Mapping[str, Range], new: Mapping[str, Range]) -> list[FeatureChange]:
    """Returns the changed ranges of columns that both versions read. (If only one version reads a column, the
    computation has changed.)"""
    changes = []
    for column in sorted(old.keys() & new.keys()):
        (old_low, old_high), (low, high) = old[column], new[column]
        if (old_low, old_high) == (low, high):
            continue
        narrowed = low > old_low or high < old_high
        how = "narrowed" if narrowed else "widened"
        sentence = (
            f"feature {feature.name} ({feature.place}): the range of {column} is {how} "
            f"from {_spell(old_low, old_high)} to {_spell(low, high)}"
        )
        changes.append(FeatureChange(feature.name, feature.place, sentence, needs_version=narrowed))
    return changes


def _ranges(plan: Plan, name: str) -> dict[str, Range]:
    """Returns the range of every column that a feature reads. Several ranges of a column are intersected."""
    found: dict[str, Range] = {}
    for _, node in plan.trimmed([name]).sources():
        column = column_name(node.params)
        low, high = found.get(column, (-math.inf, math.inf))
        minimum, maximum = node.params.get("minimum"), node.params.get("maximum")
        found[column] = (
            low if minimum is None else max(low, minimum),
            high if maximum is None else min(high, maximum),
        )
    return found


def _digests_without_ranges(plan: Plan) -> list[str]:
    """Returns the hashes of the nodes as if no column had a range, because a range does not change computed values."""
    nodes = tuple(
        dataclasses.replace(node, params=_without_bounds(node.params)) if node.op == "source" else node
        for node in plan.nodes
    )
    return node_digests(Plan(nodes, plan.features))


def _without_bounds(params: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in params.items() if name not in BOUNDS}


def _spell(low: float, high: float) -> str:
    return f"{'-∞' if low == -math.inf else low} to {'∞' if high == math.inf else high}"
