from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tackboard.bench import sequence_store
from tackboard.bench.report import table_lines
from tackboard.bench.sequence_store import ENGINES, SKIPPED, WORDS, StoreSizes, check, events, measure, report
from tackboard.core.errors import TackboardError
from tackboard.events.sequence_store.config import StoreConfig
from tackboard.events.sequence_store.opening import create_store
from tackboard.events.sequence_store.values import Values


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A measurement of the embedded engine alone, as on a machine without a Redis server."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequence_store.RedisServer, "is_installed", staticmethod(lambda: False))
        patch.setattr(sequence_store, "QUICK", StoreSizes(num_short=5, num_long=1, num_calls=5))
        return measure(tmp_path_factory.mktemp("bench"), quick=True)


def test_every_figure_is_there_with_what_it_means(result: dict[str, Any]) -> None:
    assert list(result["engines"]) == list(ENGINES)
    assert result["engines"]["redis_always"] == SKIPPED
    for name, setting in (("sqlite_full", "synchronous=full"), ("sqlite_normal", "synchronous=normal")):
        figures = result["engines"][name]
        assert setting in figures["durability"]
        assert set(figures) == {"durability", *WORDS}
        for case in WORDS:
            assert 0 < figures[case]["us_p50"] <= figures[case]["us_p99"]


def test_columns_that_are_not_asked_for_are_not_read(result: dict[str, Any]) -> None:
    figures = result["engines"]["sqlite_full"]
    bytes_of = {case: figures[case]["bytes_per_read"] for case in WORDS if case.startswith("read")}
    # Two of nine columns: 8 and 1 bytes of 36 an event; the last 256 lie in the last chunk of at most 1,024.
    assert bytes_of["read_16000_two"] < 0.3 * bytes_of["read_16000_all"]
    assert bytes_of["read_16000_last_256_two"] <= bytes_of["read_16000_two"] * 1024 / 16_000
    assert 256 * 9 <= bytes_of["read_256_two"] < 256 * 9 + 100


def test_the_table_names_everything(result: dict[str, Any]) -> None:
    text = "\n".join(table_lines(report(result)))
    assert all(words in text for words in (*WORDS.values(), SKIPPED))


def test_other_values_are_noticed(tmp_path: Path) -> None:
    columns = events(np.random.default_rng(1), 300)
    with create_store(tmp_path / "s.db", StoreConfig(fields=sequence_store.FIELDS)) as store:
        store.append(1, columns)
        check(store, 1, columns)
        wrong = columns["dwell_ms"].values.copy()
        wrong[-1] += 1e-9
        with pytest.raises(TackboardError, match="other events"):
            check(store, 1, {**columns, "dwell_ms": Values(wrong)})
