"""A feature set is defined in Python, stored as `features.json`, and read back from there.

    features = FeatureSet("home", version=1, hour=request.time.hour(), clicks=events.count())

features.json holds the operations of the plan, the names, types and code lines of the features, and a content hash. The
hash covers the computation (operators, parameters, declared columns), the names of the set and its features, and the
version. It does not cover how the code is written, such as the names of Python variables. Every feature also has its
own hash. `FeatureSet.from_json` compiles the operations again and compares the hash, so an unknown operator, a type
clash and a changed computation raise errors.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import re
import unicodedata
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from tackboard.core.config import did_you_mean
from tackboard.core.errors import CorruptFileError, DataError, UsageError
from tackboard.core.files import read_json, write_json_atomic
from tackboard.core.progress import say
from tackboard.core.user_code import load_code
from tackboard.features.expressions import Expression, caller_place
from tackboard.features.kernels.clock import database_version
from tackboard.features.plan import LEVELS, Node, Plan, PlanBuilder, SpecError, compile_features, compile_nodes
from tackboard.features.types import FeatureType

FORMAT_VERSION = 1
FILE_NAME = "features.json"
OWN_PREFIX = "tackboard."
PLACES = "allowed: path/to/features.py, features.json, a bundle or a checkpoint"
ZONED = ("hour", "weekday", "minute_of_day")
UNICODE = ("lower", "strip", "nfc")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,99}")


@dataclasses.dataclass(frozen=True)
class Feature:
    """Describes one feature to a human reader. `place` is the file and the line where the feature is defined."""

    name: str
    type: FeatureType
    level: str
    place: str
    description: str
    hash: str


class FeatureSet:
    """A set of named features. `FeatureSet(name, version=1, feature=expression, …)` compiles and checks all of them."""

    def __init__(self, name: str, /, *, version: int = 1, **features: Expression) -> None:
        place = caller_place()
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise SpecError(
                f"{place}: a feature set cannot be named {name!r}", allowed="letters, digits and _, e.g. home"
            )
        if not isinstance(version, int) or isinstance(version, bool) or version < 1:
            raise SpecError(f"{place}: feature set {name} has version = {version!r}", allowed="allowed: 1, 2, 3, …")
        if not features:
            raise SpecError(f"{place}: feature set {name} has no features", fix="give at least one: name=expression")
        for key, value in features.items():
            if not key.isidentifier():
                raise SpecError(
                    f"{place}: a feature cannot be named {key!r}", allowed="names as in Python, e.g. clicks_7d"
                )
            if not isinstance(value, Expression):
                raise SpecError(
                    f"feature {key} ({place}) is {type(value).__name__}, not an expression",
                    fix="choose events and aggregate them: events.count()"
                    if hasattr(value, "collect")
                    else "give an expression: item.price, events.count()",
                )
        texts = {key: value.text for key, value in features.items()}
        self._set(name, version, compile_features(features), texts, ())

    def _set(
        self, name: str, version: int, plan: Plan, descriptions: Mapping[str, str], declared: Iterable[str]
    ) -> None:
        self.name = name
        self.version = version
        self.plan = plan
        self.descriptions = dict(descriptions)
        self._digests = node_digests(plan)
        own = {f"{node.params['entity']}.{node.params['column']}" for _, node in plan.sources()}
        self.declared = sorted(own.union(declared))
        """The columns (as entity.column) read by this set, or by the sets from which this set was made."""

    @property
    def hash(self) -> str:
        """The SHA-256 of the set's name, version and computation; see the module's docstring."""
        parts = {"name": self.name, "version": self.version, "features": self.feature_hashes()}
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def feature_hashes(self) -> dict[str, str]:
        """Maps the name of each feature to the hash of its computation."""
        return {name: self._digests[index] for name, index in self.plan.features.items()}

    def read_hashes(self, max_history: int) -> dict[str, str]:
        """Maps each entry of `reads` to the hash of its computation.

        The hash leaves out the length `max_history` of a history. So two models that read the same columns of a history
        have the same hashes, even if the two histories differ in length.
        """
        without_length = node_digests(self.plan, max_history)
        hashes: dict[str, str] = {}
        for name, index in self.plan.features.items():
            columns = [f"{name}.{column}" for column, _ in self.plan.nodes[index].type.columns]
            of_columns = zip(columns, self.plan.nodes[index].args, strict=True) if columns else ()
            hashes |= {read: without_length[place] for read, place in of_columns} or {name: self._digests[index]}
        return hashes

    def reads(self) -> list[str]:
        """Returns the list `reads` of a model that reads the whole set. The list has one entry per feature, or, if the
        feature is a sequence, one entry per column of the sequence, such as `history.item`."""
        return [
            read
            for feature in self.features()
            for read in ([f"{feature.name}.{column}" for column, _ in feature.type.columns] or [feature.name])
        ]

    def features(self) -> list[Feature]:
        """Returns the features in the order of their definition."""
        rows = []
        for name, index in self.plan.features.items():
            node = self.plan.nodes[index]
            text = self.descriptions.get(name, "")
            rows.append(Feature(name, node.type, LEVELS[node.level], str(node.place), text, self._digests[index]))
        return rows

    def trimmed(self, names: Iterable[str]) -> FeatureSet:
        """Returns a set with only the named features."""
        return self._with_plan(self.plan.trimmed(names))

    def _with_plan(self, plan: Plan) -> FeatureSet:
        texts = {name: self.descriptions.get(name, "") for name in plan.features}
        return _make(self.name, self.version, plan, texts, self.declared)

    def reading(self, reads: Iterable[str]) -> FeatureSet:
        """Returns the part of the set that `reads` names. An entry is a feature, or a column such as `history.item`."""
        builder, places = self._rebuilt(PlanBuilder())
        named: dict[str, int] = {}
        wanted: dict[str, list[str]] = {}
        for read in reads:
            name, _, column = read.partition(".")
            if name not in self.plan.features:
                self.plan.trimmed([name])  # Raises a UsageError that suggests a name.
            wanted.setdefault(name, []).append(column)
        for name, columns in wanted.items():
            node = self.plan.nodes[self.plan.features[name]]
            index = places[self.plan.features[name]]
            if any(columns):
                index = _some_columns(builder, index, name, [column for column in columns if column], node)
            named[name] = index
        return self._with_plan(Plan(tuple(builder.nodes), named).trimmed(named))

    def merged(self, other: FeatureSet) -> FeatureSet:
        """Returns this set, extended by those features of `other` whose names this set does not have."""
        builder, places = self._rebuilt(PlanBuilder())
        named = {name: places[index] for name, index in self.plan.features.items()}
        _, more = other._rebuilt(builder)
        named |= {name: more[index] for name, index in other.plan.features.items() if name not in named}
        texts = {name: self.descriptions.get(name) or other.descriptions.get(name, "") for name in named}
        plan = Plan(tuple(builder.nodes), named).trimmed(named)
        return _make(self.name, self.version, plan, texts, [*self.declared, *other.declared])

    def _rebuilt(self, builder: PlanBuilder) -> tuple[PlanBuilder, list[int]]:
        """Adds the plan's nodes to `builder`. Returns the builder, and the position of each node in the builder."""
        places: list[int] = []
        for node in self.plan.nodes:
            places.append(builder.add(node.op, tuple(places[i] for i in node.args), node.params, node.place))
        return builder, places

    def explain(self) -> str:
        """Returns the plan as text; see `Plan.explain`."""
        return f"feature set {self.name}, version {self.version}, {self.hash[:12]}\n{self.plan.explain()}"

    def to_json(self) -> dict[str, Any]:
        """Returns the content of features.json."""
        data: dict[str, Any] = {
            "format_version": FORMAT_VERSION,
            "name": self.name,
            "version": self.version,
            "hash": self.hash,
            "declared": self.declared,
        }
        ops = {node.op for node in self.plan.nodes}
        if ops.intersection(ZONED):
            data["tzdata"] = database_version()
        if ops.intersection(UNICODE):
            data["unicode"] = unicodedata.unidata_version
        data["nodes"] = [
            {"op": node.op, "args": list(node.args), "params": dict(node.params)}
            | ({"file": Path(node.place.file).name, "line": node.place.line} if node.place.line else {})
            for node in self.plan.nodes
        ]
        data["features"] = {
            feature.name: {
                "node": self.plan.features[feature.name],
                "type": str(feature.type),
                "level": feature.level,
                "hash": feature.hash,
                "description": feature.description,
            }
            for feature in self.features()
        }
        return data

    @classmethod
    def from_json(cls, data: Any, where: str = FILE_NAME) -> FeatureSet:
        """Returns the set that `to_json` wrote. Raises DataError if this Tackboard cannot compile the set."""
        if not isinstance(data, dict) or not isinstance(data.get("format_version"), int):
            raise CorruptFileError(f"{where} is not a feature set")
        if data["format_version"] > FORMAT_VERSION:
            raise DataError(
                f"{where} has feature format version {data['format_version']}",
                allowed=f"allowed: up to {FORMAT_VERSION}",
                fix="use a newer tackboard",
            )
        try:
            named = {str(name): entry["node"] for name, entry in data["features"].items()}
            texts = {str(name): str(entry.get("description", "")) for name, entry in data["features"].items()}
            name, version, nodes = str(data["name"]), int(data["version"]), list(data["nodes"])
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            raise CorruptFileError(f"{where} is not a feature set") from None
        if not _NAME.fullmatch(name) or version < 1 or not all(key.isidentifier() for key in named):
            raise CorruptFileError(f"{where} is not a feature set")
        try:
            plan = compile_nodes(nodes, named)
        except DataError as error:
            raise DataError(f"{where}: {error.got}", allowed=error.allowed, fix=error.fix) from None
        declared = data.get("declared", [])
        if not isinstance(declared, list) or not all(isinstance(one, str) and "." in one for one in declared):
            raise CorruptFileError(f"{where} is not a feature set")
        result = _make(name, version, plan, texts, declared)
        if result.hash != data.get("hash"):
            raise CorruptFileError(f"the content of {where} does not match its hash", fix="export it again")
        _warn_about_databases(data, where)
        return result

    def write(self, folder: Path) -> None:
        """Writes features.json into a folder."""
        write_json_atomic(folder / FILE_NAME, self.to_json())


