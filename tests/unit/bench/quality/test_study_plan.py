"""What a study plans with: options over defaults, prepared datasets, cells."""

import dataclasses
from pathlib import Path

import pytest

from tackboard.bench.quality import study_plan as quality_plan
from tackboard.bench.quality.cells import Work
from tackboard.bench.quality.data import BENCHES, find_bench
from tackboard.bench.quality.methods import METHODS
from tackboard.bench.quality.study_plan import STUDIES, Options, StudyContext, find_study
from tackboard.core.errors import UsageError


@pytest.fixture
def context(fake_ml_1m: Path, tmp_path: Path) -> StudyContext:
    return StudyContext(Work.open(tmp_path / "work"), find_bench("ml-1m"), Options(), fake_ml_1m)


def test_what_is_asked_for_goes_before_the_study(context: StudyContext) -> None:
    assert context.ties(("file",)) == ("file",)
    assert [method.name for method in context.methods(("hstu",))] == ["hstu"]
    assert list(context.seeds(3)) == [0, 1, 2]
    context.options = Options(methods=("sasrec",), seeds=2, ties=("random", "file"), quick=True)
    assert context.ties(("file",)) == ("random", "file")
    assert [method.name for method in context.methods(("hstu",))] == ["sasrec"]
    assert list(context.seeds(3)) == [0, 1]
    context.options = Options(quick=True)
    assert list(context.seeds(3)) == [0]


def test_places_and_cells(context: StudyContext) -> None:
    places = context.places(("file", "reverse"))
    assert [place.prepared for place in places.values()] == ["ml-1m-file", "ml-1m-reverse"]
    cell = context.cell(places["reverse"], "reverse", METHODS["sasrec"], 4, "published", filter_newest=12)
    assert cell.run_config().seed == 4 and cell.run_config().data.dataset == "ml-1m-reverse"
    assert cell.protocol == {"filter_seen": True, "max_users": 0, "filter_newest": 12}
    assert context.cell(places["file"], "file", METHODS["popularity"], 0, "baseline").config is None
    context.options = Options(quick=True)
    assert context.places(("file",))["file"].prepared == "ml-1m-file-every2"
    kakao = StudyContext(context.work, BENCHES["kakao-brunch"], Options(quick=True))
    assert kakao.protocol() == {"filter_seen": False, "max_users": 1_000}
    assert dataclasses.replace(kakao, options=Options()).protocol()["max_users"] == 20_000


def test_what_a_study_takes(context: StudyContext) -> None:
    context.options = Options(study="validate", methods=("hstu", "popularity"))
    with pytest.raises(UsageError, match="--study validate only fits models"):
        context.fitted_methods(())
    context.options = Options(study="validate")
    assert [method.name for method in context.fitted_methods(("popularity", "hstu"))] == ["hstu"], "not asked for"
    context.options = Options(study="transfer", ties=("file", "file"), methods=("hstu", "hstu"))
    assert context.one_rule() == "file" and len(context.methods(())) == 1
    context.options = Options(study="transfer", ties=("file", "random"))
    with pytest.raises(UsageError, match="--study transfer takes one tie rule, not file,random"):
        context.one_rule()


def test_a_trial_reads_and_writes_nothing(context: StudyContext, tmp_path: Path) -> None:
    trial = StudyContext(Work(tmp_path / "absent"), context.bench, Options(quick=True), is_trial=True)
    place = trial.places(("file",))["file"]
    assert (place.prepared, place.facts.num_users, place.facts.num_items) == ("ml-1m-file-every2", 12, 30)
    assert trial.cell(place, "file", METHODS["pinfm-history"], 0, "validate").run_config().seed == 0
    with pytest.raises(UsageError, match="--ties fil does not fit ml-1m"):
        trial.places(("fil",))
    assert not (tmp_path / "absent").exists()


def test_studies_are_found_by_name_and_may_be_added(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in STUDIES:
        assert callable(find_study(name))
    monkeypatch.setitem(quality_plan.STUDIES, "own", "tackboard.bench.quality.studies:compare")
    assert find_study("own") is find_study("compare")
    with pytest.raises(UsageError, match=r"did you mean reproduce\?"):
        find_study("reproduced")
