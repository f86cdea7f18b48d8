"""The set that is measured: 40 features, 8 of them aggregations of events, over all families of operators."""

from tackboard.bench.features.run import AGGREGATIONS
from tackboard.bench.features.set import features
from tackboard.features.operators import AGGREGATING, FAMILIES


def test_it_has_40_features_and_8_aggregations() -> None:
    assert len(features.plan.features) == 40
    aggregations = [node for node in features.plan.nodes if node.op != "source" and node.op != "constant"]
    aggregations = [node for node in aggregations if node.operator.family == AGGREGATING]
    assert len(aggregations) == AGGREGATIONS == 8


def test_every_family_is_in_it() -> None:
    used = {node.operator.family for node in features.plan.nodes if node.op not in ("source", "constant")}
    assert used == set(FAMILIES)


def test_features_have_both_levels() -> None:
    levels = [feature.level for feature in features.features()]
    assert levels.count("request") == 18 and levels.count("candidate") == 22
