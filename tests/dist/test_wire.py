"""Two processes with shared tables: rows and updates at every precision against fp32, and the bytes of each message."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.dist, pytest.mark.timeout(180)]
WORKER = Path(__file__).with_name("wire_worker.py")
BOUNDS = {"fp32": (0.0, 0.0), "fp16": (3e-4, 1e-3), "bf16": (2e-3, 4e-3)} | {
    "fp8": (0.04, 0.08),
    "int8": (0.04, 0.08),
    "mx4": (0.15, 0.15),
}
"""Largest relative error of rows and of their updates."""
ROW_BYTES = {"fp32": 128, "fp16": 64, "bf16": 64, "fp8": 34, "int8": 34, "mx4": 17}
HALF_ROW_BYTES = {"fp32": 64, "fp16": 32, "bf16": 32, "fp8": 18, "int8": 18, "mx4": 9}
"""Bytes of half a row, which column sharding sends: 16 values."""
IDS = ((70, 30), (50, 90))
"""Ids that rank 0 and rank 1 ask of the two tables."""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process found, by rank."""
    if importlib.util.find_spec("torchrec") is None:
        pytest.skip("torchrec is not installed: make distributed")
    folder = tmp_path_factory.mktemp("wire")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    command = [sys.executable, str(WORKER), str(folder / "answers")]
    with (folder / "errors").open("w") as errors:
        processes = [
            subprocess.Popen(
                command,
                env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )
            for rank in range(2)
        ]
    try:
        codes = [process.wait(timeout=150) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert codes == [0, 0], (folder / "errors").read_text()[-4000:]
    return [json.loads((folder / f"answers.{rank}").read_text()) for rank in range(2)]


def both(answers: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The same run as seen by rank 0 and by rank 1."""
    return list(zip(answers[0]["runs"], answers[1]["runs"], strict=True))


def test_rows_and_updates_are_those_of_fp32_within_the_bounds(answers: list[dict[str, Any]]) -> None:
    seen = 0
    for run in answers[0]["runs"] + answers[1]["runs"]:
        assert run["row_error"] <= BOUNDS[run["forward"]][0], run
        assert run["update_error"] <= BOUNDS[run["backward"]][1], run
        assert (run["row_error"] > 0) == (run["forward"] != "fp32"), run
        assert (run["update_error"] > 0) == (run["backward"] != "fp32"), run
        seen += 1
    assert seen == 2 * 3 * 8


def test_bytes_are_those_computed_by_hand(answers: list[dict[str, Any]]) -> None:
    for runs in both(answers):
        for rank, run in enumerate(runs):
            report = run["report"]
            # Table t0 is on rank 0, t1 on rank 1; with columns, each process sends its half of every row.
            own = {"table": IDS[0][rank] + IDS[1][rank], "column": 240}.get(run["sharding"], report["forward"]["rows"])
            asked = sum(IDS[rank]) * (2 if run["sharding"] == "column" else 1)
            row_bytes = HALF_ROW_BYTES if run["sharding"] == "column" else ROW_BYTES
            assert report["forward"]["rows"] == own
            assert report["backward"]["rows"] == report["ids"]["ids"] == asked
            assert report["forward"]["payload_bytes"] == own * row_bytes[run["forward"]]
            assert report["backward"]["payload_bytes"] == asked * row_bytes[run["backward"]]
            assert report["forward"]["fp32_bytes"] == own * row_bytes["fp32"]
            assert report["ids"]["payload_bytes"] == 4 * asked
        if runs[0]["sharding"] == "row":
            assert runs[0]["report"]["forward"]["rows"] + runs[1]["report"]["forward"]["rows"] == 240


def test_the_counts_are_what_torch_was_handed(answers: list[dict[str, Any]]) -> None:
    """Without codecs and with int64, the messages are sizes, lengths, ids, rows, gradients, in this order."""
    for rank in range(2):
        for run in answers[rank]["runs"]:
            report = run["report"]
            sizes, lengths, ids, rows, gradients = run["handed_over"]
            plain = answers[rank]["plain_messages"][run["sharding"]]
            assert ids == ["int32", report["ids"]["payload_bytes"]]
            assert rows == ["uint8", report["forward"]["payload_bytes"]]
            assert gradients == ["uint8", report["backward"]["payload_bytes"]]
            assert [plain[1][1], plain[2][1]] == [2 * lengths[1], 2 * ids[1]]
            assert plain[3:] == [["float32", report[way]["fp32_bytes"]] for way in ("forward", "backward")]
            # The sizes, and two to four lengths: what the counter leaves out is the same in every step.
            assert sizes[1] <= 64 and lengths[1] <= 16


def test_a_process_may_ask_for_nothing(answers: list[dict[str, Any]]) -> None:
    row, table = answers[0]["without_ids"], answers[1]["without_ids"]
    assert [run["rows"] for run in row] == [40, 40] and [run["rows"] for run in table] == [0, 0]
    assert row[0]["changed"] > 0 and table[0]["changed"] > 0
    assert row[1]["changed"] > 0 and table[1]["changed"] == 0


def test_an_infinite_gradient_is_not_hidden(answers: list[dict[str, Any]]) -> None:
    assert set(answers[0]["broken"].values()) == {0}
    assert all(broken > 0 for broken in answers[1]["broken"].values()), answers[1]["broken"]
