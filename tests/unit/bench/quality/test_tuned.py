"""The tries of methods: every entry belongs to a method, its settings exist, and its words say what it is."""

from pathlib import Path

import numpy as np
import pytest

from tackboard.bench.quality.data import BENCHES, DatasetFacts
from tackboard.bench.quality.methods import METHODS, MethodContext
from tackboard.bench.quality.tuned import NOT_TUNED, TUNED, Tuned
from tackboard.core.config import apply_overrides

FAMILIES = {method.family for method in METHODS.values() if method.build and not method.is_published}


@pytest.mark.parametrize(("family", "dataset"), list(TUNED))
def test_every_entry_is_of_a_method_and_its_settings_exist(family: str, dataset: str) -> None:
    assert family in FAMILIES and dataset in BENCHES
    facts = DatasetFacts(Path("d"), 3_000, 3_070, np.full(500, 100), ("a",), 0.4)
    for method in METHODS.values():
        if method.family == family and method.build and not method.is_published:
            config = method.build(MethodContext(BENCHES[dataset], facts, "d"))
            assert apply_overrides(config, TUNED[family, dataset].settings) is not None


def test_what_was_tried_is_said() -> None:
    assert TUNED["pinfm", "ml-1m"].words() == "42: both inputs"
    assert METHODS["sasrec-wide-request"].tuned("ml-1m").words() == "12: both inputs, 3 diverged"
    assert METHODS["hstu-large-history"].tuned("ml-1m") == METHODS["hstu-large"].tuned("ml-1m") == NOT_TUNED
    assert Tuned(tries=12).words() == "12" and NOT_TUNED.words() == "0: not tuned"
    for tuned in TUNED.values():
        assert tuned.note != "not tuned" or not tuned.settings, "nothing was chosen"
        assert bool(tuned.date) == bool(tuned.tries)