def _make(name: str, version: int, plan: Plan, descriptions: Mapping[str, str], declared: Iterable[str]) -> FeatureSet:
    result = FeatureSet.__new__(FeatureSet)
    result._set(name, version, plan, descriptions, declared)
    return result


def _some_columns(builder: PlanBuilder, index: int, name: str, columns: list[str], node: Node) -> int:
    """Adds a sequence node with only the given columns, in the order of the sequence. Returns the node's position."""
    known = [column for column, _ in node.type.columns]
    for column in columns:
        if column not in known:
            raise UsageError(
                f"feature {name} has no column {column}",
                allowed=f"its columns: {', '.join(known) or 'none, it is not a sequence'}",
                fix=did_you_mean(column, known, f"{name}."),
            )
    kept = [position for position, column in enumerate(known) if column in columns]
    args = tuple(builder.nodes[index].args[position] for position in kept)
    return builder.add("sequence", args, {"names": [known[position] for position in kept]}, node.place)


def node_digests(plan: Plan, max_history: int | None = None) -> list[str]:
    """Returns a hash for every node. The hash covers the node's operator, parameters and the hashes of its inputs.

    If `max_history` is given, a node that takes the newest `max_history` events is hashed without this number, and
    without the stride of anchors.
    """
    digests: list[str] = []
    for node in plan.nodes:
        op, params = node.op, dict(node.params)
        if op in ("newest", "anchored") and params["count"] == max_history:
            op, params = "newest", {}
        content = [op, params, [digests[argument] for argument in node.args]]
        digests.append(hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest())
    return digests


