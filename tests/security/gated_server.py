"""A server in a process of its own, which its test can hold up and starve of descriptors.

    python gated_server.py '{"max_connections": 512}'

The argument is a ConnectionLimits as JSON. The first line of the output is the port. Then each line of the input is
obeyed and answered with the number of requests that have reached the model or wait for it: `hold` makes the model wait
and counts from 0, `count` does nothing else, `go` lets it on, `files N` sets the limit of open files, `stop` ends it.
"""

from __future__ import annotations

import json
import resource
import sys
import threading
from typing import Any

import numpy as np

from tackboard.bundle.signature import Signature
from tackboard.features.standard import standard_features
from tackboard.scoring.request import RequestReader
from tackboard.serve.admission import AdmissionConfig
from tackboard.serve.connection import ConnectionLimits
from tackboard.serve.server import ServeConfig, Server


class GatedScorer:
    """Scores an item by its id, once the gate is open."""

    signature = Signature(
        format_version=1,
        name="m",
        version="1",
        id_type="int64",
        actions=("click",),
        surfaces=("home",),
        max_history=4,
        model={},
        tables={},
        lineage={},
    )
    reader = RequestReader(signature, standard_features(signature.vocabulary, 4))

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.num_started = 0

    def compute_features(self, request: Any) -> dict[str, Any]:
        return {}

    def score_features(self, features: Any, candidate_items: np.ndarray) -> np.ndarray:
        self.num_started += 1
        self.gate.wait(30)
        return candidate_items.astype(np.float32)


def main() -> None:
    limits = ConnectionLimits(**json.loads(sys.argv[1]))
    scorer = GatedScorer()
    config = ServeConfig(port=0, connection=limits, admission=AdmissionConfig(timeout_ms=20_000))

    def obey() -> None:
        for line in sys.stdin:
            word, _, number = line.strip().partition(" ")
            if word == "hold":
                scorer.num_started = 0
                scorer.gate.clear()
            elif word == "go":
                scorer.gate.set()
            elif word == "files":
                hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
                resource.setrlimit(resource.RLIMIT_NOFILE, (int(number), hard))
            elif word == "stop":
                break
            print(scorer.num_started + server.admission.num_waiting, flush=True)
        scorer.gate.set()
        server.drain()

    def ready(url: str) -> None:
        print(url.rsplit(":", 1)[1], flush=True)
        threading.Thread(target=obey, daemon=True).start()

    server = Server(scorer, config, on_ready=ready)
    server.run()


if __name__ == "__main__":
    main()
