"""The page of features: what it says is true, nothing in it runs, and models of any age can be named."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tackboard.core.errors import UsageError
from tackboard.features.feature_catalogue import FeatureCatalogue, ModelUse, read_model, sources_of
from tackboard.features.feature_set import FeatureSet
from tackboard.features.language import Events, Float, Item, Request, String, User, days, feature, sequence

item = Item(price=Float(minimum=0, maximum=10), title=String())
user = User(country=String(default="??"))
events = Events()
request = Request()


def a_set(limit: int = 8, **more: Any) -> FeatureSet:
    recent = events.newest(limit)
    return FeatureSet(
        "home",
        hour=request.time.hour().described("The hour."),
        price=item.price.fill_missing(0.0).log1p(),
        recent=events.within(days(7)).count(),
        all=events.count(),
        share=feature("recent") / feature("all"),
        history=sequence(item=recent.collect(events.item), time=recent.collect(events.time)),
        country=user.country.hash_id(),
        **more,
    )


def a_model(folder: Path, features: FeatureSet | None, **signature: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "signature.json").write_text(json.dumps({"name": folder.name, "version": "1", **signature}))
    if features is not None:
        features.write(folder)
    return folder


class Reader(HTMLParser):
    """Collects tags and text; fails on tags that are not closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.anchors: set[str] = set()
        self.links: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        given = dict(attrs)
        self.anchors |= {given["id"]} if given.get("id") else set()
        self.links |= {given["href"]} if given.get("href") else set()
        assert not any(name.startswith("on") for name in given)
        if tag not in ("meta", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read_page(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    assert reader.open == []
    assert {link.removeprefix("#") for link in reader.links} <= reader.anchors
    return reader


def test_sources_of_a_feature_with_the_times_it_needs() -> None:
    plan = a_set().plan
    assert {source.name for source in sources_of(plan, "recent")} == {"events.time", "request.time"}
    assert [(source.name, source.type) for source in sources_of(plan, "all")] == [("events", "events")]
    assert [(source.name, source.type, source.rule) for source in sources_of(plan, "price")] == [
        ("item.price", "float?", "minimum 0, maximum 10")
    ]
    assert sources_of(plan, "country")[0].rule == 'default "??"'
    assert {source.name for source in sources_of(plan, "share")} == {"events.time", "request.time"}


def test_a_page_tells_everything_about_a_feature() -> None:
    features = a_set()
    reader = read_page(FeatureCatalogue(features).page())
    for one in features.features():
        for text in (one.name, str(one.type), one.place, one.hash, f"once per {one.level}", one.description):
            assert text in reader.text
    assert 'feature("recent") / feature("all")' in reader.text
    assert "no model was named" in reader.text
    assert re.search(r"test_feature_catalogue\.py:\d+", reader.text)


def test_models_by_what_they_read(tmp_path: Path) -> None:
    features, older = a_set(), a_set(limit=4)
    now = a_model(tmp_path / "now", features.reading(["history.item", "hour"]), reads=["history.item", "hour"])
    then = a_model(tmp_path / "then", older.reading(["history.item"]), reads=["history.item", "gone"])
    silent = a_model(tmp_path / "silent", None)
    catalogue = FeatureCatalogue(features, [read_model(folder) for folder in (now, then, silent)])
    assert catalogue.users_of("history") == {0: True, 1: False}
    assert catalogue.users_of("hour") == {0: True}
    assert catalogue.users_of("price") == {}
    text = read_page(catalogue.page()).text
    assert "then 1 (another version of it)" in text
    assert f"silent 1 ({silent}) does not say what it reads" in text
    assert "gone" in text


def test_a_run_stands_for_its_latest_checkpoint_and_reads_all_its_features(tmp_path: Path) -> None:
    checkpoint = tmp_path / "run" / "checkpoints" / "latest"
    checkpoint.mkdir(parents=True)
    a_set().reading(["history.item", "hour"]).write(checkpoint)
    model = read_model(tmp_path / "run")
    assert model.name == "run"
    assert set(model.reads) == {"history.item", "hour"}
    assert FeatureCatalogue(a_set(), [model]).users_of("history") == {0: True}


def test_a_column_that_the_set_no_longer_has_is_another_version() -> None:
    model = ModelUse("m", "m", ("history.item", "history.mood"), {})
    assert FeatureCatalogue(a_set(), [model]).users_of("history") == {0: False}


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no model"):
        read_model(tmp_path)
    with pytest.raises(UsageError, match="is not a folder"):
        read_model(tmp_path / "absent")


def test_nothing_from_a_file_becomes_markup() -> None:
    attack = '<script>alert("1")</script>"onload=x'
    features = FeatureSet("home", x=events.where(events.action == attack).count().described(attack + "\ud800"))
    features.plan.features[attack] = features.plan.features["x"]  # type: ignore[index]
    model = ModelUse(attack, attack, ("x", attack), {})
    html = FeatureCatalogue(features, [model]).page()
    reader = read_page(html)
    assert "script" not in reader.tags
    assert attack in reader.text
    assert html.encode() and "\\ud800" in html
    assert "default-src 'none'" in html


def test_a_hundred_features_stay_readable() -> None:
    more = {f"clicks_{number}": events.within(days(number)).count() for number in range(1, 101)}
    html = FeatureCatalogue(a_set(**more)).page()
    reader = read_page(html)
    assert "and 79 more" in reader.text
    assert len(html) < 400_000
