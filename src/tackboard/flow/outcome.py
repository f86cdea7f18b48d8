"""Holds the results of a demo as plain values. The pipeline fills them; the report, the bench and `--json` use them."""

import math
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tackboard.core.machine import total_memory_bytes, usable_cores
from tackboard.flow.command import Finished
from tackboard.report.svg import percentile

TARGET_GAP_CLOSED = 0.40
"""The model should close this share of the gap in HR@10 between the better baseline and the oracle. This target was set
before the first comparison."""

STAGE_NAMES = (
    *("data", "pretrain", "evaluate", "requests", "ranker", "ranker-eval", "finetune", "finetune-eval"),
    *("export", "serve", "compare", "replay", "report"),
)
BASELINE, RANKER, FINETUNED = "item mean", "ranker without PinFM", "ranker on PinFM"
"""The three ways to rank the candidates of a request, in the order of the steps: each step should add something."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """The cost of all requests in one wire format."""

    wire: str
    latencies_ms: list[float]
    """Latencies at the client, which sends one request at a time over one connection."""
    server_cpu_ms_per_request: float


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The results of one demo."""

    out: Path
    quick: bool
    stages: dict[str, Finished]
    """All stages of STAGE_NAMES except `report`, by name."""
    exchanges: list[Exchange]
    num_candidates: int
    num_compared: int
    largest_difference: float
    """Largest difference between server and offline scores, as a share of the largest absolute score."""
    total_seconds: float
    peak_rss_bytes: int
    """Peak memory of the largest stage with all its processes, plus the peak memory of the pipeline itself."""
    environment: dict[str, Any]
    """The result of `describe_environment`, and the machine under "hardware"."""

    @property
    def metrics(self) -> dict[str, dict[str, float]]:
        """The metrics of each ranking, by its name (popularity, item-to-item, model, oracle)."""
        return {str(row["name"]): row for row in self.stages["evaluate"].require("rows")}

    @property
    def gap_closed(self) -> float:
        """The share of a gap that the model closes: the gap in HR@10 between the better baseline and the oracle.

        NaN if there is no gap. This happens only if the world is too small to judge a model.
        """
        value = self.stages["evaluate"].require("gap_closed")
        return math.nan if value is None else float(value)

    @property
    def target_met(self) -> bool:
        return self.gap_closed >= TARGET_GAP_CLOSED

    @property
    def lift(self) -> dict[str, dict[str, dict[str, float]]]:
        """The metrics on requests of held-out users: label → way of ranking (BASELINE, RANKER, FINETUNED) → metrics."""
        steps = {
            BASELINE: ("ranker-eval", "item mean"),
            RANKER: ("ranker-eval", "model"),
            FINETUNED: ("finetune-eval", "model"),
        }
        found: dict[str, dict[str, dict[str, float]]] = {}
        for step, (stage, name) in steps.items():
            for row in self.stages[stage].require("rows"):
                if row["name"] == name:
                    metrics = {key: value for key, value in row.items() if key not in ("name", "label")}
                    found.setdefault(str(row["label"]), {})[step] = metrics
        return found

    @property
    def latencies_ms(self) -> list[float]:
        """Latencies of all requests in both wire formats."""
        return [value for exchange in self.exchanges for value in exchange.latencies_ms]

    def summary(self) -> dict[str, Any]:
        return {
            "report": str(self.out / "report.html"),
            "hr@10": {name: row["hr@10"] for name, row in self.metrics.items()},
            "gap_closed": None if math.isnan(self.gap_closed) else self.gap_closed,
            "target": TARGET_GAP_CLOSED,
            "target_met": self.target_met,
            "lift": self.lift,
            "requests": len(self.latencies_ms),
            "candidates_per_request": self.num_candidates,
            "latency_ms": {f"p{percent}": round(percentile(self.latencies_ms, percent), 3) for percent in (50, 99)},
            "server_cpu_ms_per_request": {
                exchange.wire: round(exchange.server_cpu_ms_per_request, 3) for exchange in self.exchanges
            },
            "largest_difference_from_offline": self.largest_difference,
            "replayed": {
                name: self.stages["replay"].require(f"num_{name}")
                for name in ("compared", "values", "mismatches", "late")
            },
            "seconds": round(self.total_seconds, 1),
            "stage_seconds": {name: round(stage.seconds, 1) for name, stage in self.stages.items()},
            "peak_rss_bytes": self.peak_rss_bytes,
            "quick": self.quick,
        }


def describe_hardware() -> dict[str, Any]:
    """Describes the machine: processor, usable cores, memory in bytes."""
    return {"cpu": _cpu_name(), "usable_cores": usable_cores(), "memory_bytes": total_memory_bytes()}


def hardware_words(hardware: dict[str, Any]) -> str:
    """Describes the machine in one line."""
    return f"{hardware['cpu']}, {hardware['usable_cores']} usable cores, {hardware['memory_bytes'] / 2**30:.1f} GiB"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
