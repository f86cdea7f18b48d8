"""Where rivals are absent, or their environment does not work, that is said; a bench then measures ours alone."""

import json
from pathlib import Path

import pytest

from tackboard.bench import rivals
from tackboard.bench.features.run import measure as measure_features
from tackboard.bench.loader.run import measure as measure_loader
from tackboard.core.errors import TackboardError


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """A program that stands for the rivals' Python and fails."""
    path = tmp_path / "python"
    path.write_text("#!/bin/sh\nexit 1\n")
    path.chmod(0o755)
    return path


def test_not_installed_is_said_and_a_broken_environment_is_an_error(tmp_path: Path, python: Path) -> None:
    assert rivals.versions(tmp_path / "none", ["numpy"]) == rivals.NOT_INSTALLED == "not installed: make rivals"
    with pytest.raises(TackboardError, match="does not work") as error:
        rivals.versions(python, ["numpy"])
    assert "make rivals" in str(error.value.fix)


def test_versions_are_those_of_the_environment(python: Path) -> None:
    python.write_text("#!/bin/sh\necho '" + json.dumps({"polars": "2.1.0"}) + "'\n")
    assert rivals.versions(python, ["polars"]) == {"polars": "2.1.0"}


@pytest.mark.slow
def test_installed_from_a_wheel_a_bench_says_so_in_one_line_and_measures_ours(
    tmp_path: Path, python: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rivals, "CODE", tmp_path / "benchmarks" / "rivals")
    result = measure_features(tmp_path / "features", quick=True, rivals_python=python)
    assert result["rivals"] == rivals.NO_CODE and list(result["online"]["contenders"]) == ["tackboard"]
    result = measure_loader(tmp_path / "loader", quick=True, rivals_python=python)
    assert result["rivals"] == rivals.NO_CODE and list(result["contenders"]) == ["tackboard"]
    lines = [line for line in capsys.readouterr().err.splitlines() if "benchmarks/rivals" in line]
    assert len(lines) == 2 and all("only our own figures are measured" in line for line in lines)
