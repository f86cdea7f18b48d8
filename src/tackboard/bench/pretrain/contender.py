"""Runs one side of `tackboard bench pretrain` in a process of its own, and prints its figures as one JSON object.

    python -m tackboard.bench.pretrain.contender SPEC.json        # our own side
    python -m rivals.plain_pretrain SPEC.json                     # the rival, in benchmarks/

SPEC.json holds the fields of a `Spec`. Decided: every measurement gets a new process, because the settings of the
memory allocator, the compiled code and the peak of memory apply to a whole process.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """What a process measures."""

    preset: str
    dataset: str
    device: str
    overrides: tuple[str, ...] = ()
    """Settings of the user, `a.b=c`."""
    warmup: int = 5
    timed: int = 20
    off: tuple[str, ...] = ()
    """Rungs of the ladder (optimisations, see `ladder`) that are switched off."""
    is_profiled: bool = False
    """Whether to profile the parts of a step, instead of timing steps."""
    batches: str = ""
    """For the rival: the file with batches and parameters that `prepared` wrote."""

    @classmethod
    def read(cls, path: Path) -> Spec:
        """Reads a spec that `write` wrote."""
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        for name in ("overrides", "off"):
            content[name] = tuple(content[name])
        return cls(**content)

    def write(self, path: Path) -> Path:
        """Writes the spec as JSON and returns the path."""
        path.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")
        return path


def measure(spec: Spec) -> dict[str, Any]:
    """Runs the timed or profiled steps of `spec` in this process and returns their figures."""
    from tackboard.bench.pretrain.breakdown import profiled
    from tackboard.bench.pretrain.data import config_of, find_preset
    from tackboard.bench.pretrain.ladder import without
    from tackboard.bench.pretrain.ours import TimedTrainer
    from tackboard.core.config import apply_overrides
    from tackboard.train.start import open_source

    config = config_of(find_preset(spec.preset), Path(spec.dataset))
    with ExitStack() as stack, TemporaryDirectory(prefix="tackboard-bench-") as runs:
        config = without(config, spec.off, spec.device, stack)
        # A profile shows the parts of a step only if the host starts every kernel, so CUDA graphs are off.
        graphs = ["training.cuda_graphs=off"] if spec.is_profiled else []
        config = apply_overrides(config, [f"training.device={spec.device}", *spec.overrides, *graphs])
        source = open_source(config)
        trainer = TimedTrainer(config, Path(runs), source, warmup=spec.warmup, timed=spec.timed)
        if spec.is_profiled:
            return profiled(trainer)
        trainer.train(quiet=True)
        return trainer.figures


def main(arguments: list[str]) -> None:
    """Measures the spec in the file `arguments[0]` and prints the figures."""
    from tackboard.core.machine import set_thread_environment

    set_thread_environment()
    sys.stdout.write(json.dumps(measure(Spec.read(Path(arguments[0])))) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
