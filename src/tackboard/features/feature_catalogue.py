"""Makes the catalogue of a feature set: a static page that shows each feature's sources, computation and models.

This module takes a feature set and the folders of models (bundles, checkpoints, runs) and returns an HTML page that
loads no other file. The features that a model uses are found in the model's own files: in `reads` of signature.json,
and in features.json. If a feature was computed differently when the model was made, the page says that the model uses
another version of the feature. All text that comes from a file is escaped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tackboard.core.errors import UsageError
from tackboard.core.files import read_json
from tackboard.features.feature_set import Feature, FeatureSet, read_features
from tackboard.features.plan import Plan
from tackboard.features.spelling import literal, source_name, spell
from tackboard.report.page import Figure, Link, Page, Section
from tackboard.report.svg import MatrixRow, matrix

OWNERS = ("user", "request", "context", "events", "item")
WORTH_SHOWING = 24
"""Largest number of features in one table cell. If there are more, the cell says how many are left out."""


@dataclasses.dataclass(frozen=True)
class ModelUse:
    """Says what a model reads. `reads` lists features and columns of features (`hour`, `history.item`)."""

    name: str
    where: str
    reads: tuple[str, ...]
    hashes: Mapping[str, str]

    def features(self) -> list[str]:
        """Returns the names of the features that the model reads, without the names of columns."""
        return list(dict.fromkeys(read.partition(".")[0] for read in self.reads))


@dataclasses.dataclass(frozen=True)
class Source:
    """A column that features read, with its declared type and range."""

    name: str
    type: str
    rule: str


def read_model(folder: Path) -> ModelUse:
    """Returns the `ModelUse` of a bundle, checkpoint or run. Does not import torch.

    If the folder does not say what the model reads, `reads` is empty.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder", allowed="allowed: a bundle, a run or a checkpoint")
    places = (folder, folder / "latest", folder / "checkpoints" / "latest")
    known = ("signature.json", "features.json", "MANIFEST.json")
    place = next((place for place in places if any((place / name).is_file() for name in known)), None)
    if place is None:
        raise UsageError(f"{folder} holds no model", allowed="allowed: a bundle, a run or a checkpoint")
    signature: Any = read_json(place / "signature.json") if (place / "signature.json").is_file() else {}
    signature = signature if isinstance(signature, dict) else {}
    features = read_features(place)
    reads = signature.get("reads")
    if not isinstance(reads, list):
        reads = [] if features is None else features.reads()
    name = f"{signature['name']} {signature.get('version', '')}".strip() if signature.get("name") else folder.name
    hashes = {} if features is None else features.feature_hashes()
    return ModelUse(name, str(folder), tuple(str(read) for read in reads), hashes)


