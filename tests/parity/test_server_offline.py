"""The server gives the scores that `tackboard score --offline` gives, through the public client, JSON and binary.

Two bundles, both trained here by the commands a user types: one of a synthetic world with int64 ids, one of a CSV with
string ids. "The same" means within 1e-5 of the largest absolute score, and in the same order except where two scores
are closer than that.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton

from tackboard.core import keyed_random

ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = 1e-5
MAX_HISTORY = 12
NUM_CANDIDATES = 70
RECIPE = f"""\
from tackboard.data.loader import DataConfig
from tackboard.models.pinfm import PinFMConfig
from tackboard.models.tables import TableConfig
from tackboard.train.config import RunConfig, TrainingConfig


def recipe() -> RunConfig:
    return RunConfig(
        name="parity",
        data=DataConfig(dataset="datasets/parity", max_length={MAX_HISTORY}, tokens_per_step=256),
        model=PinFMConfig(
            tables=TableConfig(num_hashes=2, num_rows=64, dim=8), width=16, max_history={MAX_HISTORY}
        ),
        training=TrainingConfig(steps=4, num_threads=1, device="cpu"),
    )
"""
MAKE_DATASET = {
    "int64": "data synth --name parity --set num_users=60 --set num_items=80 --set num_topics=5 --set median_events=12",
    "string": "init --from log.csv --user who --item what --time when --action how --surface where --name parity",
}
ACTIONS, SURFACES = ("click", "save", "never seen"), ("home", "search", "elsewhere")


def environment() -> dict[str, str]:
    settings = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    settings.pop("TACKBOARD_TOKEN", None)
    return settings


def log_text() -> str:
    """A log of 40 users over 60 items whose ids are words, some with blanks, commas and letters beyond ASCII."""
    lines = ["who,what,when,how,where"]
    for row in range(600):
        draw = (keyed_random.uniform(31, row, np.arange(4)) * [40, 60, 2, 2]).astype(int)
        lines.append(f'user {draw[0]},"{item_name(draw[1])}",{1_700_000_000 + 60 * row},{ACTIONS[draw[2]]},home')
    return "\n".join(lines) + "\n"


def item_name(number: int) -> str:
    return f"thing, № {number}"


@dataclass
class Served:
    """A bundle, the server on it and what a request may name."""

    folder: Path
    id_type: str
    port: int
    tackboard: Callable[..., Any]

    def item(self, number: int) -> Any:
        """Item `number`; -1 was never seen in training, nor were the strings from 60 on."""
        return item_name(number) if self.id_type == "string" else 100_000 + number

    def request(self, length: int) -> dict[str, Any]:
        draw = keyed_random.uniform(32, length, np.arange(3 * length + 1)) * 80
        events = [
            {
                "item": self.item(int(draw[3 * number])),
                "action": ACTIONS[int(draw[3 * number + 1]) % 3],
                "surface": SURFACES[int(draw[3 * number + 2]) % 3],
                # Out of order on purpose: both ways must sort alike, and cut to the newest alike.
                "time_ms": 1_700_000_000_000 + 60_000 * (number * 7 % max(1, length)),
            }
            for number in range(length)
        ]
        return {"history": events, "candidates": [self.item(number) for number in range(-1, NUM_CANDIDATES - 1)]}

    def offline(self, request: dict[str, Any]) -> np.ndarray:
        path = self.folder / "request.json"
        path.write_text(json.dumps(request))
        answer = self.tackboard("score", str(path), "--offline", "--bundle", "bundle", "--json", cwd=self.folder)
        assert answer.code == 0, answer.err
        scores = {entry["item"]: entry["score"] for entry in json.loads(answer.out)["ranked"]}
        return np.array([scores[item] for item in request["candidates"]])

    def through_client(self, request: dict[str, Any], *, binary: bool) -> np.ndarray:
        kind = "BYTES" if self.id_type == "string" else "INT64"
        history, tensors = request["history"], []
        for name, datatype, values in (
            ("history_item", kind, [event["item"] for event in history]),
            ("history_action", "BYTES", [event["action"] for event in history]),
            ("history_surface", "BYTES", [event["surface"] for event in history]),
            ("history_time_ms", "INT64", [event["time_ms"] for event in history]),
            ("candidate_item", kind, request["candidates"]),
        ):
            array = np.array(values, dtype=np.int64) if datatype == "INT64" else np.array(values, dtype=np.object_)
            tensors.append(triton.InferInput(name, [len(values)], datatype))
            tensors[-1].set_data_from_numpy(array, binary_data=binary)
        with triton.InferenceServerClient(f"127.0.0.1:{self.port}") as client:
            outputs = [triton.InferRequestedOutput("score", binary_data=binary)]
            answer = client.infer("parity", tensors, outputs=outputs)
        scores: np.ndarray = answer.as_numpy("score")
        return scores


@pytest.fixture(scope="module", params=["int64", "string"])
def served(
    request: pytest.FixtureRequest, tackboard: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "log.csv").write_text(log_text())
    (folder / "tiny.py").write_text(RECIPE)
    for arguments in (
        MAKE_DATASET[request.param].split(),
        ["train", "tiny.py:recipe"],
        ["export", "runs/latest", "--out", "bundle", "--name", "parity"],
    ):
        answer = tackboard(*arguments, cwd=folder)
        assert answer.code == 0, answer.err
    process = subprocess.Popen(
        [sys.executable, "-m", "tackboard", "serve", "bundle", "--port", "0", "--timeout-ms", "20000"],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("serving parity on http://"), line
        yield Served(folder, request.param, int(line.rsplit(":", 1)[1]), tackboard)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def assert_same(found: np.ndarray, expected: np.ndarray) -> None:
    allowed = TOLERANCE * float(np.abs(expected).max())
    assert found.shape == expected.shape
    assert float(np.abs(found - expected).max()) <= allowed
    # Ranked by what was found, the expected scores never rise by more than a tie.
    ranked = expected[np.argsort(-found, kind="stable")]
    assert float(np.diff(ranked).max(initial=0.0)) <= 2 * allowed


# The server hands the last one to its parser's process.
@pytest.mark.parametrize("length", [0, 1, MAX_HISTORY, 3 * MAX_HISTORY, 7000])
def test_the_server_scores_as_offline(served: Served, length: int) -> None:
    request = served.request(length)
    expected = served.offline(request)
    assert len(set(expected.tolist())) > NUM_CANDIDATES // 2, "the scores tell candidates apart"
    as_json = served.through_client(request, binary=False)
    as_binary = served.through_client(request, binary=True)
    assert_same(as_json, expected)
    assert_same(as_binary, expected)
    assert np.array_equal(as_json, as_binary)


def test_only_the_newest_events_count(served: Served) -> None:
    request = served.request(3 * MAX_HISTORY)
    newest = sorted(request["history"], key=lambda event: event["time_ms"])[-MAX_HISTORY:]
    both = [
        served.through_client({**request, "history": events}, binary=True) for events in (request["history"], newest)
    ]
    assert_same(both[0], both[1])


def test_a_history_changes_the_scores(served: Served) -> None:
    empty, long = (served.through_client(served.request(length), binary=True) for length in (0, MAX_HISTORY))
    assert float(np.abs(empty - long).max()) > 100 * TOLERANCE * float(np.abs(empty).max())
