"""A server process on a real bundle: the commands a user types, and the public client, against the offline scores.

The bundle holds a small PinFM with fresh parameters; whether it is any good does not matter here, only that the same
request gets the same scores whichever way it is asked.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import tritonclient.http as triton
from safetensors.torch import save_file

from tackboard.bundle.signature import FORMAT_VERSION, KIND, Signature, write_signature
from tackboard.core.manifest import write_manifest
from tackboard.models.backbone import BackboneConfig
from tackboard.models.description import describe_model
from tackboard.models.pinfm import PinFMConfig
from tackboard.models.tables import TableConfig

SOURCE = Path(__file__).resolve().parents[2] / "src"
TABLE = "item_tables.weight"


def write_bundle(folder: Path, id_type: Literal["int64", "string"]) -> Path:
    config = PinFMConfig(
        tables=TableConfig(num_rows=512, dim=8), backbone=BackboneConfig(num_layers=1), width=16, max_history=12
    )
    signature = Signature(
        format_version=FORMAT_VERSION,
        name=f"small {id_type}",
        version="3",
        id_type=id_type,
        actions=("click", "save"),
        surfaces=("home", "search"),
        max_history=config.max_history,
        model=describe_model(config),
        tables={TABLE: {"file": f"tables/{TABLE}.safetensors", "dtype": "fp16", "shape": []}},
        lineage={},
    )
    torch.manual_seed(0)
    tensors = dict(config.build(signature.vocabulary).state_dict())
    (folder / "tables").mkdir(parents=True)
    save_file({TABLE: tensors.pop(TABLE).half()}, folder / "tables" / f"{TABLE}.safetensors")
    save_file(tensors, folder / "dense.safetensors")
    write_signature(folder, signature)
    write_manifest(folder, KIND)
    return folder


@dataclass
class Served:
    """A bundle, its server (in a process of its own, or in this one), and a request for it."""

    bundle: Path
    port: int
    process: subprocess.Popen[str] | None
    history: list[dict[str, Any]]
    candidates: list[Any]

    @property
    def name(self) -> str:
        return f"small {'string' if isinstance(self.candidates[0], str) else 'int64'}"


def environment() -> dict[str, str]:
    settings = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    settings.pop("TACKBOARD_TOKEN", None)
    return settings


@pytest.fixture(scope="module", params=["int64", "string"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, serving: Callable[..., Any]
) -> Iterator[Served]:
    """Strings are served by the command in a process of its own, whole numbers by a thread, which starts sooner."""
    folder = tmp_path_factory.mktemp(request.param)
    bundle = write_bundle(folder / "bundle", request.param)

    def name(number: int) -> Any:
        return f"item {number} é" if request.param == "string" else number * 10**12 - 5

    history = [
        {"item": name(number), "action": action, "surface": "home", "time_ms": 1_700_000_000_000 + 60_000 * number}
        for number, action in enumerate(["click", "save", "never seen"] * 6)
    ]
    candidates = [name(number) for number in range(200)]
    if request.param == "int64":
        with serving(bundle) as url:
            yield Served(bundle, int(url.rsplit(":", 1)[1]), None, history, candidates)
        return
    port_file = bundle.parent / "port"
    command = ["-m", "tackboard", "serve", str(bundle), "--port", "0", "--port-file", str(port_file)]
    # Two processes at a time on two cores are slow to start; the deadline is not what is tested here.
    process = subprocess.Popen(
        [sys.executable, *command, "--timeout-ms", "20000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith(f"serving small {request.param} on http://127.0.0.1:"), line
        port = int(line.rsplit(":", 1)[1])
        assert int(port_file.read_text()) == port
        yield Served(bundle, port, process, history, candidates)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=10)


def test_server_and_offline_agree_in_scores_and_order(
    served: Served, tackboard: Callable[..., Any], tmp_path: Path
) -> None:
    request = tmp_path / "request.json"
    request.write_text(json.dumps({"history": served.history, "candidates": served.candidates}))

    def ranked(*arguments: str) -> dict[Any, float]:
        answer = tackboard("score", str(request), "--json", *arguments, cwd=tmp_path)
        assert answer.code == 0, answer.err
        return {entry["item"]: entry["score"] for entry in json.loads(answer.out)["ranked"]}

    offline = ranked("--offline", "--bundle", str(served.bundle))
    assert len(offline) == 200
    assert len(set(offline.values())) > 100, "a model that says the same of everything would agree with anything"
    largest = max(abs(score) for score in offline.values())
    url = f"http://127.0.0.1:{served.port}"
    for online in (ranked("--url", url), ranked("--url", url, "--binary")):
        assert max(abs(online[item] - offline[item]) for item in offline) <= 1e-5 * largest
        gaps = np.abs(np.diff(list(offline.values())))
        if gaps.min() > 1e-5 * largest:
            assert list(online) == list(offline)


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("compression", [None, "gzip"])
def test_tritonclient_gets_the_same_scores(served: Served, binary: bool, compression: str | None) -> None:
    from tackboard.scoring.scorer import Scorer

    scorer = Scorer.load(served.bundle, num_threads=1)
    columns: dict[str, list[Any]] = {
        field: [event[field] for event in served.history] for field in ("item", "action", "surface", "time_ms")
    }
    expected = scorer.score(scorer.reader.read(columns, served.candidates))
    as_text = scorer.signature.id_type == "string"
    inputs = [
        _input(f"history_{field}", values, binary=binary, as_text=isinstance(values[0], str))
        for field, values in columns.items()
    ]
    inputs.append(_input("candidate_item", served.candidates, binary=binary, as_text=as_text))
    client = triton.InferenceServerClient(f"127.0.0.1:{served.port}")
    assert client.is_model_ready(served.name, "3")
    output = triton.InferRequestedOutput("score", binary_data=binary)
    result = client.infer(served.name, inputs, outputs=[output], request_compression_algorithm=compression)
    client.close()
    assert np.abs(result.as_numpy("score") - expected).max() <= 1e-5 * np.abs(expected).max()


def _input(name: str, values: list[Any], *, binary: bool, as_text: bool) -> Any:
    array = np.array(values, dtype=np.object_ if as_text else np.int64)
    tensor = triton.InferInput(name, list(array.shape), "BYTES" if as_text else "INT64")
    tensor.set_data_from_numpy(array, binary_data=binary)
    return tensor


# The last test of this module: it ends the server.
@pytest.mark.parametrize("served", ["string"], indirect=True)
def test_a_signal_ends_it_with_zero_and_answers_what_was_asked(served: Served) -> None:
    assert served.process is not None
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=10)
    connection.request("GET", "/v2/health/ready")
    assert connection.getresponse().read() == b'{"ready":true,"live":true}'
    started = time.monotonic()
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(10) == 0
    assert time.monotonic() - started < 5
    connection.close()
    assert not (served.bundle.parent / "port").exists()
    assert served.process.stderr is not None
    log = served.process.stderr.read()
    assert "Traceback" not in log, log