class FeatureCatalogue:
    """Knows, for each feature of a set, the sources that the feature reads and the models that use the feature."""

    def __init__(self, features: FeatureSet, models: Sequence[ModelUse] = ()) -> None:
        self.set = features
        self.models = models
        self.features = features.features()
        self.sources_of = {feature.name: sources_of(features.plan, feature.name) for feature in self.features}
        found = {source.name: source for sources in self.sources_of.values() for source in sources}
        self.sources = sorted(found.values(), key=lambda source: (OWNERS.index(_owner(source.name)), source.name))
        self.anchors = {feature.name: f"feature-{number}" for number, feature in enumerate(self.features)}
        self._same = [self._compare(model) for model in models]

    def users_of(self, name: str) -> dict[int, bool]:
        """Returns the models that read the feature, as a dict: position of a model → whether the model reads the
        current version of the feature."""
        return {number: same[name] for number, same in enumerate(self._same) if name in same}

    def _compare(self, model: ModelUse) -> dict[str, bool]:
        columns = {feature.name: {name for name, _ in feature.type.columns} for feature in self.features}
        same: dict[str, bool] = {}
        known = []
        for read in model.reads:
            name, _, column = read.partition(".")
            if name in columns:
                same[name] = not column or column in columns[name]
                known += [read] if same[name] else []
        # If a model reads only some columns of a sequence, only these columns must be hashed for the comparison.
        now = self.set.reading(known).feature_hashes() if known else {}
        return {
            name: is_known and model.hashes.get(name, now.get(name)) == now.get(name) for name, is_known in same.items()
        }

    def page(self) -> str:
        """Returns the page as HTML."""
        page = Page(
            f"Features of {self.set.name}",
            f"Version {self.set.version}: where each feature comes from, how it is computed, and which models read it.",
            footer=f"Written by tackboard features docs. Hash of the set: {self.set.hash}",
        )
        levels = [feature.level for feature in self.features]
        used = sum(1 for feature in self.features if self.users_of(feature.name))
        page.lead.figures(
            [
                Figure(label="features", value=str(len(self.features))),
                Figure(label="once per request", value=str(sum(level != "candidate" for level in levels))),
                Figure(label="once per candidate", value=str(levels.count("candidate"))),
                Figure(label="sources", value=str(len(self.sources))),
                Figure(label="read by a model", value=str(used) if self.models else "–", note=self._unused_note(used)),
            ]
        )
        self._overview(page.section("Source, feature, model"))
        self._sources(page.section("Sources"))
        if self.models:
            self._models(page.section("Models"))
        self._entries(page.section("Features"))
        # JSON can hold half a surrogate pair, but a text file cannot.
        return page.render().encode("utf-8", "backslashreplace").decode()

    def _unused_note(self, used: int) -> str:
        if not self.models:
            return "no model was named"
        return f"{len(self.features) - used} are read by no model" if used < len(self.features) else ""

    def _overview(self, section: Section) -> None:
        places = {source.name: place for place, source in enumerate(self.sources)}
        rows = [
            MatrixRow(
                name=feature.name,
                anchor=self.anchors[feature.name],
                left={places[source.name]: True for source in self.sources_of[feature.name]},
                right=self.users_of(feature.name),
            )
            for feature in self.features
        ]
        picture = matrix(
            rows,
            [source.name for source in self.sources],
            [model.name for model in self.models],
            title="What each feature reads and who reads it",
            description=f"{len(rows)} features; the tables below hold the same facts.",
        )
        hollow = " A ring marks a model that was made with another version of the feature." if self.models else ""
        section.chart(picture, f"The sources of a feature are on its left, its models are on its right.{hollow}")

    def _sources(self, section: Section) -> None:
        rows = []
        for source in self.sources:
            readers = [name for name, sources in self.sources_of.items() if source in sources]
            users = sorted({number for name in readers for number in self.users_of(name)})
            models = tuple(self.models[number].name for number in users)
            rows.append([f"{source.name}: {source.type}", self._links(readers), models or "–", source.rule or "–"])
        section.text("A source is a column of the data. If a type ends with ?, values may be missing.")
        section.table(["source", "features that read it", "models", "declared"], rows)

    def _models(self, section: Section) -> None:
        rows = []
        for number, model in enumerate(self.models):
            same = self._same[number]
            other = [name for name, is_same in same.items() if not is_same]
            elsewhere = tuple(name for name in model.features() if name not in same)
            reads = self._links([name for name in same if same[name]])
            rows.append([model.name, model.where, reads, self._links(other), elsewhere or "–"])
            if not model.reads:
                section.text(f"{model.name} ({model.where}) does not say what it reads.")
        section.table(["model", "where", "reads", "reads another version of", "reads from outside this set"], rows)

    def _links(self, names: Sequence[str]) -> tuple[Link | str, ...] | str:
        shown: list[Link | str] = [Link(name, self.anchors[name]) for name in names[:WORTH_SHOWING]]
        more = [f"and {len(names) - WORTH_SHOWING} more"] if len(names) > WORTH_SHOWING else []
        return (*shown, *more) or "–"

    def _entries(self, section: Section) -> None:
        entries = []
        groups: dict[str, list[int]] = {}
        for number, feature in enumerate(self.features):
            entries.append(self._entry(feature))
            reads = dict.fromkeys(f"reads {_owner(source.name)}" for source in self.sources_of[feature.name])
            users = [f"used by {self.models[one].name}" for one in self.users_of(feature.name)]
            unused = ["used by no model"] if self.models and not users else []
            for group in (f"per {feature.level}", *reads, *users, *unused):
                groups.setdefault(group, []).append(number)
        section.entries(entries, sorted(groups.items()))

    def _entry(self, feature: Feature) -> Section:
        entry = Section(feature.name, self.anchors[feature.name])
        if feature.description:
            entry.text(feature.description)
        entry.code(spell(self.set.plan, feature.name))
        users = self.users_of(feature.name)
        told = tuple(
            self.models[one].name + ("" if is_same else " (another version of it)") for one, is_same in users.items()
        )
        sources = tuple(f"{source.name} ({source.type})" for source in self.sources_of[feature.name])
        entry.facts(
            [
                ("type", f"{feature.type}, computed once per {feature.level}"),
                ("reads", sources or "nothing"),
                ("used by", told or "none of the named models"),
                ("written at", feature.place),
                ("hash", feature.hash),
            ]
        )
        return entry


def sources_of(plan: Plan, name: str) -> list[Source]:
    """Returns the columns that one feature reads, including the times that a time window needs."""
    part = plan.trimmed([name])
    found = {}
    for _, node in part.sources():
        source = Source(source_name(node.params), str(node.type), _rule(node.params))
        found[source.name] = source
    if part.needs_event_times:
        found.setdefault("events.time", Source("events.time", "time", ""))
    if part.needs_request_time:
        found.setdefault("request.time", Source("request.time", "time", ""))
    if part.reads_events and not any(_owner(source) == "events" for source in found):
        found["events"] = Source("events", "events", "")
    return list(found.values())


def _rule(params: Mapping[str, Any]) -> str:
    told = [f"{name} {literal(params[name])}" for name in ("minimum", "maximum", "default") if name in params]
    return ", ".join(told)


def _owner(source: str) -> str:
    return source.split(".")[0].split("[")[0]
