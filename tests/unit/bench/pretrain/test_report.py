"""The words of a report that a whole run does not show."""

from __future__ import annotations

from typing import Any

from tackboard.bench.pretrain.breakdown import PARTS
from tackboard.bench.pretrain.floor import FORMULAS
from tackboard.bench.pretrain.report import report
from tackboard.bench.pretrain.run import FIGURES
from tackboard.bench.report import table_lines


def result_of_a_gpu() -> dict[str, Any]:
    line = dict.fromkeys(FIGURES, 2.0) | {"name": "base", "words": "nothing", "gain": 1.0, "cpu_gain": 1.0}
    counts = ("num_events", "num_rows", "causal_pairs", "num_predicting", "num_sums", "num_negatives", "num_items")
    size = {
        "words": "large",
        "counts": dict.fromkeys((*counts, "num_table_rows"), 9),
        "floor": {
            "items": {name: {"ms": 1.0, "gflop": 1.0, "mb": 1.0} for name in FORMULAS},
            "total_ms": 9.0,
            "peak_gflop_per_s": 10.0,
            "copy_gb_per_s": 4.0,
        },
        "ladder": [line | {"last_loss": 3.0, "recompiled": 0}],
        "product": {"floor_share": 0.5, "mfu": 0.25},
        "rival": {"failed": "out of memory"},
        "parts": {"parts": dict.fromkeys(PARTS, 1.0), "gpu_ms": 9.0, "synchronisations": 21.0},
    }
    aims = [{"aim": "h200: ms per step, at most 45", "value": 44.0, "met": True}]
    return {
        "quick": False,
        "overrides": ["seed=1"],
        "sizes": {"h200": size},
        "aims": aims,
        "disturbed": False,
        "others_share": 0.0,
    }


def test_a_gpu_and_a_failed_rival_are_described() -> None:
    made = report(result_of_a_gpu())
    assert made.command == "bench pretrain --size h200 --set seed=1"
    lines = table_lines(made)
    assert "plain PyTorch has no figures: out of memory" in lines
    assert "time of GPU kernels; 21.0 synchronisations per step" in lines
    assert "h200: the step runs at 50.0% of the floor's speed; MFU of backbone and projections 25.0%" in lines
    assert "met: 44, h200: ms per step, at most 45" in lines
    assert set(made.charts) == {"h200-ladder", "h200-parts"}
