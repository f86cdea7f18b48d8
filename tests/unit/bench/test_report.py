"""One writer for all benches: what the file and the terminal say, whatever was measured."""

from pathlib import Path
from typing import Any

import pytest

from tackboard.bench.report import Report, Table, table_lines, where_and_when, write_result
from tackboard.core.errors import TackboardError

RESULT = {
    "hardware": {"cpu": "some CPU", "usable_cores": 2, "memory_bytes": 2**32},
    "python": "3.11.7",
    "packages": {"numpy": "2.4.6", "absent": None},
    "commit": None,
    "date": "2027-01-31",
}


def a_report(**changes: Any) -> Report:
    table = Table("speed", ("", "rate", "words"), [("ours", "1,000", "fast"), ("theirs", "50", "slow")], "of one run")
    told: dict[str, Any] = {
        "result": RESULT, "theme": "speed", "title": "Speed", "command": "bench speed --quick",
        "words": ["One.", "Two."], "tables": [table, Table("none", ("a",), [], "skipped")],
        "notes": ["met: 2, at least 1"], "versions": "Rivals: none.", "charts": {"curve": "<svg/>"},
    }  # fmt: skip
    return Report(**told | changes)


def test_the_file_names_command_machine_commit_and_date(tmp_path: Path) -> None:
    path = write_result(a_report(), tmp_path / "results", "h200")
    assert path == tmp_path / "results" / "speed_h200_202701.md"
    assert path.read_text() == (
        "# Speed\n\n`tackboard bench speed --quick`, 2027-01-31, commit unknown.\n"
        "Machine: some CPU, 2 usable cores, 4.0 GiB. Python 3.11.7, numpy 2.4.6. Rivals: none.\n\nOne. Two.\n\n"
        "## Speed\n\nOf one run.\n\n|  | rate | words |\n|---|--:|---|\n| ours | 1,000 | fast |\n"
        "| theirs | 50 | slow |\n\n## None\n\nSkipped.\n\n- Met: 2, at least 1.\n\n"
        "![curve](speed_h200_202701_curve.svg)\n"
    )
    assert (path.parent / "speed_h200_202701_curve.svg").read_text() == "<svg/>"


def test_ranks_are_copied_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "kept.npz").write_bytes(b"ranks")
    result = RESULT | {"bench": "quality"}
    path = write_result(a_report(ranks=tmp_path / "kept.npz", result=result), tmp_path / "results", "h200")
    assert (path.parent / "speed_h200_202701_ranks.npz").read_bytes() == b"ranks"
    assert "`tackboard bench quality --recompute speed_h200_202701_ranks.npz` makes these tables" in path.read_text()


def test_the_terminal_shows_the_same_tables() -> None:
    assert table_lines(a_report()) == [
        "One.", "Two.", "", "speed", "of one run", "         rate  words", "ours    1,000  fast",
        "theirs     50  slow", "", "none", "skipped", "", "met: 2, at least 1",
    ]  # fmt: skip


def test_every_result_says_where_and_when_it_was_taken() -> None:
    assert set(where_and_when()) == set(RESULT)


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TackboardError, match="--results"):
        write_result(a_report(), tmp_path / "file", "cpu")
