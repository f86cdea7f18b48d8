"""Facts that processes state, and the message if they differ. tests/dist/test_start.py runs it in processes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tackboard.core.errors import UsageError
from tackboard.parallel import agreement
from tackboard.parallel.agreement import check_agreement, code_hash, differing_facts, run_facts
from tackboard.parallel.training_world import ALONE, TrainingWorld

CONFIG = {"seed": 3, "data": {"dataset": "/a/b", "max_length": 8}, "model": {"config": {"width": 64}}}


@dataclasses.dataclass(frozen=True)
class Stated(TrainingWorld):
    """A world whose other processes state what the test says."""

    others: tuple[dict[str, str], ...] = ()

    def gather(self, value: Any) -> list[Any]:
        return [value, *self.others]


def test_facts_are_what_must_be_equal() -> None:
    facts = run_facts(ALONE, CONFIG, "snap", the_features="f1")
    assert facts["setting seed"] == "3"
    assert facts["setting model.width"] == "64"
    assert facts["the data snapshot"] == "snap"
    assert facts["the features"] == "f1"
    assert facts["the world size"] == "1"
    assert facts["the device"] == "cpu"
    assert facts["tackboard's code"] == code_hash()
    assert {"the version of python", "the version of torch", "the version of numpy"} <= facts.keys()
    assert not [name for name in facts if "dataset" in name]  # A path may differ from host to host.


def test_the_code_has_a_hash_that_any_byte_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inside").mkdir()
    (tmp_path / "__init__.py").write_text("")
    hashes = set()
    monkeypatch.setattr(agreement.tackboard, "__file__", str(tmp_path / "__init__.py"))
    for text in ("a = 1\n", "a = 2\n"):
        (tmp_path / "inside" / "x.py").write_text(text)
        hashes.add(code_hash.__wrapped__())
    (tmp_path / "inside" / "x.py").rename(tmp_path / "inside" / "y.py")
    assert len(hashes | {code_hash.__wrapped__()}) == 3
    assert len(code_hash()) == 64


def test_processes_that_agree_go_on() -> None:
    facts = run_facts(ALONE, CONFIG, "snap")
    check_agreement(Stated(size=3, others=(facts, facts)), facts)
    check_agreement(ALONE, facts)


def test_the_message_names_facts_and_processes() -> None:
    facts = {"setting seed": "1", "the data snapshot": "a" * 64, "the version of torch": "2.13.0", "x": "y"}
    other = facts | {"setting seed": "2", "the data snapshot": "b" * 64, "the version of torch": "2.12.0"}
    assert list(differing_facts([facts, facts, other])) == [
        "setting seed",
        "the data snapshot",
        "the version of torch",
    ]
    with pytest.raises(UsageError) as caught:
        check_agreement(Stated(size=3, others=(facts, other)), facts)
    error = caught.value
    assert error.is_common
    assert "setting seed is 1 in processes 0-1, 2 in process 2; the data snapshot is aaaaaaaaaaaa… in" in error.got
    for word in ("same --set", "data.dataset", "make distributed"):
        assert word in error.fix
    assert len(str(error).splitlines()) == 3


def test_a_fact_that_one_process_lacks_differs() -> None:
    assert differing_facts([{"a": "1"}, {}]) == {"a": "1 in process 0, not stated in process 1"}


def test_many_differences_are_counted() -> None:
    facts = {f"setting s{number}": "1" for number in range(9)}
    other = dict.fromkeys(facts, "2")
    with pytest.raises(UsageError, match="s2 is .*; and 6 more"):
        check_agreement(Stated(size=2, others=(other,)), facts)
