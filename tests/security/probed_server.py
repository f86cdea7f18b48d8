"""A real server in a process of its own that measures the CPU time of every callback of its event loop.

    python probed_server.py int64 | string

The first line on standard output is the port. Each line on standard input is answered with the longest callback since
the last one: `{"ms": …, "what": …}`. The end of standard input stops the server.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from typing import Any

import numpy as np

from tackboard.bundle.signature import Signature
from tackboard.features.language import Bool, Context, Events, FeatureSet, Float, Int, Item, List, String, sequence
from tackboard.features.online_executor import OnlineExecutor
from tackboard.scoring.request import RequestReader, ScoreRequest
from tackboard.serve.admission import AdmissionConfig
from tackboard.serve.server import ServeConfig, Server

item = Item(price=Float(), title=String(), words=List(String), numbers=List(Int), sold=Bool())
events, context = Events(note=String()), Context(device=String())
FEATURES = FeatureSet(
    "probed",
    history=sequence(item=events.newest(64).collect(events.item)),
    clicks=events.where(events.action == "click").count(),
    price=item.price,
    title=item.title,
    words=item.words,
    numbers=item.numbers,
    sold=item.sold,
    note=events.last(events.note),
    device=context.device,
)


class IdScorer:
    """Computes features in earnest and scores an item by its id."""

    def __init__(self, id_type: Any) -> None:
        self.signature = Signature(
            format_version=1,
            name="m",
            version="1",
            id_type=id_type,
            actions=("click",),
            surfaces=("home",),
            max_history=64,
            model={},
            tables={},
            lineage={},
        )
        self.reader = RequestReader(self.signature, FEATURES)
        self._executor = OnlineExecutor(FEATURES.plan)

    def compute_features(self, request: ScoreRequest) -> Any:
        return self._executor.compute(
            history=request.history,
            request_ms=request.request_ms,
            user_id=0,
            item_ids=request.candidate_items,
            **request.attributes,
        )

    def score_features(self, features: Any, candidate_items: np.ndarray) -> np.ndarray:
        return (candidate_items % 1000).astype(np.float32) / 7


class Probe:
    """The longest callback of the thread that runs an event loop, by CPU time."""

    def __init__(self) -> None:
        self.worst_ms, self.what = 0.0, ""
        run = asyncio.events.Handle._run

        def measured(handle: asyncio.events.Handle) -> None:
            started = time.thread_time()
            run(handle)
            spent_ms = (time.thread_time() - started) * 1000
            if spent_ms > self.worst_ms:
                self.worst_ms, self.what = spent_ms, repr(handle)

        asyncio.events.Handle._run = measured  # type: ignore[method-assign]

    def take(self) -> str:
        found = json.dumps({"ms": self.worst_ms, "what": self.what})
        self.worst_ms, self.what = 0.0, ""
        return found


def main() -> None:
    probe = Probe()

    def answer() -> None:
        for _ in sys.stdin:
            print(probe.take(), flush=True)
        server.drain()

    def announce(url: str) -> None:
        print(url.rsplit(":", 1)[1], flush=True)
        threading.Thread(target=answer, daemon=True).start()

    config = ServeConfig(port=0, admission=AdmissionConfig(timeout_ms=20_000))
    server = Server(IdScorer(sys.argv[1]), config, on_ready=announce)
    server.run()


if __name__ == "__main__":
    main()
