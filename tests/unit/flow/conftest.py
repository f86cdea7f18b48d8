"""A demo's outcome made by hand: small files of the real formats, so that the report can be tested without a run."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from tackboard.core.keyed_random import normal
from tackboard.core.manifest import write_manifest
from tackboard.features.language import Events, FeatureSet
from tackboard.flow import command
from tackboard.flow.command import Finished
from tackboard.flow.outcome import Exchange, Outcome

ROWS: list[dict[str, Any]] = [
    {"name": "popularity", "hr@1": 0.011, "hr@5": 0.05, "hr@10": 0.09, "hr@50": 0.24, "ndcg@5": 0.03, "ndcg@10": 0.04},
    {"name": "item-to-item", "hr@1": 0.03, "hr@5": 0.09, "hr@10": 0.14, "hr@50": 0.31, "ndcg@5": 0.06, "ndcg@10": 0.08},
    {"name": "model", "hr@1": 0.06, "hr@5": 0.16, "hr@10": 0.24, "hr@50": 0.47, "ndcg@5": 0.11, "ndcg@10": 0.13},
    {"name": "oracle", "hr@1": 0.09, "hr@5": 0.23, "hr@10": 0.34, "hr@50": 0.60, "ndcg@5": 0.16, "ndcg@10": 0.19},
]


def ranker_rows(hit: float) -> list[dict[str, Any]]:
    """What `tackboard evaluate` says of a ranker with this HIT@3 of the label next."""

    def row(name: str, label: str, value: float) -> dict[str, Any]:
        more = {"auc_within_users": 0.7, "log_loss": 0.1, "ne": 0.9, "calibration": 1.0}
        return {"name": name, "label": label, "auc": 0.75, **more, "hit@3": value}

    return [
        row("item mean", "next", 0.08),
        row("model", "next", hit),
        row("item mean", "save", 0.07),
        row("model", "save", 0.2),
    ]


@pytest.fixture
def fake_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the pipeline start `fake_tackboard.py` wherever it would start `tackboard`."""
    here = Path(__file__).parent
    monkeypatch.setattr(command, "PROGRAM", (sys.executable, str(here / "fake_tackboard.py")))
    monkeypatch.setenv("PYTHONPATH", str(here.parents[2] / "src"))


@pytest.fixture
def demo_outcome(tmp_path: Path) -> Outcome:
    """A demo that met its target: 50% of the gap, 400 losses, 200 requests."""
    out = tmp_path / "demo"
    run, bundle = out / "runs" / "one", out / "bundle"
    run.mkdir(parents=True)
    bundle.mkdir()
    noise = normal(0, 1, _range(400))
    lines = [{"step": step, "loss": 2.5 + 5 * math.exp(-step / 90) + 0.1 * noise[step]} for step in range(400)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "events.jsonl").write_text('{"event": "start", "parameters": 987654}\n{"event": "done"}\n')
    signature = {
        "max_history": 64,
        "id_type": "int64",
        "model": {"config_class": "tackboard.models.pinfm:PinFMConfig", "config": {}},
        "tables": {"items.weight": {"file": "t", "dtype": "fp16", "shape": [20_000, 32]}},
    }
    (bundle / "signature.json").write_text(json.dumps(signature))
    (bundle / "dense.safetensors").write_bytes(b"\0" * 123_456)
    FeatureSet("small", num_before=Events().count().described("What the user did before.")).write(bundle)
    write_manifest(bundle, "bundle")
    answers: dict[str, dict[str, Any]] = {
        "data": {
            "dataset": str(out / "datasets/demo/one"),
            "num_events": 412_345,
            "num_users": 5000,
            "num_items": 8000,
        },
        "pretrain": {
            "run": str(run),
            "step": 400,
            "checkpoint": "c",
            "tokens_per_s": 51_234.5,
            "final_loss": 2.6,
        },
        "evaluate": {"rows": ROWS, "num_users": 5000, "gap_closed": 0.5, "filter_seen": False, "users_per_s": 900.0},
        "requests": {
            "counts": {"requests": 19_876, "candidates": 1_000_000},
            "rules": {"candidates": 50, "per_user": 4},
        },
        "ranker": {"run": str(run)},
        "ranker-eval": {"rows": ranker_rows(0.22), "num_users": 998, "num_candidates": 198_765},
        "finetune": {
            "run": str(run),
            "step": 150,
            "checkpoint": "c",
            "trimming": {"read": ["item", "action"], "skipped": ["surface"], "bytes": 6_400, "bytes_saved": 3_200},
        },
        "finetune-eval": {"rows": ranker_rows(0.31), "num_users": 998, "num_candidates": 198_765},
        "export": {"bundle": str(bundle), "bytes": 1_234_567},
        "serve": {},
        "compare": {"scores": [1.0]},
        "replay": {"num_compared": 210, "num_values": 4321, "num_mismatches": 0, "num_late": 17},
    }
    stages = {
        name: Finished(
            name=name,
            arguments=(name, "demo", "--json"),
            answer=answer,
            seconds=10.0,
            cpu_seconds=12.5,
            peak_rss_bytes=700_000_000,
        )
        for name, answer in answers.items()
    }
    latencies = [float(value) for value in 4.0 + abs(normal(0, 2, _range(200))) * 1.2]
    return Outcome(
        out=out,
        quick=False,
        stages=stages,
        exchanges=[
            Exchange(wire="binary", latencies_ms=latencies[:100], server_cpu_ms_per_request=3.2),
            Exchange(
                wire="JSON", latencies_ms=[value + 1.5 for value in latencies[100:]], server_cpu_ms_per_request=4.4
            ),
        ],
        num_candidates=1000,
        num_compared=3,
        largest_difference=3.1e-7,
        total_seconds=171.3,
        peak_rss_bytes=800_000_000,
        environment={
            "python": "3.11.7",
            "packages": {"tackboard": "0.1.0", "torch": "2.13.0", "absent": None},
            "platform": "Linux",
            "commit": "abc123",
            "hardware": {"cpu": "A <fast> & good CPU", "usable_cores": 2, "memory_bytes": 8 * 2**30},
        },
    )


def _range(count: int) -> Any:
    import numpy as np

    return np.arange(count)