def read_features(folder: Path) -> FeatureSet | None:
    """Returns the feature set of a checkpoint, bundle or snapshot, or None if the folder has no features.json."""
    path = folder / FILE_NAME
    return FeatureSet.from_json(read_json(path), str(path)) if path.exists() else None


def load_features(place: str) -> FeatureSet:
    """Loads the feature set of `file.py`, `file.py:name`, `features.json` or a folder that holds a features.json.

    For a run, the function loads the set of the latest checkpoint. For a dataset, it loads the set of the latest
    snapshot. If `place` begins with `tackboard.`, it names a module of this package.
    """
    path_text, separator, name = place.rpartition(":")
    if not separator or not (path_text.endswith(".py") or path_text.startswith(OWN_PREFIX)):
        path_text, name = place, ""
    if path_text.startswith(OWN_PREFIX):
        try:
            return _find_set(importlib.import_module(path_text), path_text, name)
        except ModuleNotFoundError:
            raise UsageError(
                f"there is no module {path_text}", allowed="allowed: path/to/features.py, a bundle …"
            ) from None
    path = Path(path_text)
    if path.is_dir():
        for folder in (path, path / "latest", path / "checkpoints" / "latest"):
            if (found := read_features(folder)) is not None:
                return found
        raise UsageError(f"{path} holds no {FILE_NAME}", allowed="allowed: a bundle, a checkpoint, a run, or file.py")
    if not path.is_file():
        raise UsageError(f"{path} is not a file", allowed=PLACES)
    if path.suffix == ".json":
        return FeatureSet.from_json(read_json(path), str(path))
    if path.suffix != ".py":
        raise UsageError(f"{path} is neither a Python file nor features.json", allowed=PLACES)
    return _find_set(load_code(path), str(path), name)


def _find_set(module: ModuleType, path: str, name: str) -> FeatureSet:
    sets = {key: value for key, value in vars(module).items() if isinstance(value, FeatureSet)}
    if name and name not in sets:
        raise UsageError(f"{path} has no feature set {name}", allowed=f"it has: {', '.join(sets) or 'none'}")
    if not sets:
        raise UsageError(f"{path} defines no feature set", fix="add: features = FeatureSet('home', name=expression)")
    if not name and len(sets) > 1 and "features" not in sets:
        raise UsageError(f"{path} has {len(sets)} feature sets", fix=f"name one of them: {path}:{next(iter(sets))}")
    return sets[name] if name else sets.get("features", next(iter(sets.values())))


def _warn_about_databases(data: Mapping[str, Any], where: str) -> None:
    zones, text = data.get("tzdata"), data.get("unicode")
    if zones and zones != (present := database_version()):
        say(f"warning: {where} was made with time zones {zones}, this machine has {present}: hours may differ")
    if text and text != (present := unicodedata.unidata_version):
        say(f"warning: {where} was made with Unicode {text}, this Python has {present}: texts may differ")
