"""Feature sets: hashes follow what is computed, and a file gives the same set, or an error, never anything else."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tackboard.core.errors import CorruptFileError, DataError, TackboardError, UsageError
from tackboard.features.column import Column, differing_rows
from tackboard.features.entities import Events, Float, Int, Item, List, Request, String, User, Vector
from tackboard.features.expressions import coalesce, concat, cross, days, feature, pack, sequence
from tackboard.features.feature_set import FILE_NAME, FeatureSet, load_features, node_digests, read_features
from tackboard.features.online_executor import OnlineExecutor
from tackboard.features.plan import SpecError, compile_nodes
from tackboard.features.types import type_from_json

item = Item(price=Float(minimum=0), stock=Int(default=0), category=String, look=Vector(2), tags=List(Int))
user = User(country=String, taste=Vector(2))
events = Events(dwell_ms=Int)
request = Request()
recent = events.newest(3)


def rich() -> FeatureSet:
    return FeatureSet(
        "home",
        version=3,
        hour=request.time.hour("Europe/Berlin"),
        price=item.price.fill_missing(0.0).log1p().clip(0.0, 9.0).described("what it costs"),
        clicks=events.where(events.action == "click").within(days(7)).count(),
        rate=feature("clicks") / (events.count() + 1),
        key=cross(user.country.fill_missing(""), item.category.lower().fill_missing("?")),
        near=user.taste.fill_missing(0.0).cosine(item.look.fill_missing(0.0)),
        dwell=events.decayed_sum(events.dwell_ms.fill_missing(0), half_life=days(1)),
        history=sequence(item=recent.collect(events.item), gap=recent.collect(events.time).differences()),
        tags=item.tags.fill_missing([]).take(2),
        level=item.stock.bucketize([1, 10]),
        both=concat(user.country.fill_missing(""), item.category.fill_missing(""), separator="/").length(),
        some=coalesce(item.price, -1.0),
        pair=pack(item.stock, 0.5),
    )


# Writing.


def test_a_set_comes_back_from_its_file(tmp_path: Path) -> None:
    features = rich()
    features.write(tmp_path)
    back = read_features(tmp_path)
    assert back is not None
    assert back.hash == features.hash and back.feature_hashes() == features.feature_hashes()
    assert back.features() == features.features()
    assert back.to_json() == features.to_json()
    assert back.descriptions["price"] == "what it costs"
    assert set(back.to_json()) == {
        "format_version", "name", "version", "hash", "declared", "tzdata", "unicode", "nodes", "features",
    }  # fmt: skip
    assert read_features(tmp_path / "elsewhere") is None
    text = (tmp_path / FILE_NAME).read_text()
    assert str(Path(__file__).parent) not in text and "test_feature_set.py" in text, "no folder of this machine"


def test_databases_are_recorded_where_they_matter(capsys: pytest.CaptureFixture[str]) -> None:
    plain = FeatureSet("plain", a=item.price).to_json()
    assert "tzdata" not in plain and "unicode" not in plain
    data = rich().to_json() | {"tzdata": "1999a", "unicode": "1.0"}
    assert FeatureSet.from_json(data, "f.json").hash == rich().hash
    said = capsys.readouterr()
    assert "was made with time zones 1999a" in said.out + said.err
    assert "was made with Unicode 1.0" in said.out + said.err


# Hashes.


def test_the_hash_follows_what_is_computed_and_not_how_it_is_written() -> None:
    helper = item.price.fill_missing(0.0)
    one = FeatureSet("s", a=helper.log1p(), b=helper + 1)
    two = FeatureSet("s", b=item.price.fill_missing(0.0) + 1, a=item.price.fill_missing(0.0).log1p().described("text"))
    assert one.hash == two.hash
    assert one.feature_hashes() == two.feature_hashes()


@pytest.mark.parametrize(
    "other",
    [
        FeatureSet("t", a=item.price + 1),
        FeatureSet("s", version=2, a=item.price + 1),
        FeatureSet("s", b=item.price + 1),
        FeatureSet("s", a=item.price + 2),
        FeatureSet("s", a=item.price + 1.0),
        FeatureSet("s", a=1 + item.price),
        FeatureSet("s", a=item.stock + 1),
        FeatureSet("s", a=Item(price=Float).price + 1),
        FeatureSet("s", a=Item(price=Float(minimum=0, default=0.0)).price + 1),
        FeatureSet("s", a=item.price + 1, b=item.stock),
    ],
)
def test_another_computation_has_another_hash(other: FeatureSet) -> None:
    assert other.hash != FeatureSet("s", a=item.price + 1).hash


def test_a_features_hash_does_not_depend_on_the_others() -> None:
    alone = FeatureSet("s", a=item.price + 1).feature_hashes()["a"]
    among = FeatureSet("s", z=item.stock, a=item.price + 1, b=events.count()).feature_hashes()["a"]
    assert alone == among
    assert len(node_digests(rich().plan)) == len(set(node_digests(rich().plan)))


def test_hashes_are_the_same_tomorrow() -> None:
    """The hash is stored in checkpoints: a change of it makes them all unreadable."""
    features = FeatureSet("s", a=item.price + 1, b=events.within(days(1)).count())
    assert features.hash == GOLDEN


GOLDEN = "0401c07a19028309f7259411a9b50ba7c3b47fede8caf12b120e01c9de250d6f"


# Making.


@pytest.mark.parametrize(
    ("name", "given", "got"),
    [
        *(
            (name, {"a": item.price}, "a feature set cannot be named")
            for name in ("", "a b", "1x", "x" * 101, "é", None, 3)
        ),
        *(("home", {"version": version, "a": item.price}, "version =") for version in (0, -1, True, "1", 1.0, None)),
        *(
            ("home", {name: item.price}, "a feature cannot be named")
            for name in ("a b", "a.b", "a@b", "1a", "", "a\nb")
        ),
        ("home", {}, "feature set home has no features"),
    ],
)
def test_names_and_versions(name: Any, given: dict[str, Any], got: str) -> None:
    with pytest.raises(SpecError, match=rf"test_feature_set.py:\d+: .*{got}"):
        FeatureSet(name, **given)


def test_features_are_expressions() -> None:
    with pytest.raises(SpecError, match=r"feature a \(test_feature_set.py:\d+\) is int, not an expression") as error:
        FeatureSet("home", a=3)  # type: ignore[arg-type]
    assert error.value.fix.startswith("give an expression")
    with pytest.raises(SpecError) as error:
        FeatureSet("home", a=events.newest(3))  # type: ignore[arg-type]
    assert "is Events, not an expression" in error.value.got and "events.count()" in error.value.fix


# Parts and unions.


def test_trimming_leaves_hashes_as_they_were() -> None:
    features = rich()
    few = features.trimmed(["price", "key"])
    assert few.feature_hashes() == {name: features.feature_hashes()[name] for name in ("price", "key")}
    assert few.descriptions == {"price": "what it costs", "key": ""}
    assert few.hash != features.hash
    assert FeatureSet.from_json(few.to_json()).hash == few.hash


def test_reading_takes_columns_of_sequences() -> None:
    features = rich()
    assert "history.item" in features.reads() and "history.gap" in features.reads() and "price" in features.reads()
    few = features.reading(["history.gap", "price"])
    assert (few.name, few.version, few.descriptions["price"]) == ("home", 3, "what it costs")
    assert few.feature_hashes()["price"] == features.feature_hashes()["price"]
    assert str(few.plan.nodes[few.plan.features["history"]].type) == "sequence{gap: int}"
    assert {node.params["column"] for _, node in few.plan.sources()} == {"time", "price"}
    assert features.reading(features.reads()).hash == features.hash
    for reads, message in (
        (["nothing"], "there is no feature nothing"),
        (["history.itm"], "feature history has no column itm"),
        (["price.x"], "feature price has no column x"),
    ):
        with pytest.raises(UsageError) as error:
            features.reading(reads)
        assert error.value.got == message


def test_merged_sets_share_what_both_compute_and_the_first_wins() -> None:
    first = FeatureSet("first", version=4, n=events.count(), both=events.newest(2).count().described("Of the first."))
    second = FeatureSet("second", both=events.newest(3).count(), n_again=events.count(), more=events.count() + 1)
    merged = first.merged(second)
    assert (merged.name, merged.version) == ("first", 4)
    assert list(merged.plan.features) == ["n", "both", "n_again", "more"]
    assert merged.plan.features["n"] == merged.plan.features["n_again"]
    assert merged.feature_hashes() == second.feature_hashes() | first.feature_hashes()
    assert merged.descriptions["both"] == "Of the first."
    # What only the losing feature needed is gone.
    assert [node.params["count"] for node in merged.plan.nodes if node.op == "newest"] == [2]
    assert FeatureSet.from_json(merged.to_json()).hash == merged.hash


# Reading what someone else wrote.


@pytest.mark.parametrize("data", [None, [], 3, "x", {}, {"format_version": "1"}, {"format_version": 1}])
def test_what_is_no_set(data: Any) -> None:
    with pytest.raises(CorruptFileError, match="f.json is not a feature set"):
        FeatureSet.from_json(data, "f.json")


def test_a_newer_format_is_refused() -> None:
    with pytest.raises(DataError) as error:
        FeatureSet.from_json(rich().to_json() | {"format_version": 2}, "f.json")
    assert error.value.got == "f.json has feature format version 2"
    assert error.value.allowed == "allowed: up to 1" and error.value.fix == "use a newer tackboard"


def test_an_operator_of_a_newer_version_is_named() -> None:
    data = rich().to_json()
    node = data["features"]["price"]["node"]
    data["nodes"][node]["op"] = "tanh"
    with pytest.raises(DataError) as error:
        FeatureSet.from_json(data, "f.json")
    assert "f.json: feature price" in error.value.got and "there is no operator 'tanh'" in error.value.got
    assert "(test_feature_set.py:" in error.value.got


def test_changed_content_does_not_have_its_hash() -> None:
    data = rich().to_json()
    place = next(place for place, node in enumerate(data["nodes"]) if node["op"] == "within")
    data["nodes"][place]["params"]["duration_ms"] += 1
    with pytest.raises(CorruptFileError, match="does not match its hash"):
        FeatureSet.from_json(data)


@pytest.mark.parametrize("version", [float("inf"), float("nan"), "x", [], None, 0])
def test_a_version_that_is_none(version: Any) -> None:
    with pytest.raises(CorruptFileError):
        FeatureSet.from_json(rich().to_json() | {"version": version})


JUNK: tuple[Any, ...] = (
    *(None, True, 0, 1, -1, 3, 2**70, 1.5, float("nan"), float("inf"), "", "x", "item", "\ud800", [], [0], [[]], {}),
    *({"kind": "int"}, {"kind": "list"}, {"entity": "item"}, "source", "events", "sequence", "x" * 1000, [0] * 50),
)


def mutate(value: Any, pick: random.Random) -> Any:
    """A copy of JSON with one random change at a random depth."""
    if isinstance(value, dict) and value and pick.random() < 0.9:
        changed = dict(value)
        key = pick.choice(list(changed))
        if pick.random() < 0.1:
            del changed[key]
        elif pick.random() < 0.1:
            changed[pick.choice(["op", "args", "params", "value", "x", "default", "minimum", "names"])] = pick.choice(
                JUNK
            )
        else:
            changed[key] = mutate(changed[key], pick)
        return changed
    if isinstance(value, list) and value and pick.random() < 0.9:
        changed_list = list(value)
        place = pick.randrange(len(changed_list))
        chance = pick.random()
        if chance < 0.1:
            del changed_list[place]
        elif chance < 0.2:
            changed_list.insert(place, pick.choice((copy.deepcopy(changed_list[place]), pick.choice(JUNK))))
        else:
            changed_list[place] = mutate(changed_list[place], pick)
        return changed_list
    if isinstance(value, int) and not isinstance(value, bool) and pick.random() < 0.6:
        return value + pick.choice((-1, 1, 2))
    return copy.deepcopy(pick.choice(JUNK))


@pytest.mark.parametrize("part", range(2))
def test_random_changes_give_an_error_or_an_equal_set(part: int) -> None:
    features, data = rich(), json.loads(json.dumps(rich().to_json()))
    pick = random.Random(part)
    outcomes = {"equal": 0, "refused": 0}
    for _ in range(200):
        changed = data
        for _ in range(pick.choice((1, 1, 2, 4))):
            changed = mutate(changed, pick)
        try:
            back = FeatureSet.from_json(changed)
        except DataError as error:
            outcomes["refused"] += 1
            assert error.got and len(error.got) < 2000
        else:
            outcomes["equal"] += 1
            assert back.hash == features.hash
    assert min(outcomes.values()) > 10


@pytest.mark.parametrize("part", range(2))
def test_a_changed_set_with_a_right_hash_runs_or_is_refused(part: int) -> None:
    """A hash is no signature: what compiles must also compute, so that no request fails where loading did not."""
    data = json.loads(json.dumps(rich().to_json()))
    named = {name: entry["node"] for name, entry in data["features"].items()}
    pick = random.Random(100 + part)
    ran = 0
    for _ in range(150):
        nodes = mutate(data["nodes"], pick)
        try:
            plan = compile_nodes(nodes if isinstance(nodes, list) else [nodes], named)
        except DataError:
            continue
        ran += 1
        try:
            columns = run_small(plan)
        except TackboardError:
            continue
        for name, column in columns.items():
            assert column.type.with_nullable(False) == plan.nodes[plan.features[name]].type.with_nullable(False)
            assert len(differing_rows(column, column)) == 0
    assert ran > 10


def run_small(plan: Any) -> dict[str, Column]:
    """One request with two candidates and two events; every attribute missing for one of the candidates."""
    values: dict[str, Any] = {"bool": True, "int": 3, "float": 0.5, "string": "é", "id": 7, "time": 1_000}
    given: dict[str, dict[str, Column]] = {"item": {}, "user": {}, "context": {}, "event": {}}
    for _, node in plan.sources():
        entity, name, type_ = node.params["entity"], node.params["column"], type_from_json(node.params["type"])
        one = values.get(type_.kind, [0.5] * type_.width if type_.kind == "vector" else [values.get(type_.element)])
        if entity in given and name != "id":
            rows = {"item": [one, None], "event": [one, one]}.get(entity, [one])
            given[entity][name] = Column.of(type_, rows)
    given["event"]["time"] = Column.of(type_from_json({"kind": "time"}), [5, 9])
    return OnlineExecutor(plan).compute(
        history=given["event"], request_ms=10, user_id=1, item_ids=np.array([1, 2]),
        user=given["user"], item=given["item"], context=given["context"],
    )  # fmt: skip


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"a": ' * 100_000, "\udcff", "nul", "{}"])
def test_a_file_that_is_no_json(text: str, tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(CorruptFileError):
        read_features(tmp_path)


def test_deep_parameters_are_refused() -> None:
    data = rich().to_json()
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    data["nodes"][0]["params"]["type"] = deep
    with pytest.raises(DataError):
        FeatureSet.from_json(data)


# Finding a set.

SOURCE = """\
from tackboard.features.language import FeatureSet, Item, Float
item = Item(price=Float())
features = FeatureSet("home", price=item.price)
other = FeatureSet("other", price=item.price + 1)
"""


def test_a_set_is_found_by_file_name_json_and_folder(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(SOURCE)
    features = load_features(str(file))
    assert features.name == "home" and load_features(f"{file}:other").name == "other"
    features.write(tmp_path)
    assert load_features(str(tmp_path)).hash == features.hash
    assert load_features(str(tmp_path / FILE_NAME)).hash == features.hash
    for place in ("run/checkpoints/latest", "dataset/latest"):
        (tmp_path / place).mkdir(parents=True)
        features.write(tmp_path / place)
        assert load_features(str(tmp_path / place.partition("/")[0])).hash == features.hash
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="empty holds no features.json"):
        load_features(str(tmp_path / "empty"))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("none.py", None, "none.py is not a file"),
        ("mine.txt", "x", "mine.txt is neither a Python file nor features.json"),
        ("empty.py", "x = 1", "empty.py defines no feature set"),
        ("two.py", SOURCE.replace("features = ", "first = "), "two.py has 2 feature sets"),
        ("broken.py", "1 / 0", "broken.py:1 raised ZeroDivisionError"),
        (
            "wrong.py",
            SOURCE.replace("item.price + 1", "item.prise"),
            "feature price (wrong.py:4): item has no column prise",
        ),
    ],
)
def test_a_set_that_is_not_found(name: str, text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UsageError) as error:
        load_features(str(tmp_path / name))
    assert message in error.value.got


def test_a_name_that_a_file_does_not_have(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SOURCE)
    with pytest.raises(UsageError) as error:
        load_features(f"{tmp_path / 'mine.py'}:hme")
    assert "has no feature set hme" in error.value.got and error.value.allowed == "it has: features, other"
    with pytest.raises(UsageError, match="there is no module tackboard.nothing"):
        load_features("tackboard.nothing")


def test_what_a_model_reads_is_compared_without_the_length_of_its_history() -> None:
    def reading(length: int, newest: int, action: str = "click", stride: int = 1) -> FeatureSet:
        history = events.newest(length) if stride == 1 else events.anchored(length, stride)
        return FeatureSet(
            "home",
            history=sequence(
                item=history.collect(events.item), action=history.collect(events.action.index_in([action]))
            ),
            last=events.newest(newest).count(),
        )

    one, longer = reading(3, 5).read_hashes(3), reading(9, 5).read_hashes(9)
    assert one == longer and list(one) == ["history.item", "history.action", "last"]
    assert reading(3, 5).hash != reading(9, 5).hash
    renamed = reading(9, 5, "save").read_hashes(9)
    assert [name for name in one if one[name] != renamed[name]] == ["history.action"]
    assert reading(5, 5, stride=2).read_hashes(5) == reading(5, 5).read_hashes(5), "nor do anchors change a column"
    assert reading(5, 5, stride=2).hash != reading(5, 5).hash
    assert one["last"] != reading(3, 3).read_hashes(3)["last"], "only a history may have another length"
